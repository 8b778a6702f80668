"""FedCorr: finds noisy clients by the dimension of their predictions, and corrects their labels.

J. Xu, Z. Chen, T. Q. S. Quek, K. F. E. Chong,
"FedCorr: Multi-Stage Federated Learning for Label Noise Correction", CVPR 2022.

    paper               here
    T_1, T_2, T_3       Config.iterations, Config.fine_tuning_rounds, the rounds that are left
    w^(t)               Server.weights, Down.weights
    w_k^(t), n_k        Up.weights, Up.samples
    LID score           Up.lid; cumulative in Standing.lid
    S_n, S_c            Standing.noisy, and the other clients
    δ̂_k                 Up.noise_level, Down.noise_level; 0 in S_c
    β, α                Config.beta, Config.mixup_alpha
    π, θ, κ             Config.relabel_share, Config.confidence, Config.trusted_up_to
    ŷ, as corrected     Client.labels

Pre-processing: in each iteration the model walks through all clients, one per round. A client
trains it with MixUp, and is held to the received model the more strongly the noisier it was found;
then it measures the dimension of the trained model's predictions, and how its losses fall into two
groups. At the end of an iteration the server splits the clients by their cumulative dimensions; the
noisy ones give those labels with the largest losses of which the global model is sure a new class.
Fine-tuning: FedAvg with MixUp at the clients of small δ̂_k; at its end the noisy clients let the
global model judge all labels. Usual training: FedAvg with MixUp at all clients.

Deviations, and what the paper leaves open. A correction needs the global model of the end of an
iteration. The paper's noisy clients get it then and there; here they get it with the model of their
next participation (`Correction`) and correct their labels before they train on them. So they train
on the same labels for the same traffic, but no round is spent on correcting alone, and the server
keeps two models at the most until all noisy clients have used them. A client cannot know during an
iteration what the server will make of it, so every client fits the mixture to its losses and sends
the share of the larger ones; if it is found clean, 0 counts instead. A client without a score (too
few samples for five neighbours, or all predictions equal) counts as clean; the score of one that
missed an iteration is scaled up to all of them. If no client is trusted, those of least δ̂_k are
fine-tuned on. A mixture starts at the best split into two, where scikit-learn's starts at a random
one, and has its update and stopping rule; a client or sample is noisy if its posterior says so.
Differences between paper and program are switches with presets (`PRESETS`).
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
from fedsieve.local.plan import Batch, Net, Plan, Sgd, count_steps
from fedsieve.losses import SievingLoss, proximal, sieving_loss
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import (
    Federation,
    Method,
    Sieved,
    choose_in_turn,
    choose_uniformly,
)
from fedsieve.methods.mixup import draw_mixing, mixed, mixed_loss
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.sieve.gmm import clean_posterior, fit_mixture
from fedsieve.sieve.lid import LARGEST_DIMENSION, mean_dimension
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["paper", "authors"]
Proximal: TypeAlias = Literal["squared", "norm"]
EvaluationView: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper and the authors' program differ; `Config` says what each one does."""

    proximal: Proximal
    sample_loss: SievingLoss
    evaluation_view: EvaluationView


PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "paper": Switches(proximal="squared", sample_loss="cross_entropy", evaluation_view="raw"),
        "authors": Switches(proximal="norm", sample_loss="bounded", evaluation_view="weak"),
    }
)
"""The paper's formulas, and the public program."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are the paper's for CIFAR-10."""

    presets = PRESETS
    name: Literal["fedcorr"] = "fedcorr"

    iterations: int = 5
    """T_1, how often the model passes through all clients in the pre-processing (at least 0; paper
    5 on CIFAR-10, 10 on CIFAR-100, 2 on Clothing1M). It takes T_1 · K of the recipe's rounds, K
    being the number of clients."""
    walk_clients: int = 1
    """Clients in a round of the pre-processing (at least 1, and no more count than in other rounds;
    paper 1). With more, an iteration takes ⌈K / walk_clients⌉ rounds, and their models are
    averaged."""
    fine_tuning_rounds: int = 500
    """T_2, rounds on trusted clients alone (at least 0; paper 500 on CIFAR-10, 450 on CIFAR-100, 50
    on Clothing1M). All later rounds of the recipe are usual training, the paper's T_3."""
    neighbours: int = 20
    """Neighbours of a sample's prediction that its dimension is estimated from (at least 2; paper
    20). Where a client has fewer, they are all others; fewer than five make no score."""
    beta: float = 5.0
    """β, strength of the proximal term, which β·δ̂_k multiplies in the pre-processing (at least 0;
    paper 5; 0 leaves the term out)."""
    mixup_alpha: float = 1.0
    """α of MixUp's λ ~ Beta(α, α) in all stages (at least 0; paper 1; 0 does not mix)."""
    relabel_share: float = 0.5
    """π, which share of the samples judged noisy an iteration may relabel (in [0, 1]; paper 0.5,
    0.8 on Clothing1M)."""
    confidence: float = 0.5
    """θ, probability that the global model must exceed to replace a label (in [0, 1]; paper 0.5,
    0.9 on Clothing1M)."""
    trusted_up_to: float = 0.1
    """κ, largest δ̂_k of a client that takes part in the fine-tuning (in [0, 1]; paper 0.1)."""

    preset: Preset = "paper"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    proximal: Proximal | None = None
    """The term that β·δ̂_k multiplies: ‖w − w_g‖² ("squared"), or ‖w − w_g‖, left out in the first
    batch of each epoch ("norm"), whose pull is as strong near w_g as far from it."""
    sample_loss: SievingLoss | None = None
    """The loss that ranks and splits a client's samples: the cross entropy, or "bounded", that of
    softmax(softmax(z)), which lies in an interval of length 1 (the program applies softmax
    twice)."""
    evaluation_view: EvaluationView | None = None
    """What dimensions, losses and corrections are computed on: the raw images, or randomly cropped
    and flipped ones."""

    correction: bool = True
    """False leaves all labels as given (the ablation "w/o correction")."""
    fine_tuning: bool = True
    """False leaves out the second stage and the correction at its end (the ablation "w/o
    fine-tuning")."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        least = {"iterations": 0, "walk_clients": 1, "fine_tuning_rounds": 0, "neighbours": 2}
        for name, smallest in least.items():
            value = getattr(self, name)
            check(value >= smallest, f"method.{name} must be at least {smallest}, not {value}.")
        for name in ("beta", "mixup_alpha"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")
        for name in ("relabel_share", "confidence", "trusted_up_to"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"method.{name} must be in [0, 1], not {value}.")

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Standing:
    """What the server knows of one client."""

    lid: float = 0.0
    """The sum of its LID scores."""
    scores: int = 0
    """How many they are."""
    reported: float = 0.0
    """δ̂_k as the client last sent it."""
    noisy: bool = False
    """Whether it is in S_n."""
    corrected: int = 0
    """Number of the last correction that was open to it when it took part."""

    @property
    def noise_level(self) -> float:
        """δ̂_k, 0 for a client in S_c"""
        return self.reported if self.noisy else 0.0


@dataclass(frozen=True)
class Correction:
    """A model by which each noisy client judges its labels once."""

    number: int
    """Of its iteration, from 1 on; T_1 + 1 after the fine-tuning."""
    weights: Weights
    suspects_only: bool
    """Whether it judges only those labels with the largest losses of the iteration."""


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    standings: tuple[Standing, ...]
    """Of every client."""
    settled: int
    """Number of the last iteration that ended and was judged; T_1 + 1 after the fine-tuning."""
    corrections: tuple[Correction, ...]
    """Those that a noisy client still has to make."""


@dataclass(frozen=True)
class Client:
    labels: Tensor | None = None
    """(n,) int64, the labels in use; None before the first verdict: as given."""
    losses: Tensor | None = None
    """(n,) float32, of the labels in use under the model trained in the last iteration, until the
    client has heard the server's verdict on it."""
    p_clean: Tensor | None = None
    """(n,) float32, what is believed of the *given* labels, for diagnosis; None before the first
    verdict."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    pre_processing: bool
    """Whether the round belongs to the first stage."""
    noisy: bool | None
    """Whether the receiving client is in S_n; None before the first verdict."""
    noise_level: float
    """Its δ̂_k"""
    corrections: tuple[Correction, ...]
    """Those that it has to make, in this order, before it trains; most often none."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    lid: float | None
    """LID score, one number: in how many directions the predictions of all samples lie around each
    other on average. None outside the pre-processing, and where it is not defined."""
    noise_level: float | None
    """δ̂_k, one number: the share of the samples whose losses are in the upper one of two groups.
    None outside the pre-processing."""


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    standings = (Standing(),) * federation.clients
    return Server(weights, federation, standings, settled=0, corrections=())


def rounds_per_iteration(cfg: Config, federation: Federation) -> int:
    """⌈K / clients of the walk⌉, the rounds in which each client can take part once."""
    return max(1, math.ceil(federation.clients / min(cfg.walk_clients, federation.per_round)))


def first_fine_tuning_round(cfg: Config, federation: Federation) -> int:
    return cfg.iterations * rounds_per_iteration(cfg, federation)


def first_usual_round(cfg: Config, federation: Federation) -> int:
    fine_tuning = cfg.fine_tuning_rounds if cfg.fine_tuning else 0
    return first_fine_tuning_round(cfg, federation) + fine_tuning


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    """Every client once per iteration, in random order; then trusted clients; then any."""
    federation = server.federation
    if round < first_fine_tuning_round(cfg, federation):
        length = rounds_per_iteration(cfg, federation)
        return choose_in_turn(federation.clients, length, round, rng.seed)
    candidates = tuple(range(federation.clients))
    if round < first_usual_round(cfg, federation):
        standings = settled(cfg, server, round).standings
        candidates = trusted_clients(standings, cfg.trusted_up_to, federation.per_round)
    chosen = choose_uniformly(len(candidates), federation.per_round, rng("select"))
    return tuple(candidates[place] for place in chosen)


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    server = settled(cfg, server, round)
    standing = server.standings[client]
    return Down(
        weights=server.weights,
        pre_processing=round < first_fine_tuning_round(cfg, server.federation),
        noisy=standing.noisy if server.settled else None,
        noise_level=standing.noise_level,
        corrections=tuple(c for c in server.corrections if is_open(c, standing)),
    )


def is_open(correction: Correction, standing: Standing) -> bool:
    """Whether the client of this standing still has to make this correction."""
    return standing.noisy and standing.corrected < correction.number


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """Average the weights and add up the LID scores; at the end of an iteration or of the
    fine-tuning, say who is noisy and by which model labels are to be corrected."""
    check(len(ups) > 0, f"No client took part in round {round}; let at least one.")
    judged_before = server.settled
    server = settled(cfg, server, round)
    samples = [up.samples for up in ups.values()]
    weights = server.weights
    if any(samples):
        weights = weighted_mean([up.weights for up in ups.values()], samples)
    standings = tuple(
        heard(standing, ups[client], server.settled) if client in ups else standing
        for client, standing in enumerate(server.standings)
    )
    corrections = tuple(
        c for c in server.corrections if any(is_open(c, standing) for standing in standings)
    )
    server = replace(server, weights=weights, standings=standings, corrections=corrections)
    after = settled(cfg, server, round + 1)
    return after, describe(cfg, after) if after.settled > judged_before else {}


def heard(standing: Standing, up: Up, corrected: int) -> Standing:
    """A client's standing after an update, in whose round so many corrections had been sent."""
    standing = replace(standing, corrected=corrected)
    if up.lid is not None:
        check(
            0 < up.lid <= LARGEST_DIMENSION,
            f"An update has the LID score {up.lid}; it must be above 0, and {LARGEST_DIMENSION:g} "
            "at the most.",
        )
        standing = replace(standing, lid=standing.lid + up.lid, scores=standing.scores + 1)
    if up.noise_level is not None:
        check(
            0 <= up.noise_level <= 1,
            f"An update has the noise level {up.noise_level}; it must be in [0, 1].",
        )
        standing = replace(standing, reported=up.noise_level)
    return standing


def settled(cfg: Config, server: Server, round: int) -> Server:
    """The server at the beginning of `round`, when it has judged what ended before.

    `merge` does so in time, unless an iteration's last update is refused or its client is without
    samples; the weights are then still those that the iteration ended with.
    """
    ended = min(round // rounds_per_iteration(cfg, server.federation), cfg.iterations)
    if ended > server.settled:
        correction = Correction(ended, server.weights, suspects_only=True)
        server = replace(
            server,
            standings=judged(server.standings, ended),
            settled=ended,
            corrections=(correction,) if cfg.correction else (),
        )
    last = cfg.iterations + 1
    is_over = cfg.fine_tuning and round >= first_usual_round(cfg, server.federation)
    if is_over and server.settled < last:
        correction = Correction(last, server.weights, suspects_only=False)
        later = (correction,) if cfg.correction else ()
        server = replace(server, settled=last, corrections=(*server.corrections, *later))
    return server


def judged(standings: tuple[Standing, ...], iterations: int) -> tuple[Standing, ...]:
    """Who is noisy by the cumulative LID scores after so many iterations."""
    scored = [k for k, standing in enumerate(standings) if standing.scores]
    scores = [standings[k].lid * iterations / standings[k].scores for k in scored]
    p_clean = smaller_component(np.array(scores, dtype=np.float64))
    noisy = {k for k, p in zip(scored, p_clean, strict=True) if p < 0.5}
    return tuple(replace(standing, noisy=k in noisy) for k, standing in enumerate(standings))


def trusted_clients(
    standings: tuple[Standing, ...], trusted_up_to: float, count: int
) -> tuple[ClientId, ...]:
    """Those with δ̂_k ≤ κ, in ascending order; if there is none, `count` of the smallest δ̂_k."""
    levels = [standing.noise_level for standing in standings]
    trusted = tuple(k for k, level in enumerate(levels) if level <= trusted_up_to)
    return trusted or tuple(sorted(sorted(range(len(levels)), key=levels.__getitem__)[:count]))


def describe(cfg: Config, server: Server) -> dict[str, float]:
    """Numbers about a verdict."""
    standings = server.standings
    trusted = sum(standing.noise_level <= cfg.trusted_up_to for standing in standings)
    result = {
        "noisy_clients": float(sum(standing.noisy for standing in standings)),
        "trusted_clients": float(trusted),
        "noise_level": sum(standing.noise_level for standing in standings) / len(standings),
    }
    for name, noisy in (("lid_clean", False), ("lid_noisy", True)):
        scores = [s.lid / s.scores for s in standings if s.scores and s.noisy is noisy]
        if scores:
            result[name] = sum(scores) / len(scores)
    return result


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client()


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Correct labels if asked to, train on them, and in the pre-processing measure the result."""
    for memory in (client.labels, client.losses):
        check(
            memory is None or len(memory) == len(shard),
            f"Client {shard.client} has labels for other samples than the {len(shard)} it holds; "
            "go on with the same samples, or start a new run.",
        )
    if len(shard) == 0:
        return client, Up(down.weights, 0, None, None), {"loss": 0.0}
    client = corrected(cfg, client, down, shard, bench, rng)
    labels = shard.labels if client.labels is None else client.labels
    fitted = bench.fit(_plan(cfg, down, shard, labels, bench, rng))
    up = Up(fitted.weights[0], len(shard), None, None)
    metrics = {
        "loss": fitted.loss,
        "noise_level": down.noise_level,
        "replaced_share": float((labels != shard.labels).float().mean()),
    }
    if not down.pre_processing:
        return client, up, metrics

    images = bench.view(cfg.switches.evaluation_view, shard.images, rng("evaluation view"))
    logits = bench.forward(up.weights, images).logits
    losses = sieving_loss(logits, labels, cfg.switches.sample_loss)
    up = replace(
        up,
        lid=lid_score(logits.double().softmax(dim=1), cfg.neighbours),
        noise_level=noise_share(clean_probability(losses)),
    )
    if up.lid is not None:
        metrics["lid"] = up.lid
    return replace(client, losses=losses), up, metrics


def corrected(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> Client:
    """The client after it has heard the verdict and made the corrections that it was sent."""
    if down.noisy is None:
        return client
    held = shard.labels if client.labels is None else client.labels
    p_clean = client.p_clean
    if client.losses is not None and down.noisy:
        p_clean = clean_probability(client.losses)
    elif client.losses is not None or p_clean is None:
        p_clean = torch.ones(len(shard), device=held.device)
    for correction in down.corrections:
        suspects = torch.ones_like(held, dtype=torch.bool)
        if correction.suspects_only:
            if client.losses is None:
                continue
            count = relabel_count(len(shard), down.noise_level, cfg.relabel_share)
            suspects = largest(client.losses, count)
        view = rng(f"correction {correction.number}")
        images = bench.view(cfg.switches.evaluation_view, shard.images, view)
        p = bench.forward(correction.weights, images).logits.softmax(dim=1)
        sure = suspects & (p.amax(dim=1) > cfg.confidence)
        held = p.argmax(dim=1).where(sure, held)
        p_clean = probability_of(shard.labels, p).where(sure, p_clean)
    # A label that is no longer in use is believed to be wrong.
    return Client(labels=held, p_clean=p_clean.where(held == shard.labels, 0))


def _plan(
    cfg: Config, down: Down, shard: Shard, labels: Tensor, bench: Bench, rng: Streams
) -> Plan:
    """FedAvg's local training with MixUp, in the pre-processing near the received model."""
    plan = fedavg.plan(fedavg.Down(down.weights), shard, bench, rng)
    per_step: dict[str, Tensor] = {}
    if cfg.mixup_alpha > 0:
        draws, device = rng("mixup"), shard.images.device
        per_step = draw_mixing(len(shard), bench.sgd, cfg.mixup_alpha, draws, device)
    strength = cfg.beta * down.noise_level if down.pre_processing else 0.0
    kind = cfg.switches.proximal if strength > 0 else None
    if kind is not None:
        pulls = torch.from_numpy(pull(kind, strength, len(shard), bench.sgd))
        per_step["pull"] = pulls.to(shard.images.device)
    return replace(
        plan,
        columns={"label": labels},
        per_step=per_step,
        constants={} if kind is None else {"anchor": down.weights},
        loss=partial(local_loss, Objective(mixes=cfg.mixup_alpha > 0, proximal=kind)),
    )


# ------------------------------------------------------------------------------------- equations

MOST_ITERATIONS = 100
TOLERANCE = 1e-3
LEAST_VARIANCE = 1e-6
"""Of both mixtures: most EM iterations, the rise of the mean log-likelihood that ends them, what is
added to each variance."""
FEWEST_NEIGHBOURS = 5
"""With fewer, a score says nothing, and may be so large that all other clients are one group beside
it: from two neighbours its mean is infinite, from three its variance."""
LEAST_SQUARED_DISTANCE = 1e-24
"""Below it a norm counts as constant: at zero it has no gradient."""


def lid_score(predictions: Tensor, neighbours: int) -> float | None:
    """The mean dimension of a client's predictions (n, classes) from so many neighbours, or from
    all others where these are fewer; None from too few, or where no sample has one."""
    if len(predictions) - 1 < min(neighbours, FEWEST_NEIGHBOURS):
        return None
    return mean_dimension(predictions, neighbours)


def smaller_component(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """(n,) posterior of the component of smaller mean in the mixture of two normals of `values`."""
    mixture = fit_mixture(values, max_iter=MOST_ITERATIONS, tol=TOLERANCE, reg_covar=LEAST_VARIANCE)
    return clean_posterior(mixture, values)


def clean_probability(losses: Tensor) -> Tensor:
    """(n,) p("clean") of each sample by a mixture of these losses; 0 for one that is not finite."""
    values = losses.numpy(force=True)
    finite = np.isfinite(values)
    result = np.zeros(len(values), dtype=np.float32)
    result[finite] = smaller_component(values[finite])
    return torch.from_numpy(result).to(losses.device)


def noise_share(p_clean: Tensor) -> float:
    """δ̂_k, the share of samples that are rather in the component of larger losses."""
    return int((p_clean < 0.5).sum()) / max(1, len(p_clean))


def relabel_count(n: int, noise_level: float, share: float) -> int:
    """⌊n·δ̂_k·π⌋, how many labels an iteration may replace."""
    # The small addend keeps products such as 0.29 · 100 = 28.999… from losing a sample.
    return math.floor(n * noise_level * share + 1e-9)


def largest(losses: Tensor, count: int) -> Tensor:
    """(n,) whether a loss is among the `count` largest."""
    chosen = torch.zeros_like(losses, dtype=torch.bool)
    chosen[losses.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def probability_of(labels: Tensor, p: Tensor) -> Tensor:
    """(n,) p_y for labels y (n,) and probabilities p (n, classes)."""
    return p.gather(1, labels[:, None]).squeeze(1)


def pull(kind: Proximal, strength: float, n: int, sgd: Sgd) -> NDArray[np.float32]:
    """(steps,) what multiplies the proximal term in each step: β·δ̂_k, but 0 in the first batch of
    an epoch where the term is the norm."""
    steps = count_steps(n, sgd)
    result = np.full(steps, strength, dtype=np.float32)
    if kind == "norm" and steps:
        result[:: steps // sgd.epochs] = 0
    return result


@dataclass(frozen=True)
class Objective:
    """What a captured step depends on besides its tensors."""

    mixes: bool
    proximal: Proximal | None
    """None where β·δ̂_k is 0."""


def local_loss(objective: Objective, batch: Batch, net: Net) -> Tensor:
    """CE on a mixed batch, and β·δ̂_k times the distance to the received model w_g."""
    if objective.mixes:
        x, others = mixed(batch)
        loss = mixed_loss(batch, others, net(x).logits)
    else:
        loss = fedavg.local_loss(batch, net)
    if objective.proximal is None:
        return loss
    return loss + batch["pull"] * distance(objective.proximal, net, batch.weights("anchor"))


def distance(kind: Proximal, net: Net, anchor: Weights) -> Tensor:
    """‖w − w_g‖², or ‖w − w_g‖, over the trainable parameters."""
    squared = 2 * proximal(list(net.parameters.values()), [anchor[n] for n in net.parameters])
    return squared if kind == "squared" else squared.clamp(min=LEAST_SQUARED_DISTANCE).sqrt()


# ------------------------------------------------------------------------------------- diagnosis


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """δ̂_k of the labels in use, once there is a verdict; nothing of single labels."""
    if not server.settled:
        return {}
    return {
        k: Sieved(standing.noise_level, None)
        for k, standing in enumerate(server.standings)
        if standing.scores
    }


def own_sieve(client: Client) -> Sieved | None:
    """What the client believes of its given labels since the last verdict that it heard."""
    if client.p_clean is None:
        return None
    return Sieved(noise_share(client.p_clean), client.p_clean)


def refined(client: Client) -> Tensor | None:
    """The labels in use."""
    return client.labels


METHOD = Method(
    name="fedcorr",
    title="FedCorr: noisy clients by the dimension of their predictions, corrected labels",
    paper="Xu et al., FedCorr: Multi-Stage Federated Learning for Label Noise Correction, CVPR "
    "2022",
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
    suspect=fedavg.suspect,
    weights=fedavg.global_weights,
    sieve=sieve,
    refined=refined,
    own_sieve=own_sieve,
)
