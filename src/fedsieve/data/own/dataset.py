"""Own data as a data set that a recipe can train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.data.own.layout import split_of
from fedsieve.data.own.read import fixed_classes, read_own
from fedsieve.data.own.reading import AS_FOUND, ONE_SITE, Kind, KindOrAuto, OwnData, Reading
from fedsieve.data.sources.dataset import (
    Dataset,
    channel_statistics,
    every_fifth_per_class,
)
from fedsieve.errors import check

TINY_SIDE = 8
"""Images with a shorter side are not distorted."""
SMALL_SIDE = 24
"""Images with a shorter side get the gentle shifts that suit the 8x8 digits."""


def as_dataset(own: OwnData, test: OwnData | None) -> Dataset:
    """`own` to train on, and `test` to test on.

    Without `test`, of each class at each site, in the order of ids, the third of every five samples
    is held out. Its labels are then as wrong as the others, so an accuracy on them says how well a
    model agrees with the given labels, not how right it is.

    No true labels are known (`train_labels_are_noisy`). Mean and std are those of the training
    images. Views: those of the 8x8 digits below 24 pixels (none below 8), those of CIFAR-10 for
    colour images, those of MNIST, which mirror nothing, for grey ones.
    """
    labels = own.labels.numpy()
    owners = _owners(own)
    if test is None:
        is_test = every_fifth_per_class(owners * len(own.classes) + labels)
        check(
            bool(is_test.any()),
            f"{own.root}: no class has the three samples that a split needs; add images, or a "
            "folder of test images.",
        )
        held_out = own.images[torch.from_numpy(is_test)], own.labels[torch.from_numpy(is_test)]
    else:
        check(
            test.classes == own.classes and test.images.shape[1:] == own.images.shape[1:],
            f"{test.root}: test images must be read with the classes and the size of {own.root}.",
        )
        is_test = np.zeros(len(own), dtype=np.bool_)
        held_out = test.images, test.labels
    train = torch.from_numpy(~is_test)
    train_images = own.images[train]
    mean, std = channel_statistics(train_images)
    names = tuple(own.sites)
    return Dataset(
        name=own.root.resolve().name,
        classes=own.classes,
        train_images=train_images,
        train_labels=own.labels[train],
        test_images=held_out[0],
        test_labels=held_out[1],
        mean=mean,
        std=std,
        views=views_for(*own.images.shape[1:]),
        train_labels_are_noisy=True,
        sites=None if names == (ONE_SITE,) else owners[~is_test],
        site_names=() if names == (ONE_SITE,) else names,
    )


def load_own(path: Path, kind: Kind) -> Dataset:
    """The data set at `path`, with its own test images where it holds a split."""
    return as_dataset(*read_splits(path, kind))


def read_splits(path: Path, kind: KindOrAuto = "auto") -> tuple[OwnData, OwnData | None]:
    """The data at `path`, or where its folders train and test hold data, these two.

    The test images are then read with the size, channels and classes of the others.
    """
    split = split_of(path, kind)
    if split is None:
        return read_own(path, Reading(kind=kind)), None
    train, test = split
    own = read_own(train, Reading(kind=kind, classes=fixed_classes(path, AS_FOUND)))
    return own, read_own(test, own.reading_alike())


def _owners(own: OwnData) -> NDArray[np.int64]:
    """(n,) the number of the site that holds each sample."""
    owners = np.empty(len(own), dtype=np.int64)
    for number, indices in enumerate(own.sites.values()):
        owners[indices] = number
    return owners


def views_for(channels: int, height: int, width: int) -> str:
    """The view set that suits images of this shape."""
    if min(height, width) < TINY_SIDE:
        return "plain"
    if min(height, width) < SMALL_SIDE:
        return "digits"
    return "cifar10" if channels == 3 else "mnist"
