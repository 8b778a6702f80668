"""ARFL: the server asks of each parameter which clients fall out of line, and weighs them by it.

S. Fu, C. Xie, B. Li, Q. Chen,
"Attack-Resistant Federated Learning with Residual-based Reweighting", 2019 (arXiv 1912.11464).

    paper            here
    w^(k)            Up.weights
    y, x             the clients' values of one parameter, and their ranks from 0 on (`ranks`)
    β_1, β_0         slope and intercept of the repeated median line (`repeated_median`)
    r, τ             residuals, and their robust deviation (`deviation`)
    H_kk             leverage
    e, Z             r/τ, clipped at Z = λ·√(2/n)
    λ, δ             Config.cutoff, Config.repair_below
    ω                confidence

Clients train as in FedAvg. The server sorts the clients' values of each parameter and lays a
robust line through them. A value far off the line makes the client's confidence ω at this parameter
small; where it is below δ, the value is moved onto the line. The sum of ω over all parameters, each
counted by how much the clients differ in it, is the weight of a client.

Deviations, and what the paper leaves open. The formulas are those of the authors' program, which
was read; the paper's text was not at hand. Like there, the smallest residual does not count in τ,
BatchNorm statistics are parameters like others, weights are squared, and a client's number of
samples does not matter. Equal values share their mean rank, where the program gives them different
ones at random: so the order of clients does not matter, and equal clients weigh the same. A value
is not moved beyond the smallest and largest of the clients', which keeps variances positive. Fewer
than four clients are averaged, because a line through them does not say who is wrong; so are
clients that are equal in everything. A client without samples sends the model that it got back, and
is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedsieve.aggregate import ascending, check_clients, median_of, weighted_mean
from fedsieve.errors import check
from fedsieve.methods import contract, fedavg
from fedsieve.methods.fedavg import Server, Up
from fedsieve.packed import in_step, like
from fedsieve.types import ClientId, Metrics, Weights


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    """Defaults are those of the authors' program."""

    name: Literal["arfl"] = "arfl"
    cutoff: float = 2.0
    """λ (above 0): residuals of more than λ·√(2/n) robust deviations, n being the clients of the
    round, lower a client's confidence."""
    repair_below: float = 0.1
    """δ, confidence below which a value is moved onto the line (in [0, 1]; 0 moves none)."""

    def __post_init__(self) -> None:
        check(0 < self.cutoff < math.inf, f"method.cutoff must be above 0, not {self.cutoff}.")
        check(
            0 <= self.repair_below <= 1,
            f"method.repair_below must be in [0, 1], not {self.repair_below}.",
        )


def merge(
    cfg: Config,
    server: Server,
    round: int,
    ups: Mapping[ClientId, Up],
) -> tuple[Server, Metrics]:
    """The mean of the repaired models, each weighed by its squared confidence."""
    models = [up.weights for up in ups.values() if up.samples > 0]
    check_clients(models)
    if len(models) < FEWEST_ON_A_LINE:
        return replace(server, weights=weighted_mean(models, [1.0] * len(models))), {}
    judged = judge(models, cfg.cutoff, cfg.repair_below)
    by = client_weights(judged.confidence)
    metrics = {
        "repaired_share": judged.repaired_share,
        "least_weight": min(by) / sum(by),
        "largest_weight": max(by) / sum(by),
    }
    return replace(server, weights=weighted_mean(judged.models, by)), metrics


FEWEST_ON_A_LINE = 4
VALUES_AT_ONCE = 2**20
"""Parameters times clients that are looked at together: what bounds the memory."""


@dataclass(frozen=True)
class Judged:
    """What the server makes of a round's models."""

    models: tuple[Weights, ...]
    """Repaired."""
    confidence: Tensor
    """(n,) float64, Σ over all parameters of ω·std(ω)."""
    repaired_share: float
    """Of all values of all clients."""


def judge(models: Sequence[Weights], cutoff: float, repair_below: float) -> Judged:
    """Confidence in each model, and the models with those values repaired that have little."""
    parts = in_step(models)
    total = torch.zeros(len(models), dtype=torch.float64, device=parts[0][0].device)
    moved = torch.zeros_like(total)
    repaired: list[Tensor] = []
    for tensors in zip(*parts, strict=True):
        values = torch.stack(tensors).flatten(1)
        for piece in torch.split(values, max(1, VALUES_AT_ONCE // len(models)), dim=1):
            omega, line = confidence(piece, cutoff)
            total += (omega * omega.std(dim=0)).sum(dim=1, dtype=torch.float64)
            low = omega < repair_below
            moved += low.sum(dim=1)
            piece.copy_(torch.where(low, line, piece))  # a piece of our own stack
        repaired.append(values)
    return Judged(
        models=tuple(
            like(
                models[0],
                [of_all[k].view(t.shape) for of_all, t in zip(repaired, parts[k], strict=True)],
            )
            for k in range(len(models))
        ),
        confidence=total,
        repaired_share=float(moved.sum()) / sum(of_all.numel() for of_all in repaired),
    )


def client_weights(confidence: Tensor) -> list[float]:
    """(c/max c)² of each client; 1 where nothing tells them apart, because all are equal."""
    largest = confidence.max()
    relative = torch.where(largest > 0, confidence / largest, torch.ones_like(confidence))
    weights: list[float] = relative.square().tolist()
    return weights


# ------------------------------------------------------------------------------------- equations

TO_NORMAL = 1.4826
"""What makes the median of |r| the standard deviation of a normal distribution."""
LEAST_DEVIATION = 1e-7


def confidence(values: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """ω of the clients' values of some parameters, and the line's values; all are (n, parameters).

    ω = √(1 − H)/e · clip(e/√(1 − H), −Z, Z), which is min(1, Z·√(1 − H)/|e|), and 1 for e = 0.
    """
    n = len(values)
    ordered = ascending(values)
    x = ranks(values, ordered)
    slope = repeated_median(ordered)
    line = median_of(values) + slope * (x - (n - 1) / 2)
    residuals = (values - line).abs()
    z = cutoff * math.sqrt(2 / n)
    allowed = z * (1 - leverage(x)).sqrt() * deviation(residuals)
    omega = (allowed / residuals).clamp(max=1)
    return omega, line.clamp(ordered[0], ordered[-1])


def repeated_median(ordered: Tensor) -> Tensor:
    """(parameters,) slope of y_0 ≤ … ≤ y_{n−1}: median_i median_{j≠i} (y_j − y_i)/(j − i).

    The line goes through the median of y at the median of x.
    """
    positions = torch.arange(len(ordered), dtype=ordered.dtype, device=ordered.device)
    slopes = torch.empty_like(ordered)
    for i, y in enumerate(ordered):
        rises = torch.cat([ordered[:i], ordered[i + 1 :]]) - y
        steps = torch.cat([positions[:i], positions[i + 1 :]]) - i
        slopes[i] = median_of(rises / steps[:, None])
    return median_of(slopes)


def ranks(values: Tensor, ordered: Tensor) -> Tensor:
    """(n, parameters) how many clients have a smaller value; equal ones share their mean rank."""
    columns = ordered.t().contiguous(), values.t().contiguous()
    smaller, not_larger = (torch.searchsorted(*columns, right=right) for right in (False, True))
    return ((smaller + not_larger - 1).to(values.dtype) / 2).t()


def leverage(x: Tensor) -> Tensor:
    """H_kk = 1/n + (x_k − x̄)²/Σ_j (x_j − x̄)², the diagonal of the hat matrix of a line on ranks."""
    n = len(x)
    return 1 / n + (x - (n - 1) / 2).square() * (12 / (n * (n * n - 1)))


def deviation(residuals: Tensor) -> Tensor:
    """(parameters,) τ = 1.4826·(1 + 5/(n − 1))·median of |r| without its smallest, and a bit more,
    so that it is never zero."""
    n = len(residuals)
    spread = median_of(ascending(residuals)[1:])
    return TO_NORMAL * (1 + 5 / (n - 1)) * spread + LEAST_DEVIATION


METHOD = replace(
    fedavg.METHOD,
    name="arfl",
    title="ARFL: clients weighed by how far their parameters are off a robust line",
    paper="Fu et al., Attack-Resistant Federated Learning with Residual-based Reweighting, 2019",
    config=Config,
    merge=merge,
)
