"""Many clients' weights into one: the weighted mean and its robust relatives.

All of them treat BatchNorm statistics like any other tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import check
from fedsieve.models.weights import check_alike
from fedsieve.packed import alike, in_step, like
from fedsieve.types import Weights


def weighted_mean(weights: Sequence[Weights], by: Sequence[float]) -> Weights:
    """Σ_k by_k·w_k / Σ_k by_k.

    Computed as a running mean in the order given, m ← m + (by_k / Σ_{j≤k} by_j)(w_k − m), so that
    the mean of equal weights is exactly these. A client with by_k = 0 is left out.
    """
    check_clients(weights)
    check(
        len(by) == len(weights),
        f"There are {len(weights)} clients' weights but {len(by)} numbers to weigh them by.",
    )
    check(
        all(math.isfinite(share) and share >= 0 for share in by),
        f"Clients must be weighed by finite numbers that are not negative, not by {list(by)}.",
    )
    counted = [(client, share) for client, share in zip(weights, by, strict=True) if share > 0]
    check(bool(counted), "All clients weigh 0, so there is no mean; leave such rounds out.")

    first, *others = in_step([client for client, _ in counted])
    mean, total = [tensor.clone() for tensor in first], counted[0][1]
    for client, (_, share) in zip(others, counted[1:], strict=True):
        total += share
        torch._foreach_lerp_(mean, client, share / total)
    return like(counted[0][0], mean)


def median(weights: Sequence[Weights]) -> Weights:
    """The median of each coordinate; for an even number of clients the mean of the middle two."""
    check_clients(weights)
    return _mean_of_middle(weights, (len(weights) - 1) // 2)


def trimmed_mean(weights: Sequence[Weights], share: float) -> Weights:
    """The mean of each coordinate without its ⌊share·n⌋ smallest and as many largest values."""
    check_clients(weights)
    check(0 <= share < 0.5, f"The share to trim at each end lies in [0, 0.5), and is {share}.")
    # The small addend keeps products such as 0.29 · 100 = 28.999… from losing a client.
    return _mean_of_middle(weights, math.floor(share * len(weights) + 1e-9))


def _mean_of_middle(weights: Sequence[Weights], cut: int) -> Weights:
    """The mean of each coordinate between its `cut` smallest and `cut` largest values."""
    return {
        name: _middle(torch.stack([client[name] for client in weights]), cut) for name in weights[0]
    }


def median_of(values: Tensor) -> Tensor:
    """The median along the first dimension; of an even number the mean of the middle two."""
    return _middle(values, (len(values) - 1) // 2)


def _middle(values: Tensor, cut: int) -> Tensor:
    """The mean along the first dimension, without the `cut` smallest and `cut` largest values."""
    return ascending(values)[cut : len(values) - cut].mean(dim=0)


def ascending(values: Tensor) -> Tensor:
    """Sorted along the first dimension."""
    if values.device.type == "cpu":  # columns of a few values: NumPy takes a fraction of the time
        return torch.from_numpy(np.sort(values.numpy(), axis=0))
    return values.sort(dim=0).values


def check_clients(weights: Sequence[Weights]) -> None:
    """Refuse weights that are none, or not of one model."""
    check(len(weights) > 0, "There are no clients' weights to aggregate; let one take part.")
    if alike(weights):
        return
    for k, client in enumerate(weights[1:], start=1):
        check_alike(weights[0], client, "client 0 of the round", f"client {k} of the round")
