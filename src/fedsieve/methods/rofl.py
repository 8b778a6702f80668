"""RoFL: robust federated learning with noisy labels, by class centroids that all clients share.

S. Yang, H. Park, J. Byun, C. Kim,
"Robust Federated Learning with Noisy Labels", IEEE Intelligent Systems 2022.

    paper              here
    w_G, w_k           Server.weights, Down.weights; Up.weights
    F(x), C(F(x))      the features and logits of a net
    f_G, f_k           Server.centroids, Down.centroids; "centroids" in the batch, Up.centroids
    R(t), forget rate  1 − Down.forget_rate, "kept_share" in the batch; Config.forget_rate
    T_k                Config.ramp_rounds
    D̂                  picked: (B,) one for each sample of small loss
    ỹ                  nearest: the class of the most similar centroid
    ŷ                  the global model's label, "pseudo" in the batch from round T_pl on
    L_c, L_cen, L_e    the parts of local_loss
    λ_cen, λ_e, T_pl   Config.lambda_cen, Config.lambda_e, Config.pseudo_label_round
    f̂_k                class_means of a batch
    s                  similarity; moved, aligned

Each step picks the samples of small loss. A picked sample whose features lie nearest to the
centroid of its given label is confident: it is trained on that label and drawn to that centroid.
Any other one is trained on the global model's label, once the global model is trusted. After the
step the centroids of the classes that were seen move towards the mean features of the picked
samples, the further the more similar these are. The server averages the clients' centroids, those
more that are similar to its own.

Deviations, and what was not known. The paper's own text was not at hand; its formulas are as FedLSR
(Eq. 5) and a public program show them. That program calls itself unofficial, so its preset is
"public" and not "authors". It detaches the features before L_cen, which so has no gradient, sums
L_cen over samples where the other parts are means, and labels augmented images: these are switches.
What else it does in another way:

- From round T_pl on its λ_cen has no value, so that it stops. Here it is λ_cen then.
- Its f_G begins as random numbers, and the first centroids are weighed by their similarity to
  these. Here a centroid that the server does not have is the plain mean of those that it is sent.
- The centroid of a class that no client of the first round holds is 0/0 there. Here an unknown
  centroid is a row of zeros, and nearest to nothing; a client begins with the mean features of its
  samples of that label, as all clients do in the first round.
- The similarities that clients' centroids are averaged by may be negative, and sum to almost 0.
  They keep their signs, but where the sum is below `LEAST_SIMILARITY` a centroid stays as it is.
- Of a small last batch it may pick no sample, whose mean loss is NaN. Here it is at least one.

Models are averaged by the clients' samples, there without weights. The forget rate grows as in
`fedcoteaching`; there it comes to its end one round earlier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import FedsieveError, check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net, Stepped
from fedsieve.losses import cross_entropy, entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import Federation, Sieved
from fedsieve.methods.fedcoteaching import kept_count, ramped_up, smallest
from fedsieve.methods.presets import check_choices, fill_in, switches_of
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights

# ------------------------------------------------------------------------------ hyper-parameters

Preset: TypeAlias = Literal["paper", "public"]
Total: TypeAlias = Literal["sum", "mean"]
EvaluationView: TypeAlias = Literal["raw", "weak"]


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Where the paper's intention and the public program differ; `Config` says what each does."""

    centroid_gradient: bool
    centroid_total: Total
    evaluation_view: EvaluationView


PRESETS: Mapping[Preset, Switches] = MappingProxyType(
    {
        "paper": Switches(centroid_gradient=True, centroid_total="mean", evaluation_view="raw"),
        "public": Switches(centroid_gradient=False, centroid_total="sum", evaluation_view="weak"),
    }
)
"""What the paper is understood to mean, and the public, unofficial program."""


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """The share of wrong labels must be known; the other defaults are those for CIFAR-10."""

    presets = PRESETS
    name: Literal["rofl"] = "rofl"

    forget_rate: float
    """Share of a batch that is not learnt from in the end (in [0, 1)): the share of wrong labels in
    the federation."""
    ramp_rounds: int = 10
    """T_k, rounds in which that share grows from 0 (at least 1; 10)."""
    pseudo_label_round: int = 100
    """T_pl, rounds in which all samples keep their given labels and the weight of L_cen grows (at
    least 0; 100 on CIFAR-10, FedLSR has 10 on Clothing1M). From then on, counted from 0, samples
    that are not confident are trained on the global model's labels."""
    lambda_cen: float = 1.0
    """λ_cen, weight of L_cen from round T_pl − 1 on; in round t before it is λ_cen·(t + 1)/T_pl (at
    least 0; 1)."""
    lambda_e: float = 0.8
    """λ_e, weight of the mean entropy of the predictions (at least 0; 0.8)."""

    preset: Preset = "paper"
    """Where the switches below that are left out take their values from, when the Config is made:
    changing `preset` with `dataclasses.replace` leaves the switches as they are."""
    centroid_gradient: bool | None = None
    """Whether L_cen moves the network, or, as in the program, is a number without a gradient."""
    centroid_total: Total | None = None
    """L_cen is the sum over the picked samples, or that sum by their number, as in the other two
    parts of the loss."""
    evaluation_view: EvaluationView | None = None
    """What the global model labels and the first centroids are made of: the raw images, or randomly
    cropped and flipped ones."""

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)
        check(
            0 <= self.forget_rate < 1,
            f"method.forget_rate must be in [0, 1), not {self.forget_rate}.",
        )
        for name, least in (("ramp_rounds", 1), ("pseudo_label_round", 0)):
            value = getattr(self, name)
            check(value >= least, f"method.{name} must be at least {least}, not {value}.")
        for name in ("lambda_cen", "lambda_e"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")

    @property
    def switches(self) -> Switches:
        """The switches as they were resolved."""
        return switches_of(self, Switches)


# --------------------------------------------------------------------------------------- records


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation
    centroids: Tensor | None
    """f_G, (classes, d); zeros in the row of a class that nobody knows yet. None before the first
    round, as the server has no model that would tell d."""


@dataclass(frozen=True)
class Client:
    p_clean: Tensor | None
    """(n,) float32: one for each sample that was confident when the client last took part, before
    it trained; None before the first time."""


@dataclass(frozen=True)
class Down:
    weights: Weights
    centroids: Tensor | None
    forget_rate: float
    """1 − R of this round."""
    lambda_cen: float
    """λ_cen of this round."""
    pseudo_labels: bool
    """Whether the round is T_pl or later."""


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int
    centroids: Tensor
    """f_k, (classes, d): about the mean features of each class, of samples with small losses; as
    received for a class that the client does not hold."""


# ---------------------------------------------------------------------------------------- server

LEAST_SIMILARITY = 1e-3
"""Where a class's similarities sum to less, in size, their mean would be arbitrary."""


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, federation, None)


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    return Down(
        weights=server.weights,
        centroids=server.centroids,
        forget_rate=ramped_up(cfg.forget_rate, round, 1.0, cfg.ramp_rounds),
        lambda_cen=centroid_weight(cfg, round),
        pseudo_labels=round >= cfg.pseudo_label_round,
    )


def centroid_weight(cfg: Config, round: int) -> float:
    """λ_cen·(t + 1)/T_pl before T_pl, then λ_cen."""
    if round >= cfg.pseudo_label_round:
        return cfg.lambda_cen
    return cfg.lambda_cen * (round + 1) / cfg.pseudo_label_round


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """FedAvg of the models; the centroids of those clients that hold samples, aligned."""
    weights = weighted_mean(
        [up.weights for up in ups.values()], [up.samples for up in ups.values()]
    )
    local = [up.centroids for up in ups.values() if up.samples]
    for centroids in local:
        check_centroids(centroids, server)
    return replace(server, weights=weights, centroids=joint_centroids(server.centroids, local)), {}


def check_centroids(centroids: Tensor, server: Server) -> None:
    """Refuse what cannot be averaged, or what no client could go on from."""
    shape, classes = tuple(centroids.shape), server.federation.num_classes
    if server.centroids is None:
        usual, fits = f"({classes}, features)", len(shape) == 2 and shape[0] == classes
    else:
        usual, fits = f"{tuple(server.centroids.shape)}", shape == server.centroids.shape
    check(
        fits and centroids.dtype == torch.float32,
        f"A client sent centroids of shape {shape} in {centroids.dtype}, where others are {usual} "
        "in torch.float32; give all clients the same model.",
    )


def joint_centroids(former: Tensor | None, local: list[Tensor]) -> Tensor | None:
    """f_G of what clients sent, which in the first round may differ in d: then most of them are
    right, and where no d is that of most, f_G stays unknown."""
    if former is None:
        shape, count = Counter(centroids.shape for centroids in local).most_common(1)[0]
        if 2 * count <= len(local):
            return None
        local = [centroids for centroids in local if centroids.shape == shape]
        former = torch.zeros_like(local[0])
    return aligned(former, torch.stack(local))


def aligned(former: Tensor, local: Tensor) -> Tensor:
    """f_G,c = Σ_k s_kc f_kc / Σ_k s_kc with s_kc = cos(f_G,c, f_kc), for f_G (classes, d) and f
    (clients, classes, d). A class that f_G does not know has weight 1 where a client knows it."""
    weight = similarity(former[None], local).where(known(former), known(local).to(local.dtype))
    total = weight.sum(dim=0)[:, None]
    usable = total.abs() >= LEAST_SIMILARITY
    mean = (weight[:, :, None] * local).sum(dim=0) / total.where(usable, 1)
    return mean.where(usable, former)


# ---------------------------------------------------------------------------------------- client


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client(None)


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """Label all samples by the global model, then train while the centroids follow."""
    switches = cfg.switches
    images = bench.view(switches.evaluation_view, shard.images, rng("evaluation view"))
    features, logits = bench.forward(down.weights, images)
    if features is None:
        raise FedsieveError(
            "RoFL compares features with centroids, so it needs a model that returns features: let "
            "yours return (features, logits)."
        )
    centroids = first_centroids(down.centroids, features, shard)
    confident = nearest(features, centroids) == shard.labels
    plan = replace(
        fedavg.plan(fedavg.Down(down.weights), shard, bench, rng),
        columns={
            "label": shard.labels,
            "pseudo": logits.argmax(dim=1) if down.pseudo_labels else shard.labels,
        },
        constants={
            "kept_share": 1 - down.forget_rate,
            "lambda_cen": down.lambda_cen,
            "lambda_e": cfg.lambda_e,
        },
        carried={"centroids": centroids},
        loss=partial(local_loss, switches.centroid_gradient, switches.centroid_total),
    )
    fitted = bench.fit(plan)
    metrics = {
        "loss": fitted.loss,
        "forget_rate": down.forget_rate,
        "confident_share": float(confident.sum()) / max(1, len(shard)),
    }
    up = Up(fitted.weights[0], len(shard), fitted.carried["centroids"])
    return Client(confident.float()), up, metrics


def first_centroids(received: Tensor | None, features: Tensor, shard: Shard) -> Tensor:
    """f_k before the first step: f_G, or where that is not known the mean features of a label."""
    own = class_means(features, shard.labels, torch.ones_like(features[:, 0]), shard.num_classes)
    return own if received is None else received.where(known(received)[:, None], own)


# ------------------------------------------------------------------------------------- equations


def local_loss(gradient: bool, total: Total, batch: Batch, net: Net) -> Stepped:
    """L_c + λ_cen·L_cen + λ_e·L_e over the samples of small loss, and the centroids after it."""
    labels, centroids = batch["label"], batch["centroids"]
    features, logits = net(batch["x"])
    assert features is not None
    seen = features.detach()
    kept = kept_count(batch)
    picked = smallest(cross_entropy(logits, labels).detach(), kept, batch.weight)
    confident = nearest(seen, centroids) == labels

    on_labels = cross_entropy(logits, labels.where(confident, batch["pseudo"]))
    apart = squared_distance(features if gradient else seen, centroids[labels]) * confident
    of_centroids = (apart * picked).sum() / (kept if total == "mean" else 1)
    loss = (
        (on_labels * picked).sum() / kept
        + batch.scalar("lambda_cen") * of_centroids
        + batch.scalar("lambda_e") * (entropy(logits) * picked).sum() / kept
    )
    means = class_means(seen, labels, picked, len(centroids))
    return Stepped(loss, {"centroids": moved(centroids, means)})


def nearest(features: Tensor, centroids: Tensor) -> Tensor:
    """ỹ: (n,) the class whose centroid, of those known, has the largest cosine with a sample's
    features."""
    cosines = F.normalize(features) @ F.normalize(centroids).T
    return cosines.masked_fill(~known(centroids), -math.inf).argmax(dim=1)


def squared_distance(features: Tensor, centroids: Tensor) -> Tensor:
    """(n,) ‖F(x) − f‖² of each sample from its centroid, both (n, d)."""
    return ((features - centroids) ** 2).sum(dim=1)


def class_means(features: Tensor, labels: Tensor, weight: Tensor, classes: int) -> Tensor:
    """f̂: (classes, d) the mean features of each label over samples of weight 1, not 0; zeros for a
    label without samples."""
    members = (labels[:, None] == torch.arange(classes, device=labels.device)) * weight[:, None]
    return (members.T @ features) / members.sum(dim=0).clamp(min=1)[:, None]


def moved(centroids: Tensor, means: Tensor) -> Tensor:
    """f ← (1 − s²)·f + s²·f̂ with s = cos(f, f̂), which is 0 where f̂ is of no sample."""
    share = similarity(centroids, means)[:, None] ** 2
    return (1 - share) * centroids + share * means


def similarity(one: Tensor, other: Tensor) -> Tensor:
    """s: (..., classes) the cosine of centroids (..., classes, d); 0 where one is unknown."""
    return F.cosine_similarity(one, other, dim=-1)


def known(centroids: Tensor) -> Tensor:
    """(..., classes) whether there is a centroid: an unknown one is a row of zeros."""
    return (centroids != 0).any(dim=-1)


# ------------------------------------------------------------------------------------- diagnosis


def own_sieve(client: Client) -> Sieved | None:
    """A label is believed if its centroid is the nearest one, before the client trains."""
    if client.p_clean is None:
        return None
    doubted = int((client.p_clean == 0).sum())
    return Sieved(doubted / max(1, len(client.p_clean)), client.p_clean)


METHOD = replace(
    fedavg.METHOD,
    name="rofl",
    title="RoFL: class centroids that clients share say which labels to trust",
    paper="Yang et al., Robust Federated Learning with Noisy Labels, IEEE Intelligent Systems 2022",
    config=Config,
    server=Server,
    client=Client,
    down=Down,
    up=Up,
    init_server=init_server,
    init_client=init_client,
    send=send,
    train=train,
    merge=merge,
    own_sieve=own_sieve,
)
