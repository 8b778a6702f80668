"""Many images, each with its own sequence of operations, in a few batched calls.

`apply_operations` sorts the images by operation, so that each kind (table look-up, saturation,
sharpness, hue, affine map) is one call on a contiguous slice; it is exactly the same as applying
the sequence to one image after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from fedsieve.data.views import colour, geometry, tables
from fedsieve.data.views.arrays import FloatArray, IntArray, to_device


class Operation(IntEnum):
    """What can be done to an image. The numbers keep operations of one kind together."""

    AUTOCONTRAST = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    EQUALIZE = 3
    POSTERIZE = 4
    SOLARIZE = 5
    SATURATION = 6
    SHARPNESS = 7
    HUE = 8
    ROTATE = 9
    SHEAR_X = 10
    SHEAR_Y = 11
    TRANSLATE_X = 12
    TRANSLATE_Y = 13
    IDENTITY = 14


_TABLES: Mapping[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    Operation.AUTOCONTRAST: tables.autocontrast,
    Operation.BRIGHTNESS: tables.brightness,
    Operation.CONTRAST: tables.contrast,
    Operation.EQUALIZE: tables.equalize,
    Operation.POSTERIZE: tables.posterize,
    Operation.SOLARIZE: tables.solarize,
}
_COLOURS: Mapping[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    Operation.SATURATION: colour.saturation,
    Operation.SHARPNESS: colour.sharpness,
    Operation.HUE: colour.hue,
}
_MAPS: Mapping[Operation, Callable[[FloatArray, int, int], FloatArray]] = {
    Operation.ROTATE: geometry.rotation,
    Operation.SHEAR_X: geometry.shear_x,
    Operation.SHEAR_Y: geometry.shear_y,
    Operation.TRANSLATE_X: geometry.translate_x,
    Operation.TRANSLATE_Y: geometry.translate_y,
}

RANDAUGMENT: Mapping[Operation, tuple[float, float]] = {
    Operation.AUTOCONTRAST: (0.0, 0.0),
    Operation.BRIGHTNESS: (0.05, 0.95),
    Operation.CONTRAST: (0.05, 0.95),
    Operation.EQUALIZE: (0.0, 0.0),
    Operation.POSTERIZE: (4.0, 8.0),
    Operation.SOLARIZE: (0.0, 256.0),
    Operation.SATURATION: (0.05, 0.95),
    Operation.SHARPNESS: (0.05, 0.95),
    Operation.ROTATE: (-30.0, 30.0),
    Operation.SHEAR_X: (-0.3, 0.3),
    Operation.SHEAR_Y: (-0.3, 0.3),
    Operation.TRANSLATE_X: (-0.3, 0.3),
    Operation.TRANSLATE_Y: (-0.3, 0.3),
    Operation.IDENTITY: (0.0, 0.0),
}
"""The 14 operations of the strong view, each with the range of its uniform magnitude."""

_CHOICES = np.array(list(RANDAUGMENT), dtype=np.int64)
_RANGES = np.array(list(RANDAUGMENT.values()))


def randaugment(choice: FloatArray, strength: FloatArray) -> tuple[IntArray, FloatArray]:
    """Operations and magnitudes of RandAugment from two arrays of numbers uniform on [0, 1).

    Every operation is equally likely and may come again; magnitudes are uniform over their range
    (posterize keeps floor(U(4, 8)) bits). There is no common magnitude parameter.
    """
    drawn = np.floor(choice * len(_CHOICES)).astype(np.int64)
    low, high = _RANGES[drawn, 0], _RANGES[drawn, 1]
    operations = _CHOICES[drawn]
    share = strength * (high - low)
    return operations, low + np.where(operations == Operation.POSTERIZE, np.floor(share), share)


def apply_operations(images: Tensor, operations: IntArray, magnitudes: FloatArray) -> Tensor:
    """Image i after operations[i, 0], operations[i, 1] … in turn, each with its magnitude."""
    standing = np.arange(len(images))
    for step in range(operations.shape[1]):
        order = np.argsort(operations[standing, step], kind="stable")
        standing = standing[order]
        images = images.index_select(0, to_device(order, images.device))
        images = _apply_sorted(images, operations[standing, step], magnitudes[standing, step])
    return images.index_select(0, to_device(np.argsort(standing), images.device))


def _apply_sorted(images: Tensor, operations: IntArray, magnitudes: FloatArray) -> Tensor:
    """One operation per image, where `operations` ascends. Overwrites `images`."""
    bounds = np.searchsorted(operations, np.arange(len(Operation) + 1)).tolist()
    present = {o: slice(bounds[o], bounds[o + 1]) for o in Operation if bounds[o] < bounds[o + 1]}
    sizes = to_device(magnitudes, images.device)
    channels, height, width = images.shape[1:]

    looked_up = [o for o in present if o in _TABLES]
    if looked_up:
        span = slice(present[looked_up[0]].start, present[looked_up[-1]].stop)
        parts = [_TABLES[o](images[present[o]], sizes[present[o]]) for o in looked_up]
        whole = torch.cat([part.expand(-1, channels, -1) for part in parts])
        images[span] = tables.apply_tables(images[span], whole)

    for operation in (o for o in present if o in _COLOURS):
        span = present[operation]
        images[span] = _COLOURS[operation](images[span], sizes[span])

    moved = [o for o in present if o in _MAPS]
    if moved:
        span = slice(present[moved[0]].start, present[moved[-1]].stop)
        matrices = [_MAPS[o](magnitudes[present[o]], height, width) for o in moved]
        images[span] = geometry.affine(images[span], np.concatenate(matrices))
    return images
