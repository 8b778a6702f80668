"""What the view modules share: array types, the way to the device, and the size of one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

GREYS = 256
"""Number of values of a uint8 pixel."""

_PIXELS_PER_PASS = {"cpu": 1 << 20}
_PIXELS_PER_PASS_ELSEWHERE = 1 << 28


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A host array on `device`, without making the host wait for work that is queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def in_passes(
    transform: Callable[[Tensor, FloatArray], Tensor], images: Tensor, uniforms: FloatArray
) -> Tensor:
    """`transform` of all images, as many at a time as suits the device's memory.

    A processor is fastest when a pass stays in its cache; an accelerator wants few, large passes.
    Image i sees only `uniforms[i]`, so the result does not depend on where the passes are cut.
    """
    at_once = _PIXELS_PER_PASS.get(images.device.type, _PIXELS_PER_PASS_ELSEWHERE)
    count = max(1, at_once // max(1, images[:1].numel()))
    if len(images) <= count:
        return transform(images, uniforms)
    starts = range(0, len(images), count)
    return torch.cat([transform(images[s : s + count], uniforms[s : s + count]) for s in starts])
