"""MNIST and Fashion-MNIST from their idx files, packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.data.sources.dataset import Dataset
from fedsieve.errors import FedsieveError, check

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

UNSIGNED_BYTE = 8
LARGEST_FILE = 2**31


def load_mnist(path: Path) -> Dataset:
    """60,000 + 10,000 handwritten digits of 28x28 pixels."""
    return _load("mnist", path, ("MNIST/raw", "MNIST", "mnist", "raw", "."), tuple("0123456789"))


def load_fashion_mnist(path: Path) -> Dataset:
    """60,000 + 10,000 articles of clothing of 28x28 pixels."""
    folders = ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion", "raw", ".")
    return _load("fashion-mnist", path, folders, FASHION_CLASSES)


def _load(name: str, path: Path, folders: Sequence[str], classes: tuple[str, ...]) -> Dataset:
    # The two sets use the same file names, so a folder that carries the set's name goes first.
    candidates = [path / folder for folder in folders]
    folder = next((f for f in candidates if _find(f, "train", "images") is not None), None)
    if folder is None:
        raise FedsieveError(
            f"{name} is not in {path}: looked for train-images-idx3-ubyte or "
            f"train-images-idx3-ubyte.gz there and in its folders {', '.join(folders[:-1])}; "
            f"put it there or run `fedsieve data get {name}`."
        )
    train_images, train_labels = _split(name, folder, "train")
    test_images, test_labels = _split(name, folder, "t10k")
    return Dataset(
        name=name,
        classes=classes,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        # MNIST's constants serve Fashion-MNIST too (whose own are .2860 and .3530): the published
        # results on noisy federated Fashion-MNIST that we compare with were made that way.
        mean=(0.1307,),
        std=(0.3081,),
        views="mnist",
    )


def _find(folder: Path, split: str, content: str) -> Path | None:
    kind = "idx3-ubyte" if content == "images" else "idx1-ubyte"
    # Some mirrors write a dot where the official name has a dash.
    names = [f"{split}-{content}{sep}{kind}{end}" for end in ("", ".gz") for sep in "-."]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _split(name: str, folder: Path, split: str) -> tuple[Tensor, Tensor]:
    arrays = []
    for content, dimensions in (("images", 3), ("labels", 1)):
        file = _find(folder, split, content)
        if file is None:
            raise FedsieveError(
                f"{name} is incomplete: {folder} has no {split}-{content}-idx{dimensions}-ubyte "
                f"or {split}-{content}-idx{dimensions}-ubyte.gz; put it there or run "
                f"`fedsieve data get {name}`."
            )
        arrays.append(read_idx(file, dimensions))
    images, labels = arrays
    check(
        images.shape[1:] == (28, 28),
        f"{folder}: {name} images are 28x28 pixels, but these are "
        f"{images.shape[1]}x{images.shape[2]}; give the folder with the official files.",
    )
    return torch.from_numpy(images[:, None]), torch.from_numpy(labels.astype(np.int64))


def read_idx(file: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes: two zero bytes, type, rank, big-endian sizes, values."""
    damaged = f"{file} is damaged: delete it and get it again"
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            head = stream.read(4 + 4 * dimensions)
            check(
                len(head) == 4 + 4 * dimensions
                and head[:4] == bytes((0, 0, UNSIGNED_BYTE, dimensions)),
                f"{file} is not an idx file of {dimensions}-dimensional unsigned bytes.",
            )
            shape = tuple(int(size) for size in np.frombuffer(head, dtype=">u4", offset=4))
            count = math.prod(shape)
            check(count <= LARGEST_FILE, f"{damaged} (its header promises {count} bytes).")
            # One byte more than promised, so that a file that is too long shows.
            values = stream.read(count + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FedsieveError(f"{file} cannot be read ({error}): get it again.") from error
    check(
        len(values) == count,
        f"{damaged} (its header promises {count} bytes of data, but it holds "
        f"{'more' if len(values) > count else len(values)}).",
    )
    return np.frombuffer(bytearray(values), dtype=np.uint8).reshape(shape)
