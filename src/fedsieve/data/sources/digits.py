"""The 1,797 handwritten digits (8x8 pixels) that come inside scikit-learn: no file, no network."""

from __future__ import annotations

import numpy as np
import torch

from fedsieve.data.sources.dataset import Dataset, channel_statistics, every_fifth_per_class


def load_digits() -> Dataset:
    """1,438 train and 359 test digits: the third of every five of a class is a test digit.

    The pixel values 0..16 are stretched to 0..255.
    """
    # Not above: its second of import is not for those who read other sources.
    from sklearn.datasets import load_digits as sklearn_digits

    pixels, digits = sklearn_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = digits.astype(np.int64)
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
