"""Operations that move pixels: crops, flips, and affine maps with the nearest pixel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedsieve.data.views.arrays import FloatArray, IntArray, to_device

_FIXED = 1 << 16
"""Pillow maps coordinates in 16.16 fixed point; so do we, to hit the same pixels."""

_WEIGHT_BITS = 22
"""Pillow's resize weighs 8-bit pixels with weights of 22 binary places."""


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Pixel (rows, columns) of each image, for int32 coordinates (n, h, 1 or w), (n, 1 or h, w)."""
    n, channels = images.shape[:2]
    places = (rows * images.shape[3] + columns).long()
    height, width = places.shape[1:]
    index = places.flatten(1)[:, None].expand(n, channels, height * width)
    return images.flatten(2).gather(2, index).view(n, channels, height, width)


def _pick_or_black(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """As `_pick`, with black wherever the coordinates lie outside the image."""
    height, width = images.shape[2:]
    framed = F.pad(images, (1, 1, 1, 1))
    return _pick(framed, rows.clamp(-1, height) + 1, columns.clamp(-1, width) + 1)


def crop(
    images: Tensor,
    top: IntArray,
    left: IntArray,
    mirrored: IntArray,
    size: tuple[int, int],
    reflect: bool,
) -> Tensor:
    """Cut `size` (height, width) at (`top`, `left`), then mirror left-right where `mirrored` is 1.

    What lies outside the image is black, or its mirror image without the edge pixel if `reflect`.
    """
    device = images.device
    height, width = images.shape[2:]
    start = to_device(np.stack([top, left, mirrored]).astype(np.int32), device)[:, :, None]
    across = torch.arange(size[1], dtype=torch.int32, device=device)
    rows = start[0] + torch.arange(size[0], dtype=torch.int32, device=device)
    columns = start[1] + across + start[2] * (size[1] - 1 - 2 * across)
    if reflect:
        rows = (height - 1) - ((height - 1) - rows.abs()).abs()
        columns = (width - 1) - ((width - 1) - columns.abs()).abs()
    pick = _pick if reflect else _pick_or_black
    return pick(images, rows[:, :, None], columns[:, None, :])


def flip(images: Tensor, mirrored: IntArray) -> Tensor:
    """Mirror left-right the images where `mirrored` is 1."""
    mask = to_device(mirrored.astype(np.bool_), images.device)[:, None, None, None]
    return torch.where(mask, images.flip(3), images)


def affine(images: Tensor, matrices: FloatArray) -> Tensor:
    """`Image.transform(size, AFFINE, matrix)` with nearest pixel and black fill; exact.

    Row (a, b, c, d, e, f) of `matrices` takes output pixel centre (x, y) to the source position
    (a x + b y + c, d x + e y + f). Exact for sides below 2**14.
    """
    device = images.device
    height, width = images.shape[2:]
    pairs = matrices.reshape(-1, 2, 3)
    origin = pairs[:, :, 2] + pairs[:, :, :2].sum(2) / 2
    fixed = np.concatenate([pairs[:, :, :2], origin[:, :, None]], axis=2) * _FIXED
    coefficients = to_device(np.floor(fixed + 0.5).astype(np.int32), device)[..., None]
    across = torch.arange(width, dtype=torch.int32, device=device)
    down = torch.arange(height, dtype=torch.int32, device=device)
    along = coefficients[:, :, 0] * across
    beside = coefficients[:, :, 1] * down + coefficients[:, :, 2]
    position = (along[:, :, None, :] + beside[:, :, :, None]) >> 16
    return _pick_or_black(images, position[:, 1], position[:, 0])


def _matrices(n: int, **entries: FloatArray) -> FloatArray:
    """n identity matrices (a, b, c, d, e, f) with the named entries replaced."""
    matrices = np.tile(np.array([1.0, 0, 0, 0, 1, 0]), (n, 1))
    for name, values in entries.items():
        matrices[:, "abcdef".index(name)] = values
    return matrices


def rotation(degrees: FloatArray, height: int, width: int) -> FloatArray:
    """`Image.rotate(degrees)`: counter-clockwise about the image's centre, same size."""
    angle = -np.deg2rad(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = width / 2, height / 2
    return _matrices(
        len(degrees), a=cos, b=sin, c=x - cos * x - sin * y, d=-sin, e=cos, f=y + sin * x - cos * y
    )


def shear_x(slopes: FloatArray, height: int, width: int) -> FloatArray:
    """The source column moves right by slope * row: `transform(AFFINE, (1, slope, 0, 0, 1, 0))`."""
    return _matrices(len(slopes), b=slopes)


def shear_y(slopes: FloatArray, height: int, width: int) -> FloatArray:
    """The source row moves down by slope * column: `transform(AFFINE, (1, 0, 0, slope, 1, 0))`."""
    return _matrices(len(slopes), d=slopes)


def translate_x(fractions: FloatArray, height: int, width: int) -> FloatArray:
    """Source columns move by fraction * width: `transform(AFFINE, (1, 0, shift, 0, 1, 0))`.

    Pillow does not use fixed point here, so the shift is rounded to whole pixels beforehand.
    """
    return _matrices(len(fractions), c=np.floor(fractions * width + 0.5))


def translate_y(fractions: FloatArray, height: int, width: int) -> FloatArray:
    """Source rows move by fraction * height: `transform(AFFINE, (1, 0, 0, 0, 1, shift))`."""
    return _matrices(len(fractions), f=np.floor(fractions * height + 0.5))


def cutout(
    images: Tensor, sides: FloatArray, rows: FloatArray, columns: FloatArray, fill: Tensor
) -> Tensor:
    """Fill a square of `sides` pixels around the centres (`rows`, `columns`), both real numbers.

    The top left corner max(0, centre - side / 2) is truncated to a pixel; from there the square
    reaches to corner + side, that last pixel included (as `ImageDraw.rectangle` draws it), and is
    cut at the image's far edges. Side 0 fills nothing. `fill` is a (1, channels, 1, 1) colour.
    """
    height, width = images.shape[2:]

    def covered(centre: FloatArray, length: int) -> Tensor:
        first = np.floor(np.maximum(0.0, centre - sides / 2))
        pixel = np.arange(length)
        inside = (pixel >= first[:, None]) & (pixel <= (first + sides)[:, None])
        return to_device(inside & (sides > 0)[:, None], images.device)

    square = covered(rows, height)[:, None, :, None] & covered(columns, width)[:, None, None, :]
    return torch.where(square, fill, images)


def resized_crop(images: Tensor, boxes: IntArray, size: int) -> Tensor:
    """Cut out boxes (top, left, height, width) and resize them with Pillow's BILINEAR filter.

    Exactly Pillow's `resize((size, height))` followed by `resize((size, size))`: across, rounded to
    8 bits, then down. One call of Pillow's may take the other order and be a grey level away. Where
    a side shrinks, the triangle widens with it, so that no source pixel is skipped.
    """
    across = _resize_axis(images, boxes[:, 1], boxes[:, 3], size, axis=3)
    return _resize_axis(across, boxes[:, 0], boxes[:, 2], size, axis=2)


def _resize_axis(images: Tensor, start: IntArray, length: IntArray, size: int, axis: int) -> Tensor:
    """Resize pixels start … start + length - 1 of one axis to `size` pixels."""
    sources, weights = _triangle_taps(start, length, size)
    target = list(images.shape)
    target[axis] = size
    aligned = (len(images), 1, 1, size) if axis == 3 else (len(images), 1, size, 1)
    half = 1 << (_WEIGHT_BITS - 1)
    total = torch.full(target, half, dtype=torch.int32, device=images.device)
    device_weights = to_device(weights, images.device)
    for source, weight in zip(to_device(sources, images.device), device_weights, strict=True):
        pixels = images.gather(axis, source.view(aligned).expand(target))
        total += pixels.int() * weight.view(aligned)
    return (total >> _WEIGHT_BITS).clamp(0, 255).to(torch.uint8)


def _triangle_taps(
    start: IntArray, length: IntArray, size: int
) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """Which source pixels make an output pixel, and with what weight: two (taps, n, size) arrays.

    Output pixel o looks at position (o + 1/2) * scale with scale = length / size; the source pixel
    at distance t has the weight max(0, 1 - t / max(1, scale)), normalised to sum 1.
    """
    scale = (length / size)[:, None]
    reach = np.maximum(scale, 1.0)
    centre = (np.arange(size) + 0.5) * scale
    first = np.maximum(np.floor(centre - reach + 0.5), 0).astype(np.int64)
    end = np.minimum(np.floor(centre + reach + 0.5), length[:, None]).astype(np.int64)
    source = first + np.arange(int((end - first).max(initial=1)))[:, None, None]
    weight = np.maximum(0.0, 1.0 - np.abs((source - centre + 0.5) * (1.0 / reach)))
    weight[source >= end] = 0.0
    weight /= weight.sum(0)
    inside = np.minimum(source, length[:, None] - 1) + start[:, None]
    return inside, np.floor(weight * (1 << _WEIGHT_BITS) + 0.5).astype(np.int32)
