"""The mixture against scikit-learn, against numbers by hand, and where there is nothing to fit."""

import time
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from fedsieve.errors import FedsieveError
from fedsieve.sieve.gmm import Mixture, clean_posterior, fit_mixture, refit_mixture


def losses(kind: str, n: int, seed: int) -> np.ndarray:
    """Losses as they look when 30 % of labels are wrong, at different times of training."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(n) < 0.3
    clean, noisy = {
        "separate": (rng.exponential(0.3, n), rng.normal(4, 1, n)),
        "normal": (rng.normal(0.5, 0.3, n), rng.normal(3, 0.7, n)),
        "overlapping": (rng.gamma(2, 0.5, n), rng.gamma(4, 0.6, n)),
        "late": (rng.exponential(0.01, n), rng.normal(8, 2, n)),
    }[kind]
    return np.where(wrong, noisy, clean)


def sklearn_fit(values: np.ndarray, seed: int) -> GaussianMixture:
    return GaussianMixture(2, max_iter=50, tol=1e-2, reg_covar=5e-4, random_state=seed).fit(
        values[:, None]
    )


@pytest.mark.parametrize("kind", ["separate", "normal", "overlapping", "late"])
@pytest.mark.parametrize("n", [500, 5_000, 200_000])
def test_agrees_with_sklearn(kind: str, n: int) -> None:
    """k-means may stop one or two values beside the best split, hence the tolerances."""
    values = losses(kind, n, seed=n)
    theirs = sklearn_fit(values, seed=0)
    order = theirs.means_[:, 0].argsort()
    ours = fit_mixture(values)
    assert ours.converged
    assert abs(ours.iterations - theirs.n_iter_) <= 1
    assert not ours.degenerate
    np.testing.assert_allclose(ours.means, theirs.means_[order, 0], rtol=0.03, atol=1e-3)
    np.testing.assert_allclose(ours.shares, theirs.weights_[order], atol=0.01)
    np.testing.assert_allclose(
        np.sqrt(ours.variances), np.sqrt(theirs.covariances_[order, 0, 0]), rtol=0.03
    )
    flagged = clean_posterior(ours, values) < 0.5
    flagged_there = theirs.predict_proba(values[:, None])[:, order[0]] < 0.5
    assert (flagged != flagged_there).mean() <= 0.01


def test_grouped_values_agree_with_single_ones() -> None:
    """More values than groups: three copies of 10,000 values have the mixture of the 10,000."""
    values = losses("overlapping", 10_000, seed=1)
    single, grouped = fit_mixture(values), fit_mixture(np.tile(values, 3))
    assert grouped.iterations == single.iterations
    np.testing.assert_allclose(grouped.means, single.means, rtol=1e-3)
    np.testing.assert_allclose(grouped.variances, single.variances, rtol=1e-3)
    np.testing.assert_allclose(grouped.shares, single.shares, atol=1e-3)


def test_groups_stay_narrow_beside_an_outlier() -> None:
    """One value of 10⁴ would make all others one group of a grid of equal widths."""
    values = losses("normal", 50_000, seed=2)
    with_outlier = fit_mixture(np.append(values, 1e4))
    assert with_outlier.means[1] == pytest.approx(1e4)
    assert with_outlier.means[0] == pytest.approx(values.mean())
    assert with_outlier.variances[0] == pytest.approx(values.var() + 5e-4, rel=1e-4)


def test_two_far_groups_by_hand() -> None:
    """Members are certain, so that one iteration leaves mean and variance of 0, .2 and of 10."""
    mixture = fit_mixture(np.array([10.0, 0.0, 0.2, 10.0, 10.0]), reg_covar=1e-3)
    np.testing.assert_allclose(mixture.means, (0.1, 10.0))
    np.testing.assert_allclose(mixture.variances, (0.01 + 1e-3, 1e-3))
    np.testing.assert_allclose(mixture.shares, (0.4, 0.6))
    assert mixture.iterations == 2  # the second one sees that nothing moved


def test_one_iteration_by_numpy() -> None:
    """Best split of 0 1 2 6 7 is {0 1 2 | 6 7}; then one E and one M step written out."""
    values = np.array([0.0, 1.0, 2.0, 6.0, 7.0])
    means, variances, shares = [1.0, 6.5], [2 / 3 + 0.5, 0.25 + 0.5], [0.6, 0.4]
    joint = np.array(
        [
            s * norm.pdf(values, m, np.sqrt(v))
            for m, v, s in zip(means, variances, shares, strict=True)
        ]
    )
    member = joint / joint.sum(axis=0)
    counts = member.sum(axis=1)
    expected_means = member @ values / counts
    expected_variances = (
        np.array(
            [member[k] @ (values - expected_means[k]) ** 2 / counts[k] for k in range(2)],
        )
        + 0.5
    )
    mixture = fit_mixture(values, max_iter=1, reg_covar=0.5)
    assert not mixture.converged
    assert mixture.iterations == 1
    np.testing.assert_allclose(mixture.means, expected_means)
    np.testing.assert_allclose(mixture.variances, expected_variances)
    np.testing.assert_allclose(mixture.shares, counts / 5)


def test_posterior_is_bayes_rule() -> None:
    mixture = Mixture(
        means=(0.5, 3.0), variances=(0.2, 2.0), shares=(0.7, 0.3), converged=True, iterations=3
    )
    values = np.linspace(-5, 10, 70_001)  # more than two chunks
    clean = 0.7 * norm.pdf(values, 0.5, np.sqrt(0.2))
    noisy = 0.3 * norm.pdf(values, 3.0, np.sqrt(2.0))
    posterior = clean_posterior(mixture, values)
    np.testing.assert_allclose(posterior, clean / (clean + noisy), rtol=1e-9, atol=1e-300)
    assert clean_posterior(mixture, np.array([1e6]))[0] == 0.0  # the density ratio overflows
    np.testing.assert_allclose(
        clean_posterior(mixture, values.astype(np.float32)), posterior, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    "values",
    [[2.0], [0.7, 0.7, 0.7], [0.1 + 0.2, 0.3]],
    ids=["one", "equal", "equal but for rounding"],
)
def test_nothing_to_separate(values: list[float]) -> None:
    mixture = fit_mixture(np.array(values))
    assert mixture.degenerate
    assert mixture.converged
    np.testing.assert_allclose(mixture.means, (values[0], values[0]))
    assert mixture.variances == (5e-4, 5e-4)
    assert mixture.shares == (1.0, 0.0)
    assert clean_posterior(mixture, np.array([0.0, 99.0])).tolist() == [1.0, 1.0]


def test_no_values() -> None:
    mixture = fit_mixture(np.array([]))
    assert mixture.degenerate
    assert np.isnan(mixture.means).all()
    assert clean_posterior(mixture, np.array([])).shape == (0,)


def test_two_distinct_values_are_two_components() -> None:
    mixture = fit_mixture(np.array([1.0, 2.0, 1.0, 1.0]))
    np.testing.assert_allclose(mixture.means, (1.0, 2.0))
    np.testing.assert_allclose(mixture.shares, (0.75, 0.25))
    np.testing.assert_allclose(clean_posterior(mixture, np.array([1.0, 2.0])), (1.0, 0.0))


def test_a_starved_component_is_reported() -> None:
    """The upper component starts at the lone 1 and, its variance inflated, turns to the zeros,
    which the other explains better; after a while it holds nothing. The mean of all values is 0
    and their variance 2/22."""
    values = np.array([-1.0] + [0.0] * 20 + [1.0])
    mixture = fit_mixture(values, max_iter=1_000, tol=0, reg_covar=0.1)
    assert mixture.degenerate
    assert 1 < mixture.iterations < 1_000
    np.testing.assert_allclose(mixture.means, 0, atol=1e-12)
    np.testing.assert_allclose(mixture.variances, 2 / 22 + 0.1)
    assert (clean_posterior(mixture, values) == 1).all()


@pytest.mark.parametrize(
    ("values", "settings_", "sentence"),
    [
        ([1.0, np.nan, np.inf], {}, "2 of 3 values are not finite"),
        ([[1.0, 2.0]], {}, r"one row of values, not over shape \(1, 2\)"),
        ([1.0, 2.0], {"max_iter": 0}, "max_iter must be at least 1"),
        ([1.0, 2.0], {"tol": -1.0}, "tol must not be negative"),
        ([1.0, 2.0], {"reg_covar": 0.0}, "reg_covar must be above 0"),
    ],
)
def test_refuses(values: list[float], settings_: dict[str, float], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        fit_mixture(np.array(values), **settings_)


def test_posterior_refuses_strange_values() -> None:
    with pytest.raises(FedsieveError, match="1 of 2 values"):
        clean_posterior(fit_mixture(np.array([1.0, 2.0])), np.array([0.0, -np.inf]))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32), min_size=0, max_size=60),
    st.floats(-20, 20),
    st.randoms(use_true_random=False),
)
def test_fit_is_sound_for_any_values(values: list[float], shift: float, random) -> None:
    """Probabilities are probabilities; neither the order nor the origin of the values matters."""
    array = np.array(values)
    mixture = fit_mixture(array)
    posterior = clean_posterior(mixture, array)
    assert ((posterior >= 0) & (posterior <= 1)).all()
    assert sum(mixture.shares) == pytest.approx(1)
    assert not mixture.means[0] > mixture.means[1]
    random.shuffle(values)
    assert fit_mixture(np.array(values)) == mixture or len(values) == 0
    moved = fit_mixture(array + shift)
    if not mixture.degenerate and moved.iterations == mixture.iterations:
        np.testing.assert_allclose(moved.means, np.array(mixture.means) + shift, atol=1e-2)


@pytest.mark.slow
def test_ten_million_values_in_seconds() -> None:
    """About 0.6 s on one core here; the bound leaves room for a busy machine."""
    values = losses("overlapping", 10_000_000, seed=3).astype(np.float32)
    start = time.perf_counter()
    clean_posterior(fit_mixture(values), values)
    assert time.perf_counter() - start < 6


# ------------------------------------------------------------------------------ from a given start


def start_of(**changes: object) -> Mixture:
    parts: dict[str, object] = {
        "means": (1.0, 2.0),
        "variances": (0.5, 1.5),
        "shares": (0.6, 0.4),
        "converged": True,
        "iterations": 9,
    }
    return Mixture(**(parts | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_refit_takes_exactly_so_many_steps_of_sklearn(iterations: int) -> None:
    """Each `fit` of a warm sklearn mixture with max_iter=1 is one E and one M step."""
    values, start = losses("overlapping", 300, seed=3), start_of()
    theirs = GaussianMixture(2, max_iter=1, tol=0, reg_covar=1e-6, warm_start=True)
    theirs.means_ = np.array(start.means)[:, None]
    theirs.covariances_ = np.array(start.variances)[:, None, None]
    theirs.weights_ = np.array(start.shares)
    theirs.precisions_cholesky_ = 1 / np.sqrt(theirs.covariances_)
    theirs.converged_, theirs.lower_bound_ = True, -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(iterations):
            theirs.fit(values[:, None])
    ours = refit_mixture(values, start, max_iter=iterations, tol=0, reg_covar=1e-6)
    assert ours.iterations == iterations
    assert not ours.converged
    np.testing.assert_allclose(ours.means, theirs.means_[:, 0], rtol=1e-9)
    np.testing.assert_allclose(ours.variances, theirs.covariances_[:, 0, 0], rtol=1e-9)
    np.testing.assert_allclose(ours.shares, theirs.weights_, rtol=1e-9)


def test_a_refit_from_the_fit_stays_there() -> None:
    values = losses("normal", 500, seed=4)
    fitted = fit_mixture(values, max_iter=500, tol=1e-12)
    again = refit_mixture(values, fitted, max_iter=500, tol=1e-9)
    assert again.converged
    assert again.iterations <= 2
    np.testing.assert_allclose(again.means, fitted.means, rtol=1e-6)


def test_components_that_change_places_are_put_in_order() -> None:
    """A narrow first component keeps the ten 0.45; the wide second one takes the rest, 20 zeros and
    a 1, so that its mean falls to 1/21."""
    values = np.array([0.0] * 20 + [0.45] * 10 + [1.0])
    start = start_of(means=(0.45, 0.5), variances=(1e-4, 0.2), shares=(0.5, 0.5))
    found = refit_mixture(values, start, max_iter=1, tol=0, reg_covar=1e-6)
    assert found.means == pytest.approx((1 / 21, 0.45), abs=0.01)
    assert found.shares == pytest.approx((21 / 31, 10 / 31), abs=0.01)
    assert found.variances[0] > found.variances[1]


@pytest.mark.parametrize("values", [[], [0.3], [0.7, 0.7]], ids=["none", "one", "equal"])
def test_without_anything_to_separate_the_start_is_kept(values: list[float]) -> None:
    start = start_of()
    assert refit_mixture(np.array(values), start) == start_of(iterations=0)


def test_a_component_without_values_leaves_the_start() -> None:
    start = start_of(means=(0.5, 1e6), variances=(0.1, 0.1))
    assert refit_mixture(np.array([0.4, 0.5, 0.6]), start).means == start.means


def test_one_component_is_no_start() -> None:
    with pytest.raises(FedsieveError, match="no start"):
        refit_mixture(np.array([0.0, 1.0]), fit_mixture(np.array([1.0])))
