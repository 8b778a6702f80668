"""Local intrinsic dimensionality: a slow reference, closed forms, points that coincide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.sieve import lid
from fedsieve.sieve.lid import dimension, local_dimensions, mean_dimension

Floats = NDArray[np.float64]


def slow(points: Floats, k: int) -> Floats:
    """Point by point, by the formula."""
    result = []
    for i in range(len(points)):
        others = np.delete(points, i, axis=0)
        r = np.sort(np.sqrt(((others - points[i]) ** 2).sum(axis=1)))[:k]
        result.append(-1 / np.mean(np.log(r / r[-1])))
    return np.array(result)


def line(*positions: float) -> Tensor:
    return torch.tensor(positions, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("pairs", [1, 37, 2**22])
def test_it_agrees_with_the_slow_reference(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is held at a time: one row, an odd number of rows, or everything."""
    monkeypatch.setattr(lid, "_PAIRS", pairs)
    points = np.random.default_rng(1).dirichlet(np.ones(10) / 2, size=60)
    found = local_dimensions(torch.from_numpy(points), 20)
    np.testing.assert_allclose(found, slow(points, 20), rtol=1e-9)


def test_neighbours_at_even_distances_on_a_line() -> None:
    """Distances 1, 2, … k from the first point: Σ log(j/k) = log k! − k·log k."""
    for k in (2, 5, 20):
        expected = k / (k * math.log(k) - math.lgamma(k + 1))
        found = local_dimensions(line(*range(k + 1)), k)
        assert float(found[0]) == pytest.approx(expected)


def test_neighbours_at_doubling_distances() -> None:
    """r_j = 2^j, j = 1 … k: the mean log is −(k − 1)/2·log 2."""
    found = local_dimensions(line(0, 2, 4, 8, 16), 4)
    assert float(found[0]) == pytest.approx(2 / (3 * math.log(2)))


@pytest.mark.parametrize("dimensions", [1, 2, 5])
def test_it_estimates_the_dimension_of_a_cloud(dimensions: int) -> None:
    """Uniform in a cube that lies in ten dimensions. The mean of 1/x̄ over Gamma-distributed means
    is m·k/(k − 2), as the last of the k logs is always 0; that of the cube's edge is less."""
    rng = np.random.default_rng(dimensions)
    basis = np.linalg.qr(rng.normal(size=(10, 10)))[0][:dimensions]
    cloud = torch.from_numpy(rng.random((2000, dimensions)) @ basis)
    assert mean_dimension(cloud, 20) == pytest.approx(dimensions * 20 / 18, rel=0.15)


def test_the_unit_of_length_does_not_matter() -> None:
    points = torch.from_numpy(np.random.default_rng(2).normal(size=(30, 4)))
    torch.testing.assert_close(local_dimensions(1e-9 * points, 5), local_dimensions(points, 5))


def test_sure_predictions_are_told_apart() -> None:
    """Softmax outputs that differ by 1e-9 have the dimension of their differences."""
    away = 1e-9 * np.random.default_rng(3).normal(size=(40, 3))
    corner = np.array([1.0, 0.0, 0.0])
    found = local_dimensions(torch.from_numpy(corner + away), 10)
    np.testing.assert_allclose(found, slow(away, 10), rtol=1e-4)


def test_a_neighbour_at_the_same_place_is_left_out() -> None:
    """Distances 0, 1, 2, 4 with k = 4: the mean of log ¼, log ½ and log 1 is −log 2."""
    found = local_dimensions(line(0, 0, 1, 2, 4), 4)
    assert float(found[0]) == pytest.approx(1 / math.log(2))


def test_points_that_coincide_have_no_dimension() -> None:
    same = torch.full((25, 10), 0.1)
    assert local_dimensions(same, 20).isnan().all()
    assert mean_dimension(same, 20) is None


def test_neighbours_at_one_distance_have_no_dimension() -> None:
    """Corners of a simplex, and those moved by less than what counts."""
    corners = torch.eye(5, dtype=torch.float64)
    assert local_dimensions(corners, 4).isnan().all()
    nearly = torch.tensor([[1.0, 1.0, 1.0 + 1e-7]], dtype=torch.float64)
    assert dimension(nearly).isnan().all()


def test_points_without_a_dimension_do_not_count_in_the_mean() -> None:
    """With k = 2 the point 0 sees 1 and 3, the point 1 sees 0 and 3, and 3 sees 1 and 0."""
    alone = [2 / math.log(3), 2 / math.log(2), 2 / math.log(3 / 2)]
    assert mean_dimension(line(0, 1, 3), 2) == pytest.approx(np.mean(alone))
    with_twins = line(0, 1, 3, 100, 100, 100)
    found = local_dimensions(with_twins, 2)
    assert found[:3].tolist() == pytest.approx(alone)
    assert found[3:].isnan().all()
    assert mean_dimension(with_twins, 2) == pytest.approx(np.mean(alone))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_points_have_no_dimension(n: int) -> None:
    points = line(*range(n))
    assert local_dimensions(points, 20).shape == (n,)
    assert mean_dimension(points, 20) is None


def test_all_others_are_neighbours_where_there_are_fewer() -> None:
    points = torch.from_numpy(np.random.default_rng(4).normal(size=(6, 3)))
    torch.testing.assert_close(local_dimensions(points, 20), local_dimensions(points, 5))


def test_a_model_that_diverged_has_no_dimension() -> None:
    assert mean_dimension(torch.full((25, 3), torch.nan), 20) is None
