"""ARFL: lines, confidences and weights in numbers worked out here, against a slow version that
follows the formulas word by word, and against SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS, arfl, fedavg
from fedsieve.methods.arfl import Config
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedavg import Server, Up
from fedsieve.packed import Layout, Packed
from fedsieve.types import Weights
from helpers import assert_same_weights

Floats = NDArray[np.float64]
FEDERATION = Federation((10,) * 6, 6, 50, 3)


def merged(models: list[Weights], cfg: Config | None = None, samples: int = 10) -> Weights:
    server = Server(models[0], FEDERATION)
    ups = {k: Up(model, samples) for k, model in enumerate(models)}
    return arfl.merge(cfg or Config(), server, 0, ups)[0].weights


def models_of(table: Floats | Tensor) -> list[Weights]:
    """A model for each row, cut into a vector of one entry and a matrix."""
    rows = torch.as_tensor(table, dtype=torch.float32)
    return [{"b": row[:1], "w": row[1:, None]} for row in rows]


def flat(weights: Weights) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in weights.values()])


def column(*values: float) -> Tensor:
    """The clients' values of a single parameter."""
    return torch.tensor(values)[:, None]


# ------------------------------------------------------------------------------------ by hand

FIVE = (0.0, 1.0, 2.5, 3.0, 10.0)
"""Median slopes from each point 9/8, 5/4, 11/8, 1, 27/8: the line has the slope 5/4 and goes
through (2, 2.5). On it lie 0, 1.25, 2.5, 3.75, 5; residuals are 0, ¼, 0, ¾, 5, and their median
without the smallest is ½."""
TAU = 1.4826 * (1 + 5 / 4) * 0.5 + 1e-7


def test_line_by_hand() -> None:
    assert arfl.repeated_median(column(*FIVE)).tolist() == [1.25]
    _, line = arfl.confidence(column(*FIVE), 2.0)
    assert line.flatten().tolist() == [0.0, 1.25, 2.5, 3.75, 5.0]


def test_deviation_and_leverage_by_hand() -> None:
    """H = 1/5 + (x − 2)²/10."""
    residuals = column(0.0, 0.25, 0.0, 0.75, 5.0)
    assert arfl.deviation(residuals).tolist() == pytest.approx([TAU])
    found = arfl.leverage(column(0.0, 1.0, 2.0, 3.0, 4.0)).flatten().tolist()
    assert found == pytest.approx([0.6, 0.3, 0.2, 0.3, 0.6])


@pytest.mark.parametrize("cutoff", [2.0, 0.5])
def test_confidence_by_hand(cutoff: float) -> None:
    """Z·√(1 − H)·τ/|r|, where that is less than 1: with λ = 2 for the last one alone."""
    z = cutoff * math.sqrt(2 / 5)
    fourth, last = z * math.sqrt(0.7) * TAU / 0.75, z * math.sqrt(0.4) * TAU / 5
    assert (fourth < 1) == (cutoff == 0.5)
    omega, _ = arfl.confidence(column(*FIVE), cutoff)
    assert omega.flatten().tolist() == pytest.approx([1, 1, 1, min(1, fourth), last], rel=1e-5)


def test_weights_and_repair_by_hand() -> None:
    """With λ = ½ the last value, of ω = 0.067, is moved from 10 to 5. A second parameter, in which
    all agree, has no say. So the weights are (ω/max ω)² = ω²."""
    omega = arfl.confidence(column(*FIVE), 0.5)[0].flatten().double().numpy()
    assert omega[-1] < 0.1 < omega[-2] < 1
    table = np.array([[value, 7.0] for value in FIVE])
    server = Server(models_of(table)[0], FEDERATION)
    ups = {k: Up(model, 10 + k) for k, model in enumerate(models_of(table))}
    after, metrics = arfl.merge(Config(cutoff=0.5), server, 0, ups)
    expected = np.average([0.0, 1.0, 2.5, 3.0, 5.0], weights=omega**2)
    assert flat(after.weights).tolist() == pytest.approx([expected, 7.0], rel=1e-5)
    assert metrics == pytest.approx(
        {
            "repaired_share": 1 / 10,
            "least_weight": omega[-1] ** 2 / (omega**2).sum(),
            "largest_weight": 1 / (omega**2).sum(),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(("repair_below", "share"), [(0.0, 0.0), (1.0, 1 / 5)])
def test_a_value_of_full_confidence_is_never_moved(repair_below: float, share: float) -> None:
    """With λ = 2 the last value alone is doubted."""
    models: list[Weights] = [{"w": torch.tensor([value])} for value in FIVE]
    judged = arfl.judge(models, 2.0, repair_below)
    assert judged.repaired_share == pytest.approx(share)


def test_a_parameter_counts_by_how_much_the_clients_differ_in_it() -> None:
    """Two parameters: confidences add up as ω·std(ω), with n − 1 below the root."""
    columns = [np.array(FIVE), np.array([3.0, 0.0, 2.9, 2.0, 1.0]) ** 3]
    expected: Floats = np.zeros(5)
    for values in columns:
        omega = arfl.confidence(column(*values), 0.5)[0].flatten().double().numpy()
        expected += omega * omega.std(ddof=1)
    found = arfl.judge(models_of(np.stack(columns, axis=1)), 0.5, 0.1).confidence
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert arfl.client_weights(found) == pytest.approx(((expected / expected.max()) ** 2).tolist())


# ------------------------------------------------------------------- against the formulas, slowly


def slow_line(y: Floats) -> Floats:
    """The line's value for each client, for different values y (n,)."""
    n = len(y)
    x = np.array([sum(other < value for other in y) for value in y], dtype=float)
    of_each = [
        np.median([(y[j] - y[i]) / (x[j] - x[i]) for j in range(n) if j != i]) for i in range(n)
    ]
    slope = np.median(of_each)
    intercept = np.median(y) - slope * np.median(x)
    return np.asarray(intercept + slope * x)


def slow_confidence(y: Floats, cutoff: float) -> Floats:
    n = len(y)
    x = stats.rankdata(y) - 1
    design = np.stack([np.ones(n), x], axis=1)
    root = np.sqrt(1 - np.diag(design @ np.linalg.inv(design.T @ design) @ design.T))
    r = y - slow_line(y)
    tau = 1.4826 * (1 + 5 / (n - 1)) * np.median(np.sort(np.abs(r))[1:]) + 1e-7
    e = r / tau
    z = cutoff * math.sqrt(2 / n)
    with np.errstate(invalid="ignore", divide="ignore"):
        omega = root / e * np.clip(e / root, -z, z)
    return np.where(np.isnan(omega), 1, omega)


def slow_merge(table: Floats, cutoff: float, repair_below: float) -> Floats:
    confidence, repaired = np.zeros(len(table)), table.copy()
    for j, y in enumerate(table.T):
        omega = slow_confidence(y, cutoff)
        confidence += omega * omega.std(ddof=1)
        line = np.clip(slow_line(y), y.min(), y.max())
        repaired[:, j] = np.where(omega < repair_below, line, y)
    weights = (confidence / confidence.max()) ** 2
    return np.asarray(np.average(repaired, axis=0, weights=weights))


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(4, 9),
    cutoff=st.sampled_from([0.3, 2.0]),
    repair_below=st.sampled_from([0.1, 0.5]),
)
@settings(max_examples=25, deadline=None)
def test_it_is_what_the_formulas_say(seed: int, n: int, cutoff: float, repair_below: float) -> None:
    """Heavy tails, so that values are repaired. In double precision: where a value is to be
    repaired is a matter of a threshold."""
    table = np.random.default_rng(seed).standard_t(2, size=(n, 5))
    models: list[Weights] = [{"w": torch.from_numpy(row.copy())} for row in table]
    found = merged(models, Config(cutoff=cutoff, repair_below=repair_below))["w"]
    np.testing.assert_allclose(found, slow_merge(table, cutoff, repair_below), rtol=1e-6)


@given(seed=st.integers(0, 10**6), n=st.integers(4, 15))
@settings(max_examples=25, deadline=None)
def test_the_slope_is_scipys(seed: int, n: int) -> None:
    """Siegel's estimator, of values with ties, too."""
    rng = np.random.default_rng(seed)
    for values in (rng.normal(size=n), rng.integers(3, size=n).astype(float)):
        ordered = np.sort(values)
        slope = arfl.repeated_median(torch.from_numpy(ordered)[:, None]).item()
        assert slope == pytest.approx(stats.siegelslopes(ordered, np.arange(n)).slope, abs=1e-12)


@given(seed=st.integers(0, 10**6), n=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_ranks_are_scipys(seed: int, n: int) -> None:
    values = np.random.default_rng(seed).integers(4, size=(n, 3)).astype(float)
    expected = stats.rankdata(values, axis=0) - 1
    found = arfl.ranks(*(torch.from_numpy(v) for v in (values, np.sort(values, axis=0))))
    np.testing.assert_array_equal(found, expected)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    models = models_of(np.random.default_rng(0).standard_t(2, size=(6, 11)))
    whole = merged(models)
    for at_once in (1, 6 * 4):
        monkeypatch.setattr(arfl, "VALUES_AT_ONCE", at_once)
        for name, tensor in merged(models).items():
            torch.testing.assert_close(tensor, whole[name])


def test_no_more_than_a_piece_is_sorted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = arfl.confidence

    def watched(values: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
        seen.append(tuple(values.shape))
        return real(values, cutoff)

    monkeypatch.setattr(arfl, "confidence", watched)
    monkeypatch.setattr(arfl, "VALUES_AT_ONCE", 20)
    merged(models_of(np.random.default_rng(0).normal(size=(6, 11))))
    assert seen == [(6, 1), (6, 3), (6, 3), (6, 3), (6, 1)]  # one in the vector, ten in the matrix


# --------------------------------------------------------------------------------- limit cases


@pytest.mark.parametrize("n", [1, 3, 4, 10])
def test_the_mean_of_equal_models_is_that_model(n: int) -> None:
    model = models_of(torch.randn(1, 9, generator=torch.Generator().manual_seed(0)))[0]
    assert_same_weights(merged([model] * n), model)


def test_fewer_than_four_are_averaged_and_samples_do_not_matter() -> None:
    models = models_of(np.array([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 4.0, 8.0]]))
    server = Server(models[0], FEDERATION)
    after, metrics = arfl.merge(
        Config(), server, 0, {k: Up(model, 10**k) for k, model in enumerate(models)}
    )
    assert flat(after.weights).tolist() == [1.0, 2.0, 4.0]
    assert metrics == {}


def test_the_number_of_samples_does_not_matter_unless_it_is_zero() -> None:
    models = models_of(np.random.default_rng(3).normal(size=(6, 7)))
    server = Server(models[0], FEDERATION)
    counts = [10, 1, 500, 7, 30, 0]
    ups = {k: Up(model, counts[k]) for k, model in enumerate(models)}
    assert_same_weights(arfl.merge(Config(), server, 0, ups)[0].weights, merged(models[:5]))
    with pytest.raises(FedsieveError, match="no clients' weights"):
        arfl.merge(Config(), server, 0, {0: Up(models[0], 0)})


@pytest.mark.parametrize("far", [0.5, 50.0])
def test_one_outlying_model_gets_a_small_weight(far: float) -> None:
    """Nine models near each other and one that is off in every parameter."""
    rng = np.random.default_rng(1)
    table = 1 + 0.01 * rng.normal(size=(10, 400))
    table[4] += far
    judged = arfl.judge(models_of(table), 2.0, 0.1)
    by = np.array(arfl.client_weights(judged.confidence))
    share = by / by.sum()
    assert share[4] < 0.01
    assert np.delete(share, 4).min() > 0.08
    assert judged.repaired_share == pytest.approx(0.1, abs=0.01)
    mean = flat(merged(models_of(table))).numpy()
    assert np.abs(mean - 1).max() < 0.02
    # FedAvg would be a tenth of the way off.
    assert table.mean() == pytest.approx(1 + far / 10, abs=0.01)


def test_four_of_ten_that_agree_do_not_win() -> None:
    rng = np.random.default_rng(2)
    table = 0.01 * rng.normal(size=(10, 300))
    table[:4] += 1
    by = np.array(arfl.client_weights(arfl.judge(models_of(table), 2.0, 0.1).confidence))
    assert by[:4].sum() < 0.2 * by[4:].sum()


def test_one_that_differs_from_equal_ones() -> None:
    """Residuals are zero but for one, and so is their median."""
    omega, line = arfl.confidence(column(2.0, 2.0, 3.0, 2.0, 2.0), 2.0)
    assert omega.flatten().tolist() == pytest.approx([1, 1, 0, 1, 1], abs=1e-6)
    assert line.flatten().tolist() == [2.0] * 5
    models = models_of(np.array([[2.0, 5.0], [2.0, 5.0], [3.0, 5.0], [2.0, 5.0], [2.0, 5.0]]))
    assert_same_weights(merged(models), models[0])


def test_equal_clients_weigh_the_same_and_their_order_does_not_matter() -> None:
    """Among clients that did not train, say, and sent the same model back."""
    rng = np.random.default_rng(5)
    table = rng.standard_t(2, size=(7, 40))
    table[3] = table[1]
    by = arfl.client_weights(arfl.judge(models_of(table), 2.0, 0.1).confidence)
    assert by[1] == by[3]
    order = rng.permutation(7)
    other = arfl.client_weights(arfl.judge(models_of(table[order]), 2.0, 0.1).confidence)
    assert other == pytest.approx([by[k] for k in order])


def test_a_repaired_value_stays_among_the_clients() -> None:
    """The line has the slope 10 and is at 20 in the middle. So it is −10 at the smallest value, and
    0 at the next: nothing that a variance may be."""
    values = column(0.1, 0.2, 10.0, 20.0, 30.0, 40.0, 50.0)
    assert arfl.repeated_median(values).item() == pytest.approx(10.0)
    omega, line = arfl.confidence(values, 2.0)
    assert omega[0] < 0.1
    assert line[0] == values[0]
    assert line[1] == pytest.approx(0.1)  # the line says 0
    mean = flat(merged(models_of(torch.cat([values, values], dim=1))))
    assert (mean > 0.1).all()


def test_weights_that_lie_in_one_vector() -> None:
    """What a GPU trained: the same numbers, and they stay in one vector."""
    layout = Layout((("w", torch.Size([2, 3, 1, 1])), ("b", torch.Size([2]))))
    rng = torch.Generator().manual_seed(0)
    packed: list[Weights] = [Packed(torch.randn(8, generator=rng), layout) for _ in range(5)]
    loose = [{name: tensor.clone() for name, tensor in model.items()} for model in packed]
    found, expected = merged(packed), merged(list(loose))
    assert isinstance(found, Packed)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_the_clients_models_stay_as_they_are() -> None:
    models = models_of(np.random.default_rng(0).standard_t(1, size=(6, 9)))
    before = [{name: tensor.clone() for name, tensor in model.items()} for model in models]
    merged(models)
    for model, kept in zip(models, before, strict=True):
        assert_same_weights(model, kept)


# -------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"cutoff": 0.0}, "cutoff must be above 0, not 0.0."),
        ({"cutoff": math.inf}, "cutoff must be above 0, not inf."),
        ({"cutoff": math.nan}, "cutoff must be above 0, not nan."),
        ({"repair_below": -0.1}, r"repair_below must be in \[0, 1\], not -0.1."),
        ({"repair_below": 1.1}, r"repair_below must be in \[0, 1\], not 1.1."),
    ],
)
def test_a_bad_setting_is_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**values)  # type: ignore[arg-type]


def test_models_of_different_shapes_are_refused() -> None:
    models: list[Weights] = [{"w": torch.zeros(2)}] * 4 + [{"w": torch.zeros(3)}]
    with pytest.raises(FedsieveError, match=r"'w' is \(2,\) in client 0 .* \(3,\) in client 4"):
        merged(models)


def test_it_is_registered_as_a_relative_of_fedavg() -> None:
    found = METHODS["arfl"]
    assert (found.config, found.merge) == (Config, arfl.merge)
    assert (found.train, found.suspect) == (fedavg.train, fedavg.suspect)
    assert (Config().cutoff, Config().repair_below) == (2.0, 0.1)
