"""The `Dataset` record, the fixed split, the pixel statistics, and the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.data.sources import SOURCES, Dataset, load
from fedsieve.data.sources.dataset import (
    VIEW_PRESETS,
    channel_statistics,
    every_fifth_per_class,
)
from fedsieve.errors import FedsieveError


def parts(**changes: Any) -> dict[str, Any]:
    """Arguments of a small valid dataset, with changes."""
    return {
        "name": "toy",
        "classes": ("a", "b"),
        "train_images": torch.zeros((4, 1, 5, 6), dtype=torch.uint8),
        "train_labels": torch.tensor([0, 1, 1, 0]),
        "test_images": torch.zeros((2, 1, 5, 6), dtype=torch.uint8),
        "test_labels": torch.tensor([1, 0]),
        "mean": (0.5,),
        "std": (0.25,),
        "views": "plain",
    } | changes


def test_a_valid_dataset_is_accepted_and_frozen() -> None:
    images, labels = torch.zeros((1, 1, 5, 6), dtype=torch.uint8), torch.tensor([1])
    dataset = Dataset(**parts(validation_images=images, validation_labels=labels))
    assert not dataset.train_labels_are_noisy
    with pytest.raises(AttributeError):
        dataset.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("views", VIEW_PRESETS)
def test_every_view_preset_is_accepted(views: str) -> None:
    assert Dataset(**parts(views=views)).views == views


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ("a",)}, "at least two classes"),
        ({"classes": ("a", "a")}, "different names"),
        ({"train_images": torch.zeros((4, 1, 5, 6))}, "train split: images must be .* uint8"),
        ({"train_images": torch.zeros((4, 5, 6), dtype=torch.uint8)}, r"\(4, 5, 6\)"),
        ({"test_images": torch.zeros((0, 1, 5, 6), dtype=torch.uint8)}, "test split.*non-empty"),
        ({"train_labels": torch.tensor([0, 1, 1])}, "each of the 4 images"),
        ({"train_labels": torch.tensor([0, 1, 1, 0], dtype=torch.int32)}, "int64"),
        ({"train_labels": torch.tensor([0, 1, 2, 0])}, "from 0 to 2.*0..1 for 2 classes"),
        ({"test_labels": torch.tensor([-1, 0])}, "from -1 to 0"),
        ({"test_images": torch.zeros((2, 1, 6, 5), dtype=torch.uint8)}, "one size"),
        ({"mean": (0.1, 0.2)}, "each of the 1 channels"),
        ({"std": (0.0,)}, "every std must be above 0"),
        ({"mean": (float("nan"),)}, "cannot normalise"),
        ({"views": "fancy"}, "views must be one of"),
        ({"validation_labels": torch.tensor([1])}, "together, or neither"),
        (
            {
                "validation_images": torch.zeros((1, 1, 5, 6), dtype=torch.uint8),
                "validation_labels": torch.tensor([2]),
            },
            "validation split: labels run from 2 to 2",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FedsieveError, match=words) as caught:
        Dataset(**parts(**changes))
    assert str(caught.value).endswith(".")


def test_the_split_takes_the_third_of_every_five_of_a_class() -> None:
    labels = np.array([7, 7, 7, 4, 7, 7, 4, 7, 7, 4, 7, 4])
    # class 7 stands at 0 1 2 4 5 7 8 10: its third and eighth are 2 and 10; class 4's third is 9
    assert np.flatnonzero(every_fifth_per_class(labels)).tolist() == [2, 9, 10]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=80))
def test_each_class_gives_a_fifth_to_the_test_split(values: list[int]) -> None:
    labels = np.array(values)
    is_test = every_fifth_per_class(labels)
    for label in range(5):
        size = int((labels == label).sum())
        assert int(is_test[labels == label].sum()) == (size + 2) // 5


def test_channel_statistics_are_those_of_numpy() -> None:
    images = np.random.default_rng(3).integers(0, 256, (7, 3, 4, 5), dtype=np.uint8)
    mean, std = channel_statistics(torch.from_numpy(images))
    scaled = images.astype(np.float64) / 255
    np.testing.assert_allclose(mean, scaled.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, scaled.std(axis=(0, 2, 3)), rtol=1e-12)


def test_the_registry_describes_each_source_in_one_line() -> None:
    names = {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "clothing1m", "npz"}
    assert set(SOURCES) == names | {"folder", "table", "sites"}
    for source in SOURCES.values():
        assert source.description
        assert "\n" not in source.description


def test_an_unknown_source_is_answered_with_the_known_ones() -> None:
    with pytest.raises(FedsieveError, match=r"no source 'svhn'.*digits, mnist"):
        load("svhn")


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"digits"}))
def test_a_source_of_files_needs_a_path(name: str) -> None:
    with pytest.raises(FedsieveError, match=f"{name} is read from files: give the path of"):
        load(name)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100", "clothing1m"])
def test_a_missing_source_says_what_was_looked_for_and_how_to_get_it(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsieveError, match="looked for") as caught:
        load(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert f"`fedsieve data get {name}`" in str(caught.value)


def test_digits_are_split_by_class_and_stretched_to_bytes() -> None:
    from sklearn.datasets import load_digits

    dataset = load("digits")
    raw = load_digits()
    # class sizes of the published set: 178 182 177 183 181 182 181 179 174 180 -> (n + 2) // 5
    expected_test = [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert torch.bincount(dataset.test_labels).tolist() == expected_test
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (1438, 359)
    assert dataset.train_images.shape[1:] == (1, 8, 8)
    # the third zero of the file is the first zero of the test split: 16 -> 255, 8 -> 127.5 -> 128
    third_zero = raw.images[np.flatnonzero(raw.target == 0)[2]]
    first_zero = dataset.test_images[int((dataset.test_labels == 0).nonzero()[0])][0]
    grey = {int(v): round(int(v) * 255 / 16) for v in range(17)}
    assert first_zero.tolist() == [[grey[int(v)] for v in row] for row in third_zero]
    assert (grey[16], grey[8], int(dataset.train_images.max())) == (255, 128, 255)
    assert dataset.views == "digits"
    pixels = dataset.train_images.numpy() / 255
    assert dataset.mean[0] == pytest.approx(pixels.mean(), rel=1e-9)


def test_digits_come_out_the_same_each_time() -> None:
    first, second = load("digits"), load("digits")
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_labels, second.test_labels)
