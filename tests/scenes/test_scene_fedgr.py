"""FedGR's scenes, bit for bit: published vectors and an independent sample-by-sample program."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.scenes import Noise, Partition, Scene, SceneConfig, build_scene

IID = Partition()
DIRICHLET = Partition(kind="balanced-dirichlet", alpha=0.3)
CIFAR10_LIKE = np.repeat(np.arange(10), 5000)
CIFAR100_LIKE = np.repeat(np.arange(100), 500)
REAL_LABELS = Path(__file__).parents[3] / "shared/data/cifar10/labels.npz"

SYM_06 = Noise(kind="symmetric", share=0.6, low=0.5, high=1.0)
SYM_1 = Noise(kind="symmetric", share=1.0, low=0.5, high=1.0)
ASYM_06 = Noise(kind="asymmetric", share=0.6, low=0.2, high=0.4)
MIXED_1 = Noise(kind="mixed", share=1.0, low=0.2, high=0.4)


def scene_of(
    partition: Partition,
    noise: Noise,
    seed: int,
    labels: np.ndarray = CIFAR10_LIKE,
    clients: int = 100,
) -> Scene:
    config = SceneConfig(clients=clients, partition=partition, noise=noise)
    return build_scene(config, labels, int(labels.max()) + 1, seed)


@pytest.mark.parametrize(
    ("seed", "first", "levels", "counts"),
    [
        (1, [26247, 35067, 34590], [0.713973, 0.856436], [356, 428]),
        (13, [17385, 23849, 18796], [0.508614, 0.642078], [254, 321]),
        (42, [33553, 9427, 199], [0.539382, 0.553344], [269, 276]),
    ],
)
def test_iid_indices_levels_and_counts(seed, first, levels, counts):
    scene = scene_of(IID, SYM_1, seed)
    assert scene.clients[0][:3].tolist() == first
    assert scene.sizes.tolist() == [500] * 100
    np.testing.assert_allclose(scene.levels[:2], levels, atol=5e-7)
    wrong = [int((scene.given[held] != CIFAR10_LIKE[held]).sum()) for held in scene.clients[:2]]
    assert wrong == counts


@pytest.mark.parametrize(
    ("partition", "seed", "overall", "loud"),
    [
        (IID, 1, [0.4467, 0.7574, 0.1783, 0.3024], 43),
        (IID, 13, [0.4409, 0.7437, 0.1759, 0.2968], 35),
        (IID, 42, [0.4376, 0.7276, 0.1748, 0.2905], 31),
        (DIRICHLET, 1, [0.4489, 0.7403, 0.1791, 0.2956], 41),
        (DIRICHLET, 13, [0.4529, 0.7457, 0.1808, 0.2977], 40),
        (DIRICHLET, 42, [0.4574, 0.7635, 0.1826, 0.3048], 40),
    ],
)
def test_overall_noise_and_loud_clients(partition, seed, overall, loud):
    scenes = [scene_of(partition, noise, seed) for noise in (SYM_06, SYM_1, ASYM_06, MIXED_1)]
    noise = [scene.overall_noise(CIFAR10_LIKE) for scene in scenes]
    np.testing.assert_allclose(noise, overall, atol=5.01e-5)
    assert int((scenes[1].levels >= 0.8).sum()) == loud


@pytest.mark.parametrize(
    ("labels", "seed", "sizes"),
    [
        (CIFAR10_LIKE, 1, [574, 189, 315, 566]),
        (CIFAR10_LIKE, 13, [383, 397, 641, 557]),
        (CIFAR10_LIKE, 42, [257, 379, 375, 520]),
        (CIFAR100_LIKE, 1, [543, 506, 520, 502]),
        (CIFAR100_LIKE, 13, [504, 483, 504, 518]),
        (CIFAR100_LIKE, 42, [513, 507, 467, 511]),
    ],
)
def test_dirichlet_sizes(labels, seed, sizes):
    """The sizes depend on the class counts alone, so labels sorted by class serve."""
    assert scene_of(DIRICHLET, Noise(), seed, labels).sizes[:4].tolist() == sizes


@pytest.mark.parametrize(("partition", "noise"), [(IID, 0.18662), (DIRICHLET, 0.15362)])
def test_ten_clients_have_the_noise_of_the_papers_table_11(partition, noise):
    scene = scene_of(partition, ASYM_06, 1, clients=10)
    assert scene.overall_noise(CIFAR10_LIKE) == pytest.approx(noise, abs=1e-9)


def test_table_11_holds_for_the_real_labels():
    if not REAL_LABELS.is_file():
        pytest.skip("the CIFAR-10 labels are not on this machine")
    with np.load(REAL_LABELS) as archive:
        labels = archive["train"]
    scene = scene_of(DIRICHLET, ASYM_06, 1, labels, clients=10)
    assert scene.overall_noise(labels) == pytest.approx(0.15362, abs=1e-9)
    assert scene_of(DIRICHLET, SYM_1, 13, labels).sizes[:4].tolist() == [383, 397, 641, 557]


def sample_by_sample(
    kind: str, phi: float, dirichlet: bool, labels: list[int], K: int, C: int, seed: int
) -> tuple[list[list[int]], list[int]]:
    """FedGR's scene as a slow program: one Python step and one scalar draw at a time."""
    python = random.Random(seed)
    legacy = np.random.RandomState(seed)
    N = len(labels)
    clients: list[list[int]] = []
    if dirichlet:
        while not clients or min(map(len, clients)) < C:
            clients = [[] for _ in range(K)]
            for c in range(C):
                members = [i for i in range(N) if labels[i] == c]
                legacy.shuffle(members)
                p = legacy.dirichlet([0.3] * K)
                p = np.array([0.0 if len(clients[k]) >= N / K else p[k] for k in range(K)])
                ends = [int(e) for e in np.cumsum(p / p.sum()) * len(members)][:-1]
                for k, (a, b) in enumerate(zip([0, *ends], [*ends, len(members)], strict=True)):
                    clients[k] += members[a:b]
        for held in clients:
            legacy.shuffle(held)
    else:
        order = legacy.permutation(N).tolist()
        clients = [order[k * (N // K) : (k + 1) * (N // K)] for k in range(K)]
    noisy = set(legacy.permutation(K)[: int(K * phi)].tolist())
    kinds = {
        k: python.choice(["symmetric", "asymmetric"]) if kind == "mixed" else kind
        for k in range(K)
        if k in noisy
    }
    rates = {k: legacy.uniform(0.3, 0.9) if k in noisy else 0.0 for k in range(K)}
    given: list[Any] = list(labels)
    for k in range(K):
        order = list(range(len(clients[k])))
        python.shuffle(order)
        flipped = set(order[: int(len(clients[k]) * rates[k])])
        for position, i in enumerate(clients[k]):
            if position in flipped and kinds[k] == "symmetric":
                given[i] = legacy.choice([c for c in range(C) if c != labels[i]])
            elif position in flipped:
                given[i] = (labels[i] + 1) % C
    return clients, [int(label) for label in given]


@pytest.mark.parametrize("dirichlet", [False, True])
@pytest.mark.parametrize(
    ("kind", "phi"), [("symmetric", 1.0), ("symmetric", 0.5), ("asymmetric", 0.6), ("mixed", 0.8)]
)
def test_equals_the_slow_program(kind, phi, dirichlet):
    labels = np.random.default_rng(5).permutation(np.repeat(np.arange(5), 160))
    noise = Noise(kind=kind, share=phi, low=0.3, high=0.9)
    scene = scene_of(DIRICHLET if dirichlet else IID, noise, 7, labels, clients=8)
    clients, given = sample_by_sample(kind, phi, dirichlet, labels.tolist(), 8, 5, 7)
    assert [held.tolist() for held in scene.clients] == clients
    assert scene.given.tolist() == given


def test_the_partition_of_a_seed_does_not_depend_on_the_noise():
    others = (Noise(), Noise(kind="symmetric", clients="normal", mean=0.3))
    for partition in (IID, DIRICHLET):
        first = scene_of(partition, SYM_1, 3)
        for noise in others:
            other = scene_of(partition, noise, 3)
            assert all(map(np.array_equal, first.clients, other.clients))


def test_global_random_state_is_neither_read_nor_moved():
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    before = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    scene = scene_of(DIRICHLET, MIXED_1, 2)
    assert np.array_equal(np.random.get_state()[1], before[0])  # noqa: NPY002
    assert random.getstate() == before[1]
    np.random.seed(99)  # noqa: NPY002
    random.seed(99)
    assert np.array_equal(scene.given, scene_of(DIRICHLET, MIXED_1, 2).given)


def test_fifty_thousand_samples_take_less_than_a_second():
    start = time.perf_counter()
    scene_of(DIRICHLET, SYM_1, 1)
    assert time.perf_counter() - start < 1.0
