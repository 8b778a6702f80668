"""FedNoRo: finds noisy clients by their loss in each class, and lets the global model teach them.

N. Wu, L. Yu, X. Jiang, K.-T. Cheng, Z. Yan, "FedNoRo: Towards Noise-Robust Federated Learning by
Addressing Class Imbalance and Label Noise Heterogeneity", IJCAI 2023.

    paper             here
    T_1               Config.warmup_rounds
    w^t               Server.weights, Down.weights
    w_k, N_k          Up.weights, Up.samples
    π_k               class_shares
    l_k^c             Up.class_losses
    S_n, S_c          Server.noisy, and the other clients
    λ                 ramp, Down.distillation
    f_G, τ            the frozen net of distilled_loss, Config.temperature
    D(k)              distances

Stage 1: FedAvg, whose cross entropy is of logits to which each client adds the logarithm of its own
class frequencies, so that it does not learn these. Then the global model's mean losses of all
clients in all classes are scaled class by class, and a mixture of two normals splits the clients.
Stage 2: clean clients go on as before. A noisy one also learns what the received model says of its
images, in the end mostly that; and it counts the less, the farther its model is from all clean
ones.

Deviations, and what the paper leaves open. In the paper all clients take part in every round, and
their losses are there when stage 1 is over. Here a client reports with its next update: after stage
1 all clients are asked in turn, once each, and train as in stage 1 while they report what the model
of the end of stage 1 makes of their labels. That model is sent along where the global one has moved
on. If all take part in every round, this is one round, in which the verdict counts already, and the
only difference is that in it nobody is taught (λ is 0.005 there). A round without a clean or
without a noisy client is averaged as in FedAvg, and so is one in which no noisy model differs from
a clean one. A client without a report, for want of samples or because its update was refused,
counts as clean. A class that nobody has, or in which all losses are equal, says nothing. The solver
is the recipe's SGD, where the paper has Adam. Differences between paper and program are switches
with presets (`PRESETS`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net
from fedsieve.losses import cross_entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import (
    Federation,
    Sieved,
    choose_in_turn,
    choose_uniformly,
    rounds_per_pass,
)
from fedsieve.methods.fedavg import Client
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.models.weights import check_alike
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["paper", "authors"]
Distance: TypeAlias = Literal["euclidean", "per_tensor"]
Covariance: TypeAlias = Literal["diagonal", "full"]
EvaluationView: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper and the authors' program differ; `Config` says what each one does."""

    distance: Distance
    covariance: Covariance
    evaluation_view: EvaluationView


PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "paper": Switches(distance="euclidean", covariance="diagonal", evaluation_view="raw"),
        "authors": Switches(distance="per_tensor", covariance="full", evaluation_view="weak"),
    }
)
"""The paper's formulas, and the public program. The paper does not say which covariance."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are the paper's."""

    presets = PRESETS
    name: Literal["fednoro"] = "fednoro"

    warmup_rounds: int = 10
    """T_1, rounds of stage 1 (at least 0; paper 10). The clients are asked for their losses in the
    ⌈clients / clients per round⌉ rounds that follow."""
    adjustment: float = 1.0
    """What multiplies log π_k where it is added to the logits (at least 0; paper 1; 0 leaves the
    logits as they are)."""
    distillation: float = 0.8
    """The largest λ, weight of what the global model says (in [0, 1]; paper 0.8; 0 teaches
    nobody)."""
    temperature: float = 0.8
    """τ, what divides the logits of the teaching model (above 0; paper 0.8)."""
    ramp_from: int = 10
    """The round up to which λ is e⁻⁵ of its largest value; rounds count from 0 (at least 0; 10)."""
    ramp_to: int = 49
    """The round from which λ has its largest value (above ramp_from; 49)."""
    distance_aware: bool = True
    """False averages the models as FedAvg does (the ablation without DaAgg)."""

    preset: Preset = "paper"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    distance: Distance | None = None
    """How far two models are apart: by the norm of their difference ("euclidean"), or by the sum of
    the norms of its tensors, BatchNorm statistics included ("per_tensor")."""
    covariance: Covariance | None = None
    """Of the two normals over class-wise losses: "diagonal", or "full", which wants many more
    clients than classes."""
    evaluation_view: EvaluationView | None = None
    """What the class-wise losses are computed on: the raw images, or randomly cropped and flipped
    ones."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        for name in ("warmup_rounds", "ramp_from"):
            value = getattr(self, name)
            check(value >= 0, f"method.{name} must be at least 0, not {value}.")
        check(
            self.ramp_to > self.ramp_from,
            f"method.ramp_to must be above method.ramp_from = {self.ramp_from}, not "
            f"{self.ramp_to}.",
        )
        check(
            0 <= self.adjustment < math.inf,
            f"method.adjustment must be at least 0, not {self.adjustment}.",
        )
        check(
            0 <= self.distillation <= 1,
            f"method.distillation must be in [0, 1], not {self.distillation}.",
        )
        check(
            0 < self.temperature < math.inf,
            f"method.temperature must be above 0, not {self.temperature}.",
        )

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    reports: Mapping[ClientId, Tensor]
    """(classes,) of each client that has reported, until the verdict."""
    judge: Weights | None
    """The model of the end of stage 1, while clients report and the global model has moved on."""
    noisy: Mapping[ClientId, bool] | None
    """Whether a client is in S_n, for those that reported; None before the verdict."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    reporting: bool
    """Whether the client is asked for its class-wise losses."""
    judge: Weights | None
    """The model to compute them with, where it is not the one above."""
    distillation: float
    """λ of this round at a noisy client; 0 at the others."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    class_losses: Tensor | None
    """(classes,) once in a run: the mean loss of the samples that carry each label, −1 for a label
    that none carries. So the server learns which labels occur. None in all other rounds."""


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, federation, reports={}, judge=None, noisy=None)


def first_round_of_stage_two(cfg: Config, federation: Federation) -> int:
    """When all clients have been asked for their losses."""
    return cfg.warmup_rounds + rounds_per_pass(federation)


def is_reporting(cfg: Config, federation: Federation, round: int) -> bool:
    return cfg.warmup_rounds <= round < first_round_of_stage_two(cfg, federation)


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    """A random set; after stage 1 once every client, in random order."""
    federation = server.federation
    if is_reporting(cfg, federation, round):
        length, place = rounds_per_pass(federation), round - cfg.warmup_rounds
        return choose_in_turn(federation.clients, length, place, rng.seed)
    return choose_uniformly(federation.clients, federation.per_round, rng("select"))


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    server = settled(cfg, server, round)
    noisy = (server.noisy or {}).get(client, False)
    return Down(
        server.weights,
        reporting=is_reporting(cfg, server.federation, round),
        judge=server.judge,
        distillation=ramp(cfg, round) if noisy else 0.0,
    )


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """Gather reports; with the last ones say who is noisy; average by samples and distances."""
    check(len(ups) > 0, f"No client took part in round {round}; let at least one.")
    server = settled(cfg, server, round)
    metrics: dict[str, float] = {}
    if is_reporting(cfg, server.federation, round):
        reports = {**server.reports, **reports_of(ups, server.federation.num_classes)}
        judge = server.weights if server.judge is None else server.judge
        server = settled(cfg, replace(server, reports=reports, judge=judge), round + 1)
        if server.noisy is not None:
            metrics |= describe(reports, server.noisy)
    far: Mapping[ClientId, float] = {}
    if server.noisy is not None and cfg.distance_aware:
        far = distances(cfg.switches.distance, ups, server.noisy)
    shares = {k: up.samples * math.exp(-far.get(k, 0.0)) for k, up in ups.items()}
    if any(shares.values()):
        weights = weighted_mean([up.weights for up in ups.values()], list(shares.values()))
        server = replace(server, weights=weights)
    if far:
        metrics["noisy_weight"] = sum(shares[k] for k in far) / sum(shares.values())
    return server, metrics


def settled(cfg: Config, server: Server, round: int) -> Server:
    """The server at the beginning of `round`, with the verdict if it is due.

    `merge` gives it in time, unless the last clients that were asked have all been refused.
    """
    if server.noisy is not None or round < first_round_of_stage_two(cfg, server.federation):
        return server
    noisy = verdict(server.reports, cfg.switches.covariance)
    return replace(server, reports={}, judge=None, noisy=noisy)


def reports_of(ups: Mapping[ClientId, Up], classes: int) -> dict[ClientId, Tensor]:
    """The reports among these updates. A strange one is refused here, where only its sender is
    harmed, and not at the verdict, where it lies among those of all rounds."""
    found = {k: up.class_losses for k, up in ups.items() if up.class_losses is not None}
    for client, losses in found.items():
        check(
            losses.shape == (classes,) and losses.dtype == torch.float32,
            f"Client {client} reported losses of shape {tuple(losses.shape)} and {losses.dtype} "
            f"for {classes} classes, not of ({classes},) and torch.float32; let it train with the "
            "same recipe.",
        )
    return found


def describe(
    reports: Mapping[ClientId, Tensor], noisy: Mapping[ClientId, bool]
) -> dict[str, float]:
    """How many clients are noisy, and the mean of the class-wise losses in the two groups."""
    result = {"noisy_clients": float(sum(noisy.values()))}
    for name, group in (("class_loss_clean", False), ("class_loss_noisy", True)):
        losses = [reports[k] for k, is_noisy in noisy.items() if is_noisy is group]
        if losses:
            together = torch.cat(losses)
            result[name] = float(together[together >= 0].mean())
    return result


# ---------------------------------------------------------------------------------------- client


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    if len(shard) == 0:
        return client, Up(down.weights, 0, None), {"loss": 0.0}
    report = None
    if down.reporting:
        judge = down.weights if down.judge is None else down.judge
        images = bench.view(cfg.switches.evaluation_view, shard.images, rng("evaluation view"))
        logits = bench.forward(judge, images).logits
        losses = cross_entropy(logits, shard.labels)
        report = class_losses(losses, shard.labels, shard.num_classes)

    plan = replace(
        fedavg.plan(fedavg.Down(down.weights), shard, bench, rng),
        constants={"offsets": offsets(class_shares(shard), cfg.adjustment)},
        loss=adjusted_loss,
    )
    if down.distillation > 0:
        plan = replace(
            plan,
            frozen=[down.weights],
            constants={**plan.constants, "distillation": down.distillation},
            loss=partial(distilled_loss, cfg.temperature),
        )
    fitted = bench.fit(plan)
    metrics = {"loss": fitted.loss, "distillation": down.distillation}
    return client, Up(fitted.weights[0], len(shard), report), metrics


# ------------------------------------------------------------------------------------- equations


def class_shares(shard: Shard) -> Tensor:
    """π_k: (classes,) share of each class among the client's labels, as given."""
    return F.one_hot(shard.labels, shard.num_classes).float().mean(dim=0)


def offsets(shares: Tensor, adjustment: float) -> Tensor:
    """(classes,) log π_k, times what multiplies it; −∞ for a class that the client has not."""
    return torch.zeros_like(shares) if adjustment == 0 else adjustment * shares.log()


def adjusted_loss(batch: Batch, net: Net) -> Tensor:
    """CE(f(x) + log π_k, ŷ), the mean over the batch."""
    return batch.mean(cross_entropy(adjusted_logits(batch, net), batch["label"]))


def adjusted_logits(batch: Batch, net: Net) -> Tensor:
    """f(x) + log π_k, (B, classes)"""
    return net(batch["x"]).logits + batch.scalar("offsets")


def distilled_loss(temperature: float, batch: Batch, net: Net, teacher: Net) -> Tensor:
    """λ·KL(softmax(f_G(x)/τ) ‖ softmax(f(x) + log π_k)) + (1 − λ)·CE(f(x) + log π_k, ŷ)."""
    logits, share = adjusted_logits(batch, net), batch.scalar("distillation")
    taught = divergence(teacher(batch["x"]).logits, logits, temperature)
    given = cross_entropy(logits, batch["label"])
    return batch.mean(share * taught + (1 - share) * given)


def divergence(teacher_logits: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """(B,) Σ_c p_c (log p_c − log q_c), p = softmax(teacher/τ), q = softmax(logits).

    Where q_c = 0, as in a class that the client has not, 0 takes the place of log q_c.
    """
    log_p = (teacher_logits / temperature).log_softmax(dim=1)
    log_q = logits.log_softmax(dim=1)
    return (log_p.exp() * (log_p - log_q.masked_fill(log_q.isinf(), 0))).sum(dim=1)


def ramp(cfg: Config, round: int) -> float:
    """λ of a round: its largest value times exp(−5(1 − (t − t_b)/(t_e − t_b))²), t in [t_b, t_e]"""
    t = min(max(round, cfg.ramp_from), cfg.ramp_to)
    left = (cfg.ramp_to - t) / (cfg.ramp_to - cfg.ramp_from)
    return cfg.distillation * math.exp(-5 * left**2)


def class_losses(losses: Tensor, labels: Tensor, classes: int) -> Tensor:
    """l_k^c: (classes,) mean of the losses (n,) of each label (n,), −1 where it does not occur."""
    given = labels.numpy(force=True)
    counts = np.bincount(given, minlength=classes)
    sums = np.bincount(given, weights=losses.numpy(force=True), minlength=classes)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), -1)
    return torch.from_numpy(means.astype(np.float32)).to(losses.device)


Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

STARTS = range(9)
"""Seeds of the mixtures that vote."""


def verdict(reports: Mapping[ClientId, Tensor], covariance: Covariance) -> dict[ClientId, bool]:
    """Whether each client that reported is noisy: what most mixtures say, of equal numbers the
    first."""
    clients = sorted(reports)
    if len(clients) < 2:
        return dict.fromkeys(clients, False)
    losses = np.stack([reports[k].numpy(force=True) for k in clients]).astype(np.float64)
    values = scaled(losses)
    if not values.any():
        return dict.fromkeys(clients, False)
    votes = [tuple(upper_group(values, covariance, seed).tolist()) for seed in STARTS]
    ((chosen, _),) = Counter(votes).most_common(1)
    return dict(zip(clients, chosen, strict=True))


def scaled(losses: Floats) -> Floats:
    """Class-wise losses (clients, classes), each class scaled to [0, 1] over the clients; one that
    is missing (−1) counts as the smallest of its class.

    A class in which all are equal, to the precision of float32, is 0.
    """
    known = losses >= 0
    lowest = np.where(known, losses, np.inf).min(axis=0)
    span = np.where(known, losses, -np.inf).max(axis=0) - lowest
    differs = span > np.finfo(np.float32).eps * np.abs(lowest)
    above = np.where(known & differs, losses - lowest, 0)
    result: Floats = above / np.where(differs, span, 1)
    return result


def upper_group(values: Floats, covariance: Covariance, seed: int) -> Flags:
    """Whether each row of values is rather of that one of two normals whose means sum to more."""
    from sklearn.mixture import GaussianMixture  # not above: it takes seconds, for one round

    kind = {"diagonal": "diag", "full": "full"}[covariance]
    mixture = GaussianMixture(2, covariance_type=kind, random_state=seed).fit(values)
    upper: Flags = mixture.predict(values) == mixture.means_.sum(axis=1).argmax()
    return upper


def distances(
    kind: Distance, ups: Mapping[ClientId, Up], noisy: Mapping[ClientId, bool]
) -> dict[ClientId, float]:
    """D(k) of the noisy clients of a round: min over the clean ones c of ‖w_k − w_c‖, divided by
    the largest of these; none where there is no clean client, or no difference."""
    trained = {k: up.weights for k, up in ups.items() if up.samples > 0}
    clean = [weights for k, weights in trained.items() if not noisy.get(k, False)]
    if not clean:
        return {}
    least = {
        k: min(distance(kind, weights, other) for other in clean)
        for k, weights in trained.items()
        if noisy.get(k, False)
    }
    largest = max(least.values(), default=0.0)
    # Compared first: the largest may be infinite, which divided by itself is no number.
    ratios = {k: 1.0 if d == largest else d / largest for k, d in least.items()}
    return ratios if largest > 0 else {}


def distance(kind: Distance, one: Weights, other: Weights) -> float:
    """‖one − other‖ over all weights, or the sum of that over the tensors."""
    check_alike(one, other, "an update", "another update of the round")
    differences = torch._foreach_sub(list(one.values()), [other[name] for name in one])
    # In double precision, so that models that are far apart have a finite distance.
    norms = torch.stack(torch._foreach_norm(differences, dtype=torch.float64))
    return float(norms.sum() if kind == "per_tensor" else norms.norm())


# ------------------------------------------------------------------------------------- diagnosis


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """The verdict, 1 or 0, of each client that has one: the method knows no shares between."""
    return {k: Sieved(float(is_noisy), None) for k, is_noisy in (server.noisy or {}).items()}


METHOD = replace(
    fedavg.METHOD,
    name="fednoro",
    title="FedNoRo: noisy clients by class-wise losses, taught by the global model",
    paper="Wu et al., FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class "
    "Imbalance and Label Noise Heterogeneity, IJCAI 2023",
    config=Config,
    server=Server,
    down=Down,
    up=Up,
    init_server=init_server,
    select=select,
    send=send,
    train=train,
    merge=merge,
    sieve=sieve,
    begins=first_round_of_stage_two,
)
