"""FedDiv: one filter for all clients' wrong labels, learnt together, and a sampler behind it.

J. Li, G. Li, H. Cheng, Z. Liao, Y. Yu,
"FedDiv: Collaborative Noise Filtering for Federated Learning with Noisy Labels", AAAI 2024.

    paper                  here
    T_wu, S, ω             Config.warmup_passes, select
    θ^(t)                  Server.weights, Down.weights
    θ_k^(t), n_k           Up.weights, Up.samples
    W^(t) = (μ, σ, π)      Server.filter, Down.filter (σ holds variances)
    W_k^(t), W_k           Up.filter, Server.cache
    p("clean" | x, y)      Lesson.p_clean, and Client.p_clean for diagnosis
    D^clean, D^noisy       p_clean ≥ Config.clean_threshold, and the rest
    δ̂_k                    Lesson.noise_level
    ŷ, ζ, D^relab          Lesson.pseudo, Config.zeta, relabelled
    p̂_k, ξ, m              Client.bias, Config.xi, Config.bias_momentum
    F(x), ỹ                debiased and its argmax
    D̄_k, D̂_k               agreement on Lesson.offered, Learnt.chosen
    L_mix, α; L_reg, η     mixed_loss, Config.mixup_alpha; uniform_prior, Config.eta

Warm-up: the model walks from client to client, each once per pass, and trains with MixUp on the
given labels; a walk of K clients is K rounds of one client. Afterwards, a round at a client: the
global model's losses under the federated filter say which labels are wrong; confident wrong ones
are relabelled; each epoch trains on those samples on which the global and the de-biased local model
agree; the losses of the trained model make the next local filter.

Deviations, and what the paper leaves open. Losses are scaled to [0, 1] client by client before they
meet a filter, as in the authors' program: otherwise filters of different clients would not be on
one scale. The first filter is `FIRST_FILTER`; the program's starts with two almost equal random
components, and so with an arbitrary split. A local filter's components are ordered by their means
before they are averaged, over the clients met so far. A client is noisy if δ̂_k > 0.1, as the text
says (Eq. 11 has ≥). Eqs. 6–7 print θ_k where Algorithm 1 has only θ; θ is used. Eq. 13's sum is a
mean. p̂_k is at least `LEAST_BIAS` inside the logarithm. Where the sampler chooses anew each epoch,
each epoch is a fit of its own, so that SGD's momentum starts at zero in it; at the paper's momentum
of 0.5 that costs about one step's way per epoch. The "local filter" variant fits each client's
mixture to the global model's losses at the start of its round. The other differences between paper
and program are switches with presets (`PRESETS`), but for one: the program also feeds every unmixed
batch through the network, which moves BatchNorm's statistics and nothing else. Neither preset does
so; `Config.unmixed_pass` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Fitted, Net, Plan, Sgd
from fedsieve.losses import SievingLoss, sieving_loss
from fedsieve.methods import contract
from fedsieve.methods.contract import (
    Federation,
    Method,
    Sieved,
    Suspicion,
    choose_in_turn,
    choose_uniformly,
)
from fedsieve.methods.mixup import draw_mixing, mixed, mixed_loss
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.sieve.gmm import Mixture, clean_posterior, fit_mixture, refit_mixture
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["paper", "authors"]
FilterKind: TypeAlias = Literal["federated", "degraded", "local"]
VarianceWeights: TypeAlias = Literal["share", "squared_share"]
Consistency: TypeAlias = Literal["each_epoch", "previous_participation"]
BiasFrom: TypeAlias = Literal["all", "confident"]
SmallSets: TypeAlias = Literal["train", "skip"]
EvaluationView: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper and the authors' program differ; `Config` says what each one does."""

    zeta: float
    xi: float
    bias_momentum: float
    filter_loss: SievingLoss
    em_iterations: int
    variance_weights: VarianceWeights
    consistency: Consistency
    bias_from: BiasFrom
    clean_only_rounds: int
    relabel_above: float
    persist_relabels: bool
    small_sets: SmallSets
    evaluation_view: EvaluationView
    prior_in_walk: bool


PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "paper": Switches(
            zeta=0.75,
            xi=0.5,
            bias_momentum=0.2,
            filter_loss="cross_entropy",
            em_iterations=0,
            variance_weights="share",
            consistency="each_epoch",
            bias_from="all",
            clean_only_rounds=0,
            relabel_above=0.1,
            persist_relabels=False,
            small_sets="train",
            evaluation_view="raw",
            prior_in_walk=False,
        ),
        "authors": Switches(
            zeta=0.0,
            xi=0.2,
            bias_momentum=0.5,
            filter_loss="bounded",
            em_iterations=3,
            variance_weights="squared_share",
            consistency="previous_participation",
            bias_from="confident",
            clean_only_rounds=5,
            relabel_above=0.2,
            persist_relabels=True,
            small_sets="skip",
            evaluation_view="weak",
            prior_in_walk=True,
        ),
    }
)
"""The equations as printed, and the public program with its default arguments."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are the paper's for CIFAR-10 with clients that differ (Table 8)."""

    presets = PRESETS
    name: Literal["feddiv"] = "feddiv"

    warmup_passes: int = 5
    """T_wu, how often the model walks through all clients, one client per round, before filtering
    begins (at least 0; paper 5 on CIFAR-10, 10 on CIFAR-100, 2 on Clothing1M). The warm-up takes
    T_wu · K of the recipe's rounds."""
    clean_threshold: float = 0.5
    """A sample is judged clean if its posterior is at least this (in (0, 1); paper 0.5)."""
    noisy_above: float = 0.1
    """A client is noisy if δ̂_k, the share judged noisy, exceeds this; others train on all their
    samples as labelled (in [0, 1]; paper 0.1)."""
    eta: float = 1.0
    """η, weight of the uniform prior L_reg (at least 0; paper 1 where clients differ, 0 on IID
    partitions; 0 is the ablation "w/o L_reg")."""
    mixup_alpha: float = 1.0
    """α of MixUp's λ ~ Beta(α, α) (at least 0; paper 1; 0 does not mix)."""
    unmixed_pass: bool = False
    """Whether a step first feeds its batch through the network as it is, without a gradient, as the
    authors' program does. BatchNorm's statistics then come from mixed and from real images; those
    of mixed images alone have a smaller variance than the images that are classified later."""

    preset: Preset = "paper"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    zeta: float | None = None
    """ζ, confidence from which the global model relabels a noisy sample (in [0, 1])."""
    xi: float | None = None
    """ξ, strength of the de-biasing (at least 0; 0 is the ablation "w/o PCS.debias")."""
    bias_momentum: float | None = None
    """m, what p̂_k keeps of itself in a participation (in [0, 1])."""
    filter_loss: SievingLoss | None = None
    """The loss that filters see: the cross entropy (Eq. 2), or "bounded", the cross entropy of
    softmax(softmax(z)), which is close to 1 − p_y once scaled (the program applies softmax
    twice)."""
    em_iterations: int | None = None
    """EM iterations of a local filter (at least 0); 0 goes on until the mean log-likelihood moves
    by less than 1e-6, for at most 100."""
    variance_weights: VarianceWeights | None = None
    """Average variances with weights γ_k = n_k / Σn (Eq. 5), or with γ_k², which makes those of K
    equal clients K times too small."""
    consistency: Consistency | None = None
    """Which local model predicts ỹ: the one being trained, at the start of each epoch (Eq. 9), or
    the one that the client's previous participation ended with."""
    bias_from: BiasFrom | None = None
    """p̂_k averages over all samples (Eq. 12), or over those with a de-biased confidence above
    0.85."""
    clean_only_rounds: int | None = None
    """In so many first participations a noisy client trains on D^clean alone: no relabelled
    samples, no sampler (at least 0)."""
    relabel_above: float | None = None
    """Relabelled samples are trained on only where δ̂_k exceeds this (in [0, 1])."""
    persist_relabels: bool | None = None
    """Whether pseudo labels of confident samples on which both models agree replace a noisy
    client's labels for good (not where `relabel` is false)."""
    small_sets: SmallSets | None = None
    """A chosen set of no more than a batch is trained on, or skipped: the client then returns the
    global model."""
    evaluation_view: EvaluationView | None = None
    """What filters and sampler look at: the raw images, or randomly cropped and flipped ones."""
    prior_in_walk: bool | None = None
    """Whether the warm-up trains with the uniform prior, too; the paper's trains with MixUp alone
    (its supplement says so)."""

    filter: FilterKind = "federated"
    """Whose filters make the global one: all clients' (cached), only this round's ("degraded"), or
    each client uses a mixture of its own ("local")."""
    relabel: bool = True
    """False leaves noisy samples out ("w/o Relab. & w/o PCS" together with `pcs`)."""
    pcs: bool = True
    """False trains on all of D^clean ∪ D^relab ("w/o PCS")."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        for name in ("warmup_passes", "em_iterations", "clean_only_rounds"):
            value = getattr(self, name)
            check(value >= 0, f"method.{name} must be at least 0, not {value}.")
        check(
            0 < self.clean_threshold < 1,
            f"method.clean_threshold must be in (0, 1), not {self.clean_threshold}.",
        )
        for name in ("noisy_above", "relabel_above", "zeta", "bias_momentum"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"method.{name} must be in [0, 1], not {value}.")
        for name in ("eta", "mixup_alpha", "xi"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Filter:
    """W = (μ, σ², π): two normals over scaled losses; the clean one, of smaller mean, first."""

    means: tuple[float, float]
    variances: tuple[float, float]
    shares: tuple[float, float]

    @property
    def mixture(self) -> Mixture:
        return Mixture(
            means=self.means,
            variances=self.variances,
            shares=self.shares,
            converged=False,
            iterations=0,
        )


FIRST_FILTER = Filter(means=(0.1, 0.8), variances=(0.05, 0.05), shares=(0.5, 0.5))
"""W^(0), over losses scaled to [0, 1]."""


@dataclass(frozen=True)
class CachedFilter:
    """W_k as the server last received it."""

    filter: Filter
    samples: int
    """n_k"""


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    filter: Filter
    cache: Mapping[ClientId, CachedFilter]
    """By client; those that took part in no round after the warm-up are missing."""


@dataclass(frozen=True)
class Client:
    bias: Tensor
    """p̂_k, (classes,) float32: how often the local model predicts each class."""
    participations: int
    """Rounds after the warm-up in which the client took part."""
    labels: Tensor | None
    """(n,) int64, the labels in use where pseudo labels persist; None: as given."""
    local_prediction: Tensor | None
    """ỹ, (n,) int64, by the model that the last participation ended with, where it is kept."""
    p_clean: Tensor | None = None
    """(n,) float32, what the last participation's filter said of the *given* labels; 0 for one that
    was replaced. For diagnosis, as all below; None before the first filtering."""
    noise_level: float = 0.0
    """Share of the given labels that it judged noisy."""
    trained_on: Tensor | None = None
    """(n,) int64, labels of the last epoch's samples, −1 for those left out."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    warm_up: bool
    filter: Filter | None
    """W^(t); None in the warm-up and where clients filter for themselves."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    filter: Filter | None
    """W_k^(t), six numbers about all of a client's losses; None as in `Down`."""


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, federation, FIRST_FILTER, cache={})


def warm_up_rounds(cfg: Config, federation: Federation) -> int:
    return cfg.warmup_passes * federation.clients


def in_warm_up(cfg: Config, federation: Federation, round: int) -> bool:
    return round < warm_up_rounds(cfg, federation)


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    """In the warm-up one client, each once per pass, in random order; afterwards a random set.

    A pass is a walk: what a client trained is what the next one starts from.
    """
    federation = server.federation
    if in_warm_up(cfg, federation, round):
        return choose_in_turn(federation.clients, federation.clients, round, rng.seed)
    return choose_uniformly(federation.clients, federation.per_round, rng("select"))


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    warm_up = in_warm_up(cfg, server.federation, round)
    return Down(
        server.weights, warm_up, None if warm_up or cfg.filter == "local" else server.filter
    )


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """Average the weights (Eq. 1), cache the local filters (Eq. 4) and average them (Eq. 5)."""
    check(len(ups) > 0, f"No client took part in round {round}; let at least one.")
    samples = [up.samples for up in ups.values()]
    weights = server.weights
    if any(samples):
        weights = weighted_mean([up.weights for up in ups.values()], samples)
    fresh = {
        client: CachedFilter(up.filter, up.samples)
        for client, up in ups.items()
        if up.filter is not None and up.samples > 0
    }
    if not fresh:
        return replace(server, weights=weights), {}
    for cached in fresh.values():
        check_fitted(cached.filter)
    cache = {**server.cache, **fresh}
    counted = fresh if cfg.filter == "degraded" else cache
    joint = aggregated(counted, cfg.switches.variance_weights)
    return Server(weights, server.federation, joint, cache), describe(joint)


def check_fitted(local: Filter) -> None:
    """Refuse a filter that no fit gives: averaged, it would spoil everybody's."""
    check(
        all(-LEAST_SPREAD <= mean <= 1 + LEAST_SPREAD for mean in local.means)
        and all(variance > 0 for variance in local.variances)
        and all(0 < share < 1 for share in local.shares),
        f"{local} is no mixture over losses in [0, 1].",
    )


def aggregated(cache: Mapping[ClientId, CachedFilter], weights: VarianceWeights) -> Filter:
    """Eq. 5: μ, σ² and π of each component, averaged with γ_k = n_k / Σn; σ² perhaps with γ_k²."""
    held = [cache[client] for client in sorted(cache)]
    gamma = np.array([each.samples for each in held]) / sum(each.samples for each in held)
    of_variances = gamma**2 if weights == "squared_share" else gamma

    def total(by: NDArray[np.float64], values: list[tuple[float, float]]) -> tuple[float, float]:
        clean, noisy = (by @ np.array(values)).tolist()
        return clean, noisy

    return Filter(
        means=total(gamma, [each.filter.means for each in held]),
        variances=total(of_variances, [each.filter.variances for each in held]),
        shares=total(gamma, [each.filter.shares for each in held]),
    )


def describe(joint: Filter) -> dict[str, float]:
    return {
        "mixture_mean_clean": joint.means[0],
        "mixture_mean_noisy": joint.means[1],
        "mixture_variance_clean": joint.variances[0],
        "mixture_variance_noisy": joint.variances[1],
        "mixture_share_clean": joint.shares[0],
    }


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    bias = torch.full((shard.num_classes,), 1 / shard.num_classes, device=shard.images.device)
    return Client(bias, participations=0, labels=None, local_prediction=None)


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Algorithm 1, lines 10–23; in the warm-up MixUp on all samples as labelled."""
    if len(shard) == 0:
        return client, Up(down.weights, 0, None), {"loss": 0.0}
    if down.warm_up:
        cfg = cfg if cfg.switches.prior_in_walk else replace(cfg, eta=0.0)
        fitted = bench.fit(_plan(cfg, down.weights, shard.images, shard.labels, bench.sgd, rng))
        return client, Up(fitted.weights[0], len(shard), None), {"loss": fitted.loss}

    images = bench.view(cfg.switches.evaluation_view, shard.images, rng("evaluation view"))
    lesson = prepare(cfg, client, down, shard, bench.forward(down.weights, images).logits)
    learnt = learn(cfg, client, down, shard, bench, rng, images, lesson)
    logits = bench.forward(learnt.weights, images).logits
    own = None
    if down.filter is not None:
        own = local_filter(cfg, logits, lesson.kept, down.filter)
    up = Up(learnt.weights, len(shard), own)
    after = _remember(cfg, client, shard, lesson, learnt, logits)
    return after, up, {"loss": learnt.loss, **_metrics(lesson, learnt, shard.labels)}


@dataclass(frozen=True)
class Lesson:
    """What filter and global model make of a client's samples before it trains, a row for each."""

    logits: Tensor
    """(n, classes) of the global model"""
    held: Tensor
    """(n,) int64, the labels that were filtered: as given, or as earlier rounds replaced them."""
    p_clean: Tensor
    """(n,) float32, Eq. 6"""
    noise_level: float
    """δ̂_k"""
    trusted: bool
    """δ̂_k is small: the client trains on all its samples as labelled."""
    pseudo: Tensor
    """(n,) int64, ŷ"""
    labels: Tensor
    """(n,) int64, the label with which a sample is trained on, if it is."""
    offered: Tensor
    """(n,) bool, D^clean ∪ D^relab, from which the sampler chooses; D_k at a trusted client."""
    kept: Tensor
    """(n,) int64, the labels after the round: `held`, unless relabelling persists."""


def prepare(cfg: Config, client: Client, down: Down, shard: Shard, logits: Tensor) -> Lesson:
    """Filtering and relabelling (Eqs. 6–8), given the global model's logits (n, classes)."""
    for memory in (client.labels, client.local_prediction):
        check(
            memory is None or len(memory) == len(shard),
            f"Client {shard.client} remembers other samples than the {len(shard)} it holds; go on "
            "with the same samples, or start a new run.",
        )
    switches = cfg.switches
    held = shard.labels if client.labels is None else client.labels
    p_clean = clean_probability(cfg, logits, held, down.filter)
    clean, pseudo = p_clean >= cfg.clean_threshold, logits.argmax(dim=1)
    noise_level = share_of(~clean)
    trusted = noise_level <= cfg.noisy_above
    labels, offered, kept = held, torch.ones_like(clean), held
    if not trusted:
        sure = relabelled(clean, logits, switches.zeta)
        adds_relabelled = (
            cfg.relabel
            and noise_level > switches.relabel_above
            and client.participations >= switches.clean_only_rounds
        )
        labels, offered = held.where(clean, pseudo), clean | sure if adds_relabelled else clean
        if switches.persist_relabels and cfg.relabel:
            replaced = sure & _first_agreement(cfg, client, logits, pseudo) if cfg.pcs else sure
            kept = pseudo.where(replaced, held)
    return Lesson(
        logits=logits,
        held=held,
        p_clean=p_clean,
        noise_level=noise_level,
        trusted=trusted,
        pseudo=pseudo,
        labels=labels,
        offered=offered,
        kept=kept,
    )


def _first_agreement(cfg: Config, client: Client, logits: Tensor, pseudo: Tensor) -> Tensor:
    """(n,) whether ŷ = ỹ before the first step; without a remembered ỹ it is ŷ."""
    if cfg.switches.consistency == "each_epoch":
        return agreement(logits, client.bias, cfg.switches.xi, pseudo)
    if client.local_prediction is None:
        return torch.ones_like(pseudo, dtype=torch.bool)
    return client.local_prediction == pseudo


@dataclass(frozen=True)
class Learnt:
    """What local training leaves behind."""

    weights: Weights
    loss: float
    """Mean of the step losses."""
    chosen: Tensor
    """(n,) bool, D̂_k of the last epoch"""


def learn(
    cfg: Config,
    client: Client,
    down: Down,
    shard: Shard,
    bench: Bench,
    rng: Streams,
    images: Tensor,
    lesson: Lesson,
) -> Learnt:
    """Local training on D̂_k (Eqs. 10–11), which the sampler may choose anew in each epoch.

    `images` are those that the sampler looks at.
    """

    switches = cfg.switches

    def fit(weights: Weights, chosen: Tensor, sgd: Sgd, rng: Streams) -> Fitted:
        rows = chosen.nonzero().squeeze(1)
        if switches.small_sets == "skip" and len(rows) <= sgd.batch_size:
            return Fitted((weights,), None, 0, 0.0)
        return bench.fit(_plan(cfg, weights, shard.images[rows], lesson.labels[rows], sgd, rng))

    sampling = (
        cfg.pcs and not lesson.trusted and client.participations >= switches.clean_only_rounds
    )
    if not (sampling and switches.consistency == "each_epoch"):
        chosen = lesson.offered
        if sampling:
            chosen = chosen & _first_agreement(cfg, client, lesson.logits, lesson.pseudo)
        fitted = fit(down.weights, chosen, bench.sgd, rng)
        return Learnt(fitted.weights[0], fitted.loss, chosen)

    weights, logits, chosen = down.weights, lesson.logits, lesson.offered
    total, steps = 0.0, 0
    for epoch in range(bench.sgd.epochs):
        if epoch > 0:
            logits = bench.forward(weights, images).logits
        chosen = lesson.offered & agreement(logits, client.bias, switches.xi, lesson.pseudo)
        streams = rng.within(f"epoch {epoch}")
        fitted = fit(weights, chosen, replace(bench.sgd, epochs=1), streams)
        weights = fitted.weights[0]
        total, steps = total + fitted.loss * fitted.steps, steps + fitted.steps
    return Learnt(weights, total / max(1, steps), chosen)


def _plan(
    cfg: Config, weights: Weights, images: Tensor, labels: Tensor, sgd: Sgd, rng: Streams
) -> Plan:
    """Training with MixUp on these samples."""
    return Plan(
        start=[weights],
        images=images,
        views={"x": "weak"},
        columns={"label": labels},
        per_step=draw_mixing(len(images), sgd, cfg.mixup_alpha, rng("mixup"), images.device),
        loss=partial(local_loss_after_pass if cfg.unmixed_pass else local_loss, cfg.eta),
        sgd=sgd,
        rng=rng,
    )


def _remember(
    cfg: Config, client: Client, shard: Shard, lesson: Lesson, learnt: Learnt, logits: Tensor
) -> Client:
    """The client after a round whose trained model has these logits (n, classes)."""
    switches = cfg.switches
    scores = debiased(logits, client.bias, switches.xi)
    counted = torch.ones_like(lesson.offered)
    if switches.bias_from == "confident":
        counted = scores.softmax(dim=1).amax(dim=1) > BIAS_CONFIDENCE
    # The filter looked at the labels in use; one that was replaced is believed to be wrong.
    p_given = lesson.p_clean.where(lesson.held == shard.labels, 0)
    keeps_prediction = switches.consistency == "previous_participation"
    return Client(
        bias=updated_bias(client.bias, logits, counted, switches.bias_momentum),
        participations=client.participations + 1,
        labels=lesson.kept if switches.persist_relabels else None,
        local_prediction=scores.argmax(dim=1) if keeps_prediction else None,
        p_clean=p_given,
        noise_level=share_of(p_given < cfg.clean_threshold),
        trained_on=lesson.labels.where(learnt.chosen, -1),
    )


def _metrics(lesson: Lesson, learnt: Learnt, given: Tensor) -> dict[str, float]:
    """Plain numbers about a round at a client; waits for the device once."""
    numbers = {
        "chosen_share": learnt.chosen.float().mean(),
        "relabelled_share": (learnt.chosen & (lesson.labels != given)).float().mean(),
        "mean_p_clean": lesson.p_clean.mean(),
    }
    values = torch.stack(list(numbers.values())).tolist()
    return {
        "noise_level": lesson.noise_level,
        "trusted": float(lesson.trusted),
        **dict(zip(numbers, values, strict=True)),
    }


# ------------------------------------------------------------------------------------- equations

MOST_ITERATIONS = 100
TOLERANCE = 1e-6
LEAST_VARIANCE = 1e-6
"""EM until convergence: most iterations, and the rise of the mean log-likelihood that ends it; what
is added to each variance."""
LEAST_SPREAD = 1e-6
"""Losses that differ by less are equal: scaling would blow up the rounding of float32."""
BIAS_CONFIDENCE = 0.85
LEAST_BIAS = 1e-6
"""p̂_c as the logarithm of Eq. 9 sees it: a class that a client never predicts would win there."""


def scaled(losses: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n,) (ℓ − min)/(max − min), or 0 where all are equal; one that is not finite becomes 1."""
    finite = np.isfinite(losses)
    result = np.ones_like(losses)
    if finite.any():
        above = losses[finite] - losses[finite].min()
        result[finite] = above / above.max() if above.max() > LEAST_SPREAD else 0
    return result


def fitted_mixture(cfg: Config, losses: NDArray[np.float32], start: Filter | None) -> Mixture:
    """Algorithm 2: EM from `start`, or from the best split into two where there is none."""
    exactly = cfg.switches.em_iterations
    most, tol = (exactly, 0.0) if exactly else (MOST_ITERATIONS, TOLERANCE)
    if start is None:
        return fit_mixture(losses, max_iter=most, tol=tol, reg_covar=LEAST_VARIANCE)
    return refit_mixture(losses, start.mixture, max_iter=most, tol=tol, reg_covar=LEAST_VARIANCE)


def local_filter(cfg: Config, logits: Tensor, labels: Tensor, start: Filter) -> Filter:
    """W_k^(t) from the trained model's logits; `start` where that model has diverged."""
    losses = sieving_loss(logits, labels, cfg.switches.filter_loss).numpy(force=True)
    if not np.isfinite(losses).all():
        return start
    mixture = fitted_mixture(cfg, scaled(losses), start)
    return Filter(mixture.means, mixture.variances, mixture.shares)


def clean_probability(cfg: Config, logits: Tensor, labels: Tensor, joint: Filter | None) -> Tensor:
    """Eq. 6: (n,) the posterior of the clean component; without a joint filter that of a mixture of
    these losses alone."""
    losses = scaled(sieving_loss(logits, labels, cfg.switches.filter_loss).numpy(force=True))
    mixture = fitted_mixture(cfg, losses, None) if joint is None else joint.mixture
    posterior = clean_posterior(mixture, losses).astype(np.float32)
    return torch.from_numpy(posterior).to(logits.device)


def share_of(judged: Tensor) -> float:
    """δ̂_k: the share of a client's samples that is judged so. In float32 50 of 500 exceed 0.1."""
    return int(judged.sum()) / len(judged)


def relabelled(clean: Tensor, logits: Tensor, zeta: float) -> Tensor:
    """Eq. 8: (n,) D^relab, the noisy samples of which the global model is at least ζ sure."""
    assert clean.shape == logits.shape[:1]
    return ~clean & (logits.softmax(dim=1).amax(dim=1) >= zeta)


def debiased(logits: Tensor, bias: Tensor, xi: float) -> Tensor:
    """Eq. 9: F(x) = f(x) − ξ·log p̂_k, for logits (n, classes) and p̂_k (classes,)."""
    assert bias.shape == logits.shape[1:]
    return logits - xi * bias.clamp(min=LEAST_BIAS).log()


def agreement(logits: Tensor, bias: Tensor, xi: float, pseudo: Tensor) -> Tensor:
    """Eq. 10: (n,) whether ỹ = argmax F(x) by these local logits is ŷ, the global model's class."""
    assert pseudo.shape == logits.shape[:1]
    return debiased(logits, bias, xi).argmax(dim=1) == pseudo


def updated_bias(bias: Tensor, logits: Tensor, counted: Tensor, momentum: float) -> Tensor:
    """Eq. 12: m·p̂_k + (1 − m)·mean of softmax(f(x)) over `counted` (n,); p̂_k where that is none."""
    assert counted.shape == logits.shape[:1]
    weight = counted.float()
    mean = weight @ logits.softmax(dim=1) / weight.sum().clamp(min=1)
    return torch.where(counted.any(), momentum * bias + (1 - momentum) * mean, bias)


def uniform_prior(batch: Batch, logits: Tensor) -> Tensor:
    """Eq. 14: Σ_c (1/C)·log((1/C)/q_c), q the batch's mean prediction, from log-probabilities, so
    that a class of which nothing is left has a finite loss and gradient."""
    log_p = logits.float().log_softmax(dim=1)
    if batch.weight is None:
        log_q = log_p.logsumexp(dim=0) - math.log(len(log_p))
    else:
        log_q = (log_p + batch.weight.log()[:, None]).logsumexp(dim=0) - batch.weight.sum().log()
    return -log_q.mean() - math.log(logits.shape[1])


def local_loss(eta: float, batch: Batch, net: Net) -> Tensor:
    """Eq. 15: L_mix (Eq. 13) + η·L_reg on x̃ = λx_i + (1 − λ)x_j, j a random order of the batch."""
    x, others = mixed(batch)
    logits = net(x).logits
    loss = mixed_loss(batch, others, logits)
    return loss + eta * uniform_prior(batch, logits) if eta > 0 else loss


def local_loss_after_pass(eta: float, batch: Batch, net: Net) -> Tensor:
    """The same after a forward pass of the unmixed batch, for BatchNorm's statistics alone."""
    with torch.no_grad():
        net(batch["x"])
    return local_loss(eta, batch, net)


# ----------------------------------------------------------------------------------------- audit


def suspect(cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench) -> Suspicion:
    """P(wrong) = 1 − (p("clean") + p_y)/2, the mean of what the filter and the global model say.

    Both look at the given label y and the raw image. In the warm-up the model judges alone:
    1 − p_y. The suggestion is the model's class ŷ.
    """
    raw = bench.view("raw", shard.images, np.random.default_rng(0))  # the raw view draws nothing
    logits = bench.forward(down.weights, raw).logits
    right = logits.softmax(dim=1).gather(1, shard.labels[:, None]).squeeze(1)
    if not down.warm_up:
        right = (clean_probability(cfg, logits, shard.labels, down.filter) + right) / 2
    return Suspicion(p_wrong=1 - right, suggested=logits.argmax(dim=1))


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """π of the noisy component of each cached filter; the server knows nothing of single labels."""
    return {k: Sieved(cached.filter.shares[1], None) for k, cached in server.cache.items()}


def own_sieve(client: Client) -> Sieved | None:
    """What the filter said at the start of the client's last round; it never leaves the site."""
    if client.p_clean is None:
        return None
    return Sieved(client.noise_level, client.p_clean)


def refined(client: Client) -> Tensor | None:
    """The labels of the last epoch; None in the warm-up, which trains on given labels."""
    return client.trained_on


def global_weights(server: Server) -> Weights:
    return server.weights


METHOD = Method(
    name="feddiv",
    title="FedDiv: a noise filter averaged over all clients, relabelling, consistent samples",
    paper="Li et al., FedDiv: Collaborative Noise Filtering for Federated Learning with Noisy "
    "Labels, AAAI 2024",
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
    suspect=suspect,
    weights=global_weights,
    sieve=sieve,
    refined=refined,
    own_sieve=own_sieve,
    begins=warm_up_rounds,
)
