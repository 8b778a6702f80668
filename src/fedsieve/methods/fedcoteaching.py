"""FedCoteaching: FedAvg of two networks, each of which picks what the other one learns from.

B. Han, Q. Yao, X. Yu, G. Niu, M. Xu, W. Hu, I. W. Tsang, M. Sugiyama,
"Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy Labels", NeurIPS 2018.

    paper         here
    w_f, w_g      `weights` and `peer` of Server, Down and Up
    f, g          the nets that local_loss gets
    D̄             the samples of a batch, padding left out
    ℓ             sample_losses
    D̄_f, D̄_g      smallest: (B,) one for each sample that f, or g, picks for the other
    R(T)          1 − Down.forget_rate, "kept_share" in the batch
    τ, T_k, c     Config.forget_rate, Config.ramp_rounds, Config.exponent
    T             the round, counted from 0

A network learns labels that agree with others before it learns those that do not, so a small loss
speaks for a label. Which samples a network takes for right is an error that it would repeat; the
other network, which began elsewhere, makes other ones.

Deviations, and what the paper leaves open. It has no clients: here each client of FedAvg trains
both networks, and both are averaged by the clients' samples, as FedGR, FedES and FedLSR compare
with it. As in FedGR, the share that is left out grows from round to round, not with the epochs of
a client; the program behind FedGR's baseline comes to τ one round earlier, in round T_k − 1. One
forward pass of each network, in training mode, serves to pick and to learn. At least one sample is
kept. The second network starts from the first one's numbers in another order, not from a draw of
its own. The networks are tested together: the class whose sum of logits is the largest, as in
FedGR; FedLSR reports the mean of two accuracies instead.

FedLSR combines itself with Co-teaching (its Table 7): `objective = "sharpened"`. Its text puts "a
sharpened prediction version" of the logits into the cross entropy that picks and teaches, and
leaves all else as it is. Taken literally, that has neither a second view to mix with nor
self-distillation, and so it is here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from torch import Tensor

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net
from fedsieve.losses import cross_entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import Federation, Suspicion
from fedsieve.methods.fedavg import Client, suspicion_by
from fedsieve.methods.fedlsr import bounded_cross_entropy, sharpened
from fedsieve.methods.presets import check_choices
from fedsieve.models.heads import BEHIND_THE_BACKBONE
from fedsieve.models.weights import check_alike, reordered
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Objective: TypeAlias = Literal["cross_entropy", "sharpened"]
SecondStart: TypeAlias = Literal["all", "head"]

SHARPENING_TEMPERATURE = 0.5
"""T of FedLSR's sharpened prediction."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """The share of wrong labels must be known; the other defaults are FedGR's."""

    name: Literal["fedcoteaching"] = "fedcoteaching"
    forget_rate: float
    """τ, share of a batch that no network learns from in the end (in [0, 1)): the share of wrong
    labels in the federation. FedGR takes the share of noisy clients times the mean of their rates:
    0.75 where all have rates in [0.5, 1], 0.45 where 60 % of the clients do; and 0.39 on
    Clothing1M."""
    ramp_rounds: int = 25
    """T_k, rounds in which that share grows from 0 to τ (at least 1; FedGR 25)."""
    exponent: float = 1.0
    """c: in round T it is τ·min(T^c / T_k, 1) (above 0; paper 0.5, 1 or 2, FedGR 1)."""
    objective: Objective = "cross_entropy"
    """The loss by which samples are picked and learnt: cross entropy, or FedLSR's with the
    "sharpened" prediction in place of the logits."""
    second_start: SecondStart = "all"
    """Which weights of the second network begin in another order than the first one's: "all", or
    those of its "head" alone, where the rest was pretrained."""

    def __post_init__(self) -> None:
        check_choices(self)
        check(
            0 <= self.forget_rate < 1,
            f"method.forget_rate must be in [0, 1), not {self.forget_rate}.",
        )
        check(
            self.ramp_rounds >= 1, f"method.ramp_rounds must be at least 1, not {self.ramp_rounds}."
        )
        check(
            0 < self.exponent < math.inf, f"method.exponent must be above 0, not {self.exponent}."
        )


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Server:
    weights: Weights
    peer: Weights
    federation: Federation


@dataclass(frozen=True)
class Down:
    weights: Weights
    peer: Weights
    forget_rate: float
    """1 − R of this round."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    peer: Weights
    """The second network, trained like the first on what that one picked for it."""
    samples: int


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, second_start(weights, cfg.second_start), federation)


def second_start(weights: Weights, where: SecondStart) -> Weights:
    """w_g before the first round: w_f with another order of the entries of some tensors."""
    names = [name for name in weights if where == "all" or name.startswith(BEHIND_THE_BACKBONE)]
    check(
        bool(names),
        "method.second_start is 'head', but no part of this model is called head; use 'all'.",
    )
    return reordered(weights, names)


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    rate = ramped_up(cfg.forget_rate, round, cfg.exponent, cfg.ramp_rounds)
    return Down(server.weights, server.peer, rate)


def ramped_up(tau: float, round: int, exponent: float, ramp: int) -> float:
    """1 − R(T) = τ·min(T^c / T_k, 1); T counts from 0."""
    return tau * min(math.pow(round, exponent) / ramp, 1.0)


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """FedAvg of each network."""
    for up in ups.values():
        check_alike(server.peer, up.peer, "the second network", "an update's")
    samples = [up.samples for up in ups.values()]
    weights = weighted_mean([up.weights for up in ups.values()], samples)
    peer = weighted_mean([up.peer for up in ups.values()], samples)
    return Server(weights, peer, server.federation), {}


def peers(server: Server) -> tuple[Weights, ...]:
    return (server.peer,)


def local_peers(up: Up) -> tuple[Weights, ...]:
    return (up.peer,)


# ---------------------------------------------------------------------------------------- client


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Algorithm 1 on the client's samples, with one R(T)."""
    plan = replace(
        fedavg.plan(fedavg.Down(down.weights), shard, bench, rng),
        start=[down.weights, down.peer],
        constants={"kept_share": 1 - down.forget_rate},
        loss=partial(local_loss, cfg.objective),
    )
    fitted = bench.fit(plan)
    weights, peer = fitted.weights
    metrics = {"loss": fitted.loss / 2, "forget_rate": down.forget_rate}
    return client, Up(weights, peer, len(shard)), metrics


def local_loss(objective: Objective, batch: Batch, f: Net, g: Net) -> Tensor:
    """Steps 4 to 7: f learns from what g picks, g from what f picks; the sum of both losses, of
    which each network gets the gradient of its own."""
    of_f, of_g = (sample_losses(objective, batch, net) for net in (f, g))
    kept = kept_count(batch)
    by_f, by_g = (smallest(losses.detach(), kept, batch.weight) for losses in (of_f, of_g))
    return ((of_f * by_g).sum() + (of_g * by_f).sum()) / kept


def sample_losses(objective: Objective, batch: Batch, net: Net) -> Tensor:
    """ℓ: (B,) cross entropy, or that of FedLSR's Table 7."""
    logits, labels = net(batch["x"]).logits, batch["label"]
    if objective == "sharpened":
        prediction = sharpened(logits.softmax(dim=1), SHARPENING_TEMPERATURE)
        return bounded_cross_entropy(prediction, labels)
    return cross_entropy(logits, labels)


def kept_count(batch: Batch) -> Tensor:
    """() ⌊R(T)·|D̄|⌋, but at least one."""
    samples = len(batch["label"]) if batch.weight is None else batch.weight.sum()
    # The small addend keeps products such as 0.7 · 10 = 6.999… from losing a sample.
    return (batch.scalar("kept_share") * samples + 1e-4).floor().clamp(min=1)


def smallest(losses: Tensor, count: Tensor, weight: Tensor | None) -> Tensor:
    """(B,) one for the `count` samples of the smallest losses, zero for all others and padding.

    By ranks and not by `topk`, whose count could not change in a captured step.
    """
    if weight is not None:
        losses = losses.masked_fill(weight == 0, math.inf)
    ranks = losses.argsort(stable=True).argsort()
    return (ranks < count).to(losses.dtype)


def suspect(cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench) -> Suspicion:
    """As FedAvg's, by both networks together."""
    return suspicion_by([down.weights, down.peer], shard, bench)


METHOD = replace(
    fedavg.METHOD,
    name="fedcoteaching",
    title="Co-teaching: two networks pick small-loss samples for each other",
    paper="Han et al., Co-teaching: Robust Training of Deep Neural Networks with Extremely Noisy "
    "Labels, NeurIPS 2018",
    config=Config,
    server=Server,
    down=Down,
    up=Up,
    init_server=init_server,
    send=send,
    train=train,
    merge=merge,
    suspect=suspect,
    peers=peers,
    local_peers=local_peers,
)
