"""FedAvg: federated averaging.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas,
"Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

    paper   here
    w_t     Server.weights, Down.weights
    S_t     select: a random set of max(C·K, 1) clients
    w_k     Up.weights
    n_k     Up.samples

Deviations. The paper's clients are sampled as a fraction C of K, here a recipe gives the number.
BatchNorm statistics, which the paper does not have, are averaged like weights. Labels are trusted:
this is the baseline that noisy labels hurt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedsieve.aggregate import weighted_mean
from fedsieve.local.bench import Bench, joint_logits
from fedsieve.local.plan import Batch, Net, Plan
from fedsieve.losses import cross_entropy
from fedsieve.methods import contract
from fedsieve.methods.contract import Federation, Method, Sieved, Suspicion, choose_uniformly
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """FedAvg has no hyper-parameters beyond the recipe's rounds, clients and local solver."""

    name: Literal["fedavg"] = "fedavg"


@dataclass(frozen=True)
class Server:
    weights: Weights
    federation: Federation


@dataclass(frozen=True)
class Client:
    """A FedAvg client remembers nothing."""


@dataclass(frozen=True)
class Down:
    weights: Weights


@dataclass(frozen=True)
class Up:
    weights: Weights
    samples: int


def init_server(cfg: Config, weights: Weights, federation: Federation) -> Server:
    return Server(weights, federation)


def init_client(cfg: Config, shard: Shard) -> Client:
    return Client()


def select(cfg: Config, server: Server, round: int, rng: Streams) -> tuple[ClientId, ...]:
    federation = server.federation
    return choose_uniformly(federation.clients, federation.per_round, rng("select"))


def send(cfg: Config, server: Server, round: int, client: ClientId) -> Down:
    return Down(server.weights)


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    fitted = bench.fit(plan(down, shard, bench, rng))
    return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss}


def plan(down: Down, shard: Shard, bench: Bench, rng: Streams) -> Plan:
    """Local training on the given labels; relatives of FedAvg replace what they change."""
    return Plan(
        start=[down.weights],
        images=shard.images,
        views={"x": "weak"},
        columns={"label": shard.labels},
        loss=local_loss,
        sgd=bench.sgd,
        rng=rng,
    )


def local_loss(batch: Batch, net: Net) -> torch.Tensor:
    """F_k(w) = mean over the batch of CE(f_w(x), ŷ)."""
    return batch.mean(cross_entropy(net(batch["x"]).logits, batch["label"]))


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """w_{t+1} = Σ_k (n_k / n) w_k over the clients of the round."""
    weights = weighted_mean(
        [up.weights for up in ups.values()], [up.samples for up in ups.values()]
    )
    return Server(weights, server.federation), {}


def suspect(cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench) -> Suspicion:
    """P(wrong) = 1 − p_ŷ(x) under the global model; the suggestion is its most likely class."""
    return suspicion_by([down.weights], shard, bench)


def suspicion_by(networks: Sequence[Weights], shard: Shard, bench: Bench) -> Suspicion:
    """1 − p_ŷ(x) and the most likely class, where the networks together predict p."""
    raw = bench.view("raw", shard.images, Streams(0, 0, shard.client)("raw"))
    probabilities = joint_logits(bench, networks, raw).softmax(dim=1)
    given = probabilities.gather(1, shard.labels[:, None]).squeeze(1)
    return Suspicion(p_wrong=1 - given, suggested=probabilities.argmax(dim=1))


def global_weights(server: Server) -> Weights:
    return server.weights


def sieve(server: Server) -> Mapping[ClientId, Sieved]:
    """FedAvg trusts every label, so it has no view of them."""
    return {}


def refined(client: Client) -> torch.Tensor | None:
    """FedAvg trains on the given labels."""
    return None


METHOD = Method(
    name="fedavg",
    title="Federated averaging: the mean of the clients' models, weighted by their samples",
    paper="McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized "
    "Data, AISTATS 2017",
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
)
