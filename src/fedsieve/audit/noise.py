"""How given labels come about, fitted without a single true one.

A sample at site k with image x has a true class c and a given label y:

    η_k(c | x) ∝ η(c | x) · ω_k(c) / ω(c)        the model's opinion, for the classes of this site
    T_k(y | c) = 1 − ρ_kc where y = c, else ρ_kc · N(y | c),      ρ_kc = min(level_k · ρ_c, 0.99)
    P(c | x, y, k) ∝ η_k(c | x) · T_k(y | c)                                     and so
    p_wrong    = 1 − P(y | x, y, k)

η comes from the logits z of a model *that has never seen the label y* (`fedsieve.audit.crossfit`):
softmax(z/τ), and where the model has learnt the noise along with the classes, that with the noise
taken out again: the distribution η with η·T closest to it (`without_noise`).

Nobody knows c, so everything is fitted to the given labels by expectation-maximisation: the shared
ω, ρ, N by the server, ω_k and level_k by each site. τ, and whether the model has learnt the noise,
are those under which the held-out labels are most likely. A site that has few samples (or few of a
class) is drawn towards what the others say: `PSEUDO` samples speak for them.

What leaves a site in a step is `Sums`: a C×C table of expected counts (true class, given label),
the sum of η over its samples, the log-likelihood of its labels, and the number of its samples.
Logits, posteriors, ω_k and level_k stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import check

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

PSEUDO = 20.0
"""Samples that the whole federation's numbers count for, beside a site's or a class's own."""
FIRST_RATE = 0.2
"""The noise rate that the fit starts from."""
HIGHEST_RATE = 0.99
TEMPERATURES = tuple(float(t) for t in np.geomspace(0.25, 2.0, 13).round(3))
FIRST_TEMPERATURE = 6
"""Where in `TEMPERATURES` the search starts."""
MOST_STEPS = 40
STILL = 1e-5
"""A fit has converged when the mean log-likelihood moves by less."""
UNMIXING_STEPS = 10
TINY = 1e-9


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a site knows of its samples. It stays there."""

    logits: Floats
    """(n, C) by a model that has not seen these labels"""
    given: Labels
    """(n,)"""

    def __post_init__(self) -> None:
        check(
            self.logits.ndim == 2 and self.given.shape == self.logits.shape[:1],
            f"There must be one row of logits for each label, not {self.logits.shape} for "
            f"{self.given.shape}.",
        )
        check(
            bool(np.isfinite(self.logits).all()),
            "The model's outputs are not finite; train it with a smaller learning rate.",
        )

    @property
    def classes(self) -> int:
        return int(self.logits.shape[1])


@dataclass(frozen=True, eq=False)
class Shared:
    """What the server tells every site."""

    temperature: float
    """τ"""
    has_learnt_noise: bool
    """whether the model predicts given labels rather than true classes"""
    prior: Floats
    """ω, (C,) how often the model sees each class"""
    rates: Floats
    """ρ, (C,) share of wrong labels by true class"""
    spread: Floats
    """N, (C, C) what a wrong label of a true class (row) says; zero on the diagonal"""

    def confusion(self, level: float = 1.0) -> Floats:
        """T, (C, C): the label (column) of each true class (row) at a site of this level."""
        rates = np.minimum(level * self.rates, HIGHEST_RATE)
        return np.diag(1 - rates) + rates[:, None] * self.spread


@dataclass(frozen=True, eq=False)
class Site:
    """What a site believes of itself. It stays there."""

    prior: Floats
    """ω_k, (C,) how often each true class occurs"""
    level: float
    """its noise as a multiple of the federation's"""


@dataclass(frozen=True, eq=False)
class Sums:
    """All that leaves a site in one step of the fit."""

    samples: int
    joint: Floats
    """(C, C) expected number of samples by true class (row) and given label (column)"""
    seen: Floats
    """(C,) Σ η"""
    log_likelihood: float
    """of the given labels"""


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """A fitted federation."""

    shared: Shared
    sites: tuple[Site, ...]
    log_likelihood: float
    """mean over all samples"""


def fit_noise(evidence: Sequence[Evidence]) -> NoiseModel:
    """The noise of a federation of sites (one will do), from held-out predictions."""
    held = [site for site in evidence if len(site.given)]
    check(bool(held), "There are no labels to audit.")
    check(
        len({site.classes for site in held}) == 1, "All sites must have logits of the same classes."
    )
    fits = [_best_temperature(evidence, has_learnt_noise=learnt) for learnt in (False, True)]
    return max(fits, key=lambda fit: fit.log_likelihood)


def _best_temperature(evidence: Sequence[Evidence], *, has_learnt_noise: bool) -> NoiseModel:
    """Climb to the temperature of highest likelihood, each fit starting from its neighbour's."""
    place = FIRST_TEMPERATURE
    best = fit_at(evidence, TEMPERATURES[place], has_learnt_noise=has_learnt_noise)
    for direction in (-1, 1):
        moved = False
        while 0 <= place + direction < len(TEMPERATURES):
            other = fit_at(
                evidence,
                TEMPERATURES[place + direction],
                has_learnt_noise=has_learnt_noise,
                start=best,
            )
            if other.log_likelihood <= best.log_likelihood:
                break
            best, place, moved = other, place + direction, True
        if moved:
            break
    return best


def fit_at(
    evidence: Sequence[Evidence],
    temperature: float,
    *,
    has_learnt_noise: bool,
    start: NoiseModel | None = None,
) -> NoiseModel:
    """Expectation-maximisation at one temperature: steps at the sites, their sums at the server."""
    if start is None:
        shared = first_guess(evidence[0].classes, temperature, has_learnt_noise=has_learnt_noise)
        sites = tuple(Site(shared.prior, 1.0) for _ in evidence)
    else:
        shared, sites = replace(start.shared, temperature=temperature), start.sites
    likelihood = -np.inf
    for _ in range(MOST_STEPS):
        steps = [site_step(*pair, shared) for pair in zip(evidence, sites, strict=True)]
        sites = tuple(site for site, _ in steps)
        previous, (shared, likelihood) = likelihood, server_step(shared, [s for _, s in steps])
        if abs(likelihood - previous) < STILL:
            break
    return NoiseModel(shared, sites, likelihood)


def first_guess(classes: int, temperature: float, *, has_learnt_noise: bool) -> Shared:
    """Where the fit starts: the same noise everywhere, from each class to all others."""
    spread = (1 - np.eye(classes)) / (classes - 1)
    return Shared(
        temperature,
        has_learnt_noise,
        np.full(classes, 1 / classes),
        np.full(classes, FIRST_RATE),
        spread,
    )


# -------------------------------------------------------------------------------------- at a site


def site_step(evidence: Evidence, site: Site, shared: Shared) -> tuple[Site, Sums]:
    """The site's new view of itself, and what it tells the server."""
    return _step(model_opinion(evidence.logits, shared), evidence.given, site, shared)


def _step(seen: Floats, given: Labels, site: Site, shared: Shared) -> tuple[Site, Sums]:
    posterior, likelihood = _posterior(seen, given, site, shared)
    n, classes = seen.shape
    joint = np.zeros((classes, classes))
    np.add.at(joint.T, given, posterior)
    prior = (joint.sum(axis=1) + PSEUDO * shared.prior) / (n + PSEUDO)
    wrong = joint.sum() - np.trace(joint)
    expected = joint.sum(axis=1) @ shared.rates
    pseudo = PSEUDO * float(shared.rates.mean())
    level = float((wrong + pseudo) / (expected + pseudo))
    return Site(prior, level), Sums(n, joint, seen.sum(axis=0), float(np.log(likelihood).sum()))


def own_view(evidence: Evidence, shared: Shared) -> Site:
    """What a site believes of itself under a fitted `shared`, which stays as it is."""
    seen = model_opinion(evidence.logits, shared)
    site, likelihood = Site(shared.prior, 1.0), -np.inf
    for _ in range(MOST_STEPS):
        site, sums = _step(seen, evidence.given, site, shared)
        previous, likelihood = likelihood, sums.log_likelihood / max(1, sums.samples)
        if abs(likelihood - previous) < STILL:
            break
    return site


def posterior_of(evidence: Evidence, site: Site, shared: Shared) -> Floats:
    """P(c | x, y, k), (n, C): what each sample is, given its image, its label and its site."""
    seen = model_opinion(evidence.logits, shared)
    return _posterior(seen, evidence.given, site, shared)[0]


def model_opinion(logits: Floats, shared: Shared) -> Floats:
    """η(c | x), (n, C): what the model takes each image for, whatever its label or site."""
    scaled = logits / shared.temperature
    scaled = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    probabilities: Floats = scaled / scaled.sum(axis=1, keepdims=True) + TINY
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    if shared.has_learnt_noise:
        return without_noise(probabilities, shared.confusion())
    return probabilities


def without_noise(labels: Floats, confusion: Floats) -> Floats:
    """η, (n, C), for which η·T comes closest to the distributions of `labels`, (n, C).

    Closest in Kullback-Leibler divergence, by Richardson's and Lucy's iteration, which stays on
    the simplex: η_c ← η_c · Σ_y T(y | c) · p(y) / (η·T)(y).
    """
    true = labels
    for _ in range(UNMIXING_STEPS):
        true = true * ((labels / (true @ confusion)) @ confusion.T)
    true = true + TINY
    true /= true.sum(axis=1, keepdims=True)
    return true


def _posterior(seen: Floats, given: Labels, site: Site, shared: Shared) -> tuple[Floats, Floats]:
    """P(c | x, y, k), (n, C), and P(y | x, k), (n,)."""
    here = seen * (site.prior / shared.prior)
    here /= here.sum(axis=1, keepdims=True)
    joint = here * shared.confusion(site.level).T[given]
    likelihood = joint.sum(axis=1)
    return joint / likelihood[:, None], likelihood


# ---------------------------------------------------------------------------------- at the server


def server_step(shared: Shared, sums: Sequence[Sums]) -> tuple[Shared, float]:
    """The new shared numbers, and the mean log-likelihood under the old ones."""
    samples = sum(site.samples for site in sums)
    joint = np.sum([site.joint for site in sums], axis=0)
    seen = np.sum([site.seen for site in sums], axis=0)
    wrong = joint - np.diag(np.diag(joint))
    overall = wrong.sum() / samples
    pseudo = PSEUDO * overall
    rates = (wrong.sum(axis=1) + pseudo) / (joint.sum(axis=1) + PSEUDO)
    spread = wrong + (pseudo + TINY) * (1 - np.eye(len(joint))) / (len(joint) - 1)
    spread /= spread.sum(axis=1, keepdims=True)
    likelihood = sum(site.log_likelihood for site in sums) / samples
    return (
        replace(shared, prior=seen / seen.sum(), rates=rates + TINY, spread=spread),
        float(likelihood),
    )
