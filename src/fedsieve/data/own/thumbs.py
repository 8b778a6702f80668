"""Small pictures of samples for people to look at."""

from __future__ import annotations

import io

from PIL import Image

from fedsieve.data.own.layout import lies_inside
from fedsieve.data.own.names import path_of
from fedsieve.data.own.pixels import UnreadableError, image_of, load_image
from fedsieve.data.own.reading import AS_FOUND, OwnData


def thumbnail(own: OwnData, index: int, side: int = 96) -> bytes:
    """A PNG of sample `index` whose longer side is at most `side` pixels, proportions kept.

    It is made from the original file where there is one, else from the pixels that were read.
    Smaller images are enlarged by a whole factor. Nothing but pixels is in it: no place, no camera.
    """
    image = _original(own, index, side)
    return small_png(image_of(own.images[index].numpy()) if image is None else image, side)


def small_png(image: Image.Image, side: int = 96) -> bytes:
    """A PNG of the image as `thumbnail` describes it."""
    factor = side // max(image.size)
    if factor >= 2:
        image = image.resize(
            (image.width * factor, image.height * factor), Image.Resampling.NEAREST
        )
    image.thumbnail((side, side), Image.Resampling.BILINEAR)
    image.info.clear()
    png = io.BytesIO()
    image.save(png, "PNG")
    return png.getvalue()


def _original(own: OwnData, index: int, side: int) -> Image.Image | None:
    file = own.root / path_of(own.ids[index])
    if not lies_inside(file, own.root):
        return None
    try:
        return load_image(file, side, AS_FOUND.max_pixels)
    except UnreadableError:
        return None
