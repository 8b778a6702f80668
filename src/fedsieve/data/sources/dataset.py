"""What every source returns: images and labels as whole tensors, checked once when made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import check

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with (done, total) while something slow goes on; total is None where it is not known."""

VIEW_PRESETS = ("cifar10", "cifar100", "mnist", "digits", "clothing1m", "plain")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """A labelled image set with its official split, before any noise or partition."""

    name: str
    classes: tuple[str, ...]
    """class names; a label is an index into them"""
    train_images: Tensor
    """(n, channels, height, width) uint8"""
    train_labels: Tensor
    """(n,) int64"""
    test_images: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    """per channel, of pixels scaled to [0, 1]; what normalisation subtracts"""
    std: tuple[float, ...]
    """per channel, of pixels scaled to [0, 1]; what normalisation divides by"""
    views: str
    """which of `VIEW_PRESETS` augments these images"""
    train_labels_are_noisy: bool = False
    """True where the training labels come wrong by nature, so that no true ones are known"""
    validation_images: Tensor | None = None
    validation_labels: Tensor | None = None
    sites: NDArray[np.int64] | None = None
    """(n,) which site holds a training sample, 0 … K−1; None where the data do not say"""
    site_names: tuple[str, ...] = ()
    """(K) their names, in order"""

    def __post_init__(self) -> None:
        check(
            len(self.classes) >= 2 and len(set(self.classes)) == len(self.classes),
            f"{self.name} needs at least two classes with different names, not {self.classes!r}.",
        )
        check(
            (self.validation_images is None) == (self.validation_labels is None),
            f"{self.name}: give validation images and validation labels together, or neither.",
        )
        splits = {
            "train": (self.train_images, self.train_labels),
            "test": (self.test_images, self.test_labels),
        }
        if self.validation_images is not None and self.validation_labels is not None:
            splits["validation"] = (self.validation_images, self.validation_labels)
        for split, (images, labels) in splits.items():
            self._check_split(split, images, labels)
        channels = self.train_images.shape[1]
        check(
            len(self.mean) == len(self.std) == channels,
            f"{self.name}: give one mean and one std for each of the {channels} channels.",
        )
        check(
            all(math.isfinite(value) for value in (*self.mean, *self.std)) and min(self.std) > 0,
            f"{self.name}: mean {self.mean} and std {self.std} cannot normalise images; every std "
            "must be above 0, so the images of a channel must not all be one colour.",
        )
        check(
            self.views in VIEW_PRESETS,
            f"{self.name}: views must be one of {', '.join(VIEW_PRESETS)}, not {self.views!r}.",
        )

    def _check_split(self, split: str, images: Tensor, labels: Tensor) -> None:
        where = f"{self.name}, {split} split"
        check(
            images.dtype == torch.uint8 and images.ndim == 4 and images.numel() > 0,
            f"{where}: images must be a non-empty uint8 tensor (n, channels, height, width), "
            f"not {images.dtype} {tuple(images.shape)}.",
        )
        check(
            labels.dtype == torch.int64 and tuple(labels.shape) == (len(images),),
            f"{where}: labels must be an int64 tensor with one entry for each of the "
            f"{len(images)} images, not {labels.dtype} {tuple(labels.shape)}.",
        )
        low, high = int(labels.min()), int(labels.max())
        check(
            low >= 0 and high < len(self.classes),
            f"{where}: labels run from {low} to {high}, but must lie in "
            f"0..{len(self.classes) - 1} for {len(self.classes)} classes.",
        )
        check(
            images.shape[1:] == self.train_images.shape[1:],
            f"{where}: images are {tuple(images.shape[1:])}, but those of the train split are "
            f"{tuple(self.train_images.shape[1:])}; all must have one size.",
        )


def every_fifth_per_class(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the test samples of a fixed stratified split of 80 : 20.

    Of each class, in the order of the file, the third of every five samples is a test sample. So
    a class of n samples gives floor((n + 2) / 5), and the split needs no seed.
    """
    is_test = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[2::5]] = True
    return is_test


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) standard deviation per channel of uint8 images scaled to [0, 1].

    Computed from the histogram of the 256 values, so it is exact and needs no float copy.
    """
    value = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].reshape(-1), minlength=256)
        share = counts.to(torch.float64) / counts.sum()
        mean = (share * value).sum()
        means.append(float(mean))
        stds.append(float((share * (value - mean) ** 2).sum().sqrt()))
    return tuple(means), tuple(stds)
