"""FedDivideMix: FedAvg of two networks, each of which says which labels the other one may trust.

J. Li, R. Socher, S. C. H. Hoi,
"DivideMix: Learning with Noisy Labels as Semi-supervised Learning", ICLR 2020.

    paper                   here
    θ^(1), θ^(2)            `weights` and `peer` of Server, Down and Up
    ℓ_i, w_i                losses of the evaluation view; clean_probability
    X_e, U_e, τ             p_clean > Config.clean_threshold, and the rest
    x̂_b,1, x̂_b,2            views "x1" and "x2" of X_e
    û_b,1, û_b,2            step images "u1" and "u2", views of U_e
    p_b, ȳ_b, ŷ_b           co_refined
    q̄_b, q_b                co_guessed
    λ', α                   at_least_half of "lam", Config.mixup_alpha
    L_X, L_U, L_reg         local_loss
    λ_u, λ_r                ramped_up from Config.lambda_u, Config.lambda_r
    T                       Config.temperature

After a warm-up by cross entropy, every local epoch begins with a look at all of the client's
samples. What one network's losses say of each label divides the samples for the *other* network:
those with probably right labels are its labelled ones, of all others it sees the images alone. Then
each trains by MixMatch: labels refined by its own predictions, guesses by both networks for the
rest, all of them mixed.

Deviations, and what the paper leaves open. It has no clients: here each client of FedAvg trains
both networks, and both are averaged by the clients' samples, as in FedGR's comparison; warm-up and
ramp count rounds, and the local epochs of a round all cover the same part of the ramp, as there.
The paper's confidence penalty for asymmetric noise is left out, as in FedGR's scripts, and so is
the mean of losses over epochs, which its program takes at 90 % noise. If there are too few labelled
samples for a step, or no unlabelled ones, the network trains that epoch by cross entropy on all
labels as given; in FedGR's program both networks return to the received weights then and warm up
anew, and what they learnt in the round is lost. Unlabelled batches are always full: one that would
be smaller is filled up from the next pass. Each local epoch of each network is a fit of its own, so
that SGD's momentum starts at zero in it. Both networks look at one draw of the evaluation view. The
mixture starts at the best split into two, where scikit-learn's starts at a random one. The second
network starts from the first one's numbers in another order, not from a draw of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Fitted, Net, Plan, count_steps
from fedsieve.losses import cross_entropy, soft_cross_entropy
from fedsieve.methods import contract, fedavg, fedcoteaching
from fedsieve.methods.contract import Federation, Sieved
from fedsieve.methods.fedcoteaching import SecondStart, Server, Up
from fedsieve.methods.feddiv import scaled, uniform_prior
from fedsieve.methods.fedlsr import sharpened
from fedsieve.methods.mixup import draw_mixing
from fedsieve.methods.presets import check_choices
from fedsieve.sieve.gmm import clean_posterior, fit_mixture
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

EvaluationView: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are FedGR's, which are the paper's for CIFAR-10 but for the warm-up and the view."""

    name: Literal["feddividemix"] = "feddividemix"
    warmup_rounds: int = 100
    """Rounds of cross entropy on all labels before samples are divided (at least 0; FedGR 100;
    paper 10 epochs on CIFAR-10, 30 on CIFAR-100)."""
    clean_threshold: float = 0.5
    """τ, a label is used where its probability of being right exceeds this (in (0, 1); paper 0.5,
    0.6 at 90 % noise)."""
    temperature: float = 0.5
    """T of the sharpening, which makes refined labels and guesses surer the smaller it is (above 0;
    paper 0.5)."""
    mixup_alpha: float = 4.0
    """α of MixUp's λ ~ Beta(α, α) (at least 0; paper 4; 0 does not mix)."""
    lambda_u: float = 25.0
    """λ_u, weight of the unlabelled samples' loss at the end of the ramp (at least 0; FedGR 25
    everywhere; paper 0, 25, 50 or 150, depending on the noise)."""
    ramp_rounds: int = 16
    """Rounds after the warm-up in which that weight grows from 0 (at least 1; the paper's program
    16 epochs)."""
    lambda_r: float = 1.0
    """λ_r, weight of the term that wants all classes to be predicted equally often in a batch (at
    least 0; paper 1). Where a client's classes are far from equal it asks for what is wrong."""
    evaluation_view: EvaluationView = "weak"
    """What the losses that divide samples are computed on: randomly cropped and flipped images, as
    in FedGR's program, or "raw" ones, as in the paper's."""
    second_start: SecondStart = "all"
    """Which weights of the second network begin in another order than the first one's: "all", or
    those of its "head" alone, where the rest was pretrained."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (("warmup_rounds", 0), ("ramp_rounds", 1)):
            value = getattr(self, name)
            check(value >= least, f"method.{name} must be at least {least}, not {value}.")
        check(
            0 < self.clean_threshold < 1,
            f"method.clean_threshold must be in (0, 1), not {self.clean_threshold}.",
        )
        check(
            0 < self.temperature < math.inf,
            f"method.temperature must be above 0, not {self.temperature}.",
        )
        for name in ("mixup_alpha", "lambda_u", "lambda_r"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Client:
    """What both networks made of the client's samples at the beginning of its last local epoch, for
    diagnosis alone; None before it has divided them."""

    p_clean: Tensor | None = None
    """(n,) float32, the mean of both w."""
    labels: Tensor | None = None
    """(n,) int64, the given label where that mean exceeds τ, or else the networks' class."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    peer: Weights
    since_warm_up: int | None
    """Rounds since the warm-up; None during it."""


# ---------------------------------------------------------------------------------------- server


def warm_up_rounds(cfg: Config, federation: Federation) -> int:
    return cfg.warmup_rounds


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    since = round - cfg.warmup_rounds
    return Down(server.weights, server.peer, since if since >= 0 else None)


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client()


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Algorithm 1 on the client's samples; in the warm-up each network trains as FedAvg's."""
    networks = [down.weights, down.peer]
    if down.since_warm_up is None or len(shard) == 0:
        fits = [
            bench.fit(fedavg.plan(fedavg.Down(start), shard, bench, streams))
            for start, streams in zip(networks, (rng, rng.within("peer")), strict=True)
        ]
        weights, peer = (fitted.weights[0] for fitted in fits)
        return client, Up(weights, peer, len(shard)), {"loss": mean_loss(fits)}

    fits, labelled = [], []
    for epoch in range(bench.sgd.epochs):
        streams = rng.within(f"epoch {epoch}")
        images = bench.view(cfg.evaluation_view, shard.images, streams("evaluation view"))
        logits = [bench.forward(weights, images).logits for weights in networks]
        p_clean = [clean_probability(cross_entropy(z, shard.labels)) for z in logits]
        for own, other in ((0, 1), (1, 0)):
            pair, judged = (networks[own], networks[other]), p_clean[other]
            plan = _epoch(
                cfg, down.since_warm_up, pair, judged, shard, bench, streams.within(f"net {own}")
            )
            fits.append(bench.fit(plan))
            networks[own] = fits[-1].weights[0]
            labelled.append((judged > cfg.clean_threshold).mean())
    client = believed(cfg, logits, p_clean, shard.labels)
    metrics = {"loss": mean_loss(fits), "labelled_share": float(np.mean(labelled))}
    return client, Up(networks[0], networks[1], len(shard)), metrics


def mean_loss(fits: Sequence[Fitted]) -> float:
    """Of the steps of several fits."""
    return sum(f.loss * f.steps for f in fits) / max(1, sum(f.steps for f in fits))


def _epoch(
    cfg: Config,
    since_warm_up: int,
    pair: tuple[Weights, Weights],
    p_clean: NDArray[np.float32],
    shard: Shard,
    bench: Bench,
    rng: Streams,
) -> Plan:
    """A local epoch of the first of two networks on what the second makes of the samples."""
    own, other = pair
    sgd, device = replace(bench.sgd, epochs=1), shard.images.device
    is_labelled = p_clean > cfg.clean_threshold
    chosen, rest = np.flatnonzero(is_labelled), np.flatnonzero(~is_labelled)
    steps = count_steps(len(chosen), sgd)
    if steps == 0 or len(rest) == 0:
        return replace(fedavg.plan(fedavg.Down(own), shard, bench, rng), sgd=sgd)
    rows = torch.from_numpy(chosen).to(device)
    beside = unlabelled_rows(rest, steps * sgd.batch_size, rng("unlabelled"))
    drawn = shard.images[torch.from_numpy(beside).to(device)]
    seen = {name: bench.view("weak", drawn, rng(f"view/{name}")) for name in ("u1", "u2")}
    ramp = ramped_up(cfg, since_warm_up, steps)
    return Plan(
        start=[own],
        frozen=[other],
        images=shard.images[rows],
        views={"x1": "weak", "x2": "weak"},
        columns={
            "label": shard.labels[rows],
            "p_clean": torch.from_numpy(p_clean[chosen]).to(device),
        },
        step_images={name: u.view(steps, -1, *u.shape[1:]) for name, u in seen.items()},
        per_step={
            **draw_mixing(len(rows), sgd, cfg.mixup_alpha, rng("mixup"), device, blocks=4),
            "lambda_u": torch.from_numpy(ramp).to(device),
        },
        loss=partial(local_loss, cfg.temperature, cfg.lambda_r),
        sgd=sgd,
        rng=rng,
    )


def believed(
    cfg: Config, logits: Sequence[Tensor], p_clean: Sequence[NDArray[np.float32]], given: Tensor
) -> Client:
    """What both networks together make of the samples."""
    mean = torch.from_numpy(np.mean(p_clean, axis=0)).to(given.device)
    guess = torch.stack([z.softmax(dim=1) for z in logits]).mean(dim=0).argmax(dim=1)
    return Client(p_clean=mean, labels=given.where(mean > cfg.clean_threshold, guess))


# ------------------------------------------------------------------------------------- equations

MOST_ITERATIONS = 10
TOLERANCE = 1e-2
LEAST_VARIANCE = 5e-4
"""Of the mixture, as in the paper's program: most EM iterations, the rise of the mean
log-likelihood that ends them, what is added to each variance."""


def clean_probability(losses: Tensor) -> NDArray[np.float32]:
    """(n,) w_i, the posterior of the component of smaller mean in a mixture of the client's losses,
    which are scaled to [0, 1] first."""
    values = scaled(losses.numpy(force=True))
    mixture = fit_mixture(values, max_iter=MOST_ITERATIONS, tol=TOLERANCE, reg_covar=LEAST_VARIANCE)
    return clean_posterior(mixture, values).astype(np.float32)


def unlabelled_rows(
    rest: NDArray[np.int64], count: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """(count,) pass after pass through `rest`, each in random order."""
    passes = math.ceil(count / len(rest))
    return np.concatenate([rng.permutation(rest) for _ in range(passes)])[:count]


def ramped_up(cfg: Config, since_warm_up: int, steps: int) -> NDArray[np.float32]:
    """(steps,) λ_u·min((t + s/steps) / ramp, 1) for the steps s of an epoch of round t."""
    progress = (since_warm_up + np.arange(steps) / steps) / cfg.ramp_rounds
    return (cfg.lambda_u * progress.clip(max=1)).astype(np.float32)


def co_refined(temperature: float, batch: Batch, net: Net) -> Tensor:
    """Label co-refinement: (B, C) sharpened w·y + (1 − w)·p, p the mean prediction for both
    views."""
    p = mean_prediction([net], [batch["x1"], batch["x2"]])
    w, given = batch["p_clean"][:, None], F.one_hot(batch["label"], p.shape[1])
    return sharpened(w * given + (1 - w) * p, temperature)


def co_guessed(temperature: float, batch: Batch, net: Net, other: Net) -> Tensor:
    """Label co-guessing: (rows, C) sharpened mean prediction of both networks for both views."""
    return sharpened(mean_prediction([net, other], [batch["u1"], batch["u2"]]), temperature)


def mean_prediction(nets: Sequence[Net], views: Sequence[Tensor]) -> Tensor:
    """(B, C) the mean of each net's softmax for each view; a trained net's pass is in training
    mode, and BatchNorm's statistics follow it."""
    return torch.stack([net(x).logits.softmax(dim=1) for net in nets for x in views]).mean(dim=0)


def at_least_half(lam: Tensor) -> Tensor:
    """λ' = max(λ, 1 − λ), so that a mixed sample is nearer to the one whose place it takes."""
    return torch.maximum(lam, 1 - lam)


def local_loss(temperature: float, lambda_r: float, batch: Batch, net: Net, other: Net) -> Tensor:
    """L = L_X + λ_u·L_U + λ_r·L_reg of the samples as MixMatch mixes them."""
    with torch.no_grad():
        guessed = co_guessed(temperature, batch, net, other)
        refined = co_refined(temperature, batch, net)
    x = torch.cat([batch["x1"], batch["x2"], batch["u1"], batch["u2"]])
    targets = torch.cat([refined, refined, guessed, guessed])
    lam, order = at_least_half(batch["lam"]), batch["keys"][: len(x)].argsort(stable=True)
    logits = net(lam * x + (1 - lam) * x[order]).logits
    targets = lam * targets + (1 - lam) * targets[order]

    size = len(refined)
    errors = soft_cross_entropy(logits[: 2 * size], targets[: 2 * size])
    l_x = batch.mean(errors.view(2, size).mean(dim=0))
    l_u = F.mse_loss(logits[2 * size :].softmax(dim=1), targets[2 * size :])
    loss = l_x + batch["lambda_u"] * l_u
    if lambda_r > 0:
        loss = loss + lambda_r * uniform_prior(of_all_blocks(batch, len(x)), logits)
    return loss


def of_all_blocks(batch: Batch, count: int) -> Batch:
    """The batch with a weight for each of its `count` mixed samples: padding is padding in both
    views, and among the unlabelled ones there is none."""
    if batch.weight is None:
        return batch
    unpadded = batch.weight.new_ones(count - 2 * len(batch.weight))
    return replace(batch, weight=torch.cat([batch.weight, batch.weight, unpadded]))


# ------------------------------------------------------------------------------------- diagnosis


def own_sieve(client: Client) -> Sieved | None:
    """What both networks believed of the given labels in the client's last round."""
    if client.p_clean is None:
        return None
    return Sieved(float((1 - client.p_clean).mean()), client.p_clean)


def refined_labels(client: Client) -> Tensor | None:
    """The labels by which the networks last learnt, as far as one class can say it."""
    return client.labels


METHOD = replace(
    fedcoteaching.METHOD,
    name="feddividemix",
    title="DivideMix: two networks divide samples for each other and learn from both parts",
    paper="Li et al., DivideMix: Learning with Noisy Labels as Semi-supervised Learning, ICLR 2020",
    config=Config,
    client=Client,
    down=Down,
    init_client=init_client,
    send=send,
    train=train,
    own_sieve=own_sieve,
    refined=refined_labels,
    begins=warm_up_rounds,
)
