"""A scene: who holds what, with which labels. Built from a config and a seed, kept in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedsieve.errors import check
from fedsieve.scenes._options import check_whole
from fedsieve.scenes.noise import Noise, add_noise
from fedsieve.scenes.partition import (
    Clients,
    FloatArray,
    IntArray,
    Partition,
    partition_stream,
    split,
)

MAX_SEED = 2**32 - 1
"""NumPy's legacy generator takes seeds up to here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneConfig:
    """Everything that decides a scene besides the data and the seed."""

    clients: int = 100
    """K >= 1, the number of clients. FedGR 100, FedES 20."""
    partition: Partition = field(default_factory=Partition)
    """How the samples are dealt to the clients."""
    noise: Noise = field(default_factory=Noise)
    """How labels become wrong."""

    def __post_init__(self) -> None:
        check_whole("scene.clients", self.clients, 1)
        check(
            not (self.partition.overlap and self.noise.is_per_client),
            "scene: clients that share samples cannot have noise of their own;"
            ' set scene.noise.clients = "global" or scene.partition.overlap = false.',
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scene:
    """Who holds what, with which labels. It knows no true labels, only their fingerprint."""

    clients: Clients
    """K arrays of sample indices; no sample is held twice unless the partition overlaps"""
    given: IntArray
    """(N,) the given label of every sample of the data set"""
    levels: FloatArray
    """(K,) the noise level meant for each client (for labels from a file: what it is)"""
    kinds: tuple[str, ...]
    """(K) none, symmetric, asymmetric, matrix or file"""
    config: SceneConfig
    seed: int
    num_classes: int
    fingerprint: str
    """sha256 of the true labels that the scene was built from"""

    def __post_init__(self) -> None:
        for array in (*self.clients, self.given, self.levels):
            array.setflags(write=False)

    @property
    def sizes(self) -> IntArray:
        """(K,) the number of samples of each client."""
        return np.array([len(held) for held in self.clients], dtype=np.int64)

    def true_rates(self, true_labels: npt.ArrayLike) -> FloatArray:
        """(K,) the share of each client's labels that is wrong."""
        return np.add.reduceat(self._wrong(true_labels), self._starts()) / self.sizes

    def overall_noise(self, true_labels: npt.ArrayLike) -> float:
        """The share of all labels held by the clients that is wrong."""
        return float(self._wrong(true_labels).mean())

    def class_counts(self, true_labels: npt.ArrayLike) -> IntArray:
        """(C, K) how many samples of each true class each client holds."""
        true = self._checked_truth(true_labels)
        owners = np.repeat(np.arange(len(self.clients)), self.sizes)
        cells = true[np.concatenate(self.clients)] * len(self.clients) + owners
        shape = (self.num_classes, len(self.clients))
        counts: IntArray = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        return counts

    def _starts(self) -> IntArray:
        """Where each client begins in the concatenation of all clients (none of them is empty)."""
        return np.cumsum(self.sizes) - self.sizes

    def _wrong(self, true_labels: npt.ArrayLike) -> IntArray:
        """1 for each wrong label in the concatenation of all clients, else 0."""
        wrong: IntArray = (self.given != self._checked_truth(true_labels)).astype(np.int64)
        return wrong[np.concatenate(self.clients)]

    def _checked_truth(self, true_labels: npt.ArrayLike) -> IntArray:
        true = checked_labels(true_labels, self.num_classes)
        check(
            fingerprint_of(true) == self.fingerprint,
            "these true labels are not the ones that the scene was built from;"
            " load the same data set or build the scene anew.",
        )
        return true


def build_scene(
    config: SceneConfig,
    true_labels: npt.ArrayLike,
    num_classes: int,
    seed: int,
    *,
    class_names: Sequence[str] | None = None,
    superclass_of: Sequence[int] | None = None,
    sites: npt.ArrayLike | None = None,
) -> Scene:
    """Draw a scene; the same arguments give the same scene on every machine.

    iid and balanced Dirichlet partitions with FedGR's noise equal FedGR's own for the same seed.
    `class_names` are for label files with names, `superclass_of` (the super-class of each class)
    for asymmetric noise within super-classes, `sites` (a client id per sample) for ready
    federations.
    """
    check_whole("the seed of a scene", seed, 0)
    check(seed <= MAX_SEED, f"the seed of a scene must not exceed {MAX_SEED}.")
    check_whole("the number of classes", num_classes, 1)
    check(
        sites is None or config.partition.kind == "sites",
        'this data set says who holds what; set scene.partition.kind = "sites" or give no sites.',
    )
    true = checked_labels(true_labels, num_classes)
    rng = partition_stream(config.partition, seed)
    clients = split(
        config.partition,
        true,
        num_classes=num_classes,
        num_clients=config.clients,
        rng=rng,
        sites=None if sites is None else np.asarray(sites),
    )
    noisy = add_noise(
        config.noise,
        true,
        clients,
        num_classes=num_classes,
        seed=seed,
        partition_rng=rng,
        class_names=class_names,
        superclass_of=superclass_of,
    )
    return Scene(
        clients=clients,
        given=noisy.given,
        levels=noisy.levels,
        kinds=noisy.kinds,
        config=config,
        seed=seed,
        num_classes=num_classes,
        fingerprint=fingerprint_of(true),
    )


def same_scene(a: Scene, b: Scene) -> bool:
    """Whether two scenes agree in every part, arrays bit for bit."""
    return (
        (a.config, a.seed, a.num_classes, a.fingerprint, a.kinds)
        == (b.config, b.seed, b.num_classes, b.fingerprint, b.kinds)
        and len(a.clients) == len(b.clients)
        and all(map(np.array_equal, a.clients, b.clients))
        and np.array_equal(a.given, b.given)
        and np.array_equal(a.levels, b.levels)
    )


def fingerprint_of(labels: IntArray) -> str:
    """sha256 of the labels as little-endian 64-bit integers: equal on every machine."""
    return hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest()


def checked_labels(labels: npt.ArrayLike, num_classes: int) -> IntArray:
    """The labels as (N,) int64, refused unless they are whole numbers in 0 … C−1."""
    array = np.asarray(labels)
    check(
        array.ndim == 1 and len(array) > 0 and np.issubdtype(array.dtype, np.integer),
        "true labels must be one whole number per sample.",
    )
    check(
        bool(array.min() >= 0 and array.max() < num_classes),
        f"true labels must lie between 0 and {num_classes - 1}.",
    )
    return array.astype(np.int64)
