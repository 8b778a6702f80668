"""FedGR: the global model sieves, refines and regularises what clients learn from wrong labels.

Y. Tian, M. Yang, Y. Zhou, J. Wang, Q. Ye, T. Liu, G. Niu, J. Lv, "Learning Locally, Revising
Globally: Global Reviser for Federated Learning with Noisy Labels", ICML 2026.

    paper            here
    t, α             round; warm_up_rounds, Down.warm_up
    S(t)             select
    w_g^{t−1}        Server.weights, Down.weights
    w_k^t, n_k       Up.weights, Up.samples
    d_i              Shard.ids, Up.ids
    ℓ̄_i, T_k         Client.mean_loss and Up.losses, Client.observations
    q_i, r_k         Partition.q, Partition.noise_ratio
    D^c, D^n         q ≥ Config.clean_threshold, and the rest
    y^pse            pseudo_labels; Client.pseudo holds the hard labels of the last participation
    β, ε, μ          Config.beta, Config.epsilon, Config.mu
    w_ema, γ_g, γ_l  Client.ema, Config.gamma_g, Config.gamma_l
    B_k, R_k, τ      distillation, representation, Config.temperature
    x, x^w, x^s      the views "raw", "weak" and "strong"

A round at a client: the global model looks at the raw images (the losses that the server sieves)
and at one weak view (pseudo labels, target representations); the client's moving average is pulled
towards the global model and becomes the teacher; then comes SGD on fresh strong views. A client
always works with the q and r_k of its *previous* participation.

Deviations, and what the paper leaves open. Phases follow Eqs. 5–8 (warm-up is t < α from t = 0),
not Algorithm 2's t ≤ α. |D^r| is divided by n_k. The mixture's settings and the threshold of 0.5
are those of the authors' programs. The other differences between paper and programs are switches
with presets (`PRESETS`); the default takes one from the programs, the weighing of a batch's labels
by its mean q, without which the sieve drifts in long runs. Where clients differ in their classes,
all switches of the newest program do better. The model's head should be linear, as the paper says:
that of the programs blinds the sieve. A client without q (first met after the warm-up, or a new
sample) counts as clean with r_k = 0; one without a moving average starts it at the global model. If
the number of clients is not a multiple of those per round, the rounds of a warm-up pass differ in
size by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import FedsieveError, check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Ema, Net, Plan
from fedsieve.losses import cross_entropy, kl
from fedsieve.methods import contract
from fedsieve.methods.contract import (
    Federation,
    Method,
    Sieved,
    Suspicion,
    choose_in_turn,
    choose_uniformly,
    rounds_per_pass,
)
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.packed import in_step, like
from fedsieve.sieve.gmm import Mixture, clean_posterior, fit_mixture
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["published", "paper", "authors", "generation-a"]
Mix: TypeAlias = Literal["per_sample", "batch_mean"]
PseudoMemory: TypeAlias = Literal["none", "persistent"]
ReliableFrom: TypeAlias = Literal["same_round", "previous_participation"]
Threshold: TypeAlias = Literal["inclusive", "strict"]
FixMatch: TypeAlias = Literal["global", "global_or_ema"]
Representation: TypeAlias = Literal["cached", "per_batch"]
ViewName: TypeAlias = Literal["weak", "strong"]
SieveAt: TypeAlias = Literal["server", "client"]
Teacher: TypeAlias = Literal["revised", "online"]
WarmUpSampling: TypeAlias = Literal["without_replacement", "with_replacement"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper and the authors' programs differ; `Config` says what each one does."""

    mix: Mix
    pseudo_memory: PseudoMemory
    extra_local_obs: bool
    ema_double: bool
    dr_from: ReliableFrom
    threshold: Threshold
    fixmatch: FixMatch
    rep: Representation


_PAPER = Switches(
    mix="per_sample",
    pseudo_memory="none",
    extra_local_obs=False,
    ema_double=False,
    dr_from="same_round",
    threshold="inclusive",
    fixmatch="global",
    rep="cached",
)
_AUTHORS = Switches(
    mix="batch_mean",
    pseudo_memory="persistent",
    extra_local_obs=True,
    ema_double=True,
    dr_from="previous_participation",
    threshold="strict",
    fixmatch="global",
    rep="cached",
)
PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "published": replace(_PAPER, mix="batch_mean"),
        "paper": _PAPER,
        "authors": _AUTHORS,
        "generation-a": replace(
            _AUTHORS,
            extra_local_obs=False,
            ema_double=False,
            fixmatch="global_or_ema",
            rep="per_batch",
        ),
    }
)
"""What reaches a published number on IID data with a linear head; the equations as printed; the
newest public program, which does so where clients differ in their classes; the oldest one, which
the public run scripts call (it sets `extra_local_obs` on partitions that are not IID: set it
yourself there)."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are the paper's for CIFAR-10 (Table 17)."""

    presets = PRESETS
    name: Literal["fedgr"] = "fedgr"

    warmup_rounds: int | None = None
    """α, rounds of plain training before labels are refined (at least 0; paper 100). Left out:
    warmup_passes · ⌈clients / clients per round⌉."""
    warmup_passes: int = 10
    """How often every client takes part in the warm-up when α is left out (at least 1; paper 10 on
    CIFAR, 1 on Clothing1M)."""
    clean_threshold: float = 0.5
    """A sample is flagged clean if q is at least this (in (0, 1); 0.5)."""
    beta: float = 0.8
    """β, noise ratio r_k from which none of a client's labels is trusted (in (0, 1]; paper 0.8)."""
    epsilon: float = 0.9
    """ε, confidence that the global model must exceed to give a pseudo label (in [0, 1]; 0.9)."""
    mu: float = 0.5
    """μ, share of reliably labelled samples below which a distrusted client's moving average is
    replaced by the global model (in [0, 1]; paper 0.5)."""
    gamma_g: float = 0.9
    """γ_g, what the moving average keeps of itself at the start of a round (in [0, 1]; 0.9)."""
    gamma_l: float = 0.99
    """γ_l, what the moving average keeps of itself in a local step (in [0, 1); paper 0.99)."""
    temperature: float = 0.5
    """τ of both divergences (above 0; paper 0.5)."""
    lambda_b: float = 1.0
    """λ_B, weight of the distillation B_k after the warm-up (at least 0; paper 1; 0 is the
    ablation "w/o B_k")."""
    lambda_r: float = 0.1
    """λ_R, weight of the representation term R_k in all rounds (at least 0; paper 0.1 on CIFAR-10,
    0.2 on CIFAR-100 and Clothing1M; 0 is the ablation "w/o R_k")."""

    preset: Preset = "published"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    mix: Mix | None = None
    """Weigh given and pseudo label by each sample's own q ("per_sample", Eq. 11), or all samples of
    a batch by its mean q ("batch_mean", what a broadcast in the authors' programs amounts to)."""
    pseudo_memory: PseudoMemory | None = None
    """Pseudo labels are this round's only ("none"), or stay until replaced ("persistent")."""
    extra_local_obs: bool | None = None
    """Also average the local model's losses after its first epoch into the uploaded mean."""
    ema_double: bool | None = None
    """Update the moving average twice per step, and revise it again after the teacher's pass."""
    dr_from: ReliableFrom | None = None
    """Whether μ is compared with D^r of this round (Eq. 16), or with the hard labels that were left
    by the client's previous participation."""
    threshold: Threshold | None = None
    """A client is distrusted if r_k ≥ β ("inclusive"), or if r_k > β ("strict")."""
    fixmatch: FixMatch | None = None
    """Who must be confident for a pseudo label: the global model, or it or the revised average. The
    class is the global model's, and D^r of the same round counts the global model's only."""
    rep: Representation | None = None
    """Global representations are those of the round's one weak view ("cached"), or are computed
    for every batch on a fresh one ("per_batch", one more forward pass per step)."""

    sieve_at: SieveAt = "server"
    """"client" is the ablation "w/o FS": each client observes with its trained local model and fits
    a mixture to its own losses."""
    refine_labels: bool = True
    """False is the ablation "w/o LR": train on the samples flagged clean and nothing else."""
    student_view: ViewName = "strong"
    """The view that is trained on; "weak" is the ablation "w/o strong aug"."""
    teacher_view: ViewName = "weak"
    """The view of pseudo labels, teacher and global representation; "strong" is "w/o weak aug"."""
    teacher: Teacher = "revised"
    """"online" distils from the current moving average on each batch's own weak view."""
    warmup_sampling: WarmUpSampling = "without_replacement"
    """How clients are drawn in the warm-up: each once per pass, or independently each round."""
    sieve_after_warmup: bool = True
    """False keeps every q as the warm-up left it."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        alpha, passes = self.warmup_rounds, self.warmup_passes
        check(alpha is None or alpha >= 0, f"method.warmup_rounds must be at least 0, not {alpha}.")
        check(passes >= 1, f"method.warmup_passes must be at least 1, not {passes}.")
        check(
            0 < self.clean_threshold < 1,
            f"method.clean_threshold must be in (0, 1), not {self.clean_threshold}.",
        )
        check(0 < self.beta <= 1, f"method.beta must be in (0, 1], not {self.beta}.")
        for name in ("epsilon", "mu", "gamma_g"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"method.{name} must be in [0, 1], not {value}.")
        check(0 <= self.gamma_l < 1, f"method.gamma_l must be in [0, 1), not {self.gamma_l}.")
        tau = self.temperature
        check(0 < tau < math.inf, f"method.temperature must be above 0, not {tau}.")
        for name in ("lambda_b", "lambda_r"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)

    @property
    def keeps_ema(self) -> bool:
        """Whether anything reads a client's moving average."""
        return self.lambda_b > 0 or self.fixmatch == "global_or_ema"

    @property
    def ema_decay(self) -> float:
        """What a step leaves of the average: γ_l, or γ_l² where it is updated twice, since
        γ(γe + (1−γ)w) + (1−γ)w = γ²e + (1−γ²)w."""
        return self.gamma_l**2 if self.ema_double else self.gamma_l


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Partition:
    """What a mixture says about the samples of one client."""

    ids: Tensor
    """(n,) int64"""
    q: Tensor
    """(n,) float32, posterior of the clean component, in the order of `ids`."""
    noise_ratio: float
    """r_k, share of the samples that are flagged noisy."""


@dataclass(frozen=True, eq=False)
class Partitions(Mapping[ClientId, Partition]):
    """The partitions of all clients, in two tensors in which each client has a place.

    Two tensors for each of ten thousand clients would take more memory for themselves than for the
    numbers in them. Clients that never took part are missing.
    """

    ids: Tensor
    """(N,) int64, N the samples of all clients"""
    q: Tensor
    """(N,) float32"""
    starts: tuple[int, ...]
    """Where the place of client k begins."""
    counts: tuple[int, ...]
    """How many samples of client k were sieved; 0 for a client that never took part."""
    noise_ratios: tuple[float, ...]
    """r_k"""

    @staticmethod
    def none(sizes: tuple[int, ...]) -> Partitions:
        """Room for clients of these sizes, of which none has been sieved."""
        *starts, total = accumulate(sizes, initial=0)
        unknown = torch.zeros(total, dtype=torch.int64), torch.ones(total)
        return Partitions(*unknown, tuple(starts), (0,) * len(sizes), (0.0,) * len(sizes))

    def updated(self, fresh: Mapping[ClientId, Partition]) -> Partitions:
        """With the partitions `fresh` in the place of those clients' older ones."""
        ids, q = self.ids.clone(), self.q.clone()
        ends = (*self.starts[1:], len(ids))
        counts, ratios = list(self.counts), list(self.noise_ratios)
        for client, partition in fresh.items():
            counts[client], ratios[client] = len(partition.ids), partition.noise_ratio
            place = slice(self.starts[client], self.starts[client] + counts[client])
            check(
                place.stop <= ends[client],
                f"Client {client} sent losses of {counts[client]} samples, but told of "
                f"{ends[client] - place.start} before the first round; start a new run with them.",
            )
            ids[place], q[place] = partition.ids, partition.q
        return replace(self, ids=ids, q=q, counts=tuple(counts), noise_ratios=tuple(ratios))

    def place(self, client: ClientId) -> slice:
        """Where a client's samples lie in `ids` and `q`."""
        if client not in range(len(self.counts)) or self.counts[client] == 0:
            raise KeyError(client)
        return slice(self.starts[client], self.starts[client] + self.counts[client])

    def __getitem__(self, client: ClientId) -> Partition:
        place = self.place(client)
        return Partition(self.ids[place], self.q[place], self.noise_ratios[client])

    def __iter__(self) -> Iterator[ClientId]:
        return (client for client, count in enumerate(self.counts) if count)

    def __len__(self) -> int:
        return sum(count > 0 for count in self.counts)


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    partitions: Partitions
    """As of each client's last participation."""


@dataclass(frozen=True)
class Client:
    mean_loss: Tensor
    """ℓ̄, (n,) float32, mean of a sample's observed losses in the shard's order."""
    observations: int
    """How many losses `mean_loss` averages."""
    pseudo: Tensor | None
    """(n,) int64, the hard label of each sample after the last refining, −1 for none; None before
    the first."""
    ema: Weights | None
    """The moving average after the last step, where one is kept."""
    partition: Partition | None
    """By the client's own mixture, only where `sieve_at` is "client"."""
    trained_on: Tensor | None = None
    """(n,) int64, the last round's hard labels, −1 for none; None in the warm-up. For diagnosis."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    warm_up: bool
    """t < α"""
    partition: Partition | None
    """Of the receiving client's own samples, and of nobody else's."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    ids: Tensor
    """(n,) int64, opaque; empty where clients sieve for themselves."""
    losses: Tensor
    """(n,) float32, mean loss of each of `ids`."""


# ---------------------------------------------------------------------------------------- server


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, federation, Partitions.none(federation.sizes))


def warm_up_rounds(cfg: Config, federation: Federation) -> int:
    """α"""
    if cfg.warmup_rounds is not None:
        return cfg.warmup_rounds
    return cfg.warmup_passes * rounds_per_pass(federation)


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    """Every client once per pass of the warm-up, in random order; afterwards a random set."""
    federation = server.federation
    in_warm_up = round < warm_up_rounds(cfg, federation)
    if in_warm_up and cfg.warmup_sampling == "without_replacement":
        return choose_in_turn(federation.clients, rounds_per_pass(federation), round, rng.seed)
    return choose_uniformly(federation.clients, federation.per_round, rng("select"))


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    in_warm_up = round < warm_up_rounds(cfg, server.federation)
    return Down(server.weights, in_warm_up, server.partitions.get(client))


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """Sieve this round's losses together, and average the weights (Eq. 2)."""
    check(len(ups) > 0, f"No client took part in round {round}; let at least one.")
    partitions, metrics = server.partitions, dict[str, float]()
    in_warm_up = round < warm_up_rounds(cfg, server.federation)
    if cfg.sieve_at == "server" and (in_warm_up or cfg.sieve_after_warmup):
        fresh, mixture = federated_sieving(ups, cfg.clean_threshold, SERVER_ITERATIONS)
        partitions = partitions.updated(fresh)
        metrics = describe(mixture)
    if partitions:
        ratios = [partitions.noise_ratios[client] for client in partitions]
        metrics["noise_ratio"] = sum(ratios) / len(ratios)
    samples = [up.samples for up in ups.values()]
    weights = server.weights
    if any(samples):
        weights = weighted_mean([up.weights for up in ups.values()], samples)
    return Server(weights, server.federation, partitions), metrics


SERVER_ITERATIONS = 50
CLIENT_ITERATIONS = 20
"""Most iterations of a mixture fit over many clients' losses, and over one client's."""


def federated_sieving(
    ups: Mapping[ClientId, Up], threshold: float, iterations: int
) -> tuple[dict[ClientId, Partition], Mixture]:
    """One mixture of two normals over all uploaded losses; q is the posterior of the smaller mean.

    Losses are taken as they are, neither scaled nor shifted. r_k = #{i of k : q_i < threshold}/n_k.
    """
    observed = torch.cat([up.losses for up in ups.values()])
    losses = observed.cpu().numpy()
    mixture = fit_mixture(losses, max_iter=iterations, tol=1e-2, reg_covar=5e-4)
    posterior = clean_posterior(mixture, losses).astype(np.float32)
    ids = torch.cat([up.ids for up in ups.values()])
    q = torch.from_numpy(posterior).to(observed.device)
    partitions, first = {}, 0
    for client, up in ups.items():
        part = slice(first, first + len(up.losses))
        first = part.stop
        if part.stop > part.start:
            ratio = float((posterior[part] < threshold).mean())
            partitions[client] = Partition(ids[part], q[part], ratio)
    assert first == len(losses)
    return partitions, mixture


def describe(mixture: Mixture) -> dict[str, float]:
    """The numbers of a mixture; none where there was not a single value."""
    if math.isnan(mixture.means[0]):
        return {}
    return {
        "mixture_mean_clean": mixture.means[0],
        "mixture_mean_noisy": mixture.means[1],
        "mixture_variance_clean": mixture.variances[0],
        "mixture_variance_noisy": mixture.variances[1],
        "mixture_share_clean": mixture.shares[0],
        "mixture_converged": float(mixture.converged),
        "mixture_degenerate": float(mixture.degenerate),
    }


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    mean_loss = torch.zeros(len(shard), device=shard.images.device)
    return Client(mean_loss, observations=0, pseudo=None, ema=None, partition=None)


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    check(
        len(client.mean_loss) == len(shard),
        f"Client {shard.client} remembers {len(client.mean_loss)} samples but now holds "
        f"{len(shard)}; go on with the same samples, or start a new run.",
    )
    if len(shard) == 0:
        return client, Up(down.weights, 0, shard.ids, client.mean_loss), {"loss": 0.0}

    raw = _raw(bench, shard.images)
    mean, count = client.mean_loss, client.observations
    if cfg.sieve_at == "server":
        logits = bench.forward(down.weights, raw).logits
        mean = running_mean(mean, count, cross_entropy(logits, shard.labels))
        count += 1

    lesson = prepare(cfg, client, down, shard, bench, rng)
    fitted = bench.fit(_plan(cfg, down, shard, bench, rng, lesson))

    local = []
    if cfg.extra_local_obs:
        # Without a step nothing was observed, and the local model is still the global one.
        local.append(fitted.observed or bench.forward(fitted.weights[0], raw))
    if cfg.sieve_at == "client":
        local.append(bench.forward(fitted.weights[0], raw))
    for said in local:
        mean = running_mean(mean, count, cross_entropy(said.logits, shard.labels))
        count += 1

    up = Up(fitted.weights[0], len(shard), shard.ids, mean)
    own = client.partition
    if cfg.sieve_at == "client":
        # A model that diverged is left out of the average by its weights; it has nothing to sieve.
        usable = bool(torch.isfinite(mean).all())
        if usable and (down.warm_up or cfg.sieve_after_warmup):
            fresh, _ = federated_sieving({shard.client: up}, cfg.clean_threshold, CLIENT_ITERATIONS)
            own = fresh[shard.client]
        up = replace(up, ids=up.ids[:0], losses=up.losses[:0])
    trained_on = None if down.warm_up else lesson.pseudo
    after = Client(mean, count, lesson.table, fitted.ema, own, trained_on)
    return after, up, {"loss": fitted.loss, **_metrics(lesson, shard.labels)}


@dataclass(frozen=True)
class Lesson:
    """What a client trains on in one round, one row per sample."""

    noise_ratio: float
    """r_k"""
    clean: Tensor
    """(n,) bool, D^c"""
    q: Tensor
    """(n,) weight of the given label's loss; the pseudo label's is 1 − q."""
    pseudo: Tensor
    """(n,) int64, y^pse, −1 for none."""
    table: Tensor | None
    """(n,) int64, the hard labels to remember, −1 for none."""
    gamma_g: Tensor
    """() what the moving average kept of itself"""
    ema: Weights | None
    """Where the moving average starts."""
    teacher_logits: Tensor
    """(n, classes), Eq. 14"""
    features: Tensor | None
    """(n, d), f(x^w; w_g)"""


def prepare(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> Lesson:
    """All that precedes the first step (Algorithm 2, lines 1–5), but for the observed losses."""
    weak = bench.view(cfg.teacher_view, shard.images, rng("round view"))
    seen = bench.forward(down.weights, weak)
    if cfg.lambda_r > 0 and seen.features is None:
        raise FedsieveError(
            "FedGR regularises representations, so it needs a model that returns features: let "
            "yours return (features, logits), or set method.lambda_r to 0."
        )
    partition = client.partition if cfg.sieve_at == "client" else down.partition
    q = posterior_of(partition, shard.ids)
    plain = Lesson(
        noise_ratio=0.0 if partition is None else partition.noise_ratio,
        clean=q >= cfg.clean_threshold,
        q=torch.ones_like(q),
        pseudo=shard.labels,
        table=client.pseudo,
        gamma_g=q.new_zeros(()),
        ema=down.weights if cfg.keeps_ema else None,
        teacher_logits=seen.logits,  # in the warm-up the revised average is the global model
        features=seen.features,
    )
    if down.warm_up:
        return plain
    return _refine(cfg, plain, q, client, down, shard, bench, weak)


def _refine(
    cfg: Config,
    plain: Lesson,
    q: Tensor,
    client: Client,
    down: Down,
    shard: Shard,
    bench: Bench,
    weak: Tensor,
) -> Lesson:
    """Label refining (Eq. 11) and the revised moving average (Eqs. 12, 14–16)."""
    switches, global_logits = cfg.switches, plain.teacher_logits
    distrusted = is_distrusted(plain.noise_ratio, cfg.beta, switches.threshold)
    none = torch.full_like(shard.labels, -1)
    remembered = none if client.pseudo is None else client.pseudo
    kept = remembered if switches.pseudo_memory == "persistent" else none
    sure = confident(global_logits, cfg.epsilon)
    if switches.dr_from == "same_round":
        reliable = reliable_samples(plain.clean, sure | (kept >= 0))
    else:
        reliable = remembered >= 0
    gamma_g = revision_decay(cfg.gamma_g, distrusted, reliable, cfg.mu)

    ema, teacher_logits = None, global_logits
    if cfg.keeps_ema:
        previous = down.weights if client.ema is None else client.ema
        ema = revised(previous, down.weights, gamma_g)
        teacher_logits = bench.forward(ema, weak).logits
        if switches.ema_double:
            ema = revised(ema, down.weights, gamma_g)
    if switches.fixmatch == "global_or_ema":
        sure = sure | confident(teacher_logits, cfg.epsilon)

    fresh = pseudo_labels(global_logits, sure)
    table = hard_labels(fresh, kept, shard.labels, plain.clean, distrusted)
    if cfg.refine_labels:
        weight, pseudo = torch.zeros_like(q) if distrusted else q, table
    else:
        weight, pseudo = plain.clean.float(), shard.labels.where(plain.clean, -1)
    return replace(
        plain,
        q=weight,
        pseudo=pseudo,
        table=table,
        gamma_g=gamma_g,
        ema=ema,
        teacher_logits=teacher_logits,
    )


def _plan(
    cfg: Config,
    down: Down,
    shard: Shard,
    bench: Bench,
    rng: Streams,
    lesson: Lesson,
) -> Plan:
    """Local training as data. Both phases share one loss, so that one captured step serves both."""
    objective = Objective(
        # Without refining, the weights are flags, and flags of a batch are not to be averaged.
        mix=cfg.switches.mix if cfg.refine_labels else "per_sample",
        teacher=cfg.teacher if cfg.lambda_b > 0 else None,
        rep=cfg.switches.rep if cfg.lambda_r > 0 else None,
        temperature=cfg.temperature,
        lambda_r=cfg.lambda_r,
    )
    views: dict[str, str] = {"student": cfg.student_view}
    columns = {"label": shard.labels, "q": lesson.q, "pseudo": lesson.pseudo}
    if objective.teacher == "revised":
        columns["teacher_logits"] = lesson.teacher_logits
    if objective.rep == "cached":
        assert lesson.features is not None
        columns["features"] = lesson.features
    if objective.teacher == "online" or objective.rep == "per_batch":
        views["weak"] = cfg.teacher_view
    ema = None
    if lesson.ema is not None:
        ema = Ema(lesson.ema, cfg.ema_decay, in_loss=objective.teacher == "online")
    return Plan(
        start=[down.weights],
        images=shard.images,
        views=views,
        columns=columns,
        constants={"lambda_b": 0.0 if down.warm_up else cfg.lambda_b},
        loss=partial(local_loss, objective),
        sgd=bench.sgd,
        rng=rng,
        ema=ema,
        frozen=[down.weights] if objective.rep == "per_batch" else [],
        observe_after=1 if cfg.extra_local_obs else None,
    )


def _metrics(lesson: Lesson, given: Tensor) -> dict[str, float]:
    """Plain numbers about a lesson; waits for the device once."""
    numbers = {
        "flagged_share": (~lesson.clean).float().mean(),
        "relabelled_share": ((lesson.pseudo >= 0) & (lesson.pseudo != given)).float().mean(),
        "unlabelled_share": (lesson.pseudo < 0).float().mean(),
        "gamma_g": lesson.gamma_g,
    }
    values = torch.stack(list(numbers.values())).tolist()
    return {"noise_ratio": lesson.noise_ratio, **dict(zip(numbers, values, strict=True))}


def _raw(bench: Bench, images: Tensor) -> Tensor:
    """The raw view, which draws nothing: any generator will do."""
    return bench.view("raw", images, np.random.default_rng(0))


# ------------------------------------------------------------------------------------- equations


def running_mean(mean: Tensor, count: int, loss: Tensor) -> Tensor:
    """Eqs. 9–10: ℓ̄ ← ℓ̄ + (ℓ − ℓ̄)/(T + 1), the mean of T + 1 losses from that of T, all (n,)."""
    assert mean.shape == loss.shape, f"{mean.shape} meets {loss.shape}"
    return mean + (loss - mean) / (count + 1)


def posterior_of(partition: Partition | None, ids: Tensor) -> Tensor:
    """(n,) q of the samples `ids`, in their order; 1 for those that were never sieved."""
    q = torch.ones(len(ids), device=ids.device)
    if partition is None or len(partition.ids) == 0:
        return q
    assert partition.q.shape == partition.ids.shape
    known, order = partition.ids.to(ids.device).sort()
    place = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    return torch.where(known[place] == ids, partition.q.to(ids.device)[order][place], q)


def is_distrusted(noise_ratio: float, beta: float, threshold: Threshold) -> bool:
    """r_k ≥ β, the last case of Eq. 11; r_k > β where the threshold is strict."""
    return noise_ratio > beta or (noise_ratio == beta and threshold == "inclusive")


def confident(logits: Tensor, epsilon: float) -> Tensor:
    """FixMatch: (n,) whether max softmax(z) > ε, for logits (n, classes)."""
    assert logits.dim() == 2
    return logits.softmax(dim=1).amax(dim=1) > epsilon


def pseudo_labels(logits: Tensor, sure: Tensor) -> Tensor:
    """y^pse of Eq. 11: (n,) argmax of the logits (n, classes) where `sure` (n,), else −1."""
    assert sure.shape == logits.shape[:1]
    return logits.argmax(dim=1).where(sure, -1)


def hard_labels(
    pseudo: Tensor, kept: Tensor, given: Tensor, clean: Tensor, distrusted: bool
) -> Tensor:
    """(n,) y^pse as the loss of Eq. 11 uses it: this round's, else the kept one, −1 for none.

    At a trusted client, samples flagged clean get their given label, so that their refined label
    q·ŷ + (1 − q)·ŷ is ŷ: the first case of Eq. 11.
    """
    assert pseudo.shape == kept.shape == given.shape == clean.shape
    labels = pseudo.where(pseudo >= 0, kept)
    return labels if distrusted else given.where(clean, labels)


def refined_cross_entropy(
    batch: Batch, logits: Tensor, given: Tensor, q: Tensor, pseudo: Tensor, mix: Mix
) -> Tensor:
    """Eqs. 5–8 and 11: (1/B) Σ_i [q_i·CE(z_i, ŷ_i) + (1 − q_i)·CE(z_i, y_i^pse)].

    The sum is divided by the whole batch; a sample without pseudo label (−1) adds nothing in its
    second part. In the warm-up q = 1; at a distrusted client q = 0. With "batch_mean" the sum is
    mean(q)·mean(CE(z, ŷ)) + (1 − mean(q))·mean(CE(z, y^pse)), the mean over all B×B pairs (i, j) of
    q_i·CE(z_j, ŷ_j) + (1 − q_i)·CE(z_j, y_j^pse).
    """
    on_given = cross_entropy(logits, given)
    on_pseudo = cross_entropy(logits, pseudo.clamp(min=0)) * (pseudo >= 0)
    assert q.shape == on_given.shape == on_pseudo.shape, f"{q.shape} meets {on_given.shape}"
    if mix == "per_sample":
        return batch.mean(q * on_given + (1 - q) * on_pseudo)
    share = batch.mean(q)
    return share * batch.mean(on_given) + (1 - share) * batch.mean(on_pseudo)


def revised(ema: Weights, global_weights: Weights, gamma_g: Tensor) -> Weights:
    """Eq. 12, m = 0: γ_g·w_ema + (1 − γ_g)·w_g, BatchNorm statistics included.

    The case m ≥ 1 is `Ema.decay`, carried out by the workbench after every step.
    """
    assert gamma_g.dim() == 0
    towards, own = in_step([global_weights, ema])
    away = torch._foreach_sub([tensor.to(gamma_g.device) for tensor in own], towards)
    torch._foreach_mul_(away, gamma_g)
    torch._foreach_add_(away, towards)
    return like(global_weights, away)


def distillation(teacher_logits: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Eq. 13: (B,) KL(softmax(z_ema(x^w)/τ) ‖ softmax(z(x^s)/τ)), the teacher constant, no τ²."""
    return kl(teacher_logits.detach(), logits, temperature)


def revision_decay(gamma_g: float, distrusted: bool, reliable: Tensor, mu: float) -> Tensor:
    """Eq. 15 after the warm-up: () 0 at a distrusted client with |D^r|/n_k < μ, else γ_g.

    `reliable` (n,) marks D^r. The result stays a tensor, so that the device need not be waited for.
    """
    assert reliable.dim() == 1
    enough = reliable.float().mean() >= mu
    return gamma_g * (enough.float() if distrusted else torch.ones_like(enough, dtype=torch.float))


def reliable_samples(clean: Tensor, labelled: Tensor) -> Tensor:
    """Eq. 16: (n,) D^r, the samples flagged clean and those with a pseudo label."""
    assert clean.shape == labelled.shape
    return clean | labelled


def representation(global_features: Tensor, features: Tensor, temperature: float) -> Tensor:
    """Eq. 17: (B,) KL(softmax(f(x^w; w_g)/τ) ‖ softmax(f(x^s; w_k)/τ)) over the feature dimension,
    the global side constant, no τ²."""
    return kl(global_features.detach(), features, temperature)


@dataclass(frozen=True)
class Objective:
    """What a captured step depends on besides its tensors."""

    mix: Mix
    teacher: Teacher | None
    """Who teaches; None where λ_B is 0."""
    rep: Representation | None
    """Where the global representations come from; None where λ_R is 0."""
    temperature: float
    lambda_r: float


def local_loss(objective: Objective, batch: Batch, net: Net, *others: Net) -> Tensor:
    """Eq. 4: L_k = L_k^SR + λ_B·B_k + λ_R·R_k, with λ_B = 0 in the warm-up.

    `others` are the global model where `rep` is "per_batch", then the moving average where the
    teacher is "online".
    """
    outputs = net(batch["student"])
    loss = refined_cross_entropy(
        batch, outputs.logits, batch["label"], batch["q"], batch["pseudo"], objective.mix
    )
    if objective.teacher is not None:
        online = objective.teacher == "online"
        teacher = others[-1](batch["weak"]).logits if online else batch["teacher_logits"]
        term = distillation(teacher, outputs.logits, objective.temperature)
        loss = loss + batch.scalar("lambda_b") * batch.mean(term)
    if objective.rep is not None:
        fresh = objective.rep == "per_batch"
        target = others[0](batch["weak"]).features if fresh else batch["features"]
        assert target is not None
        assert outputs.features is not None
        term = representation(target, outputs.features, objective.temperature)
        loss = loss + objective.lambda_r * batch.mean(term)
    return loss


# ----------------------------------------------------------------------------------------- audit


def suspect(cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench) -> Suspicion:
    """P(wrong) = 1 − (q + p_ŷ)/2, the mean of what the sieve and the global model say.

    p_ŷ is the global model's probability of the given label on the raw image. A client that was
    never sieved is judged by the model alone, 1 − p_ŷ. The suggestion is the model's class.
    """
    probabilities = bench.forward(down.weights, _raw(bench, shard.images)).logits.softmax(dim=1)
    given = probabilities.gather(1, shard.labels[:, None]).squeeze(1)
    partition = client.partition if cfg.sieve_at == "client" else down.partition
    right = given if partition is None else (posterior_of(partition, shard.ids) + given) / 2
    return Suspicion(p_wrong=1 - right, suggested=probabilities.argmax(dim=1))


@dataclass(frozen=True, eq=False)
class Opinions(Mapping[ClientId, Sieved]):
    """What the server believes, made for a client when it is asked for."""

    partitions: Partitions

    def __getitem__(self, client: ClientId) -> Sieved:
        place = self.partitions.place(client)
        return Sieved(self.partitions.noise_ratios[client], self.partitions.q[place])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self.partitions)

    def __len__(self) -> int:
        return len(self.partitions)


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """r_k and q of every client that the server has sieved."""
    return Opinions(server.partitions)


def own_sieve(client: Client) -> Sieved | None:
    """What the client's own mixture says, where it has one."""
    own = client.partition
    return None if own is None else Sieved(own.noise_ratio, own.q)


def refined(client: Client) -> Tensor | None:
    """The hard labels of the last round; None in the warm-up, which trains on given labels."""
    return client.trained_on


def global_weights(server: Server) -> Weights:
    return server.weights


METHOD = Method(
    name="fedgr",
    title="FedGR: the global model sieves and refines labels and regularises local training",
    paper="Tian et al., Learning Locally, Revising Globally: Global Reviser for Federated Learning "
    "with Noisy Labels, ICML 2026",
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
