"""Means of weights against numbers by hand, and the properties every mean has."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsieve.aggregate import median, trimmed_mean, weighted_mean
from fedsieve.errors import FedsieveError
from fedsieve.models.weights import read_weights


def client(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values), "bn.running_mean": torch.tensor(values[:1]) * 10}


def test_weighted_mean_by_hand() -> None:
    """(1·[1, 2] + 3·[5, 10]) / 4 = [4, 8]; the statistics: (10 + 150) / 4 = 40."""
    mean = weighted_mean([client(1.0, 2.0), client(5.0, 10.0)], [1, 3])
    assert mean["w"].tolist() == [4.0, 8.0]
    assert mean["bn.running_mean"].tolist() == [40.0]
    assert list(mean) == ["w", "bn.running_mean"]


def test_batchnorm_statistics_are_averaged() -> None:
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    models[1].running_mean += 4.0
    mean = weighted_mean([read_weights(model) for model in models], [1, 1])
    assert mean["running_mean"].tolist() == [2.0, 2.0]
    assert "num_batches_tracked" not in mean


def test_mean_is_a_new_tensor_and_inputs_stay() -> None:
    clients = [client(1.0, 2.0), client(3.0, 4.0)]
    mean = weighted_mean(clients, [1, 1])
    mean["w"].zero_()
    alone = weighted_mean(clients[:1], [2])
    alone["w"].zero_()
    assert clients[0]["w"].tolist() == [1.0, 2.0]
    assert clients[1]["w"].tolist() == [3.0, 4.0]


def test_a_client_that_weighs_nothing_is_left_out() -> None:
    broken = client(float("nan"), float("inf"))
    mean = weighted_mean([broken, client(1.0, 2.0), broken, client(3.0, 4.0)], [0, 1, 0, 1])
    assert mean["w"].tolist() == [2.0, 3.0]


def test_median_by_hand() -> None:
    three = [client(1.0, 9.0), client(100.0, 5.0), client(2.0, -7.0)]
    assert median(three)["w"].tolist() == [2.0, 5.0]
    assert median(three)["bn.running_mean"].tolist() == [20.0]
    four = [*three, client(4.0, 6.0)]  # sorted: 1 2 4 100 and −7 5 6 9
    assert median(four)["w"].tolist() == [3.0, 5.5]
    assert median(three[:1])["w"].tolist() == [1.0, 9.0]


def test_trimmed_mean_by_hand() -> None:
    """A quarter of five is one at each end: of 1 2 3 6 100 the middle is (2+3+6)/3."""
    five = [client(v) for v in (100.0, 2.0, 1.0, 6.0, 3.0)]
    assert trimmed_mean(five, 0.25)["w"].item() == pytest.approx(11 / 3)
    assert trimmed_mean(five, 0.0)["w"].item() == pytest.approx(112 / 5)
    assert trimmed_mean(five, 0.4)["w"].item() == median(five)["w"].item() == 3.0


def test_trimmed_share_survives_rounding() -> None:
    """0.29 · 100 is 28.999… in floating point; 29 clients go at each end, not 28."""
    squares = [client(float(v * v)) for v in range(100)]
    expected = np.mean([v * v for v in range(29, 71)])
    assert trimmed_mean(squares, 0.29)["w"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "by", "sentence"),
    [
        ([], [], "no clients' weights"),
        ([client(1.0)], [1, 2], "1 clients' weights but 2 numbers"),
        ([client(1.0), client(2.0)], [0, 0], "All clients weigh 0"),
        ([client(1.0), client(2.0)], [2, -1], "not negative"),
        ([client(1.0), client(2.0)], [2, float("nan")], "finite"),
        ([client(1.0), client(2.0, 3.0)], [1, 1], r"'w' is \(1,\) in client 0 .* \(2,\)"),
        ([client(1.0), {"w": torch.ones(1)}], [1, 1], "'bn.running_mean' of client 0 .* missing"),
        ([{"w": torch.ones(1)}, client(1.0)], [1, 1], "'bn.running_mean' of client 1 .* missing"),
    ],
)
def test_weighted_mean_refuses(weights, by, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        weighted_mean(weights, by)


@pytest.mark.parametrize("share", [-0.1, 0.5])
def test_trimmed_mean_refuses_a_share(share: float) -> None:
    with pytest.raises(FedsieveError, match=r"lies in \[0, 0.5\)"):
        trimmed_mean([client(1.0)], share)


numbers = st.floats(-1e3, 1e3, width=32)
rounds = st.lists(st.tuples(numbers, numbers, st.floats(0.01, 1e3)), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(numbers, st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20))
def test_mean_of_equal_weights_is_exactly_these(value: float, by: list[float]) -> None:
    mean = weighted_mean([client(value) for _ in by], by)
    assert mean["w"].item() == client(value)["w"].item()


@settings(max_examples=50, deadline=None)
@given(rounds, st.randoms(use_true_random=False))
def test_mean_is_numpys_and_does_not_depend_on_order(drawn, random) -> None:
    expected = np.average([r[:2] for r in drawn], axis=0, weights=[r[2] for r in drawn])
    random.shuffle(drawn)
    mean = weighted_mean([client(a, b) for a, b, _ in drawn], [r[2] for r in drawn])
    np.testing.assert_allclose(mean["w"].numpy(), expected, rtol=1e-4, atol=2e-3)


@settings(max_examples=50, deadline=None)
@given(rounds)
def test_all_means_lie_between_the_clients(drawn) -> None:
    clients = [client(a, b) for a, b, _ in drawn]
    table = np.array([r[:2] for r in drawn])
    slack = 1e-5 * np.abs(table).max() + 1e-30
    for mean in (
        weighted_mean(clients, [r[2] for r in drawn]),
        median(clients),
        trimmed_mean(clients, 0.2),
    ):
        assert (mean["w"].numpy() >= table.min(axis=0) - slack).all()
        assert (mean["w"].numpy() <= table.max(axis=0) + slack).all()
    np.testing.assert_allclose(median(clients)["w"], np.median(table, axis=0), atol=slack)
