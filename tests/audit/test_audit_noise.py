"""The noise model: Bayes' rule by hand, known noise found again, limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.audit import noise
from fedsieve.audit.noise import Evidence, Shared, Site, Sums
from fedsieve.errors import FedsieveError


def shared(rate: float, *, temperature: float = 1.0, learnt: bool = False) -> Shared:
    """Two classes, as frequent as each other."""
    return Shared(
        temperature, learnt, np.full(2, 0.5), np.full(2, rate), np.array([[0.0, 1.0], [1.0, 0.0]])
    )


def logits(*probabilities: tuple[float, float]) -> np.ndarray:
    return np.log(np.array(probabilities))


def test_the_posterior_is_bayes_rule() -> None:
    """η = (.9, .1), label 1, noise .2: wrong : right = .9·.2 : .1·.8 = .18 : .08."""
    evidence = Evidence(logits((0.9, 0.1)), np.array([1]))
    posterior = noise.posterior_of(evidence, Site(np.full(2, 0.5), 1.0), shared(0.2))
    np.testing.assert_allclose(posterior, [[18 / 26, 8 / 26]], atol=1e-6)


def test_the_sites_classes_and_level_change_the_posterior() -> None:
    """Prior (.2, .8) and level 2: η ∝ (.9·.4, .1·1.6) = (.36, .16); ρ = .4;
    wrong : right = .36·.4 : .16·.6 = .144 : .096."""
    evidence = Evidence(logits((0.9, 0.1)), np.array([1]))
    posterior = noise.posterior_of(evidence, Site(np.array([0.2, 0.8]), 2.0), shared(0.2))
    np.testing.assert_allclose(posterior, [[0.6, 0.4]], atol=1e-6)


def test_the_temperature_sharpens_the_model() -> None:
    """p^(1/τ) with τ = ½: (.8², .2²) = (.64, .04) / .68."""
    opinion = noise.model_opinion(logits((0.8, 0.2)), shared(0.2, temperature=0.5))
    np.testing.assert_allclose(opinion, [[64 / 68, 4 / 68]], atol=1e-6)


def test_a_level_never_makes_all_labels_wrong() -> None:
    confusion = shared(0.5).confusion(level=10.0)
    np.testing.assert_allclose(confusion, [[0.01, 0.99], [0.99, 0.01]])


@given(st.floats(0.02, 0.4), st.integers(2, 6), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_noise_that_a_model_has_learnt_is_taken_out_again(
    rate: float, classes: int, seed: int
) -> None:
    """η·T is given, so the way back brings η·T closer than the start does, and stays a
    distribution."""
    rng = np.random.default_rng(seed)
    true = rng.dirichlet(np.full(classes, 0.3), size=20)
    confusion = (1 - rate) * np.eye(classes) + rate * (1 - np.eye(classes)) / (classes - 1)
    labels = true @ confusion
    found = noise.without_noise(labels, confusion)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert (found >= 0).all()
    assert np.abs(found - true).sum() <= np.abs(labels - true).sum() + 1e-6


def test_a_sites_sums_are_those_of_its_posterior() -> None:
    """Two labels of the same image: joint has the posteriors in the columns of the labels."""
    evidence = Evidence(logits((0.9, 0.1), (0.9, 0.1)), np.array([1, 0]))
    site, sums = noise.site_step(evidence, Site(np.full(2, 0.5), 1.0), shared(0.2))
    expected = np.array([[72 / 74, 18 / 26], [2 / 74, 8 / 26]])
    np.testing.assert_allclose(sums.joint, expected, atol=1e-6)
    np.testing.assert_allclose(sums.seen, [1.8, 0.2], atol=1e-6)
    assert sums.samples == 2
    assert sums.log_likelihood == pytest.approx(np.log(0.26) + np.log(0.74), abs=1e-6)
    of_class_0 = 72 / 74 + 18 / 26
    np.testing.assert_allclose(
        site.prior, [(of_class_0 + 10) / 22, (2 - of_class_0 + 10) / 22], atol=1e-6
    )
    wrong = 18 / 26 + 2 / 74
    assert site.level == pytest.approx((wrong + 4) / (2 * 0.2 + 4), abs=1e-6)


def test_the_server_needs_nothing_but_sums() -> None:
    """Of 100 samples of class 0 ten are called 1, of 100 of class 1 thirty are called 0; each rate
    is drawn towards the mean .2 by 20 pseudo samples: (10 + 4)/120 and (30 + 4)/120."""
    halves = [
        Sums(100, np.array([[45.0, 5.0], [15.0, 35.0]]), np.array([60.0, 40.0]), -30.0),
        Sums(100, np.array([[45.0, 5.0], [15.0, 35.0]]), np.array([60.0, 40.0]), -50.0),
    ]
    after, likelihood = noise.server_step(shared(0.1), halves)
    np.testing.assert_allclose(after.rates, [14 / 120, 34 / 120], atol=1e-6)
    np.testing.assert_allclose(after.prior, [0.6, 0.4])
    np.testing.assert_allclose(after.spread, [[0, 1], [1, 0]])
    assert likelihood == pytest.approx(-0.4)


def one_of_each(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A class from every row of probabilities."""
    beyond = probabilities.cumsum(axis=1) < rng.random((len(probabilities), 1))
    return np.minimum(beyond.sum(axis=1), probabilities.shape[1] - 1)


def drawn(
    sizes: tuple[int, ...],
    rates: tuple[float, ...],
    seed: int,
    *,
    classes: int = 4,
    noisy_model: bool = False,
    to_next: bool = False,
) -> tuple[list[Evidence], list[np.ndarray]]:
    """Sites whose model is right about P(class | image), and their true classes."""
    rng = np.random.default_rng(seed)
    sites, truths = [], []
    spread = np.roll(np.eye(classes), 1, axis=1)
    if not to_next:
        spread = (1 - np.eye(classes)) / (classes - 1)
    pooled = (1 - np.mean(rates)) * np.eye(classes) + np.mean(rates) * spread
    for n, rate in zip(sizes, rates, strict=True):
        opinions = rng.dirichlet(np.full(classes, 0.15), size=n)
        true = one_of_each(opinions, rng)
        other = one_of_each(spread[true], rng)
        labels = np.where(rng.random(n) < rate, other, true)
        seen = opinions @ pooled if noisy_model else opinions
        sites.append(Evidence(np.log(seen + 1e-6), labels.astype(np.int64)))
        truths.append(true)
    return sites, truths


def scored(sites: list[Evidence]) -> tuple[noise.NoiseModel, list[np.ndarray]]:
    fitted = noise.fit_noise(sites)
    p_wrong = [
        1 - noise.posterior_of(e, s, fitted.shared)[np.arange(len(e.given)), e.given]
        for e, s in zip(sites, fitted.sites, strict=True)
    ]
    return fitted, p_wrong


@pytest.mark.parametrize("noisy_model", [False, True])
@pytest.mark.parametrize("to_next", [False, True])
def test_known_noise_is_found_again_and_calibrated(noisy_model: bool, to_next: bool) -> None:
    """Whether the model has learnt the noise or not: each site's rate to ± 6 %, and a calibration
    error below 5 %."""
    rates = (0.0, 0.2, 0.4)
    sites, truths = drawn((1500, 1500, 1500), rates, 7, noisy_model=noisy_model, to_next=to_next)
    _, p_wrong = scored(sites)
    for rate, site in zip(rates, p_wrong, strict=True):
        assert site.mean() == pytest.approx(rate, abs=0.06)
    p = np.concatenate(p_wrong)
    wrong = np.concatenate([e.given != t for e, t in zip(sites, truths, strict=True)])
    tenth = np.minimum((10 * p).astype(int), 9)
    gaps = [abs((p - wrong)[tenth == part].sum()) for part in range(10)]
    assert sum(gaps) / len(p) < 0.05


def test_right_labels_are_left_alone() -> None:
    """Nothing is wrong, so hardly anything may be flagged."""
    sites, _ = drawn((800, 800), (0.0, 0.0), 3)
    _, p_wrong = scored(sites)
    p = np.concatenate(p_wrong)
    assert p.mean() < 0.02
    assert (p >= 0.5).mean() < 0.01


def test_the_kind_of_mistake_is_found() -> None:
    """Wrong labels that always say the next class: the spread says so."""
    sites, _ = drawn((2000, 2000), (0.3, 0.3), 5, to_next=True)
    spread = noise.fit_noise(sites).shared.spread
    assert (spread[np.arange(4), (np.arange(4) + 1) % 4] > 0.8).all()


def test_the_best_temperature_is_found_in_both_directions() -> None:
    """Logits ten times too large or too small: the search ends on that side of the middle."""
    sites, _ = drawn((1500,), (0.2,), 11)
    middle = noise.TEMPERATURES[noise.FIRST_TEMPERATURE]
    for factor in (4.0, 0.25):
        scaled = [Evidence(e.logits * factor, e.given) for e in sites]
        found = noise.fit_noise(scaled).shared.temperature
        assert (found > middle) == (factor > 1)


def test_a_site_can_form_its_own_view_from_what_the_server_says() -> None:
    """The same as it had when the fit ended."""
    sites, _ = drawn((600, 300), (0.1, 0.4), 13)
    fitted = noise.fit_noise(sites)
    for evidence, site in zip(sites, fitted.sites, strict=True):
        own = noise.own_view(evidence, fitted.shared)
        assert own.level == pytest.approx(site.level, rel=0.1)
        np.testing.assert_allclose(own.prior, site.prior, atol=0.02)


def test_a_site_of_one_sample_and_one_of_none_are_no_trouble() -> None:
    sites, _ = drawn((500, 1), (0.2, 0.2), 17)
    empty = Evidence(np.empty((0, 4)), np.empty(0, dtype=np.int64))
    fitted = noise.fit_noise([*sites, empty])
    assert all(np.isfinite(site.level) for site in fitted.sites)
    assert noise.posterior_of(empty, fitted.sites[2], fitted.shared).shape == (0, 4)


def test_bad_evidence_is_refused_in_a_sentence() -> None:
    with pytest.raises(FedsieveError, match="one row of logits"):
        Evidence(np.zeros((2, 3)), np.zeros(3, dtype=np.int64))
    with pytest.raises(FedsieveError, match="not finite"):
        Evidence(np.array([[np.nan, 0.0]]), np.zeros(1, dtype=np.int64))
    with pytest.raises(FedsieveError, match="no labels"):
        noise.fit_noise([])
    two, three = (Evidence(np.zeros((1, c)), np.zeros(1, dtype=np.int64)) for c in (2, 3))
    with pytest.raises(FedsieveError, match="same classes"):
        noise.fit_noise([two, three])
