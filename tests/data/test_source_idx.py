"""MNIST and Fashion-MNIST from small idx files made here by the format's description."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsieve.data.sources import load
from fedsieve.errors import FedsieveError

STEMS = {"train": 12, "t10k": 5}


def idx(array: NDArray[np.uint8]) -> bytes:
    """Two zero bytes, 8 for unsigned byte, the rank, big-endian sizes, the values."""
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def write_set(
    folder: Path, *, seed: int = 0, packed: bool = False, sep: str = "-"
) -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, count in STEMS.items():
        arrays[f"{split}-images"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{split}-labels"] = rng.integers(0, 10, count, dtype=np.uint8)
    for stem, array in arrays.items():
        name = f"{stem}{sep}idx{array.ndim}-ubyte"
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array), 1))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "."),
        ("mnist", "raw"),
        ("mnist", "MNIST/raw"),
        ("mnist", "mnist"),
        ("fashion-mnist", "."),
        ("fashion-mnist", "FashionMNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
    ],
)
def test_a_set_is_found_and_read(name: str, folder: str, packed: bool, tmp_path: Path) -> None:
    arrays = write_set(tmp_path / folder, packed=packed)
    dataset = load(name, tmp_path)
    assert dataset.name == name
    assert np.array_equal(dataset.train_images[:, 0].numpy(), arrays["train-images"])
    assert dataset.train_labels.tolist() == arrays["train-labels"].tolist()
    assert np.array_equal(dataset.test_images[:, 0].numpy(), arrays["t10k-images"])
    assert dataset.test_labels.tolist() == arrays["t10k-labels"].tolist()
    assert (dataset.mean, dataset.std, dataset.views) == ((0.1307,), (0.3081,), "mnist")
    assert len(dataset.classes) == 10


def test_names_with_a_dot_are_found_too(tmp_path: Path) -> None:
    arrays = write_set(tmp_path, sep=".")
    assert load("mnist", tmp_path).train_labels.tolist() == arrays["train-labels"].tolist()


def test_two_sets_with_the_same_file_names_are_told_apart(tmp_path: Path) -> None:
    digits = write_set(tmp_path / "MNIST/raw", seed=1)
    fashion = write_set(tmp_path / "FashionMNIST/raw", seed=2)
    write_set(tmp_path, seed=3)
    for name, arrays in (("mnist", digits), ("fashion-mnist", fashion)):
        images = load(name, tmp_path).train_images[:, 0].numpy()
        assert np.array_equal(images, arrays["train-images"])
    assert load("fashion-mnist", tmp_path).classes[9] == "Ankle boot"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FedsieveError, match=r"no t10k-labels-idx1-ubyte.*fedsieve data get mnist"):
        load("mnist", tmp_path)


GOOD = np.zeros((12, 28, 28), dtype=np.uint8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an idx file"),
        (b"\x00\x00\x08", "not an idx file"),
        (idx(GOOD[0]), "not an idx file of 3-dimensional"),
        (b"\x00\x00\x0d\x03" + idx(GOOD)[4:], "not an idx file"),
        (idx(GOOD)[:-1], "promises 9408 bytes of data, but it holds 9407"),
        (idx(GOOD) + b"x", "but it holds more"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 28, 28), "damaged"),
        (idx(GOOD[:, :20]), "28x28 pixels, but these are 20x28"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_file_is_refused(
    content: bytes, words: str, packed: bool, tmp_path: Path
) -> None:
    write_set(tmp_path, packed=packed)
    name = "train-images-idx3-ubyte"
    if packed:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FedsieveError, match=words):
        load("mnist", tmp_path)


def test_a_cut_off_or_false_gzip_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, packed=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"no gzip at all", whole[:40] + b"\xff" * 200):
        file.write_bytes(content)
        with pytest.raises(FedsieveError, match="cannot be read"):
            load("mnist", tmp_path)


def test_more_labels_than_images_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    labels = np.zeros(13, dtype=np.uint8)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(FedsieveError, match="each of the 12 images"):
        load("mnist", tmp_path)
