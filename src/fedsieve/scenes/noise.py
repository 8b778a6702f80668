"""With which labels: how many labels of each client are wrong, which ones, and what they become."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from fedsieve.errors import check
from fedsieve.scenes._options import (
    check_belongs,
    check_between,
    check_choice,
    check_given,
    check_whole,
)
from fedsieve.scenes.label_file import read_labels
from fedsieve.scenes.partition import Clients, FloatArray, IntArray, Rng
from fedsieve.types import SERVER, rng_for

NoiseKind: TypeAlias = Literal["none", "symmetric", "asymmetric", "mixed", "matrix", "file"]
LevelModel: TypeAlias = Literal["uniform", "bernoulli", "normal", "fixed", "global"]
SampleModel: TypeAlias = Literal["exact", "bernoulli"]
FlipTo: TypeAlias = Literal["next", "previous", "next-in-block", "next-in-superclass"]

_COIN = ("symmetric", "asymmetric")

_USED: dict[NoiseKind, tuple[str, ...]] = {
    "none": (),
    "symmetric": ("clients", "samples", "include_true", "label_range"),
    "asymmetric": ("clients", "samples", "flip_to"),
    "mixed": ("clients", "samples", "flip_to"),
    "matrix": ("matrix",),
    "file": ("path", "column"),
}
_NEEDED: dict[NoiseKind, tuple[str, ...]] = {"matrix": ("matrix",), "file": ("path",)}
_USED_BY_LEVELS: dict[LevelModel, tuple[str, ...]] = {
    "uniform": ("share", "low", "high"),
    "bernoulli": ("share", "low", "high"),
    "normal": ("mean", "std"),
    "fixed": ("rate",),
    "global": ("rate",),
}
_NEEDED_BY_LEVELS: dict[LevelModel, tuple[str, ...]] = {
    "uniform": ("low",),
    "bernoulli": ("low",),
    "normal": ("mean",),
    "fixed": ("rate",),
    "global": ("rate",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How labels become wrong. An option that its kind does not use is refused."""

    kind: NoiseKind = "none"
    """`symmetric`: to any other class. `asymmetric`: to one set class (`flip_to`). `mixed`: a fair
    coin per noisy client decides which of the two. `matrix`: every label is drawn from its row of
    `matrix`. `file`: the given labels are read from `path`. `none`: every label is right."""
    clients: LevelModel = "uniform"
    """How the noise level ρ_k of client k is drawn. `uniform`: exactly floor(φK) random clients
    are noisy, ρ_k ~ U(low, high) (FedGR). `bernoulli`: each client is noisy with probability φ,
    same ρ_k (FedCorr and FedDiv, who write (ρ, τ) for (share, low)). `normal`: ρ_k =
    clip(N(mean, std), 0, 1) (FedES). `fixed`: ρ_k = rate. `global`: no levels; the labels of each
    class are flipped at `rate` in the whole data set before it is dealt (FedLSR)."""
    share: float = 1.0
    """φ, in [0, 1]: the share of noisy clients. FedGR φ = 0.6 or 1, FedDiv ρ = 0.4 to 1."""
    low: float | None = None
    """ρ_min, in [0, 1]. FedGR 0.5 (symmetric) or 0.2 (others), FedDiv τ = 0 or 0.5."""
    high: float = 1.0
    """ρ_max, in [low, 1]. FedGR 1.0 (symmetric) or 0.4 (others), FedDiv 1."""
    mean: float | None = None
    """μ, in [0, 1]. FedES 0.3 or 0.5."""
    std: float = 0.2
    """σ >= 0, a standard deviation. FedES 0.2."""
    rate: float | None = None
    """ε, in [0, 1]: the one noise rate of `fixed` and `global`."""
    samples: SampleModel = "exact"
    """Which samples of n are flipped. `exact`: floor(n·ρ) random ones (FedGR, FedES, FedLSR).
    `bernoulli`: each one with probability ρ (FedCorr, FedDiv)."""
    include_true: bool = False
    """symmetric only: the new label is uniform over all C classes and may be the true one (FedCorr,
    FedDiv), so that the noise rate is ρ(C−1)/C instead of ρ."""
    label_range: int | None = None
    """symmetric only: new labels come from the classes 0 … label_range − 1. 10 repeats what the
    code of FedCorr and FedDiv does on CIFAR-100; not set: all classes."""
    flip_to: FlipTo = "next"
    """Where asymmetric noise sends class y. `next`: y+1 mod C (FedGR on CIFAR-10). `previous`:
    y−1 mod C (FedLSR, "pairwise"). `next-in-block`: cyclic next among `block` consecutive classes
    (FedGR on CIFAR-100). `next-in-superclass`: cyclic next in the data set's own super-class."""
    block: int = 5
    """next-in-block only: classes per block, >= 2."""
    matrix: tuple[tuple[float, ...], ...] | None = None
    """C × C; row y holds the probabilities of the given labels for true class y, and sums to 1."""
    path: str | None = None
    """A .npy, .npz, .txt or .csv file with one label (index or class name) per sample."""
    column: str | None = None
    """The name of the array (.npz) or column (.csv) that holds the labels."""

    def __post_init__(self) -> None:
        where = "scene.noise"
        check_choice(f"{where}.kind", self.kind, get_args(NoiseKind))
        check_choice(f"{where}.clients", self.clients, get_args(LevelModel))
        check_choice(f"{where}.samples", self.samples, get_args(SampleModel))
        check_choice(f"{where}.flip_to", self.flip_to, get_args(FlipTo))
        chosen = f'kind = "{self.kind}"'
        used, needed = ("kind", *_USED[self.kind]), _NEEDED.get(self.kind, ())
        if "clients" in used:
            chosen += f', clients = "{self.clients}"'
            used += _USED_BY_LEVELS[self.clients]
            needed += _NEEDED_BY_LEVELS[self.clients]
        if "flip_to" in used:
            chosen += f', flip_to = "{self.flip_to}"'
            used += ("block",) if self.flip_to == "next-in-block" else ()
        check_belongs(self, where, chosen, used)
        check_given(self, where, chosen, needed)
        for name in ("share", "low", "high", "mean", "rate"):
            check_between(f"{where}.{name}", getattr(self, name), 0, 1)
        check_between(f"{where}.std", self.std, 0)
        check(
            self.low is None or self.low <= self.high,
            f"{where}.low must not be greater than {where}.high.",
        )
        check_whole(f"{where}.label_range", self.label_range, 2)
        check_whole(f"{where}.block", self.block, 2)
        check(
            (self.kind, self.clients) != ("mixed", "global"),
            f'{where}: mixed noise tosses a coin per client, so clients = "global" cannot be used.',
        )
        if self.matrix is not None:
            object.__setattr__(self, "matrix", _checked_matrix(self.matrix))

    @property
    def is_per_client(self) -> bool:
        """Whether the noise of a sample depends on the client that holds it."""
        return "clients" in _USED[self.kind] and self.clients != "global"

    @property
    def is_fedgr(self) -> bool:
        """Whether this is FedGR's noise, whose random streams are then repeated bit for bit."""
        return (
            self.kind in ("symmetric", "asymmetric", "mixed")
            and (self.clients, self.samples) == ("uniform", "exact")
            and not self.include_true
            and self.label_range is None
        )


@dataclass(frozen=True, slots=True)
class NoisyLabels:
    """The outcome of `add_noise`."""

    given: IntArray
    """(N,) the labels that the clients see"""
    levels: FloatArray
    """(K,) the noise level meant for each client"""
    kinds: tuple[str, ...]
    """(K) what happened at each client: none, symmetric, asymmetric, matrix or file"""


def add_noise(
    noise: Noise,
    true: IntArray,
    clients: Clients,
    *,
    num_classes: int,
    seed: int,
    partition_rng: Rng,
    class_names: Sequence[str] | None = None,
    superclass_of: Sequence[int] | None = None,
) -> NoisyLabels:
    """Make the given labels from the `true` ones.

    `partition_rng` is the stream as the partition left it: FedGR's noise goes on with it where it
    is a legacy stream. All other draws come from streams of their own.
    """
    if noise.kind == "none":
        return NoisyLabels(true.copy(), np.zeros(len(clients)), ("none",) * len(clients))
    if noise.kind == "file":
        assert noise.path is not None
        given = read_labels(
            Path(noise.path),
            num_samples=len(true),
            num_classes=num_classes,
            column=noise.column,
            class_names=class_names,
        )
        levels = np.array([(given[held] != true[held]).mean() for held in clients])
        return NoisyLabels(given, levels, ("file",) * len(clients))
    if noise.kind == "matrix":
        return _by_matrix(noise, true, clients, num_classes, seed)
    check(num_classes >= 2, "label noise needs at least two classes.")
    check(
        noise.label_range is None or noise.label_range <= num_classes,
        f"scene.noise.label_range must not exceed the number of classes, {num_classes}.",
    )
    targets = flip_targets(noise, num_classes, superclass_of)
    if noise.is_fedgr and isinstance(partition_rng, np.random.RandomState):
        return _by_fedgr_streams(noise, true, clients, num_classes, targets, partition_rng, seed)
    return _by_own_streams(noise, true, clients, num_classes, targets, seed)


def flip_targets(
    noise: Noise, num_classes: int, superclass_of: Sequence[int] | None = None
) -> IntArray:
    """(C,) the class that asymmetric noise sends each class to."""
    classes = np.arange(num_classes)
    if noise.flip_to == "previous":
        return (classes - 1) % num_classes
    if noise.flip_to == "next":
        group = np.zeros(num_classes, dtype=np.int64)
    elif noise.flip_to == "next-in-block":
        group = classes // noise.block
    else:
        check(
            superclass_of is not None and len(superclass_of) == num_classes,
            'scene.noise.flip_to = "next-in-superclass" needs a data set that names the'
            f" super-class of each of its {num_classes} classes.",
        )
        group = np.asarray(superclass_of, dtype=np.int64)
    targets = classes.copy()
    for name in np.unique(group):
        members = classes[group == name]
        check(
            len(members) > 1,
            f"scene.noise.flip_to: class {members[0]} is alone in its group, so there is no class"
            " to flip it to; choose another block size or flip_to.",
        )
        targets[members] = np.roll(members, -1)
    return targets


def draw_levels(noise: Noise, num_clients: int, rng: Rng) -> FloatArray:
    """(K,) the noise level ρ_k of each client; 0 for a clean one."""
    if noise.clients in ("fixed", "global"):
        assert noise.rate is not None
        return np.full(num_clients, float(noise.rate))
    if noise.clients == "normal":
        assert noise.mean is not None
        return np.clip(rng.normal(noise.mean, noise.std, num_clients), 0.0, 1.0)
    assert noise.low is not None
    if noise.clients == "uniform":
        # The permutation is drawn for φ = 1 too, as FedGR does.
        noisy = np.sort(rng.permutation(num_clients)[: int(num_clients * noise.share)])
    else:
        noisy = np.flatnonzero(rng.uniform(size=num_clients) < noise.share)
    levels = np.zeros(num_clients)
    levels[noisy] = rng.uniform(noise.low, noise.high, len(noisy))
    return levels


def _draw_kinds(noise: Noise, levels: FloatArray, toss: Callable[[], str]) -> tuple[str, ...]:
    """What each client suffers: nothing at level 0; mixed noise tosses for each noisy client."""
    return tuple(
        "none" if level == 0 else toss() if noise.kind == "mixed" else noise.kind
        for level in levels
    )


def _other_class(true: IntArray, draws: IntArray) -> IntArray:
    """The draws 0 … C−2 as positions in the ascending list of the classes that are not `true`."""
    return draws + (draws >= true)


def _by_fedgr_streams(
    noise: Noise,
    true: IntArray,
    clients: Clients,
    num_classes: int,
    targets: IntArray,
    numpy_rng: np.random.RandomState,
    seed: int,
) -> NoisyLabels:
    """FedGR's noise, draw for draw.

    NumPy: permutation and levels. Python: the coins of mixed noise for noisy clients in id order,
    then for each client (clean ones too) a shuffle of 0 … n−1, whose first floor(n·ρ) are noisy.
    NumPy: one draw from the other classes for each symmetric flip, by ascending position.
    """
    python_rng = random.Random(seed)
    levels = draw_levels(noise, len(clients), numpy_rng)
    kinds = _draw_kinds(noise, levels, lambda: python_rng.choice(_COIN))
    given = true.copy()
    for held, level, kind in zip(clients, levels, kinds, strict=True):
        positions = list(range(len(held)))
        python_rng.shuffle(positions)
        flipped = held[sorted(positions[: int(len(held) * level)])]
        if kind == "symmetric":
            draws = numpy_rng.randint(0, num_classes - 1, size=len(flipped))
            given[flipped] = _other_class(true[flipped], draws)
        else:
            given[flipped] = targets[true[flipped]]
    return NoisyLabels(given, levels, kinds)


def _by_own_streams(
    noise: Noise,
    true: IntArray,
    clients: Clients,
    num_classes: int,
    targets: IntArray,
    seed: int,
) -> NoisyLabels:
    """All other noise at a level: client by client, or class by class in the whole data set."""
    levels = draw_levels(noise, len(clients), rng_for(seed, 0, SERVER, "noise levels"))
    coin_rng = rng_for(seed, 0, SERVER, "noise kinds")
    kinds = _draw_kinds(noise, levels, lambda: _COIN[coin_rng.integers(2)])
    given = true.copy()

    def flip(group: IntArray, level: float, kind: str, rng: np.random.Generator) -> None:
        if noise.samples == "exact":
            flipped = rng.permutation(group)[: int(len(group) * level)]
        else:
            flipped = group[rng.random(len(group)) < level]
        if kind == "symmetric":
            given[flipped] = _symmetric(noise, true[flipped], num_classes, rng)
        else:
            given[flipped] = targets[true[flipped]]

    if noise.clients == "global":
        assert noise.rate is not None
        rng = rng_for(seed, 0, SERVER, "label noise")
        for c in range(num_classes):
            flip(np.flatnonzero(true == c), noise.rate, noise.kind, rng)
    else:
        for k, (held, level, kind) in enumerate(zip(clients, levels, kinds, strict=True)):
            flip(held, level, kind, rng_for(seed, 0, k, "label noise"))
    return NoisyLabels(given, levels, kinds)


def _symmetric(
    noise: Noise, true: IntArray, num_classes: int, rng: np.random.Generator
) -> IntArray:
    """New labels, uniform over the classes 0 … label_range − 1, with or without the true class."""
    label_range = noise.label_range or num_classes
    if noise.include_true:
        return rng.integers(label_range, size=len(true))
    return _other_class(
        true, rng.integers(np.where(true < label_range, label_range - 1, label_range))
    )


def _by_matrix(
    noise: Noise, true: IntArray, clients: Clients, num_classes: int, seed: int
) -> NoisyLabels:
    """Each label drawn from the row of its true class; a client's level is its mean 1 − T_yy."""
    matrix = np.array(noise.matrix)
    check(
        len(matrix) == num_classes,
        f"scene.noise.matrix has {len(matrix)} rows, but the data has {num_classes} classes.",
    )
    rng = rng_for(seed, 0, SERVER, "label noise")
    given = true.copy()
    for c, row in enumerate(matrix):
        group = true == c
        given[group] = rng.choice(num_classes, size=int(group.sum()), p=row / row.sum())
    leaves = 1 - np.diag(matrix)
    levels = np.array([leaves[true[held]].mean() for held in clients])
    return NoisyLabels(given, levels, ("matrix",) * len(clients))


def _checked_matrix(matrix: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """The matrix as nested tuples (a recipe file gives lists), refused if it is no C × C one."""
    rows = tuple(tuple(float(p) for p in row) for row in matrix)
    check(
        len(rows) > 0 and all(len(row) == len(rows) for row in rows),
        "scene.noise.matrix must have as many columns as rows.",
    )
    check(
        all(min(row) >= 0 and abs(sum(row) - 1) < 1e-6 for row in rows),
        "each row of scene.noise.matrix must hold probabilities that sum to 1.",
    )
    return rows
