"""FedMixup: FedAvg with MixUp, which trains on lines between pairs of samples.

H. Zhang, M. Cisse, Y. N. Dauphin, D. Lopez-Paz,
"mixup: Beyond Empirical Risk Minimization", ICLR 2018.

    paper     here
    α         Config.alpha
    λ         drawn for each step by draw_mixing
    x̃, ỹ      mixed, mixed_loss of methods/mixup.py

Deviations. The paper has no clients: here each client of FedAvg trains with it, as in FedES's
comparisons. The loss is λ·CE(y_i) + (1 − λ)·CE(y_j), which is the cross entropy against ỹ. A sample
is mixed with one of its own batch, and all of a batch with one λ, as in the paper's program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net
from fedsieve.methods import contract, fedavg
from fedsieve.methods.fedavg import Client, Down, Up
from fedsieve.methods.mixup import draw_mixing, mixed, mixed_loss
from fedsieve.types import Metrics, Shard, Streams


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    name: Literal["fedmixup"] = "fedmixup"
    alpha: float = 1.0
    """α of λ ~ Beta(α, α) (at least 0; 0 is FedAvg; 1 draws λ uniformly, as in the comparisons of
    the noisy-label papers; the larger, the nearer λ is to ½)."""

    def __post_init__(self) -> None:
        check(0 <= self.alpha < math.inf, f"method.alpha must be at least 0, not {self.alpha}.")


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    draws = draw_mixing(len(shard), bench.sgd, cfg.alpha, rng("mixup"), shard.images.device)
    plan = replace(fedavg.plan(down, shard, bench, rng), loss=local_loss, per_step=draws)
    fitted = bench.fit(plan)
    return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss}


def local_loss(batch: Batch, net: Net) -> Tensor:
    """The mean over the batch of CE(f(x̃), ỹ)."""
    x, others = mixed(batch)
    return mixed_loss(batch, others, net(x).logits)


METHOD = replace(
    fedavg.METHOD,
    name="fedmixup",
    title="FedAvg with MixUp: each client trains on lines between pairs of samples",
    paper="Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018",
    config=Config,
    train=train,
)
