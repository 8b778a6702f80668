"""The 1,797 handwritten digits (8x8 pixels) that come inside scikit-learn: no file, no network."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedsieve.data.sources.dataset import Dataset, channel_statistics, every_fifth_per_class
from fedsieve.errors import FedsieveError

FILE = "datasets/data/digits.csv.gz"
"""Inside scikit-learn's folder."""


def load_digits() -> Dataset:
    """1,438 train and 359 test digits: the third of every five of a class is a test digit.

    The pixel values 0..16 are stretched to 0..255.
    """
    rows = _rows()
    images = np.rint(rows[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = rows[:, -1]
    is_test = every_fifth_per_class(labels)
    train_images = torch.from_numpy(images[~is_test])
    mean, std = channel_statistics(train_images)
    return Dataset(
        name="digits",
        classes=tuple("0123456789"),
        train_images=train_images,
        train_labels=torch.from_numpy(labels[~is_test]),
        test_images=torch.from_numpy(images[is_test]),
        test_labels=torch.from_numpy(labels[is_test]),
        mean=mean,
        std=std,
        views="digits",
    )


def _rows() -> npt.NDArray[np.int64]:
    """(1797, 65): the pixels of a digit from left to right and top to bottom, and then which it is.

    The file is found without importing scikit-learn, which would take a second in every process.
    """
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        path = Path(folder) / FILE
        if path.is_file():
            with gzip.open(path, "rt", encoding="ascii") as file:
                return np.loadtxt(file, dtype=np.int64, delimiter=",")
    raise FedsieveError(
        f"The digits are in scikit-learn's {FILE}, which is not there; install scikit-learn again."
    )
