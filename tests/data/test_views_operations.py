"""Every operation against Pillow, image by image. All comparisons are exact unless said otherwise.

Pillow's blend truncates a float32; builds that fuse multiply and add (arm64) may differ by one grey
level, so the blending operations get that tolerance there and only there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from fedsieve.data.views import RANDAUGMENT, Operation, apply_operations, geometry
from fedsieve.data.views.operations import randaugment

BLEND_TOLERANCE = 0 if platform.machine() in ("x86_64", "AMD64") else 1
SHAPES = [(3, 32, 32), (1, 28, 28), (3, 9, 14), (1, 8, 5), (3, 2, 7)]


def sample_images(shape: tuple[int, int, int], n: int = 24, seed: int = 0) -> torch.Tensor:
    """Noise, narrow ranges, few values, constants: what tables and histograms stumble over."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 256, (n, shape[0], 1, 1))
    high = rng.integers(0, 256, (n, shape[0], 1, 1))
    images = rng.integers(np.minimum(low, high), np.maximum(low, high) + 1, (n, *shape))
    images[0] = rng.integers(0, 256, shape)
    images[1] = 0
    images[2] = 255
    images[3] = images[3, :, :1, :1]
    images[4] = np.where(rng.random(shape) < 0.9, 200, images[4])
    images[5] = np.linspace(0, 255, shape[2]).astype(int)
    return torch.from_numpy(images.astype(np.uint8))


def to_pillow(image: torch.Tensor) -> Image.Image:
    array = image.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, 2))


def from_pillow(image: Image.Image) -> np.ndarray:
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else np.moveaxis(array, 2, 0)


def turn_hue(image: Image.Image, turns: float) -> Image.Image:
    if image.mode == "L":
        return image
    hue, saturation, value = image.convert("HSV").split()
    shifted = (np.asarray(hue).astype(int) + int(turns * 255)) % 256
    planes = (Image.fromarray(shifted.astype(np.uint8)), saturation, value)
    return Image.merge("HSV", planes).convert("RGB")


def transform(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


PILLOW: dict[Operation, Callable[[Image.Image, float], Image.Image]] = {
    Operation.AUTOCONTRAST: lambda image, _: ImageOps.autocontrast(image),
    Operation.BRIGHTNESS: lambda image, m: ImageEnhance.Brightness(image).enhance(m),
    Operation.CONTRAST: lambda image, m: ImageEnhance.Contrast(image).enhance(m),
    Operation.EQUALIZE: lambda image, _: ImageOps.equalize(image),
    Operation.POSTERIZE: lambda image, m: ImageOps.posterize(image, int(m)),
    Operation.SOLARIZE: lambda image, m: ImageOps.solarize(image, m),
    Operation.SATURATION: lambda image, m: ImageEnhance.Color(image).enhance(m),
    Operation.SHARPNESS: lambda image, m: ImageEnhance.Sharpness(image).enhance(m),
    Operation.HUE: turn_hue,
    Operation.ROTATE: lambda image, m: image.rotate(m),
    Operation.SHEAR_X: lambda image, m: transform(image, 1, m, 0, 0, 1, 0),
    Operation.SHEAR_Y: lambda image, m: transform(image, 1, 0, 0, m, 1, 0),
    Operation.TRANSLATE_X: lambda image, m: transform(image, 1, 0, m * image.width, 0, 1, 0),
    Operation.TRANSLATE_Y: lambda image, m: transform(image, 1, 0, 0, 0, 1, m * image.height),
    Operation.IDENTITY: lambda image, _: image,
}

BLENDING = {
    Operation.BRIGHTNESS,
    Operation.CONTRAST,
    Operation.SATURATION,
    Operation.SHARPNESS,
}

MAGNITUDES = {
    Operation.AUTOCONTRAST: [0.0],
    Operation.EQUALIZE: [0.0],
    Operation.IDENTITY: [0.0],
    Operation.POSTERIZE: [1, 4, 5, 6, 7, 8],
    Operation.SOLARIZE: [0.0, 0.5, 100.0, 127.99, 128.0, 254.5, 255.0, 256.0],
    Operation.HUE: [0.0, 0.2, -0.2, 0.003, -0.003, 0.5, -0.5, 0.11],
    Operation.ROTATE: [0.0, 30.0, -30.0, 7.3, -19.99, 45.0, 90.0, 180.0, 0.01],
    Operation.SHEAR_X: [0.0, 0.3, -0.3, 0.123, 0.001],
    Operation.SHEAR_Y: [0.0, 0.3, -0.3, -0.217, 0.001],
    Operation.TRANSLATE_X: [0.0, 0.3, -0.3, 0.11, -0.01, 0.0156],
    Operation.TRANSLATE_Y: [0.0, 0.3, -0.3, 0.11, -0.01, 0.0156],
} | {operation: [0.0, 0.05, 0.5, 0.61, 0.95, 1.0, 1.37, 1.8] for operation in BLENDING}


def assert_equal(
    ours: torch.Tensor, pillow: list[Image.Image], tolerance: int = 0, note: str = ""
) -> None:
    expected = np.stack([from_pillow(image) for image in pillow]).astype(int)
    assert ours.dtype == torch.uint8
    assert ours.shape == expected.shape
    off = np.abs(ours.numpy().astype(int) - expected)
    assert off.max() <= tolerance, f"{note}: {np.count_nonzero(off > tolerance)} pixels differ"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", list(Operation), ids=lambda o: o.name.lower())
def test_each_operation_is_what_pillow_does(
    operation: Operation, shape: tuple[int, int, int]
) -> None:
    images = sample_images(shape)
    before = images.clone()
    for magnitude in MAGNITUDES[operation]:
        ours = apply_operations(
            images, np.full((len(images), 1), operation), np.full((len(images), 1), magnitude)
        )
        expected = [PILLOW[operation](to_pillow(image), magnitude) for image in images]
        tolerance = BLEND_TOLERANCE if operation in BLENDING else 0
        assert_equal(ours, expected, tolerance, f"{operation.name} {magnitude}")
    assert torch.equal(images, before), "the input was written to"


def test_magnitudes_belong_to_their_own_image() -> None:
    rng = np.random.default_rng(5)
    images = sample_images((3, 17, 23), n=60, seed=3)
    operations = rng.permutation(np.arange(60) % len(Operation))[:, None]
    magnitudes = np.array([[rng.choice(MAGNITUDES[Operation(o)])] for o in operations[:, 0]])
    ours = apply_operations(images, operations, magnitudes)
    expected = [
        PILLOW[Operation(o)](to_pillow(image), m)
        for image, o, m in zip(images, operations[:, 0], magnitudes[:, 0], strict=True)
    ]
    assert_equal(ours, expected, BLEND_TOLERANCE)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(0, 4),
    shape=st.sampled_from(SHAPES),
    n=st.integers(0, 12),
)
def test_sequences_are_pillow_calls_one_after_the_other(
    seed: int, steps: int, shape: tuple[int, int, int], n: int
) -> None:
    rng = np.random.default_rng(seed)
    images = sample_images(shape, n=12, seed=seed)[:n]
    operations, magnitudes = randaugment(rng.random((n, steps)), rng.random((n, steps)))
    ours = apply_operations(images, operations, magnitudes)
    assert ours.shape == images.shape
    for i, image in enumerate(images):
        expected = to_pillow(image)
        for operation, magnitude in zip(operations[i], magnitudes[i], strict=True):
            expected = PILLOW[Operation(operation)](expected, magnitude)
        if BLEND_TOLERANCE == 0:
            assert_equal(ours[i : i + 1], [expected])


def test_hue_of_many_colours() -> None:
    """Every 5th level of red, green and blue (140,608 colours), which Pillow rounds in all ways."""
    levels = np.arange(0, 256, 5, dtype=np.uint8)
    colours = np.stack(np.meshgrid(levels, levels, levels, indexing="ij")).reshape(3, 52, -1)
    image = torch.from_numpy(colours)[None]
    for turns in (0.0, 0.2, -0.137):
        ours = apply_operations(image, np.array([[Operation.HUE]]), np.array([[turns]]))
        assert_equal(ours, [turn_hue(to_pillow(image[0]), turns)])


def test_saturation_zero_is_the_grey_image() -> None:
    images = sample_images((3, 8, 8))
    zero = np.zeros((len(images), 1))
    ours = apply_operations(images, np.full((len(images), 1), Operation.SATURATION), zero)
    assert_equal(ours, [to_pillow(image).convert("L").convert("RGB") for image in images])


def test_randaugment_draws_all_fourteen_evenly_and_over_their_whole_range() -> None:
    assert len(RANDAUGMENT) == 14
    assert Operation.HUE not in RANDAUGMENT
    choice = (np.arange(28) + 0.5) / 28
    operations, lowest = randaugment(choice[:, None], np.zeros((28, 1)))
    _, highest = randaugment(choice[:, None], np.full((28, 1), np.nextafter(1, 0)))
    assert np.array_equal(np.bincount(operations[:, 0])[list(RANDAUGMENT)], np.full(14, 2))
    for operation, low, high in zip(operations[:, 0], lowest[:, 0], highest[:, 0], strict=True):
        expected = {
            Operation.POSTERIZE: (4, 7),
            Operation.SOLARIZE: (0, 256),
            Operation.ROTATE: (-30, 30),
            Operation.SHEAR_X: (-0.3, 0.3),
            Operation.SHEAR_Y: (-0.3, 0.3),
            Operation.TRANSLATE_X: (-0.3, 0.3),
            Operation.TRANSLATE_Y: (-0.3, 0.3),
            Operation.BRIGHTNESS: (0.05, 0.95),
            Operation.CONTRAST: (0.05, 0.95),
            Operation.SATURATION: (0.05, 0.95),
            Operation.SHARPNESS: (0.05, 0.95),
        }.get(Operation(operation), (0, 0))
        assert (low, high) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), height=st.integers(1, 20), width=st.integers(1, 20))
def test_cutout_draws_pillows_rectangle(data: st.DataObject, height: int, width: int) -> None:
    """The corner is max(0, centre - side / 2) truncated; Pillow paints corner + side as well."""
    side = data.draw(st.floats(0.01, 16))
    row, column = data.draw(st.floats(0, height)), data.draw(st.floats(0, width))
    images = sample_images((3, height, width), n=6)[:1]
    fill = torch.tensor([9, 8, 7], dtype=torch.uint8).view(1, 3, 1, 1)
    ours = geometry.cutout(images, *(np.array([v]) for v in (side, row, column)), fill)
    expected = to_pillow(images[0]).copy()
    left, top = int(max(0, column - side / 2)), int(max(0, row - side / 2))
    corners = (left, top, min(width, left + side), min(height, top + side))
    ImageDraw.Draw(expected).rectangle(corners, (9, 8, 7))
    assert_equal(ours, [expected])


def test_cutout_by_hand() -> None:
    image = torch.zeros(3, 1, 6, 6, dtype=torch.uint8)
    ours = geometry.cutout(
        image,
        sides=np.array([2.5, 2.5, 0.0]),
        rows=np.array([0.5, 5.9, 3.0]),
        columns=np.array([3.0, 5.9, 3.0]),
        fill=torch.full((1, 1, 1, 1), 1, dtype=torch.uint8),
    )
    expected = np.zeros((3, 6, 6), dtype=int)
    expected[0, 0:3, 1:4] = 1  # corner (0, 1.75 -> 1): rows 0..2.5, columns 1..3.5
    expected[1, 4:, 4:] = 1  # corner (4.65 -> 4), cut at the far edges
    assert np.array_equal(ours[:, 0].numpy(), expected)


def test_resized_crop_is_pillows_bilinear_resize() -> None:
    """Exact for across-then-down; Pillow's single call may go down first and round differently."""
    rng = np.random.default_rng(2)
    boxes = np.array(
        [[0, 0, 40, 50], [3, 5, 20, 20], [7, 1, 1, 1], [10, 12, 30, 7], [1, 2, 39, 41]]
    )
    images = torch.from_numpy(rng.integers(0, 256, (len(boxes), 3, 40, 50), dtype=np.uint8))
    for size in (1, 5, 20, 64):
        ours = geometry.resized_crop(images, boxes, size)
        cuts = [
            to_pillow(image).crop((left, top, left + width, top + height))
            for image, (top, left, height, width) in zip(images, boxes.tolist(), strict=True)
        ]
        bilinear = Image.Resampling.BILINEAR
        across = [cut.resize((size, cut.height), bilinear) for cut in cuts]
        assert_equal(ours, [cut.resize((size, size), bilinear) for cut in across])
        assert_equal(ours, [cut.resize((size, size), bilinear) for cut in cuts], tolerance=1)
