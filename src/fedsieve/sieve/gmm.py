"""A mixture of two normal distributions over losses; the one of smaller losses is the clean one.

The fit is expectation-maximisation from the best split into two groups (2-means), with the update
and stopping rules of scikit-learn's `GaussianMixture`. In one dimension the best split is found
exactly from running sums of the sorted values, so that no random start, and no seed, is needed.

Up to 16,384 values are fitted one by one. More are first gathered into at most that many narrow
groups of neighbours, each kept as its size, mean and inner variance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import check

Floats: TypeAlias = NDArray[np.float64]

_MOST_GROUPS = 16_384
_CHUNK = 32_768


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Two weighted normal distributions; component 0 has the smaller mean."""

    means: tuple[float, float]
    variances: tuple[float, float]
    shares: tuple[float, float]
    """How much of the values each component explains; they sum to 1."""
    converged: bool
    """Whether the mean log-likelihood moved by less than `tol` in the last iteration."""
    iterations: int
    degenerate: bool = False
    """True where there was nothing to separate: no values, all of them equal (to the precision of
    float32), or one component left without values. Component 0 then describes all values (mean and
    variance NaN where there are none), component 1 repeats it with share 0, and
    `clean_posterior` is 1 everywhere."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Sorted values in groups of neighbours, all arrays (g,)."""

    sizes: Floats
    means: Floats
    variances: Floats

    def distances(self, centres: Floats) -> Floats:
        """(k, g) mean squared distance of each group's values to each of the k centres."""
        return (self.means - centres[:, None]) ** 2 + self.variances


def fit_mixture(
    values: NDArray[np.floating],
    *,
    max_iter: int = 50,
    tol: float = 1e-2,
    reg_covar: float = 5e-4,
) -> Mixture:
    """The two-component mixture of `values` (n,).

    Stops when the mean log-likelihood moves by less than `tol` (nats), or after `max_iter`
    iterations. `reg_covar` is added to each variance in each iteration.
    """
    _check_values(values)
    _check_settings(max_iter, tol, reg_covar)
    if len(values) == 0:
        return _single(float("nan"), float("nan"), iterations=0)

    ordered = np.sort(values)
    lowest, highest = float(ordered[0]), float(ordered[-1])
    if _are_equal(lowest, highest):
        return _single((lowest + highest) / 2, reg_covar, iterations=0)
    groups = _group(ordered)
    first = _Expected(_two_means(groups), -np.inf)
    return _expectation_maximisation(groups, first, 0, max_iter, tol, reg_covar)


def refit_mixture(
    values: NDArray[np.floating],
    start: Mixture,
    *,
    max_iter: int = 50,
    tol: float = 1e-2,
    reg_covar: float = 5e-4,
) -> Mixture:
    """The mixture that expectation-maximisation on `values` (n,) makes of `start`.

    The first iteration computes memberships under `start`; the rules are those of `fit_mixture`,
    and `tol = 0` carries out exactly `max_iter` iterations. Where there is nothing to separate (no
    values, all of them equal, or a component left without any) the result is `start`.
    """
    _check_values(values)
    _check_settings(max_iter, tol, reg_covar)
    check(not start.degenerate, "A mixture of one component is no start; give one of two.")
    unchanged = replace(start, converged=True, iterations=0)
    if len(values) == 0 or _are_equal(float(values.min()), float(values.max())):
        return unchanged
    groups = _group(np.sort(values))
    means, variances, shares = (
        np.array(parameter) for parameter in (start.means, start.variances, start.shares)
    )
    first = _expect(groups, groups.distances(means), variances, shares)
    result = _expectation_maximisation(groups, first, 1, max_iter, tol, reg_covar)
    return unchanged if result.degenerate else result


def clean_posterior(mixture: Mixture, values: NDArray[np.floating]) -> Floats:
    """(n,) P(component 0 | value) = 1 / (1 + s₁N(v; m₁, σ₁²) / s₀N(v; m₀, σ₀²))."""
    _check_values(values)
    posterior = np.ones(len(values), dtype=np.float64)
    if mixture.degenerate:
        return posterior
    (mean_0, mean_1), (var_0, var_1) = mixture.means, mixture.variances
    share_0, share_1 = mixture.shares
    offset = np.log(share_1 / share_0) - 0.5 * np.log(var_1 / var_0)
    with np.errstate(over="ignore"):  # exp → inf is a posterior of 0
        for start in range(0, len(values), _CHUNK):  # chunks stay in the processor's cache
            v = values[start : start + _CHUNK].astype(np.float64)
            log_odds = 0.5 * ((v - mean_0) ** 2 / var_0 - (v - mean_1) ** 2 / var_1) + offset
            posterior[start : start + _CHUNK] = 1.0 / (1.0 + np.exp(log_odds))
    return posterior


def _check_values(values: NDArray[np.floating]) -> None:
    check(values.ndim == 1, f"A mixture is over one row of values, not over shape {values.shape}.")
    strange = len(values) - int(np.isfinite(values).sum())
    check(
        strange == 0,
        f"{strange} of {len(values)} values are not finite; leave them out or find the model that "
        "diverged.",
    )


def _check_settings(max_iter: int, tol: float, reg_covar: float) -> None:
    check(max_iter >= 1, f"max_iter must be at least 1, not {max_iter}.")
    check(tol >= 0, f"tol must not be negative, and is {tol}.")
    check(reg_covar > 0, f"reg_covar must be above 0, and is {reg_covar}.")


def _are_equal(lowest: float, highest: float) -> bool:
    """Whether values in this range are equal to the precision of float32."""
    return highest - lowest <= float(np.finfo(np.float32).eps) * max(abs(lowest), abs(highest))


def _single(mean: float, variance: float, iterations: int) -> Mixture:
    return Mixture(
        means=(mean, mean),
        variances=(variance, variance),
        shares=(1.0, 0.0),
        converged=True,
        iterations=iterations,
        degenerate=True,
    )


def _group(ordered: NDArray[np.floating]) -> _Groups:
    """Cut sorted values where either a grid of equal counts or one of equal widths does.

    Equal counts keep the groups narrow where values are dense, equal widths where they are sparse.
    """
    n = len(ordered)
    if n <= _MOST_GROUPS:
        return _Groups(np.ones(n), ordered.astype(np.float64), np.zeros(n))
    half = _MOST_GROUPS // 2
    by_count = np.linspace(0, n, half, endpoint=False).astype(np.int64)
    grid = np.linspace(ordered[0], ordered[-1], half, dtype=ordered.dtype)
    starts = np.union1d(by_count, np.searchsorted(ordered, grid))
    counts = np.diff(starts, append=n)
    exact = ordered.astype(np.float64)
    means = np.add.reduceat(exact, starts) / counts
    exact -= np.repeat(means, counts)
    np.square(exact, out=exact)
    return _Groups(counts.astype(np.float64), means, np.add.reduceat(exact, starts) / counts)


def _two_means(groups: _Groups) -> Floats:
    """(2, g) membership 0 or 1 of the split that leaves the smallest squared distance to its means.

    The distance left is a constant minus S₀²/n₀ + S₁²/n₁, with S the sums of the centred values.
    """
    total = groups.sizes.sum()
    centred = groups.means - groups.sizes @ groups.means / total
    sizes = np.cumsum(groups.sizes)[:-1]
    sums = np.cumsum(groups.sizes * centred)[:-1]  # those of all values sum to 0
    split = int(np.argmax(sums**2 / sizes + sums**2 / (total - sizes))) + 1
    left = np.arange(len(groups.means)) < split
    return np.stack([left, ~left]).astype(np.float64)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What an expectation step finds."""

    member: Floats
    """(2, g) how much of each group each component explains."""
    likelihood: float
    """Mean log-likelihood of the values under the mixture that the step looked at."""


def _expect(groups: _Groups, distances: Floats, variances: Floats, shares: Floats) -> _Expected:
    """Memberships under a mixture whose squared distances to the groups are `distances` (2, g)."""
    log_shares = np.log(shares) - 0.5 * np.log(2 * np.pi * variances)
    log_joint = log_shares[:, None] - 0.5 * distances / variances[:, None]
    log_density = np.logaddexp(log_joint[0], log_joint[1])
    likelihood = float(groups.sizes @ log_density / groups.sizes.sum())
    return _Expected(np.exp(log_joint - log_density), likelihood)


def _expectation_maximisation(
    groups: _Groups,
    expected: _Expected,
    iteration: int,
    max_iter: int,
    tol: float,
    reg_covar: float,
) -> Mixture:
    """Maximise, expect, and so on, from memberships that `iteration` iterations have given."""
    total = float(groups.sizes.sum())
    converged = False
    while True:
        held = expected.member * groups.sizes
        counts = held.sum(axis=1)
        if counts.min() < 1e-9 * total:
            mean = float(groups.sizes @ groups.means / total)
            spread = float(groups.sizes @ groups.distances(np.full(1, mean))[0] / total)
            return _single(mean, spread + reg_covar, iteration)
        means = held @ groups.means / counts
        distances = groups.distances(means)
        variances = (held * distances).sum(axis=1) / counts + reg_covar
        shares = counts / total
        if converged or iteration == max_iter:
            break

        previous, expected = expected, _expect(groups, distances, variances, shares)
        converged = abs(expected.likelihood - previous.likelihood) < tol
        iteration += 1

    first, second = np.argsort(means, kind="stable")
    return Mixture(
        means=(float(means[first]), float(means[second])),
        variances=(float(variances[first]), float(variances[second])),
        shares=(float(shares[first]), float(shares[second])),
        converged=converged,
        iterations=iteration,
    )
