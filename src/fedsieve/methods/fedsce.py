"""FedSCE: FedAvg with symmetric cross entropy, a loss that tolerates wrong labels.

Y. Wang, X. Ma, Z. Chen, Y. Luo, J. Yi, J. Bailey,
"Symmetric Cross Entropy for Robust Learning with Noisy Labels", ICCV 2019.

    paper      here
    α, β       Config.alpha, Config.beta
    A          Config.log_zero
    l_ce       cross_entropy, inside symmetric_cross_entropy
    l_rce      its reverse, −A·(1 − p_ŷ), likewise

Deviations. The paper has no clients: here each client of FedAvg trains with its loss, as in the
comparisons of FedLSR. The paper takes log 0 to be a constant A < 0; federated programs let no entry
of the label be less than 1e-4, which is A = log 1e-4 = −9.21, the default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from fedsieve.errors import check
from fedsieve.local.bench import Bench
from fedsieve.local.plan import Batch, Net
from fedsieve.losses import symmetric_cross_entropy
from fedsieve.methods import contract, fedavg
from fedsieve.methods.fedavg import Client, Down, Up
from fedsieve.types import Metrics, Shard, Streams


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are those for CIFAR-10, with which FedLSR's paper compares."""

    name: Literal["fedsce"] = "fedsce"
    alpha: float = 0.1
    """α, weight of the cross entropy (at least 0; 0.01 for MNIST, 6 for CIFAR-100)."""
    beta: float = 1.0
    """β, weight of the reverse cross entropy (at least 0; 0.1 for CIFAR-100)."""
    log_zero: float = math.log(1e-4)
    """A, what the logarithm of 0 is taken to be (below 0); no reverse cross entropy exceeds −A."""

    def __post_init__(self) -> None:
        check_weights(self.alpha, self.beta)
        check(
            -math.inf < self.log_zero < 0, f"method.log_zero must be below 0, not {self.log_zero}."
        )


def check_weights(alpha: float, beta: float) -> None:
    """What a configuration asks of the weights of this loss."""
    for name, value in (("alpha", alpha), ("beta", beta)):
        check(0 <= value < math.inf, f"method.{name} must be at least 0, not {value}.")
    check(alpha + beta > 0, "method.alpha and method.beta are both 0; set one of them above 0.")


def train(
    cfg: Config, client: Client, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Client, Up, Metrics]:
    loss = partial(local_loss, cfg.alpha, cfg.beta, cfg.log_zero)
    fitted = bench.fit(replace(fedavg.plan(down, shard, bench, rng), loss=loss))
    return client, Up(fitted.weights[0], len(shard)), {"loss": fitted.loss}


def local_loss(alpha: float, beta: float, log_zero: float, batch: Batch, net: Net) -> Tensor:
    """l_sl = α·l_ce + β·l_rce, the mean over the batch."""
    logits = net(batch["x"]).logits
    return batch.mean(symmetric_cross_entropy(logits, batch["label"], alpha, beta, log_zero))


METHOD = replace(
    fedavg.METHOD,
    name="fedsce",
    title="FedAvg with symmetric cross entropy: α·CE + β·reverse CE",
    paper="Wang et al., Symmetric Cross Entropy for Robust Learning with Noisy Labels, ICCV 2019",
    config=Config,
    train=train,
)
