"""FedLSR: FedAvg whose clients regularise themselves with a second, distorted view of each image.

X. Jiang, S. Sun, Y. Wang, M. Liu, "Towards Federated Learning against Noisy Labels via Local
Self-Regularization", CIKM 2022.

    paper             here
    x, x̃              the views `Config.view` and "aug"; "original" and "augmented" in the batch
    o1, o2            logits of x and x̃, from two forward passes of one model in training mode
    p1, p2            softmax(o1), softmax(o2)
    λ                 "mixing": one draw from Beta(1, 1) per step
    T, T_d            Config.sharpening_temperature, Config.distillation_temperature
    p_s, q1, q2       sharpened, softened
    γ, t_w            Config.gamma, Config.warmup_rounds; γ of round t is Down.gamma
    λ_e, L_e          Config.lambda_e, prediction_entropy (LSR+, Eq. 11)
    w_t, w_t^k, n_k   Server.weights and Down.weights, Up.weights, Up.samples

What resists wrong labels is `bounded_cross_entropy`: the paper uses p_s *instead of the logits* in
the cross entropy, so that the loss of a sample stays within an interval of length 1 and its
gradient vanishes where the model is sure, be it right or wrong. −log p_s,y would be another loss.

Deviations, and what the paper leaves open. Each image is distorted by a draw of its own and then
normalised; the authors' program distorts whole normalised batches with one draw. Where no MixUp
prediction is made (Table 4), a step averages the cross entropies of x and x̃. Warm-up counts rounds
from 0, so γ is 0 in the first. Differences between paper and program are switches with presets
(`PRESETS`); those of model and scene are `always_on_dropout` and `overlap` of a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net, count_steps
from fedsieve.losses import cross_entropy, entropy, symmetric_cross_entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedavg import Client, Server, Up
from fedsieve.methods.fedsce import check_weights
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["paper", "authors"]
JsReduction: TypeAlias = Literal["sum", "mean"]
EntropyOf: TypeAlias = Literal["predictions", "softened"]
Prediction: TypeAlias = Literal["mixed", "original", "none", "logits"]
Distance: TypeAlias = Literal["js", "l1", "l2", "cosine"]
ViewName: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper and the authors' program differ; `Config` says what each one does."""

    js_reduction: JsReduction
    entropy_of: EntropyOf


PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "paper": Switches(js_reduction="sum", entropy_of="predictions"),
        "authors": Switches(js_reduction="mean", entropy_of="softened"),
    }
)
"""The equations as printed; the public program, with which the published γ were chosen."""

WARM_UP_SHARE = 0.2
"""t_w as a share of all rounds where it is left out (the paper's section 5)."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are what the paper recommends for all noise levels (section 5), without LSR+."""

    presets = PRESETS
    name: Literal["fedlsr"] = "fedlsr"

    gamma: float = 0.4
    """γ, weight of the self-distillation after its warm-up (at least 0; paper 0.1 to 1, growing
    with the noise, Table 2; 0 is the ablation "w/o" of Table 5). The paper's values were chosen
    with `js_reduction = "mean"`: with "sum" the same γ weighs as many times more as there are
    classes."""
    warmup_rounds: int | None = None
    """t_w, rounds in which γ grows linearly from 0 (at least 0; paper 10 on MNIST and Clothing1M,
    20 on Fashion-MNIST, 40 on CIFAR-10). Left out: a fifth of all rounds."""
    lambda_e: float = 0.0
    """λ_e, weight of the entropy of the predictions (at least 0; 0 is LSR, LSR+ has 0.6)."""
    sharpening_temperature: float = 0.5
    """T of the sharpened prediction (in (0, 1]; paper 1/2)."""
    distillation_temperature: float = 1 / 3
    """T_d of the self-distillation (above 0; paper 1/3)."""
    distance: Distance = "js"
    """What the self-distillation measures between q1 and q2: Jensen-Shannon divergence (the paper's
    on IID data), "l1" (the paper's on other data), "l2", or "cosine"."""
    prediction: Prediction = "mixed"
    """What is classified: the sharpened mixture of both predictions; the sharpened prediction of x
    alone ("original", the ablation λ = 1); the plain logits of both ("none", "w/o MixUp"); or the
    mixture of both logits, by symmetric cross entropy ("logits", Table 7's combination with it)."""
    alpha: float = 0.1
    """α, weight of the cross entropy where `prediction = "logits"` (at least 0; paper 0.1)."""
    beta: float = 1.0
    """β, weight of the reverse cross entropy there (at least 0; paper 1)."""
    view: ViewName = "raw"
    """x: the image as it is (the paper), or the weak view that other methods train on."""
    lr_drop_round: int | None = None
    """From this round on the learning rate is a tenth of the recipe's (at least 0; paper 20 on
    Clothing1M). Left out: never."""

    preset: Preset = "paper"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    js_reduction: JsReduction | None = None
    """Sum the Jensen-Shannon divergence over the classes (Eq. 9), or take their mean, which is a
    tenth of it on ten classes. Both are averaged over the batch."""
    entropy_of: EntropyOf | None = None
    """LSR+: the mean entropy of p1 and p2, or that of softmax(q1), the softmax of a softmax."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        for name in ("gamma", "lambda_e"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")
        for name in ("warmup_rounds", "lr_drop_round"):
            value = getattr(self, name)
            check(value is None or value >= 0, f"method.{name} must be at least 0, not {value}.")
        sharpening, distillation = self.sharpening_temperature, self.distillation_temperature
        check(
            0 < sharpening <= 1,
            f"method.sharpening_temperature must be in (0, 1], not {sharpening}.",
        )
        check(
            0 < distillation < math.inf,
            f"method.distillation_temperature must be above 0, not {distillation}.",
        )
        check_weights(self.alpha, self.beta)

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Down:
    weights: Weights
    gamma: float
    """γ of this round."""
    lr_scale: float
    """What the recipe's learning rate is multiplied by in this round."""


# ---------------------------------------------------------------------------------------- server


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    gamma = warmed_up(cfg.gamma, round, warm_up_rounds(cfg, server.federation))
    dropped = cfg.lr_drop_round is not None and round >= cfg.lr_drop_round
    return Down(server.weights, gamma, 0.1 if dropped else 1.0)


def warm_up_rounds(cfg: Config, federation: Federation) -> float:
    """t_w"""
    if cfg.warmup_rounds is not None:
        return cfg.warmup_rounds
    return WARM_UP_SHARE * federation.rounds


def warmed_up(gamma: float, round: int, warm_up: float) -> float:
    """γ_t = γ·t/t_w for t < t_w, then γ; t counts from 0."""
    return gamma * round / warm_up if round < warm_up else gamma


# ---------------------------------------------------------------------------------------- client


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Algorithm 1."""
    sgd = replace(bench.sgd, lr=bench.sgd.lr * down.lr_scale)
    objective = Objective(
        prediction=cfg.prediction,
        sharpening_temperature=cfg.sharpening_temperature,
        distance=cfg.distance if cfg.gamma > 0 else None,
        js_reduction=cfg.switches.js_reduction,
        distillation_temperature=cfg.distillation_temperature,
        entropy_of=cfg.switches.entropy_of if cfg.lambda_e > 0 else None,
        lambda_e=cfg.lambda_e,
        symmetric=(cfg.alpha, cfg.beta) if cfg.prediction == "logits" else None,
    )
    mixing = draw_mixing(cfg.prediction, count_steps(len(shard), sgd), rng("mixing"))
    plan = replace(
        fedavg.plan(fedavg.Down(down.weights), shard, bench, rng),
        views={"original": cfg.view, "augmented": "aug"},
        per_step={"mixing": mixing},
        constants={"gamma": down.gamma},
        loss=partial(local_loss, objective),
        sgd=sgd,
    )
    fitted = bench.fit(plan)
    return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss, "gamma": down.gamma}


def draw_mixing(prediction: Prediction, steps: int, rng: np.random.Generator) -> Tensor:
    """(steps,) λ ~ Beta(1, 1), which is uniform in (0, 1); 1 where x alone is to count."""
    if prediction == "original":
        return torch.ones(steps)
    return torch.from_numpy(rng.beta(1.0, 1.0, steps)).float()


# ------------------------------------------------------------------------------------- equations


def mixed(p1: Tensor, p2: Tensor, mixing: Tensor) -> Tensor:
    """Eq. 6: (B, M) p = λ·p1 + (1 − λ)·p2, for one λ () per batch; in Table 7 of logits."""
    assert mixing.dim() == 0
    return mixing * p1 + (1 - mixing) * p2


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """Eq. 7: (B, M) p_s,i = p_i^{1/T} / Σ_j p_j^{1/T}."""
    # Divided by the largest first, which changes nothing but keeps small T from 0/0.
    powers = (p / p.detach().amax(dim=1, keepdim=True)) ** (1 / temperature)
    return powers / powers.sum(dim=1, keepdim=True)


def bounded_cross_entropy(prediction: Tensor, labels: Tensor) -> Tensor:
    """Loss_cls: (B,) −log(e^{p_s,y} / Σ_j e^{p_s,j}), Eq. 1 with p_s (B, M) in place of the logits.

    Since Σ_j p_s,j = 1, it is at most log(e + M − 1), and at least that less 1: within
    [1.46, 2.46] for ten classes.
    """
    return cross_entropy(prediction, labels)


def softened(logits: Tensor, temperature: float) -> Tensor:
    """Eq. 8: (B, M) q = softmax(o / T_d), clamped to [1e-6, 1]."""
    return (logits / temperature).softmax(dim=1).clamp(min=1e-6)


def jensen_shannon(q1: Tensor, q2: Tensor) -> Tensor:
    """Eq. 9: (B,) ½[KL(q1 ‖ U) + KL(q2 ‖ U)], with U = ½(q1 + q2)."""
    log_u = ((q1 + q2) / 2).log()
    return ((q1 * (q1.log() - log_u) + q2 * (q2.log() - log_u)) / 2).sum(dim=1)


def mean_absolute(q1: Tensor, q2: Tensor) -> Tensor:
    """L1: (B,) mean over the classes of |q1 − q2|."""
    return (q1 - q2).abs().mean(dim=1)


def mean_squared(q1: Tensor, q2: Tensor) -> Tensor:
    """L2: (B,) mean over the classes of (q1 − q2)²."""
    return ((q1 - q2) ** 2).mean(dim=1)


def cosine_distance(q1: Tensor, q2: Tensor) -> Tensor:
    """Cosine: (B,) 2 − 2·⟨q1, q2⟩ / (‖q1‖·‖q2‖)."""
    return 2 - 2 * F.cosine_similarity(q1, q2, dim=1)


DISTANCES: Mapping[Distance, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {
        "js": jensen_shannon,
        "l1": mean_absolute,
        "l2": mean_squared,
        "cosine": cosine_distance,
    }
)


def self_distillation(q1: Tensor, q2: Tensor, distance: Distance, js: JsReduction) -> Tensor:
    """Loss_reg: (B,) how far the softened predictions of x and x̃ are apart; both get gradients."""
    between = DISTANCES[distance](q1, q2)
    return between / q1.shape[1] if distance == "js" and js == "mean" else between


def prediction_entropy(o1: Tensor, o2: Tensor, q1: Tensor, of: EntropyOf) -> Tensor:
    """L_e of Eq. 11: (B,) ½[H(p1) + H(p2)]; in the authors' program H(softmax(q1))."""
    return entropy(q1) if of == "softened" else (entropy(o1) + entropy(o2)) / 2


@dataclass(frozen=True)
class Objective:
    """What a captured step depends on besides its tensors."""

    prediction: Prediction
    sharpening_temperature: float
    distance: Distance | None
    """None where γ is 0."""
    js_reduction: JsReduction
    distillation_temperature: float
    entropy_of: EntropyOf | None
    """None where λ_e is 0."""
    lambda_e: float
    symmetric: tuple[float, float] | None
    """α and β of symmetric cross entropy; None for predictions other than "logits"."""


def local_loss(objective: Objective, batch: Batch, net: Net) -> Tensor:
    """Eqs. 10 and 11: Loss_cls + γ·Loss_reg + λ_e·L_e, the mean over the batch."""
    o1, o2 = net(batch["original"]).logits, net(batch["augmented"]).logits
    labels = batch["label"]
    if objective.prediction == "none":
        terms = (cross_entropy(o1, labels) + cross_entropy(o2, labels)) / 2
    elif objective.symmetric is not None:
        o = mixed(o1, o2, batch["mixing"])
        terms = symmetric_cross_entropy(o, labels, *objective.symmetric)
    else:
        p = mixed(o1.softmax(dim=1), o2.softmax(dim=1), batch["mixing"])
        terms = bounded_cross_entropy(sharpened(p, objective.sharpening_temperature), labels)
    q1, q2 = (softened(o, objective.distillation_temperature) for o in (o1, o2))
    if objective.distance is not None:
        apart = self_distillation(q1, q2, objective.distance, objective.js_reduction)
        terms = terms + batch.scalar("gamma") * apart
    if objective.entropy_of is not None:
        unsure = prediction_entropy(o1, o2, q1, objective.entropy_of)
        terms = terms + objective.lambda_e * unsure
    return batch.mean(terms)


METHOD = replace(
    fedavg.METHOD,
    name="fedlsr",
    title="FedLSR: a bounded loss on sharpened predictions, and agreement between two views",
    paper="Jiang et al., Towards Federated Learning against Noisy Labels via Local "
    "Self-Regularization, CIKM 2022",
    config=Config,
    down=Down,
    send=send,
    train=train,
)
