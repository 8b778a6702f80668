"""Who holds what: the ways in which the papers cut a data set into clients.

Every way but the overlapping ones gives each sample to exactly one client, and no way leaves a
client empty. The classes are those of the *true* labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fedsieve.errors import FedsieveError, check
from fedsieve.scenes._options import (
    check_belongs,
    check_between,
    check_choice,
    check_given,
    check_whole,
)
from fedsieve.types import SERVER, rng_for

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Clients: TypeAlias = tuple[IntArray, ...]
Rng: TypeAlias = np.random.RandomState | np.random.Generator
Draw: TypeAlias = Callable[["Partition", list[IntArray], int, Rng], Clients | None]

PartitionKind: TypeAlias = Literal[
    "iid", "balanced-dirichlet", "dirichlet", "bernoulli-dirichlet", "classes", "sites"
]

MAX_DRAWS = 1000
"""How often a random partition is drawn anew before its settings are called impossible."""

FEDES_BATCH = 128
"""FedES redraws until every client has one batch; this is its batch on CIFAR."""

_USED: dict[PartitionKind, tuple[str, ...]] = {
    "iid": ("stratified", "overlap"),
    "balanced-dirichlet": ("alpha", "min_size"),
    "dirichlet": ("alpha", "min_size"),
    "bernoulli-dirichlet": ("alpha", "presence", "min_size"),
    "classes": ("classes", "overlap", "min_size"),
    "sites": (),
}
_NEEDED: dict[PartitionKind, tuple[str, ...]] = {
    "iid": (),
    "balanced-dirichlet": ("alpha",),
    "dirichlet": ("alpha",),
    "bernoulli-dirichlet": ("alpha", "presence"),
    "classes": ("classes",),
    "sites": (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """How the samples are dealt to the clients. An option that its kind does not use is refused."""

    kind: PartitionKind = "iid"
    """`iid`: equal random pieces. `balanced-dirichlet`: FedGR's "hetero-dir", where a client that
    already holds N/K samples gets no more. `dirichlet`: the same without that cap (FedES).
    `bernoulli-dirichlet`: FedCorr, FedDiv. `classes`: a few classes per client (FedLSR).
    `sites`: the data set itself says which client holds a sample."""
    alpha: float | None = None
    """Dirichlet concentration > 0; small means uneven. FedGR α = 0.3, FedES β = 0.5, FedCorr and
    FedDiv α = 1 or 10."""
    presence: float | None = None
    """p, in [0.01, 1]: probability that a client may hold a class. FedCorr, FedDiv 0.3 or 0.7."""
    classes: int | None = None
    """Classes per client, >= 1. FedLSR: 5."""
    min_size: int | None = None
    """Samples that every client holds at least, >= 1; the draw is repeated until they do. Not set:
    the number of classes (balanced-dirichlet), 128 = one batch of FedES (dirichlet), 1 (others)."""
    stratified: bool = False
    """iid only: every client gets an equal share of each true class (FedLSR)."""
    overlap: bool = False
    """FedLSR's code: each client draws from the whole data set, so that clients share samples and
    some samples are nobody's. For `classes` and for stratified `iid`."""

    def __post_init__(self) -> None:
        where, chosen = "scene.partition", f'kind = "{self.kind}"'
        check_choice(f"{where}.kind", self.kind, get_args(PartitionKind))
        check_belongs(self, where, chosen, ("kind", *_USED[self.kind]))
        check_given(self, where, chosen, _NEEDED[self.kind])
        check_between(f"{where}.alpha", self.alpha, 0)
        check(self.alpha != 0, f"{where}.alpha must be greater than 0.")
        check_between(f"{where}.presence", self.presence, 0.01, 1)
        check_whole(f"{where}.classes", self.classes, 1)
        check_whole(f"{where}.min_size", self.min_size, 1)
        check(
            self.stratified or not self.overlap or self.kind != "iid",
            f"{where}.overlap needs stratified = true with {chosen}.",
        )


def partition_stream(partition: Partition, seed: int) -> Rng:
    """The random stream that `split` draws from.

    Plain iid and balanced Dirichlet partitions use NumPy's legacy generator, so that they equal
    FedGR's for the same seed; FedGR's label noise then goes on with the same generator.
    """
    if partition.kind == "balanced-dirichlet" or (
        partition.kind == "iid" and not partition.stratified
    ):
        return np.random.RandomState(seed)
    return rng_for(seed, 0, SERVER, "partition")


def split(
    partition: Partition,
    labels: IntArray,
    *,
    num_classes: int,
    num_clients: int,
    rng: Rng,
    sites: IntArray | None = None,
) -> Clients:
    """Deal the samples 0 … N−1 with the true `labels` to the clients: their sample indices."""
    check(
        num_clients <= len(labels),
        f"{num_clients} clients cannot share {len(labels)} samples; lower scene.clients.",
    )
    if partition.kind == "sites":
        check(sites is not None, "scene.partition: this data set does not say who holds what.")
        assert sites is not None
        return _by_site(sites, len(labels), num_clients)
    pools = [np.flatnonzero(labels == c) for c in range(num_classes)]
    if partition.kind == "iid":
        if partition.overlap:
            return _stratified_overlapping(pools, num_clients, rng)
        if partition.stratified:
            return _stratified(pools, num_clients, rng)
        return tuple(np.array_split(rng.permutation(len(labels)), num_clients))
    min_size = partition.min_size or _default_min_size(partition.kind, num_classes)
    check(
        num_clients * min_size <= len(labels),
        f"{num_clients} clients with at least {min_size} samples each need"
        f" {num_clients * min_size} samples, but there are {len(labels)};"
        " lower scene.clients or scene.partition.min_size.",
    )
    draw: Draw = _few_classes_overlapping if partition.overlap else _DRAWS[partition.kind]
    for _ in range(MAX_DRAWS):
        clients = draw(partition, pools, num_clients, rng)
        if clients is not None and min(map(len, clients)) >= min_size:
            for client in clients:
                rng.shuffle(client)
            return clients
    raise FedsieveError(
        f"{MAX_DRAWS} draws gave no partition in which each of {num_clients} clients has at least"
        f" {min_size} samples and each class an owner; lower scene.clients or"
        " scene.partition.min_size, or raise alpha, presence or classes of scene.partition."
    )


def _default_min_size(kind: PartitionKind, num_classes: int) -> int:
    return {"balanced-dirichlet": num_classes, "dirichlet": FEDES_BATCH}.get(kind, 1)


def _gather(samples: IntArray, owners: IntArray, num_clients: int) -> Clients:
    """Each client's samples, in the order in which they were dealt."""
    ends = np.cumsum(np.bincount(owners, minlength=num_clients))
    return tuple(np.split(samples[np.argsort(owners, kind="stable")], ends[:-1]))


def _by_site(sites: IntArray, num_samples: int, num_clients: int) -> Clients:
    sites = np.asarray(sites)
    check(
        sites.shape == (num_samples,) and np.issubdtype(sites.dtype, np.integer),
        f"sites must hold one whole number (a client id) for each of the {num_samples} samples.",
    )
    named = np.unique(sites)
    check(
        np.array_equal(named, np.arange(num_clients)),
        f"sites must name each of the clients 0 … {num_clients - 1}, but they name"
        f" {len(named)} clients from {named[0]} to {named[-1]}; set scene.clients accordingly.",
    )
    return _gather(np.arange(num_samples), sites.astype(np.int64), num_clients)


def _stratified(pools: list[IntArray], num_clients: int, rng: Rng) -> Clients:
    """Deal class after class round the table: class shares and sizes differ by at most one."""
    dealt = np.concatenate([rng.permutation(pool) for pool in pools])
    return tuple(rng.permutation(dealt[client::num_clients]) for client in range(num_clients))


def _stratified_overlapping(pools: list[IntArray], num_clients: int, rng: Rng) -> Clients:
    """n_c // K samples of each class c, drawn by each client from the whole class."""
    shares = np.array([len(pool) // num_clients for pool in pools])
    check(
        bool(shares.any()),
        f"no class has a sample for each of {num_clients} clients; lower scene.clients.",
    )
    clients = _draw_from_pools(pools, np.tile(shares, (num_clients, 1)), rng)
    return tuple(map(rng.permutation, clients))


def _draw_from_pools(pools: list[IntArray], wanted: FloatArray | IntArray, rng: Rng) -> Clients:
    """Client k draws int(wanted[k, c]) samples of class c without replacement, or all there are.

    Nothing is taken out of the pools, so that clients overlap.
    """
    return tuple(
        np.concatenate(
            [
                rng.choice(pool, min(count, len(pool)), replace=False)
                for pool, count in zip(pools, counts, strict=True)
                if count > 0
            ]
            or [np.empty(0, dtype=np.int64)]
        )
        for counts in wanted.astype(np.int64)
    )


def _cut(shares: FloatArray, num_samples: int) -> IntArray:
    """Counts per client when n shuffled samples are cut at floor(n · cumsum(shares))."""
    cuts = (np.cumsum(shares) * num_samples).astype(np.int64)[:-1]
    return np.diff(cuts, prepend=0, append=num_samples)


def _dirichlet(
    partition: Partition, pools: list[IntArray], num_clients: int, rng: Rng
) -> Clients | None:
    """Cut each class by p ~ Dir(α·1_K); balanced: p_k = 0 for a client that holds >= N/K samples.

    None where p has no mass left to normalise (a tiny α).
    """
    assert partition.alpha is not None
    fair_share = sum(map(len, pools)) / num_clients
    sizes = np.zeros(num_clients, dtype=np.int64)
    dealt, owners = [], []
    for pool in pools:
        samples = pool.copy()
        rng.shuffle(samples)
        shares = rng.dirichlet(np.full(num_clients, partition.alpha))
        if partition.kind == "balanced-dirichlet":
            shares = shares * (sizes < fair_share)
        mass = shares.sum()
        if not mass > 0:
            return None
        counts = _cut(shares / mass, len(samples))
        sizes += counts
        dealt.append(samples)
        owners.append(np.repeat(np.arange(num_clients), counts))
    return _gather(np.concatenate(dealt), np.concatenate(owners), num_clients)


def _bernoulli_dirichlet(
    partition: Partition, pools: list[IntArray], num_clients: int, rng: Rng
) -> Clients | None:
    """Φ_kc ~ Bernoulli(p), a client without any class drawn again; each sample of class c goes to
    a client drawn from q_c ~ Dir(α) over the clients with Φ_kc = 1.

    None where a class has no client.
    """
    assert partition.alpha is not None
    assert partition.presence is not None
    pools = [pool for pool in pools if len(pool)]
    may_hold = np.zeros((num_clients, len(pools)), dtype=bool)
    while not (has_class := may_hold.any(axis=1)).all():
        missing = int((~has_class).sum())
        may_hold[~has_class] = rng.uniform(size=(missing, len(pools))) < partition.presence
    owners = []
    for pool, holds in zip(pools, may_hold.T, strict=True):
        holders = np.flatnonzero(holds)
        if len(holders) == 0:
            return None
        shares = rng.dirichlet(np.full(len(holders), partition.alpha))
        owners.append(rng.choice(holders, size=len(pool), p=shares))
    return _gather(np.concatenate(pools), np.concatenate(owners), num_clients)


def _draw_classes(
    classes: int, present: IntArray, num_classes: int, num_clients: int, rng: Rng
) -> npt.NDArray[np.bool_]:
    """(K, C) table of who holds what: `classes` different random classes for each client."""
    holds = np.zeros((num_clients, num_classes), dtype=bool)
    for row in holds:
        row[rng.choice(present, classes, replace=False)] = True
    return holds


def _give_every_class_a_holder(holds: npt.NDArray[np.bool_], present: IntArray, rng: Rng) -> None:
    """Swap each class that nobody drew for one that several clients drew, at a random client."""
    for orphan in present[~holds[:, present].any(axis=0)]:
        client, spare = rng.permutation(np.argwhere(holds & (holds.sum(axis=0) > 1)))[0]
        holds[client, [spare, orphan]] = False, True


def _draw_shares(holds: npt.NDArray[np.bool_], rng: Rng) -> FloatArray:
    """(K, C) shares: U(0, 1) for each class that a client holds, its row normalised to 1."""
    # 1 − U lies in (0, 1] where U lies in [0, 1): no share that should be there is zero.
    weights = np.where(holds, 1 - rng.uniform(size=holds.shape), 0.0)
    shares: FloatArray = weights / weights.sum(axis=1, keepdims=True)
    return shares


def _few_classes(
    partition: Partition, pools: list[IntArray], num_clients: int, rng: Rng
) -> Clients:
    """Cut each class among its holders in proportion to their shares: nothing is left over."""
    classes, present = _checked_classes(partition, pools)
    check(
        num_clients * classes >= len(present),
        f"{num_clients} clients with {classes} classes each cannot hold {len(present)} classes;"
        " raise scene.clients or scene.partition.classes, or set overlap = true.",
    )
    holds = _draw_classes(classes, present, len(pools), num_clients, rng)
    _give_every_class_a_holder(holds, present, rng)
    shares = _draw_shares(holds, rng)
    dealt, owners = [], []
    for c in present:
        dealt.append(rng.permutation(pools[c]))
        counts = _cut_among_holders(shares[:, c], len(pools[c]))
        owners.append(np.repeat(np.arange(num_clients), counts))
    return _gather(np.concatenate(dealt), np.concatenate(owners), num_clients)


def _cut_among_holders(shares: FloatArray, num_samples: int) -> IntArray:
    """As `_cut`, but the remainder of rounding goes to the last client that has a share."""
    holders = np.flatnonzero(shares)
    counts = np.zeros(len(shares), dtype=np.int64)
    counts[holders] = _cut(shares[holders] / shares.sum(), num_samples)
    return counts


def _few_classes_overlapping(
    partition: Partition, pools: list[IntArray], num_clients: int, rng: Rng
) -> Clients:
    """Each client draws int(share · N/K) samples of each of its classes, from the whole class."""
    classes, present = _checked_classes(partition, pools)
    fair_share = sum(map(len, pools)) / num_clients
    holds = _draw_classes(classes, present, len(pools), num_clients, rng)
    return _draw_from_pools(pools, _draw_shares(holds, rng) * fair_share, rng)


def _checked_classes(partition: Partition, pools: list[IntArray]) -> tuple[int, IntArray]:
    assert partition.classes is not None
    present = np.flatnonzero([len(pool) for pool in pools])
    check(
        partition.classes <= len(present),
        f"scene.partition.classes = {partition.classes}, but the data has {len(present)} classes.",
    )
    return partition.classes, present


_DRAWS: dict[PartitionKind, Draw] = {
    "balanced-dirichlet": _dirichlet,
    "dirichlet": _dirichlet,
    "bernoulli-dirichlet": _bernoulli_dirichlet,
    "classes": _few_classes,
}
