"""Your own images: one .npz file with `x` and `y`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.data.sources.dataset import Dataset, channel_statistics, every_fifth_per_class
from fedsieve.errors import FedsieveError, check

VIEWS_BY_SHAPE: dict[tuple[int, ...], str] = {(3, 32, 32): "cifar10", (1, 28, 28): "mnist"}
CHANNELS = (1, 3)
ARRAYS = ("x", "y", "classes", "x_test", "y_test")


def load_npz(file: Path) -> Dataset:
    """Images `x` (n,h,w), (n,h,w,c) or (n,c,h,w) of uint8 and labels `y` (n,) counted from 0.

    Optional: `classes`, the names; `x_test` and `y_test`, without which the third of every five
    samples of a class is a test sample. Mean and std are those of the train split.
    """
    arrays = read_arrays(file)
    images, labels = images_in(file, arrays, "x"), labels_in(file, arrays, "y")
    check(
        len(images) == len(labels),
        f"{file}: x holds {len(images)} images, but y {len(labels)} labels.",
    )
    check(
        ("x_test" in arrays) == ("y_test" in arrays),
        f"{file}: give x_test and y_test together, or neither.",
    )
    if "x_test" in arrays:
        train, test = (
            (images, labels),
            (
                images_in(file, arrays, "x_test"),
                labels_in(file, arrays, "y_test"),
            ),
        )
    else:
        is_test = every_fifth_per_class(labels)
        check(
            bool(is_test.any()),
            f"{file}: no class has the three samples that a split needs; add x_test and y_test.",
        )
        train, test = (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])
    train_images = torch.from_numpy(train[0])
    mean, std = channel_statistics(train_images)
    classes = classes_in(file, arrays)
    if classes is None:
        classes = numbered_classes(file, np.concatenate([train[1], test[1]]))
    return Dataset(
        name=file.stem,
        classes=classes,
        train_images=train_images,
        train_labels=torch.from_numpy(train[1]),
        test_images=torch.from_numpy(test[0]),
        test_labels=torch.from_numpy(test[1]),
        mean=mean,
        std=std,
        views=VIEWS_BY_SHAPE.get(tuple(train_images.shape[1:]), "plain"),
    )


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Those of the known arrays that the file holds; nothing is unpickled."""
    check(
        file.is_file(),
        f"There is no file {file}: give the path of an .npz file with x (uint8 images) and y "
        "(labels); there is nothing for `fedsieve data get npz` to fetch.",
    )
    try:
        content = np.load(file, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise FedsieveError(f"{file} holds one array: save x and y together with numpy.savez.")
        with content:
            return {name: content[name] for name in ARRAYS if name in content}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise FedsieveError(
            f"{file} cannot be read as an .npz file of plain arrays ({error}): save x and y with "
            "numpy.savez, without Python objects."
        ) from error


def images_in(file: Path, arrays: dict[str, NDArray[Any]], key: str) -> NDArray[np.uint8]:
    """The images in array `key` as (n, channels, height, width)."""
    check(key in arrays, f"{file} has no array {key}: it must hold uint8 images.")
    x = arrays[key]
    check(
        x.dtype == np.uint8 and x.ndim in (3, 4) and x.size > 0,
        f"{file}: {key} must be uint8 images (n,h,w), (n,h,w,c) or (n,c,h,w), "
        f"not {x.dtype} {x.shape}.",
    )
    if x.ndim == 3:
        return x[:, None]
    first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
    check(
        first != last,
        f"{file}: {key} has shape {x.shape}, but exactly one of its second and last numbers must "
        "be 1 or 3, the channels.",
    )
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if last else x


def labels_in(file: Path, arrays: dict[str, NDArray[Any]], key: str) -> NDArray[np.int64]:
    """The labels in array `key`, numbers from 0."""
    check(key in arrays, f"{file} has no array {key}: it must hold a label for each image.")
    y = arrays[key]
    check(
        y.dtype.kind in "iu" and y.ndim == 1 and y.size > 0,
        f"{file}: {key} must be whole numbers (n,), not {y.dtype} {y.shape}.",
    )
    check(
        int(y.min()) >= 0 and int(y.max()) < 2**31,
        f"{file}: {key} must count classes from 0, but runs from {y.min()} to {y.max()}.",
    )
    return y.astype(np.int64)


def classes_in(file: Path, arrays: dict[str, NDArray[Any]]) -> tuple[str, ...] | None:
    """The class names that the file holds, or None."""
    if "classes" not in arrays:
        return None
    names = arrays["classes"]
    check(
        names.dtype.kind == "U" and names.ndim == 1,
        f"{file}: classes must be a list of text, not {names.dtype} {names.shape}.",
    )
    return tuple(str(name) for name in names)


def numbered_classes(file: Path, labels: NDArray[np.int64]) -> tuple[str, ...]:
    """The class numbers as names, where there are no others."""
    count = int(labels.max()) + 1
    check(
        count <= len(labels),
        f"{file}: the labels reach {count - 1} with only {len(labels)} samples; count classes "
        "from 0 without gaps, or give their names as `classes`.",
    )
    return tuple(str(label) for label in range(count))
