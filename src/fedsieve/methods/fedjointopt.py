"""FedJointOpt: each client learns its labels along with the model.

D. Tanaka, D. Ikami, T. Yamasaki, K. Aizawa,
"Joint Optimization Framework for Learning with Noisy Labels", CVPR 2018.

    paper         here
    Y             Client.soft_labels
    s, past s     what the model predicts; Client.history, over the last Config.history_epochs
    p             the uniform distribution
    L_c           soft_cross_entropy, inside local_loss
    L_p           uniform_prior of FedDiv, which has it from this paper
    L_e           entropy, inside local_loss
    α, β          Config.alpha, Config.beta

The client alternates: an epoch of training on its labels, then each label becomes the mean of what
the model predicted of that sample after the last epochs. L_p keeps the model from predicting one
class for all, L_e from predicting all classes for each. Labels stay as given up to a certain epoch.

Deviations, and what is left open. The paper has no clients: here each client of FedAvg does this
with labels of its own, and counts the epochs that it has trained itself, in whatever rounds.
FedCorr and FedDiv print numbers of such a method without saying how it was made. The formulas are
those of the paper's program, which was read; its prior is uniform too, and its L_p lacks the
constant Σ_c p_c·log p_c. It takes the predictions of the training steps; here those after an epoch,
of the raw images, in evaluation mode. A mean is taken over as many epochs as there are, where the
program's queue starts with zeros. Each epoch is a fit of its own as soon as predictions are
remembered, so that SGD's momentum starts at zero in it. The paper's second step, which trains a new
network on the labels that were found, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net, Plan
from fedsieve.losses import entropy, soft_cross_entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.contract import Sieved
from fedsieve.methods.fedavg import Down, Up
from fedsieve.methods.feddiv import uniform_prior
from fedsieve.types import Metrics, Shard, Streams, Weights


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are those of the paper's program for CIFAR-10."""

    name: Literal["fedjointopt"] = "fedjointopt"
    alpha: float = 1.0
    """α, weight of L_p, which wants all classes predicted equally often (at least 0). That is wrong
    where a client holds few of them."""
    beta: float = 0.5
    """β, weight of the entropy L_e (at least 0)."""
    begin_epoch: int = 70
    """How many local epochs a client trains on its labels as given (at least 1)."""
    history_epochs: int = 10
    """Over how many of its last epochs' predictions a label is the mean (at least 1)."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")
        for name in ("begin_epoch", "history_epochs"):
            value = getattr(self, name)
            check(value >= 1, f"method.{name} must be at least 1, not {value}.")


@dataclass(frozen=True)
class Client:
    epochs: int = 0
    """How many local epochs the client has trained, in all its rounds."""
    history: Tensor | None = None
    """(epochs, n, classes) float32, what the model predicted after each of the last epochs; None
    before it is needed."""
    soft_labels: Tensor | None = None
    """(n, classes) float32, the labels of the last epoch; None where they were those given."""
    p_clean: Tensor | None = None
    """(n,) float32, what the soft labels say of the given ones."""


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client()


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    """All epochs at once while nothing is to be remembered; then one by one, each with labels from
    those before it."""
    check(
        client.history is None or client.history.shape[1] == len(shard),
        f"Client {shard.client} remembers predictions of other samples than the {len(shard)} it "
        "holds; go on with the same samples, or start a new run.",
    )
    epochs = bench.sgd.epochs
    if client.epochs + epochs <= cfg.begin_epoch - cfg.history_epochs:
        fitted = bench.fit(_plan(cfg, client, down.weights, shard, bench, rng))
        client = replace(client, epochs=client.epochs + epochs)
        return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss}

    weights, losses = down.weights, 0.0
    for epoch in range(epochs):
        client = relabelled(cfg, client, shard.labels)
        streams = rng.within(f"epoch {epoch}")
        plan = _plan(cfg, client, weights, shard, bench, streams)
        fitted = bench.fit(replace(plan, sgd=replace(bench.sgd, epochs=1), observe_after=1))
        weights, losses = fitted.weights[0], losses + fitted.loss
        if fitted.observed is not None:
            client = remembering(cfg, client, fitted.observed.logits)
    metrics = {"loss": losses / epochs, "replaced_share": replaced_share(client, shard.labels)}
    return client, Up(weights, len(shard)), metrics


def _plan(
    cfg: Config, client: Client, weights: Weights, shard: Shard, bench: Bench, rng: Streams
) -> Plan:
    """FedAvg's local training on the labels in use."""
    return replace(
        fedavg.plan(Down(weights), shard, bench, rng),
        columns={"soft_label": labels_in_use(client, shard)},
        loss=partial(local_loss, cfg.alpha, cfg.beta),
    )


# ------------------------------------------------------------------------------------- equations


def local_loss(alpha: float, beta: float, batch: Batch, net: Net) -> Tensor:
    """L = L_c + α·L_p + β·L_e"""
    logits = net(batch["x"]).logits
    classification = batch.mean(soft_cross_entropy(logits, batch["soft_label"]))
    spread = uniform_prior(batch, logits)
    return classification + alpha * spread + beta * batch.mean(entropy(logits))


def labels_in_use(client: Client, shard: Shard) -> Tensor:
    """(n, classes) soft labels; as long as there are none, all weight on the given class."""
    if client.soft_labels is None:
        return F.one_hot(shard.labels, shard.num_classes).float()
    return client.soft_labels


def relabelled(cfg: Config, client: Client, given: Tensor) -> Client:
    """Before an epoch: y ← the mean of the past s, once enough epochs have been trained."""
    if client.epochs < cfg.begin_epoch or client.history is None:
        return client
    soft_labels = client.history.mean(dim=0)
    p_clean = soft_labels.gather(1, given[:, None]).squeeze(1)
    return replace(client, soft_labels=soft_labels, p_clean=p_clean)


def remembering(cfg: Config, client: Client, logits: Tensor) -> Client:
    """After an epoch: its predictions s, from logits (n, classes), in place of the oldest ones."""
    client = replace(client, epochs=client.epochs + 1)
    if not bool(logits.isfinite().all()):
        return client  # of a model that has diverged: they would spoil the labels for good
    past = logits.softmax(dim=1)[None]
    if client.history is not None:
        past = torch.cat([client.history, past])[-cfg.history_epochs :]
    return replace(client, history=past)


# ------------------------------------------------------------------------------------- diagnosis


def refined(client: Client) -> Tensor | None:
    """The likeliest class of each of the last epoch's labels."""
    return None if client.soft_labels is None else client.soft_labels.argmax(dim=1)


def replaced_share(client: Client, given: Tensor) -> float:
    """The share of samples whose label in use is another than the given one."""
    labels = refined(client)
    return 0.0 if labels is None else float((labels != given).float().mean())


def own_sieve(client: Client) -> Sieved | None:
    """What the last epoch's labels say of the given ones."""
    if client.p_clean is None:
        return None
    return Sieved(float(1 - client.p_clean.mean()), client.p_clean)


METHOD = replace(
    fedavg.METHOD,
    name="fedjointopt",
    title="FedAvg whose clients replace labels by the mean of what the model lately predicted",
    paper="Tanaka et al., Joint Optimization Framework for Learning with Noisy Labels, CVPR 2018",
    config=Config,
    client=Client,
    init_client=init_client,
    train=train,
    refined=refined,
    own_sieve=own_sieve,
)
