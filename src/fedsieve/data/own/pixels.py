"""From an image file of any kind to pixels of one size.

Only the formats below are tried. The first frame counts. Transparent pixels lie on white, the
orientation that a camera noted is applied, and 16 bits become 8 as v · 255/65535.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "DIB", "WEBP", "GIF", "PPM")
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"})
DEEP_MODES = GREY_MODES - {"1", "L", "LA", "La"}
ORIENTATION = 0x0112
TURNED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""


class UnreadableError(Exception):
    """An image that cannot be used; the text says why, as part of a sentence."""


@dataclass(frozen=True)
class Look:
    """What the head of an image says."""

    height: int
    width: int
    is_grey: bool


def look_at(source: Path | NDArray[np.uint8], max_pixels: int) -> Look:
    """Height, width and colour of an image, without decoding it."""
    if isinstance(source, np.ndarray):
        channels, height, width = source.shape
        _check_size(width, height, max_pixels)
        return Look(height, width, channels == 1)
    with _said_plainly(), _opened(source, max_pixels) as image:
        width, height = image.size
        # A TIFF is turned by Pillow itself; a PNG may have the note after its pixels, and then all
        # of these would have to be decoded first.
        is_noted_ahead = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
        if is_noted_ahead and _orientation(image) in TURNED:
            width, height = height, width
        return Look(height, width, image.mode in GREY_MODES)


def decode(
    source: Path | NDArray[np.uint8], size: tuple[int, int], channels: int, max_pixels: int
) -> NDArray[np.uint8]:
    """(channels, *size) pixels of an image, stretched to the size."""
    if isinstance(source, np.ndarray):
        if source.shape == (channels, *size):
            return source
        image = image_of(source)
    else:
        image = load_image(source, max(size), max_pixels)
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != size[::-1]:
        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def image_of(pixels: NDArray[np.uint8]) -> Image.Image:
    """The image, in mode L or RGB, of pixels (channels, height, width)."""
    return Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0).copy())


def load_image(file: Path, side: int, max_pixels: int) -> Image.Image:
    """The image of a file, upright and in mode L or RGB.

    A JPEG is decoded at a half, a quarter or an eighth of its size where that leaves both sides at
    least twice as long as `side`.
    """
    with _said_plainly(), _opened(file, max_pixels) as image:
        image.draft(None, (2 * side, 2 * side))
        image.load()
        is_noted = _orientation(image) in range(2, 9)
        return _flat(ImageOps.exif_transpose(image) if is_noted else image)


@contextmanager
def _opened(file: Path, max_pixels: int) -> Iterator[Image.Image]:
    if not file.is_file():  # opening a pipe would wait for ever
        raise UnreadableError("not a plain file")
    if file.stat().st_size == 0:
        raise UnreadableError("an empty file")
    # Given a path instead, Pillow maps some TIFF files into memory and forgets to turn them.
    with file.open("rb") as stream, Image.open(stream, formats=FORMATS) as image:
        _check_size(image.width, image.height, max_pixels)
        yield image


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadableError(f"{width} x {height} pixels, more than {max_pixels:,}")


def _orientation(image: Image.Image) -> int:
    """How the camera was held; 1 where nothing legible says so, for that spoils no image."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return 1


def _flat(image: Image.Image) -> Image.Image:
    """The image in mode L or RGB."""
    if image.mode == "F":
        raise UnreadableError("pixels that are fractions; save it with 8 or 16 bits")
    if image.mode in DEEP_MODES:
        values = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    mode = "L" if image.mode in GREY_MODES else "RGB"
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert(mode)


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Turn whatever a decoder makes of a damaged file into an `UnreadableError`.

    Pillow's decoders raise almost any exception on hostile bytes, so all are meant here, but for
    those that say something about this machine.
    """
    try:
        yield
    except (UnreadableError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableError("too many pixels") from error
    except UnidentifiedImageError as error:
        raise UnreadableError("not an image of a known format") from error
    except PermissionError as error:
        raise UnreadableError("a file that you may not read") from error
    except Exception as error:
        raise UnreadableError("a damaged image") from error
