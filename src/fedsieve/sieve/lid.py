"""Local intrinsic dimensionality: in how many directions a point's neighbours lie around it.

L. Amsaleg, O. Chelly, T. Furon, S. Girard, M. E. Houle, K. Kawarabayashi, M. Nett,
"Estimating Local Intrinsic Dimensionality", KDD 2015: the maximum-likelihood estimate from the
distances to the nearest neighbours. Where a network learns wrong labels by heart, its predictions
spread out, and the estimate grows.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PAIRS = 2**22
"""Distances that are held at a time."""
LEAST_SPREAD = 1e-6
"""Neighbours whose distances differ by less, as a share of the farthest, say nothing of a
dimension: the estimate is its reciprocal."""
LARGEST_DIMENSION = 1 / LEAST_SPREAD
"""No estimate is larger."""


def local_dimensions(points: Tensor, neighbours: int) -> Tensor:
    """(n,) float64, the estimate at each of `points` (n, d) from its nearest neighbours among the
    others; NaN where there is none.

    There are n − 1 neighbours at the most, and at least two are needed.
    """
    n, k = len(points), min(neighbours, len(points) - 1)
    exact = points.double()
    if k < 2:
        return torch.full((n,), torch.nan, dtype=torch.float64, device=points.device)
    rows = max(1, _PAIRS // n)
    parts = []
    for first in range(0, n, rows):
        block = exact[first : first + rows]
        # Not by matrix products, whose rounding is larger than the distances of sure predictions.
        apart = torch.cdist(block, exact, compute_mode="donot_use_mm_for_euclid_dist")
        apart.diagonal(offset=first).fill_(torch.inf)  # nobody is a neighbour of itself
        parts.append(dimension(apart.topk(k, largest=False).values))
    return torch.cat(parts)


def dimension(distances: Tensor) -> Tensor:
    """(n,) −(mean_j log(r_j / r_k))^{−1} over the distances (n, k) to the k neighbours in ascending
    order, the last of which is the farthest.

    A distance of zero, to an equal point, is left out of the mean. NaN where none is left, or where
    all that are left are equal.
    """
    counted = distances > 0
    logs = (distances / distances[:, -1:]).log().where(counted, 0)
    mean = logs.sum(dim=1) / counted.sum(dim=1)
    return (-1 / mean).where(mean < -LEAST_SPREAD, torch.nan)


def mean_dimension(points: Tensor, neighbours: int) -> float | None:
    """The mean estimate over the points that have one; None where no point has."""
    mean = float(local_dimensions(points, neighbours).nanmean())
    return mean if mean == mean else None
