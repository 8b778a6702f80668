"""FedProx: FedAvg with a proximal term that keeps a client near the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith,
"Federated Optimization in Heterogeneous Networks", MLSys 2020.

    paper   here
    μ       Config.mu
    w^t     Down.weights, the anchor of the proximal term
    h_k     local_loss

Deviations. Clients are averaged by their samples, as in the comparisons of the noisy-label papers,
and every client does all its epochs (γ-inexactness is not simulated). BatchNorm statistics are not
parameters and so are not pulled towards the anchor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net
from fedsieve.losses import proximal
from fedsieve.methods import contract, fedavg
from fedsieve.methods.fedavg import Client, Down, Up
from fedsieve.types import Metrics, Shard, Streams


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    name: Literal["fedprox"] = "fedprox"
    mu: float = 1.0
    """μ, strength of the proximal term (at least 0; 0 is FedAvg; the noisy-label papers use 1)."""

    def __post_init__(self) -> None:
        check(0 <= self.mu < math.inf, f"method.mu must be at least 0, not {self.mu}.")


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    plan = replace(
        fedavg.plan(down, shard, bench, rng),
        loss=local_loss,
        constants={"anchor": down.weights, "mu": cfg.mu},
    )
    fitted = bench.fit(plan)
    return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss}


def local_loss(batch: Batch, net: Net) -> torch.Tensor:
    """h_k(w; w^t) = F_k(w) + (μ/2)·‖w − w^t‖², the norm squared, over trainable parameters."""
    anchor = batch.weights("anchor")
    distance = proximal(list(net.parameters.values()), [anchor[name] for name in net.parameters])
    return fedavg.local_loss(batch, net) + batch.scalar("mu") * distance


METHOD = replace(
    fedavg.METHOD,
    name="fedprox",
    title="FedAvg with a proximal term (μ/2)·‖w − w_global‖² in the local loss",
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
    config=Config,
    train=train,
)
