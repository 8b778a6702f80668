"""Noise: how many labels are wrong, at whom, and what they become."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.scenes import Noise, Partition, Scene, SceneConfig, build_scene
from fedsieve.scenes.noise import draw_levels, flip_targets

BLOCKS = Noise(kind="asymmetric", low=0.2, flip_to="next-in-block")


def scene_of(
    noise: Noise, labels, *, clients: int = 4, seed: int = 0, classes: int = 10, **given_data
) -> Scene:
    # A stratified partition has no legacy stream, so that the library's own streams are tested.
    config = SceneConfig(clients=clients, partition=Partition(stratified=True), noise=noise)
    return build_scene(config, np.asarray(labels), classes, seed, **given_data)


def deviation(count: float, n: int, p: float) -> float:
    """Distance of a binomial count from its mean, in standard deviations."""
    return float(abs(count - n * p) / np.sqrt(n * p * (1 - p)))


@pytest.mark.parametrize("stratified", [False, True], ids=["fedgr-streams", "own-streams"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(1, 7),
    classes=st.integers(2, 6),
    samples=st.integers(7, 90),
    share=st.floats(0, 1),
    levels=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    kind=st.sampled_from(["symmetric", "asymmetric", "mixed"]),
)
def test_exact_noise_flips_exactly_floor_n_rho(
    stratified, seed, clients, classes, samples, share, levels, kind
):
    true = np.random.default_rng(seed).integers(classes, size=samples)
    noise = Noise(kind=kind, share=share, low=levels[0], high=levels[1])
    config = SceneConfig(clients=clients, partition=Partition(stratified=stratified), noise=noise)
    scene = build_scene(config, true, classes, seed)
    wrong = scene.given != true
    for held, level, what in zip(scene.clients, scene.levels, scene.kinds, strict=True):
        assert wrong[held].sum() == int(len(held) * level)
        if what == "asymmetric":
            flipped = held[wrong[held]]
            assert np.array_equal(scene.given[flipped], (true[flipped] + 1) % classes)
    assert (scene.levels > 0).sum() <= int(clients * share)
    assert {*scene.kinds} <= {
        "none",
        *(("symmetric", "asymmetric") if kind == "mixed" else (kind,)),
    }
    assert scene.given.min() >= 0
    assert scene.given.max() < classes
    assert np.array_equal(build_scene(config, true, classes, seed).given, scene.given)


@pytest.mark.parametrize("stratified", [False, True], ids=["fedgr-streams", "own-streams"])
def test_symmetric_noise_is_uniform_over_the_other_classes(stratified):
    """All of 20,000 labels of class 3 are flipped: each other class gets Binomial(20000, 1/9)."""
    true = np.full(20_000, 3)
    noise = Noise(kind="symmetric", low=1.0, high=1.0)
    config = SceneConfig(clients=5, partition=Partition(stratified=stratified), noise=noise)
    counts = np.bincount(build_scene(config, true, 10, 1).given, minlength=10)
    assert counts[3] == 0
    assert max(deviation(counts[c], 20_000, 1 / 9) for c in range(10) if c != 3) < 4.5


def test_fedcorr_noise_may_keep_the_true_class():
    """Bernoulli(δ) per sample, uniform over all C: the noise rate is δ(C−1)/C."""
    true = np.arange(40_000) % 10
    noise = Noise(
        kind="symmetric", clients="fixed", rate=0.6, samples="bernoulli", include_true=True
    )
    scene = scene_of(noise, true)
    assert deviation(scene.overall_noise(true) * 40_000, 40_000, 0.6 * 9 / 10) < 4.5
    assert len(set((scene.true_rates(true) * 10_000).round().astype(int))) > 1


@pytest.mark.parametrize("include_true", [False, True])
def test_label_range_confines_the_new_labels(include_true):
    true = np.arange(30_000) % 30
    noise = Noise(
        kind="symmetric", clients="fixed", rate=1.0, include_true=include_true, label_range=10
    )
    scene = scene_of(noise, true, classes=30)
    assert scene.given.max() == 9
    kept = (scene.given == true).sum()
    if include_true:
        assert deviation(kept, 10_000, 1 / 10) < 4.5
    else:
        assert kept == 0
    # A class beyond the range goes to each of the ten with probability 1/10.
    counts = np.bincount(scene.given[true >= 10], minlength=10)
    assert max(deviation(n, 20_000, 1 / 10) for n in counts) < 4.5


def test_bernoulli_samples_follow_their_level():
    true = np.zeros(50_000, dtype=int)
    noise = Noise(kind="symmetric", clients="fixed", rate=0.3, samples="bernoulli")
    wrong = scene_of(noise, true).overall_noise(true) * 50_000
    assert deviation(wrong, 50_000, 0.3) < 4.5
    assert wrong != 15_000


def test_global_noise_is_exact_in_each_class():
    """FedLSR: int(ε n_c) of each class in the whole data set, y → y−1 mod C."""
    true = np.repeat([0, 1, 2], [101, 50, 9])
    noise = Noise(kind="asymmetric", clients="global", rate=0.3, flip_to="previous")
    scene = scene_of(noise, true, classes=3)
    wrong = scene.given != true
    assert np.bincount(true[wrong], minlength=3).tolist() == [30, 15, 2]
    assert np.array_equal(scene.given[wrong], (true[wrong] - 1) % 3)
    assert scene.levels.tolist() == [0.3] * 4
    assert scene.kinds == ("asymmetric",) * 4


def test_global_noise_serves_clients_that_share_samples():
    true = np.repeat(np.arange(4), 50)
    config = SceneConfig(
        clients=5,
        partition=Partition(kind="classes", classes=2, overlap=True),
        noise=Noise(kind="symmetric", clients="global", rate=0.4),
    )
    scene = build_scene(config, true, 4, 3)
    assert int((scene.given != true).sum()) == 80
    held = np.concatenate(scene.clients)
    assert scene.overall_noise(true) == (scene.given[held] != true[held]).mean()


def test_mixed_noise_tosses_a_fair_coin_for_noisy_clients_only():
    noise = Noise(kind="mixed", clients="bernoulli", share=0.5, low=0.5)
    scene = scene_of(noise, np.arange(8000) % 10, clients=2000)
    noisy = int((scene.levels > 0).sum())
    assert deviation(noisy, 2000, 0.5) < 4.5
    assert scene.kinds.count("none") == 2000 - noisy
    assert deviation(scene.kinds.count("symmetric"), noisy, 0.5) < 4.5


def test_uniform_levels_have_an_exact_number_of_noisy_clients():
    noise = Noise(kind="symmetric", share=0.37, low=0.2, high=0.4)
    levels = draw_levels(noise, 1000, np.random.default_rng(0))
    drawn = levels[levels > 0]
    assert len(drawn) == 370
    assert 0.2 <= drawn.min() < drawn.max() <= 0.4
    # The mean of 370 uniform draws: standard deviation 0.2 / sqrt(12 · 370).
    assert abs(drawn.mean() - 0.3) < 4.5 * 0.2 / np.sqrt(12 * 370)
    assert (levels[:370] > 0).sum() < 370


def test_bernoulli_levels_reach_from_tau_to_one():
    noise = Noise(kind="symmetric", clients="bernoulli", share=0.4, low=0.5)
    levels = draw_levels(noise, 5000, np.random.default_rng(1))
    drawn = levels[levels > 0]
    assert deviation(len(drawn), 5000, 0.4) < 4.5
    assert 0.5 <= drawn.min() < 0.51
    assert 0.99 < drawn.max() <= 1


def test_normal_levels_are_clipped():
    """P(N(.3, .2) < 0) = Φ(−1.5) = 0.0668 of all levels become exactly 0."""
    noise = Noise(kind="symmetric", clients="normal", mean=0.3)
    levels = draw_levels(noise, 20_000, np.random.default_rng(2))
    assert levels.min() == 0
    assert levels.max() <= 1
    assert deviation((levels == 0).sum(), 20_000, 0.0668072) < 4.5
    assert np.median(levels) == pytest.approx(0.3, abs=4.5 * 0.2 * 1.2533 / np.sqrt(20_000))


def test_matrix_noise_follows_its_rows():
    matrix = [[1, 0, 0], [0.2, 0.5, 0.3], [0, 0.25, 0.75]]
    true = np.repeat([0, 1, 2], 10_000)
    scene = scene_of(Noise(kind="matrix", matrix=matrix), true, classes=3)
    for c in range(3):
        counts = np.bincount(scene.given[true == c], minlength=3)
        for target, p in enumerate(matrix[c]):
            if p in (0, 1):
                assert counts[target] == 10_000 * p
            else:
                assert deviation(counts[target], 10_000, p) < 4.5
    np.testing.assert_allclose(scene.levels, (0 + 0.5 + 0.25) / 3)
    assert scene.kinds == ("matrix",) * 4


def test_labels_from_a_file(tmp_path):
    true = np.arange(8) % 2
    np.save(tmp_path / "human.npy", np.array([0, 1, 1, 1, 0, 0, 0, 1], dtype=np.uint8))
    noise = Noise(kind="file", path=str(tmp_path / "human.npy"))
    config = SceneConfig(clients=2, partition=Partition(kind="sites"), noise=noise)
    scene = build_scene(config, true, 2, 0, sites=[0, 0, 0, 0, 1, 1, 1, 1])
    assert scene.given.tolist() == [0, 1, 1, 1, 0, 0, 0, 1]
    assert scene.levels.tolist() == [0.25, 0.25]
    assert scene.kinds == ("file", "file")


def test_no_noise_keeps_every_label():
    true = np.arange(50) % 10
    scene = scene_of(Noise(), true)
    assert np.array_equal(scene.given, true)
    assert scene.kinds == ("none",) * 4
    assert not scene.levels.any()


@pytest.mark.parametrize(
    ("noise", "classes", "superclass_of", "targets"),
    [
        (Noise(kind="asymmetric", low=0.2), 4, None, [1, 2, 3, 0]),
        (Noise(kind="asymmetric", low=0.2, flip_to="previous"), 4, None, [3, 0, 1, 2]),
        (BLOCKS, 10, None, [1, 2, 3, 4, 0, 6, 7, 8, 9, 5]),
        (
            Noise(kind="asymmetric", low=0.2, flip_to="next-in-block", block=3),
            8,
            None,
            [1, 2, 0, 4, 5, 3, 7, 6],
        ),
        (
            Noise(kind="asymmetric", low=0.2, flip_to="next-in-superclass"),
            6,
            (7, 1, 7, 1, 1, 7),
            [2, 3, 5, 4, 1, 0],
        ),
    ],
)
def test_flip_targets(noise, classes, superclass_of, targets):
    assert flip_targets(noise, classes, superclass_of).tolist() == targets


def test_superclass_noise_reaches_the_scene():
    true = np.repeat(np.arange(4), 25)
    noise = Noise(kind="asymmetric", clients="fixed", rate=1.0, flip_to="next-in-superclass")
    scene = scene_of(noise, true, classes=4, superclass_of=(0, 1, 0, 1))
    assert np.array_equal(scene.given, np.array([2, 3, 0, 1])[true])


def test_a_clients_noise_does_not_depend_on_the_other_clients():
    """The stream of client k is its own: two scenes that agree on it give it the same labels."""
    noise = Noise(kind="symmetric", clients="fixed", rate=0.5)
    true = np.arange(60) % 5
    for second in ([1] * 30 + [2] * 10, [2] * 10 + [1] * 30):
        config = SceneConfig(clients=3, partition=Partition(kind="sites"), noise=noise)
        scene = build_scene(config, true, 5, 4, sites=[0] * 20 + second)
        if second[0] == 1:
            first = scene.given[:20]
    assert np.array_equal(first, scene.given[:20])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "sym"}, "must be one of none, symmetric"),
        ({"kind": "symmetric", "low": 0.2, "clients": "all"}, "clients must be one of"),
        ({"kind": "symmetric", "low": 0.2, "samples": "some"}, "samples must be one of"),
        ({"kind": "asymmetric", "low": 0.2, "flip_to": "cat"}, "flip_to must be one of"),
        ({"kind": "none", "share": 0.5}, 'share means nothing with kind = "none"'),
        ({"kind": "none", "clients": "fixed"}, "clients means nothing"),
        ({"kind": "symmetric"}, "low must be set"),
        ({"kind": "symmetric", "clients": "normal"}, "mean must be set"),
        ({"kind": "symmetric", "clients": "global"}, "rate must be set"),
        ({"kind": "symmetric", "clients": "fixed", "rate": 0.2, "low": 0.1}, "low means nothing"),
        ({"kind": "symmetric", "low": 0.1, "rate": 0.2}, 'nothing with .* clients = "uniform"'),
        ({"kind": "symmetric", "low": 0.1, "std": 0.1}, "std means nothing"),
        ({"kind": "symmetric", "low": 0.1, "flip_to": "previous"}, "flip_to means nothing"),
        ({"kind": "asymmetric", "low": 0.1, "block": 4}, 'nothing with .* flip_to = "next"'),
        ({"kind": "asymmetric", "low": 0.1, "include_true": True}, "include_true means nothing"),
        ({"kind": "mixed", "low": 0.1, "label_range": 10}, "label_range means nothing"),
        ({"kind": "matrix"}, "matrix must be set"),
        ({"kind": "matrix", "matrix": [[1.0]], "low": 0.1}, "low means nothing"),
        ({"kind": "file"}, "path must be set"),
        ({"kind": "file", "path": "x.npy", "samples": "bernoulli"}, "samples means nothing"),
        ({"kind": "symmetric", "low": 0.7, "high": 0.5}, "low must not be greater"),
        ({"kind": "symmetric", "low": -0.1}, "between 0 and 1"),
        ({"kind": "symmetric", "low": 0.1, "share": 1.1}, "between 0 and 1"),
        ({"kind": "symmetric", "clients": "normal", "mean": 0.3, "std": -1}, "at least 0"),
        ({"kind": "symmetric", "low": 0.1, "label_range": 1}, "whole number >= 2"),
        (
            {"kind": "asymmetric", "low": 0.1, "flip_to": "next-in-block", "block": 1},
            "whole number >= 2",
        ),
        ({"kind": "mixed", "clients": "global", "rate": 0.2}, "coin per client"),
        ({"kind": "matrix", "matrix": []}, "as many columns as rows"),
        ({"kind": "matrix", "matrix": [[1, 0]]}, "as many columns as rows"),
        ({"kind": "matrix", "matrix": [[0.5, 0.4], [0, 1]]}, "sum to 1"),
        ({"kind": "matrix", "matrix": [[1.5, -0.5], [0, 1]]}, "sum to 1"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(FedsieveError, match=match):
        Noise(**options)


@pytest.mark.parametrize(
    ("noise", "classes", "match"),
    [
        (Noise(kind="symmetric", low=0.2), 1, "at least two classes"),
        (Noise(kind="symmetric", low=0.2, label_range=10), 5, "must not exceed"),
        (Noise(kind="matrix", matrix=((1, 0), (0, 1))), 5, "has 2 rows"),
        (BLOCKS, 6, "class 5 is alone"),
        (Noise(kind="mixed", low=0.2, flip_to="next-in-superclass"), 5, "names the super-class"),
    ],
)
def test_noise_that_does_not_fit_the_data_is_refused(noise, classes, match):
    with pytest.raises(FedsieveError, match=match):
        scene_of(noise, np.zeros(20, dtype=int), classes=classes)
