"""MixUp: the mixed loss against NumPy, the pairing within a batch, and the draws of a plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax

from fedsieve.local.plan import Batch, Sgd
from fedsieve.methods.mixup import draw_mixing, mixed, mixed_cross_entropy, mixed_loss

CPU = torch.device("cpu")


def draw(seed: int, n: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 4)) * 2, rng.integers(4, size=n)


@given(seed=st.integers(0, 1000), lam=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_mixup_is_the_cross_entropy_against_the_mixed_label(seed: int, lam: float) -> None:
    z, y = draw(seed, 6)
    others = y[::-1].copy()
    soft = lam * np.eye(4)[y] + (1 - lam) * np.eye(4)[others]
    expected = -(soft * log_softmax(z, axis=1)).sum(axis=1)
    found = mixed_cross_entropy(
        torch.tensor(z), torch.tensor(y), torch.tensor(others), torch.tensor(lam)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [5, 3])
def test_a_sample_is_mixed_with_one_of_its_own_batch(size: int) -> None:
    """The keys of a full batch, 5, serve a last one of 3: their order there is 2, 0, 1. Padding, of
    weight zero, does not count in the mean."""
    z, y = draw(6, size)
    order = {5: [2, 4, 0, 3, 1], 3: [2, 0, 1]}[size]
    values = {
        "x": torch.tensor(z),
        "label": torch.tensor(y),
        "lam": torch.tensor(0.3),
        "keys": torch.tensor([0.5, 0.9, 0.1, 0.7, 0.3]),
    }
    batch = Batch(values, {}, torch.tensor([1.0] * (size - 1) + [0.0]))
    x, others = mixed(batch)
    np.testing.assert_allclose(x, 0.3 * z + 0.7 * z[order], rtol=1e-5)
    assert others.tolist() == y[order].tolist()
    soft = 0.3 * np.eye(4)[y] + 0.7 * np.eye(4)[y[order]]
    expected = -(soft * log_softmax(x.numpy(), axis=1)).sum(axis=1)[:-1].mean()
    assert float(mixed_loss(batch, others, x)) == pytest.approx(expected, rel=1e-5)


def test_several_blocks_that_are_mixed_together_have_a_key_for_each_sample() -> None:
    """The shares are those of one block."""
    sgd = Sgd(epochs=2, batch_size=4)
    one, four = (draw_mixing(10, sgd, 2.0, np.random.default_rng(0), CPU, b) for b in (1, 4))
    assert (one["keys"].shape, four["keys"].shape) == ((6, 4), (6, 16))
    assert torch.equal(one["lam"], four["lam"])


def test_all_pairings_are_equally_likely() -> None:
    """Each of the four samples of a batch meets each in a quarter of 1,800 steps, itself included:
    450 times, give or take 18, the standard deviation; and all 24 orders occur."""
    drawn = draw_mixing(24, Sgd(epochs=300, batch_size=4), 1.0, np.random.default_rng(0), CPU)
    orders = drawn["keys"].argsort(dim=1, stable=True)
    for place in range(4):
        met = np.bincount(orders[:, place].numpy(), minlength=4)
        np.testing.assert_allclose(met, 450, atol=4 * 18)
    assert len({tuple(order) for order in orders.tolist()}) == 24


def test_lambda_is_beta_distributed() -> None:
    """Beta(α, α) has mean ½ and variance 1/(4(2α + 1)): ¹⁄₂₀ for α = 2."""
    sgd = Sgd(epochs=300, batch_size=4)
    drawn = draw_mixing(24, sgd, 2.0, np.random.default_rng(0), CPU)
    assert drawn["keys"].shape == (1800, 4)
    lam = drawn["lam"].numpy()
    assert len(set(lam.tolist())) > 1700
    assert lam.mean() == pytest.approx(0.5, abs=0.02)
    assert lam.var() == pytest.approx(1 / 20, rel=0.1)
    unmixed = draw_mixing(24, sgd, 0.0, np.random.default_rng(0), CPU)
    assert unmixed["lam"].tolist() == [1.0] * 1800
