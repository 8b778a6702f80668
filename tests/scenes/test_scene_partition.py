"""Partitions: every sample has one owner, sizes keep their promises, shares follow their law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.scenes import Partition
from fedsieve.scenes import partition as module
from fedsieve.scenes.partition import partition_stream, split


def dealt(partition: Partition, labels, clients: int, seed: int = 0, classes: int | None = None):
    labels = np.asarray(labels)
    return split(
        partition,
        labels,
        num_classes=int(labels.max()) + 1 if classes is None else classes,
        num_clients=clients,
        rng=partition_stream(partition, seed),
    )


DISJOINT = [
    Partition(),
    Partition(stratified=True),
    Partition(kind="balanced-dirichlet", alpha=0.5, min_size=2),
    Partition(kind="dirichlet", alpha=1.0, min_size=2),
    Partition(kind="bernoulli-dirichlet", alpha=1.0, presence=0.7, min_size=2),
    Partition(kind="classes", classes=2, min_size=2),
]
DISJOINT_IDS = [f"{p.kind}{'-stratified' * p.stratified}" for p in DISJOINT]


@pytest.mark.parametrize("partition", DISJOINT, ids=DISJOINT_IDS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clients=st.integers(2, 8),
    counts=st.lists(st.integers(30, 60), min_size=2, max_size=4),
)
def test_every_sample_has_exactly_one_owner(partition, seed, clients, counts):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    parts = dealt(partition, labels, clients, seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(map(len, parts)) >= (partition.min_size or 1)
    again = dealt(partition, labels, clients, seed)
    assert all(map(np.array_equal, parts, again))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 12),
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda c: sum(c) >= 12),
)
def test_stratified_shares_differ_by_at_most_one(seed, clients, counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    parts = dealt(Partition(stratified=True), labels, clients, seed, classes=len(counts))
    table = np.array([np.bincount(labels[part], minlength=len(counts)) for part in parts])
    assert (np.ptp(table, axis=0) <= 1).all()
    assert np.ptp(table.sum(axis=1)) <= 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), extra=st.integers(0, 4), per_client=st.integers(1, 3))
def test_few_classes_means_at_most_that_many_and_no_class_is_lost(seed, extra, per_client):
    """K·k = C + a little: a plain random draw would almost always leave classes without owner."""
    clients = 6 // per_client + extra
    labels = np.repeat(np.arange(6), 40)
    parts = dealt(Partition(kind="classes", classes=per_client), labels, clients, seed)
    assert max(len(np.unique(labels[part])) for part in parts) <= per_client
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(240))


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, dealt(Partition(), np.zeros(11, int), 4))) == [2, 3, 3, 3]


def test_balanced_dirichlet_gives_no_more_to_a_client_that_has_its_fair_share():
    """Before the last class a client holds at most what one cut adds to less than N/K."""
    labels = np.repeat(np.arange(4), 250)
    partition = Partition(kind="balanced-dirichlet", alpha=0.2, min_size=1)
    capped = 0
    for seed in range(20):
        for part in dealt(partition, labels, 5, seed):
            counts = np.bincount(labels[part], minlength=4)
            full = np.flatnonzero(np.cumsum(counts) >= 200)
            if len(full) and full[0] < 3:
                capped += 1
                # Only the rounding remainder may still reach the last client.
                assert counts[full[0] + 1 :].sum() <= 3
    assert capped > 10


def test_dirichlet_without_the_cap_lets_a_full_client_grow():
    labels = np.repeat(np.arange(4), 250)
    partition = Partition(kind="dirichlet", alpha=0.2, min_size=1)
    growth = 0
    for seed in range(20):
        for part in dealt(partition, labels, 5, seed):
            counts = np.bincount(labels[part], minlength=4)
            full = np.flatnonzero(np.cumsum(counts) >= 200)
            growth += int(counts[full[0] + 1 :].sum()) if len(full) else 0
    assert growth > 1000


def test_default_minimum_sizes():
    labels = np.repeat(np.arange(10), 500)
    balanced = Partition(kind="balanced-dirichlet", alpha=0.05)
    plain = Partition(kind="dirichlet", alpha=0.5)
    for seed in range(5):
        assert min(map(len, dealt(balanced, labels, 20, seed))) >= 10
        assert min(map(len, dealt(plain, labels, 10, seed))) >= 128


def test_a_dirichlet_share_has_the_mean_and_variance_of_its_law():
    """Share of client 0 in a class: mean 1/K, variance (1/K)(1−1/K)/(αK+1); 1,600 draws."""
    K, alpha, n = 4, 0.5, 1000
    labels = np.repeat(np.arange(16), n)
    partition = Partition(kind="dirichlet", alpha=alpha, min_size=1)
    shares = np.concatenate(
        [np.bincount(labels[dealt(partition, labels, K, seed)[0]], minlength=16) / n
         for seed in range(100)]
    )  # fmt: skip
    variance = (1 / K) * (1 - 1 / K) / (alpha * K + 1)
    assert abs(shares.mean() - 1 / K) < 5 * np.sqrt(variance / len(shares)) + 1 / n
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_bernoulli_dirichlet_presence_follows_p():
    """Large α and many samples: a client holds a class exactly when Φ = 1.

    P(Φ_kc = 1 | row not empty) = p / (1 − (1−p)^C).
    """
    p, C, K = 0.3, 5, 60
    labels = np.repeat(np.arange(C), 4000)
    partition = Partition(kind="bernoulli-dirichlet", alpha=100.0, presence=p)
    held = np.mean(
        [
            [len(np.unique(labels[part])) / C for part in dealt(partition, labels, K, seed)]
            for seed in range(10)
        ]
    )
    expected = p / (1 - (1 - p) ** C)
    # 600 independent rows, each a mean of C indicators with standard deviation below 1/2.
    assert abs(held - expected) < 5 * 0.5 / np.sqrt(600)


def test_bernoulli_dirichlet_is_a_categorical_draw_not_a_cut():
    """With every Φ = 1 and α huge, class sizes at a client are Binomial(n, 1/K), not n/K."""
    K, n = 10, 1000
    labels = np.repeat(np.arange(20), n)
    partition = Partition(kind="bernoulli-dirichlet", alpha=1e7, presence=1.0)
    counts = np.array(
        [np.bincount(labels[part], minlength=20) for part in dealt(partition, labels, K)]
    )
    assert counts.var() == pytest.approx(n * (1 / K) * (1 - 1 / K), rel=0.35)


def test_overlapping_classes_repeat_fedlsr():
    """Sizes just under N/K, no sample twice at one client, about (1−1/K)^K of the data unused."""
    K = 100
    labels = np.repeat(np.arange(10), 1000)
    parts = dealt(Partition(kind="classes", classes=5, overlap=True), labels, K)
    for part in parts:
        assert 100 - 5 <= len(part) <= 100
        assert len(np.unique(part)) == len(part)
        assert len(np.unique(labels[part])) <= 5
    unused = 1 - len(np.unique(np.concatenate(parts))) / len(labels)
    # floor() keeps each client about 2 samples short of N/K, hence a little above 36.6 %.
    assert 0.36 < unused < 0.41


def test_overlapping_stratified_shares_are_equal():
    labels = np.repeat(np.arange(3), [40, 20, 9])
    parts = dealt(Partition(stratified=True, overlap=True), labels, 10)
    assert all(np.bincount(labels[part], minlength=3).tolist() == [4, 2, 0] for part in parts)
    assert all(len(np.unique(part)) == 6 for part in parts)
    assert len(np.unique(np.concatenate(parts))) < 60


def test_sites_say_who_holds_what():
    parts = split(
        Partition(kind="sites"),
        np.zeros(6, int),
        num_classes=1,
        num_clients=3,
        rng=np.random.default_rng(0),
        sites=np.array([2, 0, 1, 0, 2, 2], dtype=np.int32),
    )
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]


@pytest.mark.parametrize(
    ("sites", "match"),
    [
        (None, "does not say"),
        (np.array([0, 1]), "one whole number"),
        (np.array([0.0, 1.0, 2.0]), "one whole number"),
        (np.array([0, 0, 2]), "they name 2 clients from 0 to 2"),
        (np.array([1, 2, 3]), "they name 3 clients from 1 to 3"),
    ],
)
def test_bad_sites_are_refused(sites, match):
    with pytest.raises(FedsieveError, match=match):
        split(
            Partition(kind="sites"),
            np.zeros(3, int),
            num_classes=1,
            num_clients=3,
            rng=np.random.default_rng(0),
            sites=sites,
        )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kind": "dirichelt"}, "must be one of iid"),
        ({"kind": "iid", "alpha": 0.3}, 'alpha means nothing with kind = "iid"'),
        ({"kind": "dirichlet", "alpha": 1, "presence": 0.5}, "presence means nothing"),
        ({"kind": "dirichlet", "alpha": 1, "overlap": True}, "overlap means nothing"),
        ({"kind": "sites", "min_size": 5}, "min_size means nothing"),
        ({"kind": "classes", "classes": 2, "stratified": True}, "stratified means nothing"),
        ({"kind": "balanced-dirichlet"}, "alpha must be set"),
        ({"kind": "bernoulli-dirichlet", "alpha": 1}, "presence must be set"),
        ({"kind": "classes"}, "classes must be set"),
        ({"kind": "dirichlet", "alpha": 0}, "alpha must be greater than 0"),
        ({"kind": "dirichlet", "alpha": float("inf")}, "finite"),
        ({"kind": "dirichlet", "alpha": float("nan")}, "at least 0"),
        ({"kind": "dirichlet", "alpha": "0.3"}, "at least 0"),
        ({"kind": "bernoulli-dirichlet", "alpha": 1, "presence": 1.5}, "between 0.01 and 1"),
        ({"kind": "classes", "classes": 0}, "whole number >= 1"),
        ({"kind": "classes", "classes": True}, "whole number >= 1"),
        ({"kind": "dirichlet", "alpha": 1, "min_size": 0}, "whole number >= 1"),
        ({"kind": "iid", "overlap": True}, "needs stratified"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(FedsieveError, match=match):
        Partition(**options)


@pytest.mark.parametrize(
    ("partition", "clients", "match"),
    [
        (Partition(), 41, "41 clients cannot share 40 samples"),
        (Partition(kind="dirichlet", alpha=1), 5, "need 640 samples"),
        (Partition(kind="classes", classes=5), 3, "the data has 4 classes"),
        (Partition(kind="classes", classes=1), 3, "cannot hold 4 classes"),
        (Partition(stratified=True, overlap=True), 11, "no class has a sample for each"),
    ],
)
def test_impossible_requests_are_refused(partition, clients, match):
    with pytest.raises(FedsieveError, match=match):
        dealt(partition, np.repeat(np.arange(4), 10), clients)


@pytest.mark.parametrize(
    "partition",
    [
        Partition(kind="dirichlet", alpha=0.001, min_size=10),
        Partition(kind="balanced-dirichlet", alpha=1e-300, min_size=1),
        Partition(kind="bernoulli-dirichlet", alpha=1, presence=0.01),
        Partition(kind="bernoulli-dirichlet", alpha=1e-300, presence=1.0, min_size=10),
        Partition(kind="classes", classes=1, overlap=True, min_size=10),
    ],
)
def test_redraws_are_bounded_and_the_sentence_advises(partition, monkeypatch):
    monkeypatch.setattr(module, "MAX_DRAWS", 5)
    with pytest.raises(FedsieveError, match=r"5 draws gave no partition .* lower scene\.clients"):
        dealt(partition, np.repeat(np.arange(8), 5), 4)


def test_absent_classes_are_no_obstacle():
    labels = np.repeat([1, 4], 30)
    for partition in DISJOINT:
        parts = dealt(partition, labels, 3, seed=2, classes=6)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(60))
