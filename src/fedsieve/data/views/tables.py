"""Operations that send each grey value of an image to another one: a table of 256 per channel.

Each function returns the (n, channels or 1, 256) uint8 tables of n images and agrees exactly with
the Pillow call that it names; `apply_tables` looks all pixels up in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedsieve.data.views.arrays import GREYS
from fedsieve.data.views.colour import blend, grey_level


def apply_tables(images: Tensor, tables: Tensor) -> Tensor:
    """Replace pixel v of channel c of image i by `tables[i, c, v]`."""
    n, channels = images.shape[:2]
    rows = torch.arange(n * channels, dtype=torch.int32, device=images.device) * GREYS
    entries = images.reshape(n * channels, -1).int() + rows[:, None]
    return tables.reshape(-1).index_select(0, entries.reshape(-1)).view(images.shape)


def _greys(images: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.arange(GREYS, dtype=dtype, device=images.device)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """`ImageOps.autocontrast`: stretch each channel's [lowest, highest] to [0, 255], truncating.

    A channel of one value stays as it is.
    """
    flat = images.flatten(2)
    lowest = flat.amin(2, keepdim=True).double()
    spread = flat.amax(2, keepdim=True).double() - lowest
    # A number divided by a tensor is a multiplication with the reciprocal, which rounds twice.
    scale = torch.full_like(spread, 255.0) / spread.clamp(min=1.0)
    greys = _greys(images, torch.float64)
    stretched = (greys * scale - lowest * scale).clamp(0, 255)
    return torch.where(spread > 0, stretched, greys).to(torch.uint8)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """`ImageEnhance.Brightness`: blend with black."""
    greys = _greys(images, torch.float32)
    return blend(torch.zeros_like(greys), greys, factors[:, None, None])


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """`ImageEnhance.Contrast`: blend with the image's mean grey level, floor(mean + 1/2)."""
    level = grey_level(images).flatten(1)
    pixels = level.shape[1]
    total = level.sum(1, dtype=torch.int64)
    mean = torch.div(2 * total + pixels, 2 * pixels, rounding_mode="floor")
    return blend(mean[:, None, None].float(), _greys(images, torch.float32), factors[:, None, None])


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """`ImageOps.equalize`: make each channel's histogram h as flat as whole grey values allow.

    With step = (pixels - h of the highest occurring value) // 255, value v becomes
    (step // 2 + sum of h below v) // step, at most 255. A channel with step 0 stays as it is.
    """
    n, channels = images.shape[:2]
    values = images.reshape(n * channels, -1).long()
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand(values.shape)
    histogram = torch.zeros(n * channels, GREYS, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(1, values, ones)
    highest = values.amax(1, keepdim=True)
    step = (values.shape[1] - histogram.gather(1, highest)) // 255
    below = histogram.cumsum(1, dtype=torch.int32) - histogram
    flattened = (torch.div(step, 2, rounding_mode="floor") + below) // step.clamp(min=1)
    greys = _greys(images, torch.int32)
    tables = torch.where(step > 0, flattened.clamp(max=255), greys).to(torch.uint8)
    return tables.view(n, channels, GREYS)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """`ImageOps.posterize`: keep the highest `bits` (1 to 8, whole numbers) bits of each value."""
    step = torch.bitwise_left_shift(1, 8 - bits.int())[:, None, None]
    greys = _greys(images, torch.int32)
    return (greys - greys % step).to(torch.uint8)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """`ImageOps.solarize`: invert the values that are not below the threshold."""
    greys = _greys(images, torch.uint8)
    return torch.where(greys < thresholds[:, None, None], greys, 255 - greys)
