"""Views: random versions of whole image tensors, made the same way on every device.

A view is a frozen description, called with (n, channels, H, W) uint8 images (one channel or RGB)
and a generator. It draws one row of uniform numbers per image on the host, in a single call; the
images are then transformed on their own device. So a view depends on its parameters, the images and
the generator only, and image i on row i only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from fedsieve.data.views import geometry
from fedsieve.data.views.arrays import FloatArray, IntArray, in_passes, to_device
from fedsieve.data.views.colour import grey_level
from fedsieve.data.views.operations import Operation, apply_operations, randaugment
from fedsieve.errors import check

CUTOUT_COLOUR = (125, 123, 114)
"""The RGB that fills a cut-out square; one-channel images get its grey level."""


class View(ABC):
    """A random transformation of images; `view(images, rng)` makes one version of each."""

    __slots__ = ()

    def __call__(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """A new version of all images, as uint8 on their device."""
        check(
            images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] in (1, 3),
            f"A view takes uint8 images of shape (n, 1 or 3, H, W), not {images.dtype} of shape "
            f"{tuple(images.shape)}; convert them first.",
        )
        return in_passes(self.apply, images, rng.random((len(images), self.draws)))

    @property
    @abstractmethod
    def draws(self) -> int:
        """How many uniform numbers an image needs."""

    @abstractmethod
    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        """The view that the (n, draws) numbers in [0, 1) stand for."""


@dataclass(frozen=True, slots=True)
class Raw(View):
    """The images as they are."""

    draws = 0

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        return images


@dataclass(frozen=True, slots=True)
class CentreCrop(View):
    """The middle `size` x `size` pixels."""

    size: int

    draws = 0

    def __post_init__(self) -> None:
        _check_size(self.size)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        height, width = _check_room(images, self.size)
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return images[:, :, top : top + self.size, left : left + self.size].contiguous()


@dataclass(frozen=True, slots=True)
class Resize(View):
    """The whole image, resized to `size` x `size` pixels as Pillow's BILINEAR filter does."""

    size: int

    draws = 0

    def __post_init__(self) -> None:
        _check_size(self.size)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        height, width = images.shape[2:]
        return geometry.resized_crop(
            images, np.tile([0, 0, height, width], (len(images), 1)), self.size
        )


@dataclass(frozen=True, slots=True)
class Weak(View):
    """Random crop with black padding, mirrored with probability 1/2, rotated by U(-rotate, rotate).

    The crop has the size of the image, or `size` x `size`. Rotation is about the centre, with the
    nearest pixel and black corners, and left out where `rotate` is 0.
    """

    padding: int = 4
    flip: bool = True
    rotate: float = 0.0
    size: int | None = None

    draws = 4

    def __post_init__(self) -> None:
        _check_padding(self.padding)
        _check_degrees(self.rotate)
        if self.size is not None:
            _check_size(self.size)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        images = _random_crop(
            images, uniforms[:, :3], self.padding, self.flip, self.size, reflect=False
        )
        return _rotate(images, uniforms[:, 3], self.rotate) if self.rotate else images


@dataclass(frozen=True, slots=True)
class Strong(View):
    """Random crop with mirrored padding, flip, RandAugment, cutout.

    `operations` of the 14 in `RANDAUGMENT` are drawn with replacement and applied in turn. The
    cut-out square has the side U(0, cutout) times the image's shorter side and a uniform centre.
    """

    padding: int = 4
    flip: bool = True
    operations: int = 3
    cutout: float = 0.5

    def __post_init__(self) -> None:
        _check_padding(self.padding)
        _check_randaugment(self.operations, self.cutout)

    @property
    def draws(self) -> int:
        return 3 + _randaugment_draws(self.operations)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        images = _random_crop(
            images, uniforms[:, :3], self.padding, self.flip, size=None, reflect=True
        )
        return _randaugment_and_cutout(images, uniforms[:, 3:], self.operations, self.cutout)


@dataclass(frozen=True, slots=True)
class StrongResized(View):
    """Random resized crop, flip, RandAugment, cutout: the strong view of photographs.

    The crop covers a share U(scale) of the image with the width-to-height ratio exp(U(log aspect))
    and is resized to `size` x `size`. Ten tries are made to find one that fits into the image;
    failing that, it is as large as the image and `aspect` allow.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    operations: int = 3
    cutout: float = 0.5

    def __post_init__(self) -> None:
        _check_size(self.size)
        low, high = self.scale
        check(
            0 < low <= high <= 1,
            f"The scale of a resized crop is a range within (0, 1], not {self.scale}.",
        )
        low, high = self.aspect
        check(
            0 < low <= high < math.inf,
            f"The aspect of a resized crop is a range of positive numbers, not {self.aspect}.",
        )
        _check_randaugment(self.operations, self.cutout)

    @property
    def draws(self) -> int:
        return 2 * _CROP_TRIES + 3 + _randaugment_draws(self.operations)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        height, width = images.shape[2:]
        tries, rest = uniforms[:, : 2 * _CROP_TRIES], uniforms[:, 2 * _CROP_TRIES :]
        sides = _crop_sides(tries, height, width, self.scale, self.aspect)
        corners = np.floor(rest[:, :2] * (np.array([height, width]) - sides + 1)).astype(np.int64)
        images = geometry.resized_crop(images, np.hstack([corners, sides]), self.size)
        if self.flip:
            images = geometry.flip(images, _coin(rest[:, 2]))
        return _randaugment_and_cutout(images, rest[:, 3:], self.operations, self.cutout)


@dataclass(frozen=True, slots=True)
class Rotate(View):
    """Rotation by U(-degrees, degrees) about the centre, nearest pixel, black corners."""

    degrees: float = 30.0

    draws = 1

    def __post_init__(self) -> None:
        _check_degrees(self.degrees)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        return _rotate(images, uniforms[:, 0], self.degrees)


@dataclass(frozen=True, slots=True)
class SimClr(View):
    """SimCLR's colour distortion, after a flip with probability 1/2 where `flip` is set.

    With probability `jitter`, brightness, contrast and saturation change by factors
    U(max(0, 1 - s), 1 + s) and the hue by U(-hue, hue) turns, in random order; then the image turns
    grey with probability `grey`. One-channel images know only brightness and contrast.
    """

    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2
    jitter: float = 0.8
    grey: float = 0.2
    flip: bool = True

    draws = 11

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            strength = getattr(self, name)
            check(
                0 <= strength < math.inf,
                f"The {name} strength of colour jitter is at least 0, not {strength}.",
            )
        check(0 <= self.hue <= 0.5, f"The hue of colour jitter is in [0, 0.5], not {self.hue}.")
        for name in ("jitter", "grey"):
            chance = getattr(self, name)
            check(0 <= chance <= 1, f"{name} is a probability in [0, 1], not {chance}.")

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        if self.flip:
            images = geometry.flip(images, _coin(uniforms[:, 0]))
        order = np.argsort(uniforms[:, 3:7], axis=1)
        strengths = np.array([self.brightness, self.contrast, self.saturation])
        low = np.append(np.maximum(0.0, 1 - strengths), -self.hue)
        high = np.append(1 + strengths, self.hue)
        magnitudes = low + uniforms[:, 7:11] * (high - low)
        operations = np.where(uniforms[:, 1:2] < self.jitter, _JITTER[order], Operation.IDENTITY)
        # Saturation 0 is the grey image.
        greyed = np.where(uniforms[:, 2:3] < self.grey, Operation.SATURATION, Operation.IDENTITY)
        return apply_operations(
            images,
            np.hstack([operations, greyed]),
            np.hstack([np.take_along_axis(magnitudes, order, axis=1), np.zeros_like(greyed)]),
        )


@dataclass(frozen=True, slots=True)
class Chain(View):
    """One view after the other."""

    views: tuple[View, ...]

    def __post_init__(self) -> None:
        check(len(self.views) > 0, "A chain needs at least one view; use Raw() for none.")

    @property
    def draws(self) -> int:
        return sum(view.draws for view in self.views)

    def apply(self, images: Tensor, uniforms: FloatArray) -> Tensor:
        bounds = accumulate((view.draws for view in self.views), initial=0)
        for view, (start, end) in zip(self.views, pairwise(bounds), strict=True):
            images = view.apply(images, uniforms[:, start:end])
        return images


_CROP_TRIES = 10

_JITTER = np.array(
    [Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE], dtype=np.int64
)


def _coin(uniforms: FloatArray) -> IntArray:
    return (uniforms < 0.5).astype(np.int64)


def _random_crop(
    images: Tensor,
    uniforms: FloatArray,
    padding: int,
    flip: bool,
    size: int | None,
    reflect: bool,
) -> Tensor:
    """Crop of `size` (None: as large as the image) anywhere in the padded image, then the flip."""
    height, width = images.shape[2:]
    check(
        not reflect or padding < min(height, width),
        f"Mirrored padding of {padding} pixels does not fit {height} x {width} images; pad less.",
    )
    if size is not None:
        _check_room(images, size - 2 * padding)
    target = (height, width) if size is None else (size, size)
    room = np.array([height, width]) + 2 * padding - np.array(target) + 1
    corner = np.floor(uniforms[:, :2] * room).astype(np.int64) - padding
    mirrored = _coin(uniforms[:, 2]) if flip else np.zeros(len(images), dtype=np.int64)
    return geometry.crop(images, corner[:, 0], corner[:, 1], mirrored, target, reflect)


def _rotate(images: Tensor, uniforms: FloatArray, degrees: float) -> Tensor:
    height, width = images.shape[2:]
    angles = degrees * (2 * uniforms - 1)
    return geometry.affine(images, geometry.rotation(angles, height, width))


def _randaugment_draws(operations: int) -> int:
    return 2 * operations + 3


def _randaugment_and_cutout(
    images: Tensor, uniforms: FloatArray, count: int, cutout: float
) -> Tensor:
    height, width = images.shape[2:]
    operations, magnitudes = randaugment(uniforms[:, :count], uniforms[:, count : 2 * count])
    images = apply_operations(images, operations, magnitudes)
    side, row, column = uniforms[:, 2 * count :].T
    rgb = to_device(np.array(CUTOUT_COLOUR, dtype=np.uint8), images.device).view(1, 3, 1, 1)
    fill = rgb if images.shape[1] == 3 else grey_level(rgb).to(torch.uint8)
    sides = side * cutout * min(height, width)
    return geometry.cutout(images, sides, row * height, column * width, fill)


def _crop_sides(
    uniforms: FloatArray,
    height: int,
    width: int,
    scale: tuple[float, float],
    aspect: tuple[float, float],
) -> IntArray:
    """(n, 2) heights and widths: the first of the tries that fits, else the largest allowed."""
    area = height * width * (scale[0] + uniforms[:, :_CROP_TRIES] * (scale[1] - scale[0]))
    low, high = np.log(aspect)
    ratio = np.exp(low + uniforms[:, _CROP_TRIES:] * (high - low))
    tall, wide = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
    fits = (tall >= 1) & (tall <= height) & (wide >= 1) & (wide <= width)
    fallback = _largest_sides(height, width, aspect)
    tall = np.hstack([tall, np.full((len(tall), 1), fallback[0])])
    wide = np.hstack([wide, np.full((len(wide), 1), fallback[1])])
    chosen = np.where(fits.any(1), fits.argmax(1), _CROP_TRIES)[:, None]
    sides = [np.take_along_axis(side, chosen, axis=1) for side in (tall, wide)]
    return np.hstack(sides).astype(np.int64)


def _largest_sides(height: int, width: int, aspect: tuple[float, float]) -> tuple[int, int]:
    low, high = aspect
    if width < low * height:
        return max(1, round(width / low)), width
    if width > high * height:
        return height, max(1, round(height * high))
    return height, width


def _check_size(size: int) -> None:
    check(size >= 1, f"The size of a crop is at least 1 pixel, not {size}.")


def _check_room(images: Tensor, size: int) -> tuple[int, int]:
    height, width = images.shape[2:]
    check(
        size <= min(height, width),
        f"A crop needs {size} x {size} pixels and the images have {height} x {width}; "
        "use larger images or a smaller crop.",
    )
    return height, width


def _check_padding(padding: int) -> None:
    check(padding >= 0, f"The padding of a crop is at least 0 pixels, not {padding}.")


def _check_degrees(degrees: float) -> None:
    check(0 <= degrees <= 180, f"A rotation is in [0, 180] degrees, not {degrees}.")


def _check_randaugment(operations: int, cutout: float) -> None:
    check(operations >= 0, f"RandAugment applies at least 0 operations, not {operations}.")
    check(0 <= cutout <= 1, f"The cutout is a share of the side in [0, 1], not {cutout}.")
