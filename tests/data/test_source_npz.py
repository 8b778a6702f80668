"""A person's own images from an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.data.sources import load
from fedsieve.errors import FedsieveError

RNG = np.random.default_rng(11)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 1], dtype=np.int16)


def pixels(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def saved(folder: Path, **arrays: Any) -> Path:
    file = folder / "mine.npz"
    np.savez(file, **arrays)
    return file


@pytest.mark.parametrize(
    ("shape", "to_channels_first", "views"),
    [
        ((10, 9, 7), lambda x: x[:, None], "plain"),
        ((10, 28, 28), lambda x: x[:, None], "mnist"),
        ((10, 28, 28, 1), lambda x: np.moveaxis(x, 3, 1), "mnist"),
        ((10, 32, 32, 3), lambda x: np.moveaxis(x, 3, 1), "cifar10"),
        ((10, 3, 32, 32), lambda x: x, "cifar10"),
        ((10, 1, 9, 7), lambda x: x, "plain"),
    ],
)
def test_shapes_and_split(
    shape: tuple[int, ...], to_channels_first: Any, views: str, tmp_path: Path
) -> None:
    x = pixels(*shape)
    dataset = load("npz", saved(tmp_path, x=x, y=LABELS))
    # the third of each class: label 0 stands at 0 3 6, label 1 at 1 4 7 9, label 2 at 2 5 8
    test = [6, 7, 8]
    train = [0, 1, 2, 3, 4, 5, 9]
    expected = to_channels_first(x)
    assert np.array_equal(dataset.train_images.numpy(), expected[train])
    assert np.array_equal(dataset.test_images.numpy(), expected[test])
    assert dataset.train_labels.tolist() == LABELS[train].tolist()
    assert dataset.test_labels.tolist() == LABELS[test].tolist()
    scaled = expected[train] / 255
    np.testing.assert_allclose(dataset.mean, scaled.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(dataset.std, scaled.std(axis=(0, 2, 3)))
    assert (dataset.views, dataset.name, dataset.classes) == (views, "mine", ("0", "1", "2"))


def test_a_given_test_split_and_names_are_used(tmp_path: Path) -> None:
    x, x_test = pixels(10, 5, 5), pixels(2, 5, 5)
    names = np.array(["no", "yes", "perhaps", "never"])
    file = saved(tmp_path, x=x, y=LABELS, x_test=x_test, y_test=np.array([3, 0]), classes=names)
    dataset = load("npz", file)
    assert np.array_equal(dataset.train_images[:, 0].numpy(), x)
    assert np.array_equal(dataset.test_images[:, 0].numpy(), x_test)
    assert dataset.test_labels.tolist() == [3, 0]
    assert dataset.classes == ("no", "yes", "perhaps", "never")


GOOD: dict[str, Any] = {"x": pixels(10, 5, 5), "y": LABELS}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": None}, "no array x"),
        ({"y": None}, "no array y"),
        ({"x": np.zeros((10, 5, 5))}, "must be uint8 images.*not float64"),
        ({"x": pixels(10, 5)}, r"\(10, 5\)"),
        ({"x": pixels(0, 5, 5)}, "must be uint8 images"),
        ({"x": pixels(10, 5, 5, 4)}, "exactly one of its second and last"),
        ({"x": pixels(10, 3, 5, 3)}, "exactly one of its second and last"),
        ({"x": pixels(9, 5, 5)}, "x holds 9 images, but y 10 labels"),
        ({"x": np.full((10, 5, 5), 7, np.uint8)}, "must not all be one colour"),
        ({"y": LABELS.astype(float)}, "whole numbers"),
        ({"y": LABELS[:, None]}, r"\(10, 1\)"),
        ({"y": LABELS - 1}, "count classes from 0, but runs from -1 to 1"),
        ({"y": np.full(10, 2**40)}, "count classes from 0"),
        ({"y": LABELS * 5}, "reach 10 with only 10 samples"),
        ({"y": np.arange(10)}, "no class has the three samples"),
        ({"y": LABELS * 0}, "at least two classes"),
        ({"classes": np.array([1, 2, 3])}, "classes must be a list of text"),
        ({"classes": np.array(["a", "b"])}, "0..1 for 2 classes"),
        ({"x_test": pixels(2, 5, 5)}, "x_test and y_test together"),
        ({"x_test": pixels(2, 5, 6), "y_test": LABELS[:2]}, "all must have one size"),
        ({"y": np.array([{}] * 10, dtype=object)}, "cannot be read.*without Python objects"),
    ],
)
def test_what_is_wrong_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    arrays = {key: array for key, array in (GOOD | changes).items() if array is not None}
    with pytest.raises(FedsieveError, match=words):
        load("npz", saved(tmp_path, **arrays))


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsieveError, match="There is no file"):
        load("npz", tmp_path / "missing.npz")
    single = tmp_path / "single.npy"
    np.save(single, GOOD["x"])
    with pytest.raises(FedsieveError, match="holds one array"):
        load("npz", single)
    text = tmp_path / "text.npz"
    text.write_text("x, y")
    with pytest.raises(FedsieveError, match=r"cannot be read as an .npz file"):
        load("npz", text)
    whole = saved(tmp_path, **GOOD)
    whole.write_bytes(whole.read_bytes()[:300])
    with pytest.raises(FedsieveError, match=r"cannot be read as an .npz file"):
        load("npz", whole)
