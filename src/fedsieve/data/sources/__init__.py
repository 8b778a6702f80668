"""Where images come from: `load(name, path)` reads a source from its official files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsieve.data.sources.cifar import (
    CIFAR100_SUPERCLASS_OF,
    CIFAR100_SUPERCLASSES,
    load_cifar10,
    load_cifar100,
)
from fedsieve.data.sources.clothing1m import load_clothing1m
from fedsieve.data.sources.dataset import Dataset, Progress
from fedsieve.data.sources.digits import load_digits
from fedsieve.data.sources.idx import load_fashion_mnist, load_mnist
from fedsieve.data.sources.npz import load_npz
from fedsieve.errors import FedsieveError, check

if TYPE_CHECKING:
    from fedsieve.data.own.reading import Kind

__all__ = [
    "CIFAR100_SUPERCLASSES",
    "CIFAR100_SUPERCLASS_OF",
    "SOURCES",
    "Dataset",
    "Progress",
    "Source",
    "load",
    "load_clothing1m",
]


@dataclass(frozen=True, slots=True)
class Source:
    """A source by name: what it is, where it is read from, and how."""

    description: str
    place: str | None
    """what a path to this source must hold; None where it is read from no file"""
    read: Callable[[Path], Dataset]
    is_own: bool = False
    """whether its labels are what people gave: no truth is known, and no noise is added to them"""


def _own(kind: Kind) -> Callable[[Path], Dataset]:
    def read(path: Path) -> Dataset:
        from fedsieve.data.own.dataset import load_own  # late, since it is built on this package

        return load_own(path, kind)

    return read


SOURCES: dict[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits of 8x8 pixels, built in: for trying things out",
        None,
        lambda _: load_digits(),
    ),
    "mnist": Source(
        "70,000 handwritten digits of 28x28 pixels in 10 classes",
        "the folder of its four idx files (packed or not)",
        load_mnist,
    ),
    "fashion-mnist": Source(
        "70,000 articles of clothing of 28x28 pixels in 10 classes",
        "the folder of its four idx files (packed or not)",
        load_fashion_mnist,
    ),
    "cifar10": Source(
        "60,000 colour photographs of 32x32 pixels in 10 classes",
        "the folder of its binary or Python edition (unpacked or not)",
        load_cifar10,
    ),
    "cifar100": Source(
        "60,000 colour photographs of 32x32 pixels in 100 classes",
        "the folder of its binary or Python edition (unpacked or not)",
        load_cifar100,
    ),
    "clothing1m": Source(
        "a million shop photographs in 14 classes with real label noise, clean test labels",
        "the folder with images/ and the official lists",
        load_clothing1m,
    ),
    "folder": Source(
        "your own images: one folder for each class",
        "the folder",
        _own("folder"),
        is_own=True,
    ),
    "table": Source(
        "your own images: a table with the columns path and label (and site)",
        "the table, or a folder with labels.csv",
        _own("table"),
        is_own=True,
    ),
    "sites": Source(
        "your own images, a ready federation: one folder, table or .npz file for each site",
        "the folder of the sites",
        _own("sites"),
        is_own=True,
    ),
    "npz": Source(
        "your own images: one .npz file with x (uint8 images) and y (labels)",
        "the .npz file",
        load_npz,
    ),
}


def load(name: str, path: Path | None = None) -> Dataset:
    """Read source `name` from `path` (needless for digits, which come with scikit-learn)."""
    check(name in SOURCES, f"There is no source {name!r}: choose one of {', '.join(SOURCES)}.")
    source = SOURCES[name]
    if source.place is None:
        return source.read(Path())
    if path is None:
        raise FedsieveError(f"{name} is read from files: give the path of {source.place}.")
    return source.read(path)
