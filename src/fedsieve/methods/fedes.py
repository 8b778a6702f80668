"""FedES: a client updates as much of its model, and counts as much, as its labels seem to be right.

B. Zeng, X. Yang, Y. Chen, Z. Shen, H. Yu, Y. Zhang, "FedES: Federated Early-Stopping for Hindering
Memorizing Heterogeneous Label Noise", IJCAI 2024.

    paper               here
    N, |D_n|            Federation.clients, Up.samples
    s₁                  Config.pretrain_rounds: the rounds of stage 1, the estimation's included
    W(t)                Server.weights, Down.weights
    W_n(t+1)            Up.weights
    m                   the number of trainable parameters (`Bench.trainable`, `Up.trainable`)
    g_n, g_s            criticality (CoP) of a client's and of the averaged update
    d_n                 distances
    ρ_n, q_n            Server.qualities, Down.quality; the truth, which no method sees
    M_n                 Client.critical
    SeGD, NaAgg         Config.selective, Config.weigh_by_quality

Stage 1 is FedAvg. From updates of all clients that start at the same W, the server compares the
distribution of each client's criticalities |ΔW ⊙ W| with that of the averaged update, and scales
the distances to ρ_n in [0, 1]. In stage 2 client n updates the ⌊ρ_n·m⌋ parameters that were its
most critical ones, with steps scaled by ρ_n, and weighs |D_n|·ρ_n in the average.

Deviations, and what the paper leaves open; no program of the authors is public. The paper takes the
sign of d_n from the means of a mixture of N + 1 normals fitted to the N + 1 vectors. Each component
of such a fit sits on one vector, so the sign is taken from the vectors' own means. The earth
mover's distance is that of two samples of m numbers, computed on their sorted values, of which
large models sum all but the largest in small groups (`profile`). The scaled update holds gradient
*and* weight decay and comes before the momentum, so a parameter that is not critical does not move
at all. BatchNorm statistics are no parameters: they move at every client and are averaged with the
same weights. E counts epochs, as the text says; Algorithm 1 counts steps. g_n and M_n are made
once, at the end of stage 1. Stage 2 goes on from the pre-trained model.

The paper lets every client take part in every round. Where fewer do, the last pass of stage 1 lets
each client take part once, all from the same W, which is averaged when the pass is over. A client
that missed it counts as ρ_n = 1 with every parameter critical. A client whose weight is zero is not
asked to train. If all d_n are equal, every ρ_n is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import Federation, Sieved, choose_uniformly
from fedsieve.methods.presets import check_choices
from fedsieve.types import SERVER, ClientId, Metrics, Shard, Streams, Weights, rng_for

# ------------------------------------------------------------------------------ hyper-parameters

Indicator: TypeAlias = Literal["signed_emd", "emd", "mean", "cosine", "oracle"]
StageTwoStart: TypeAlias = Literal["pretrained", "initial"]


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are the paper's."""

    name: Literal["fedes"] = "fedes"

    pretrain_rounds: int | None = None
    """s₁, rounds of stage 1, whose last ⌈clients / clients per round⌉ estimate the qualities (at
    least that many; paper 10). Left out: pretrain_passes · ⌈clients / clients per round⌉."""
    pretrain_passes: int = 10
    """s₁ in passes over all clients, when the rounds are left out (at least 1; paper 10)."""
    indicator: Indicator = "signed_emd"
    """d_n: "signed_emd" (Eq. 9); "emd" without its sign and "mean", the difference of the mean
    criticalities (both Table 4); "cosine" between the client's and the averaged update (not in the
    paper; on CIFAR-10 with a ResNet-18 it ranks clients after five pre-training rounds with a
    correlation of .98 with the truth and reaches 82.4 %, "signed_emd" after the paper's ten with
    −.87 and 78.3 %, FedAvg 80.2 %).
    "oracle" estimates nothing and takes `oracle_quality`: for diagnosis only."""
    oracle_quality: tuple[float, ...] | None = None
    """ρ_n of every client for the indicator "oracle", in [0, 1]. Whoever writes them here knows the
    truth, so a run with them is no result of FedES; they stay in the run's saved configuration."""
    direction: Literal[1, -1] = 1
    """Whether a large d_n means right labels (1, paper) or wrong ones (-1)."""
    normalise_steps: bool = False
    """Divide each client's update by its number of steps before it is judged, so that a client does
    not look better for having more data."""
    quality_floor: float = 0.0
    """Lower bound of ρ_n (in [0, 1]; paper 0, where the client of the smallest d_n is lost)."""
    drop_below: float = 0.0
    """Clients with a smaller ρ_n take no part in stage 2 (in [0, 1]; paper 0; 0.5 is the ablation
    "CS" of Table 5)."""
    selective: bool = True
    """SeGD: scale updates by ρ_n and keep what is not critical (Eq. 16); False is an ablation."""
    weigh_by_quality: bool = True
    """NaAgg: average by |D_n|·ρ_n instead of |D_n| (Eq. 18); False is an ablation."""
    spare_vectors: bool = False
    """Count biases and other one-dimensional parameters as critical at every client."""
    stage_two_start: StageTwoStart = "pretrained"
    """Stage 2 goes on from the pre-trained model, or begins anew from the "initial" one."""

    def __post_init__(self) -> None:
        check_choices(self)
        rounds, passes = self.pretrain_rounds, self.pretrain_passes
        check(
            rounds is None or rounds >= 1,
            f"method.pretrain_rounds must be at least 1, not {rounds}.",
        )
        check(passes >= 1, f"method.pretrain_passes must be at least 1, not {passes}.")
        for name in ("quality_floor", "drop_below"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"method.{name} must be in [0, 1], not {value}.")
        given = self.oracle_quality
        check(
            (self.indicator == "oracle") == (given is not None),
            "method.oracle_quality and method.indicator = 'oracle' belong together; give both, or "
            "neither.",
        )
        if given is not None:
            check(
                all(0 <= quality <= 1 for quality in given),
                f"method.oracle_quality must hold numbers in [0, 1], not {list(given)}.",
            )
            best = max((*given, self.quality_floor))
            check(
                best > 0 and best >= self.drop_below,
                "method.oracle_quality leaves no client to train; give one of them a quality above "
                "0 and not below method.drop_below.",
            )


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Estimation:
    """What a pass of stage 1 has gathered: updates that all start from the server's weights."""

    weights: Weights
    """The mean of the clients' weights, by their samples."""
    update: Tensor
    """(m,) the mean of their updates, by their samples."""
    samples: int
    trainable: tuple[str, ...]
    """The parameters that `update` holds, one after another."""
    traces: Mapping[ClientId, Tensor]
    """What `distances` needs of each client: the profile of its criticalities, or for the cosine
    its whole update."""


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    qualities: Mapping[ClientId, float]
    """ρ_n as of a client's last estimation; clients that were never estimated are missing."""
    estimation: Estimation | None
    """A pass that is not over."""
    initial: Weights | None
    """W(0) until stage 2 begins, whether or not it is to begin there: a fork may decide that."""


@dataclass(frozen=True)
class Client:
    criticality: Weights | None
    """g_n by parameter, between the estimation and the first round of stage 2."""
    critical: Weights | None
    """M_n by parameter, bool, from then on."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    estimating: bool
    """Whether the server will judge this update."""
    quality: float | None
    """ρ_n of the receiving client in stage 2; None in stage 1."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    steps: int
    """How many steps of SGD the update took."""
    trainable: tuple[str, ...]
    """Which of the weights are trained; told while the qualities are estimated, else empty."""


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    needed = rounds_per_pass(federation)
    check(
        pretrain_rounds(cfg, federation) >= needed,
        f"method.pretrain_rounds is {cfg.pretrain_rounds}, but every client must take part once "
        f"before its quality is known; set it to at least {needed}.",
    )
    qualities = oracle_qualities(cfg, federation)
    return Server(weights, federation, qualities, estimation=None, initial=weights)


def oracle_qualities(cfg: Config, federation: Federation) -> Mapping[ClientId, float]:
    """ρ_n by the oracle, if one is asked."""
    if cfg.oracle_quality is None:
        return {}
    check(
        len(cfg.oracle_quality) == federation.clients,
        f"method.oracle_quality holds {len(cfg.oracle_quality)} numbers for "
        f"{federation.clients} clients; give one for each.",
    )
    return {k: max(quality, cfg.quality_floor) for k, quality in enumerate(cfg.oracle_quality)}


def with_samples(federation: Federation) -> list[ClientId]:
    """The clients that hold anything."""
    return [client for client, size in enumerate(federation.sizes) if size]


def rounds_per_pass(federation: Federation) -> int:
    """The rounds in which each client with samples can take part once."""
    return max(1, math.ceil(len(with_samples(federation)) / federation.per_round))


def pretrain_rounds(cfg: Config, federation: Federation) -> int:
    """s₁, the first round of stage 2 when rounds count from 0."""
    if cfg.pretrain_rounds is not None:
        return cfg.pretrain_rounds
    return cfg.pretrain_passes * rounds_per_pass(federation)


def first_estimate(cfg: Config, federation: Federation) -> int:
    """The round that completes the estimation of the qualities."""
    return pretrain_rounds(cfg, federation) - 1


def is_estimating(cfg: Config, federation: Federation, round: int) -> bool:
    """Whether the updates of this round are judged: those of the last pass of stage 1.

    Where every client takes part in every round, a pass is one round and costs nothing, so each one
    is judged, and the last counts.
    """
    length, end = rounds_per_pass(federation), pretrain_rounds(cfg, federation)
    return round < end and (length == 1 or round >= end - length)


def as_found_by(cfg: Config, server: Server, round: int) -> Server:
    """The server at the beginning of `round`, ready for stage 2 if that is where it belongs.

    Usually `merge` has seen to that. It is not called after a round that left no usable update, and
    if that was the last one of stage 1, the pass is still open.
    """
    if round < pretrain_rounds(cfg, server.federation):
        return server
    server, _ = concluded(cfg, server)
    if server.initial is None:
        return server
    weights = server.initial if cfg.stage_two_start == "initial" else server.weights
    return replace(server, weights=weights, initial=None)


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    """Every client once in the pass that estimates; in stage 2 those that weigh anything."""
    server = as_found_by(cfg, server, round)
    federation = server.federation
    if is_estimating(cfg, federation, round):
        length, end = rounds_per_pass(federation), pretrain_rounds(cfg, federation)
        # The order belongs to the pass: each of its rounds draws the same one and takes its part.
        order = rng_for(rng.seed, 0, SERVER, "estimation order").permutation(
            with_samples(federation)
        )
        part = np.array_split(order, length)[(round - end) % length]
        return tuple(sorted(part.tolist()))
    clients = list(range(federation.clients))
    if round >= pretrain_rounds(cfg, federation):
        clients = [k for k in clients if takes_part(cfg, quality_of(server, k))]
    chosen = choose_uniformly(len(clients), federation.per_round, rng("select"))
    return tuple(clients[i] for i in chosen)


def quality_of(server: Server, client: ClientId) -> float:
    """ρ_n; 1 for a client that was never estimated."""
    return server.qualities.get(client, 1.0)


def takes_part(cfg: Config, quality: float) -> bool:
    """Whether a client with this ρ_n can change the model of stage 2."""
    return quality >= cfg.drop_below and (quality > 0 or not cfg.weigh_by_quality)


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    server = as_found_by(cfg, server, round)
    in_stage_two = round >= pretrain_rounds(cfg, server.federation)
    return Down(
        server.weights,
        estimating=is_estimating(cfg, server.federation, round),
        quality=quality_of(server, client) if in_stage_two else None,
    )


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """Stage 1: FedAvg, and at the end of a pass the qualities. Stage 2: Eq. 18."""
    check(len(ups) > 0, f"No client took part in round {round}; let at least one.")
    server = as_found_by(cfg, server, round)
    end = pretrain_rounds(cfg, server.federation)
    if is_estimating(cfg, server.federation, round):
        server = replace(server, estimation=gathered(cfg, server, ups))
        is_last_of_pass = (round + 1 - end) % rounds_per_pass(server.federation) == 0
        server, metrics = concluded(cfg, server) if is_last_of_pass else (server, {})
        return as_found_by(cfg, server, round + 1), metrics
    shares = [float(up.samples) for up in ups.values()]
    if round >= end and cfg.weigh_by_quality:
        shares = [n * quality_of(server, k) for n, k in zip(shares, ups, strict=True)]
    if any(shares):
        weights = weighted_mean([up.weights for up in ups.values()], shares)
        server = replace(server, weights=weights)
    return server, {}


def gathered(cfg: Config, server: Server, ups: Mapping[ClientId, Up]) -> Estimation | None:
    """The pass with this round's updates; None while no client had a sample."""
    so_far = server.estimation
    for client, up in ups.items():
        if up.samples == 0:
            continue
        start = flat(server.weights, up.trainable)
        update = flat(up.weights, up.trainable) - start
        if cfg.normalise_steps:
            update = update / max(1, up.steps)
        traces: Mapping[ClientId, Tensor] = {}
        if cfg.indicator != "oracle":
            seen = update if cfg.indicator == "cosine" else profile(criticality(update, start))
            traces = {client: seen}
        alone = Estimation(up.weights, update, up.samples, up.trainable, traces)
        so_far = alone if so_far is None else joined(so_far, alone)
    return so_far


def joined(first: Estimation, second: Estimation) -> Estimation:
    """Both estimations as one: means by samples, as `weighted_mean` takes them."""
    samples = first.samples + second.samples
    return Estimation(
        weighted_mean([first.weights, second.weights], [first.samples, second.samples]),
        torch.lerp(first.update, second.update, second.samples / samples),
        samples,
        first.trainable,
        {**first.traces, **second.traces},
    )


def concluded(cfg: Config, server: Server) -> tuple[Server, Metrics]:
    """The server after a pass: the averaged weights and every client's ρ_n."""
    estimation = server.estimation
    if estimation is None:
        return server, {}
    # Asked again: a run may have forked from one that had estimated before.
    qualities = {**server.qualities, **oracle_qualities(cfg, server.federation)}
    metrics: dict[str, float] = {}
    if estimation.traces:
        found = distances(cfg.indicator, estimation, flat(server.weights, estimation.trainable))
        metrics["positive_distances"] = sum(d > 0 for d in found.values()) / len(found)
        values = data_quality([cfg.direction * d for d in found.values()])
        floored = [max(value, cfg.quality_floor) for value in values]
        qualities = {**qualities, **dict(zip(found, floored, strict=True))}
    metrics["quality"] = sum(qualities.values()) / len(qualities)
    after = replace(server, weights=estimation.weights, qualities=qualities, estimation=None)
    return after, metrics


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client(criticality=None, critical=None)


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    plan = fedavg.plan(fedavg.Down(down.weights), shard, bench, rng)
    metrics: dict[str, float] = {}
    if down.quality is not None and cfg.selective:
        if client.criticality is not None:
            mask = critical_parameters(client.criticality, down.quality, cfg.spare_vectors)
            client = Client(criticality=None, critical=mask)
        plan = replace(plan, update_scale=decay(client.critical, down.quality, bench.trainable))
        if client.critical is not None:
            counts = torch.stack([mask.sum() for mask in client.critical.values()])
            total = sum(mask.numel() for mask in client.critical.values())
            metrics["critical_share"] = int(counts.sum()) / total
    fitted = bench.fit(plan)
    weights = fitted.weights[0]
    if down.estimating:
        own = {
            n: criticality(weights[n] - down.weights[n], down.weights[n]) for n in bench.trainable
        }
        client = Client(criticality=own, critical=None)
    trainable = bench.trainable if down.estimating else ()
    up = Up(weights, len(shard), fitted.steps, trainable)
    return client, up, {"loss": fitted.loss, **metrics}


# ------------------------------------------------------------------------------------- equations


def criticality(update: Tensor, weights: Tensor) -> Tensor:
    """Eqs. 7 and 8: g = |ΔW ⊙ W|, where W is what the update started from."""
    return (update * weights).abs()


PROFILE = 16_384
"""Most numbers in a `profile`."""


def profile(values: Tensor) -> Tensor:
    """(≤ PROFILE,) float64: the sorted `values` (m,) ≥ 0, or where m is larger, sums of them.

    Half of the numbers are the largest values one by one, for the tail of criticalities is heavy.
    The others are sums of consecutive groups of the rest, all of one size, the first filled up with
    zeros, which come first in any such order.
    """
    ordered = values.sort().values
    if len(values) <= PROFILE:
        return ordered.double()
    many, largest = ordered[: -(PROFILE // 2)], ordered[-(PROFILE // 2) :]
    size = math.ceil(len(many) / (PROFILE // 2))
    groups = math.ceil(len(many) / size)
    padded = many.new_zeros(groups * size)
    padded[len(padded) - len(many) :] = many
    sums = padded.view(groups, size).sum(dim=1, dtype=torch.float64)
    return torch.cat([sums, largest.double()])


def distances(indicator: Indicator, estimation: Estimation, start: Tensor) -> dict[ClientId, float]:
    """d_n (Eqs. 9 and 10), or what Table 4 puts in its place, for each client of the pass.

    EMD(g_n, g_s) of two samples of m numbers is the mean of |sorted g_n − sorted g_s|, here taken
    of their profiles: exact unless the two cross within a group.
    """
    if indicator == "cosine":
        return {
            client: float(torch.cosine_similarity(update, estimation.update, dim=0))
            for client, update in estimation.traces.items()
        }
    reference = profile(criticality(estimation.update, start))
    found = {}
    for client, trace in estimation.traces.items():
        difference = trace - reference
        mean = float(difference.sum()) / len(start)
        distance = float(difference.abs().sum()) / len(start)
        signed = math.copysign(distance, mean) if mean else 0.0
        found[client] = {"signed_emd": signed, "emd": distance, "mean": mean}[indicator]
    return found


def data_quality(distances: list[float]) -> list[float]:
    """Eq. 11: ρ_n = (d_n − min d)/(max d − min d); 1 for all where every d_n is the same."""
    low, high = min(distances), max(distances)
    if low == high:
        return [1.0] * len(distances)
    return [(distance - low) / (high - low) for distance in distances]


def critical_parameters(
    criticality: Weights, quality: float, spare_vectors: bool
) -> dict[str, Tensor]:
    """Eqs. 12–15: M_n, true where g_n is among its ⌊ρ_n·m⌋ largest values of all parameters.

    As in Eq. 15, values equal to the smallest of those count too.
    """
    values = flat(criticality, tuple(criticality))
    # The small addend keeps products such as 0.29 · 100 = 28.999… from losing a parameter.
    count = math.floor(quality * len(values) + 1e-9)
    threshold = values.sort(descending=True).values[count - 1] if count else math.inf
    return {
        name: torch.ones_like(g, dtype=torch.bool)
        if spare_vectors and g.dim() <= 1
        else g >= threshold
        for name, g in criticality.items()
    }


def decay(critical: Weights | None, quality: float, trainable: tuple[str, ...]) -> Weights:
    """ρ_n·M_n of Eq. 16, the scale of a client's updates; ρ_n alone where M_n is not known."""
    if critical is None:
        return {name: torch.tensor(quality) for name in trainable}
    return {name: mask.float() * quality for name, mask in critical.items()}


def flat(weights: Weights, names: tuple[str, ...]) -> Tensor:
    """(m,) the named tensors one after another."""
    return torch.cat([weights[name].flatten() for name in names])


# ----------------------------------------------------------------------------------------- audit


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """1 − ρ_n of every client that was estimated; no opinion on single labels."""
    return {client: Sieved(1 - quality, None) for client, quality in server.qualities.items()}


METHOD = replace(
    fedavg.METHOD,  # whose suspicion of single labels is FedES's too
    name="fedes",
    title="FedES: clients update and count as much as their estimated data quality",
    paper="Zeng et al., FedES: Federated Early-Stopping for Hindering Memorizing Heterogeneous "
    "Label Noise, IJCAI 2024",
    config=Config,
    server=Server,
    client=Client,
    down=Down,
    up=Up,
    init_server=init_server,
    init_client=init_client,
    select=select,
    send=send,
    train=train,
    merge=merge,
    sieve=sieve,
    begins=first_estimate,
)
