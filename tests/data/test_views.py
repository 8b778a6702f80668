"""Whole views, rebuilt image by image with Pillow and NumPy from the same random numbers."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance

from fedsieve.data.views import (
    CUTOUT_COLOUR,
    CentreCrop,
    Chain,
    Raw,
    Resize,
    Rotate,
    SimClr,
    Strong,
    StrongResized,
    View,
    Weak,
    apply_operations,
    arrays,
    geometry,
)
from fedsieve.data.views.operations import randaugment
from fedsieve.errors import FedsieveError

VIEWS = [
    Raw(),
    CentreCrop(5),
    Resize(6),
    Weak(),
    Weak(padding=0, flip=False, rotate=20.0),
    Weak(padding=0, size=6),
    Strong(),
    Strong(padding=0, flip=False, operations=0, cutout=0.0),
    StrongResized(10),
    Rotate(),
    SimClr(),
    SimClr(flip=False, jitter=0.0, grey=1.0),
    Chain((Weak(padding=1), Rotate(10.0))),
]


def noise(n: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8))


def gradient(n: int, height: int, width: int) -> torch.Tensor:
    """One-channel images whose pixel (row, column) is 1 + 16 row + column: readable places."""
    image = 1 + 16 * torch.arange(height)[:, None] + torch.arange(width)
    return image.to(torch.uint8).expand(n, 1, height, width)


def pad(image: np.ndarray, padding: int, mode: str) -> np.ndarray:
    return np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode=mode)


@pytest.mark.parametrize("view", VIEWS, ids=repr)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_view_keeps_its_promises(view: View, channels: int) -> None:
    images = noise(30, channels, 9, 12)
    before = images.clone()
    made = view(images, np.random.default_rng(4))
    again = view(images, np.random.default_rng(4))
    assert made.dtype == torch.uint8
    assert made.shape[:2] == images.shape[:2]
    assert made.is_contiguous()
    assert torch.equal(made, again), "the same generator must give the same view"
    assert torch.equal(images, before), "a view must not write to its input"
    assert len(view(images[:0], np.random.default_rng(4))) == 0
    assert hash(view) == hash(view.__class__(**{f: getattr(view, f) for f in view.__slots__}))


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_passes_and_neighbours_do_not_change_an_image(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = noise(20, 3, 9, 12)
    whole = view(images, np.random.default_rng(1))
    first = view(images[:7], np.random.default_rng(1))
    assert torch.equal(whole[:7], first)
    monkeypatch.setitem(arrays._PIXELS_PER_PASS, "cpu", 3 * 9 * 12 * 6)
    assert torch.equal(whole, view(images, np.random.default_rng(1)))


def test_views_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Weak().padding = 3  # type: ignore[misc]


def test_non_contiguous_images_are_fine() -> None:
    images = noise(16, 3, 10, 11)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    for view in VIEWS:
        a, b = (view(x, np.random.default_rng(2)) for x in (images, channels_last))
        assert torch.equal(a, b), view


def test_raw_is_the_identity_and_centre_crop_the_middle() -> None:
    images = noise(4, 3, 9, 12)
    rng = np.random.default_rng(0)
    assert torch.equal(Raw()(images, rng), images)
    assert torch.equal(CentreCrop(5)(images, rng), images[:, :, 2:7, 3:8])


@pytest.mark.parametrize("side", [5, 12, 20])
def test_resize_is_pillows(side: int) -> None:
    images = noise(3, 3, 9, 12)
    for image, made in zip(images, Resize(side)(images, np.random.default_rng(0)), strict=True):
        pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
        bilinear = Image.Resampling.BILINEAR
        expected = pillow.resize((side, 9), bilinear).resize((side, side), bilinear)
        assert np.array_equal(made.permute(1, 2, 0).numpy(), np.asarray(expected))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    padding=st.integers(0, 5),
    flip=st.booleans(),
    height=st.integers(6, 11),
    width=st.integers(6, 11),
    mode=st.sampled_from(["constant", "reflect"]),
)
def test_crop_and_flip_are_numpy_slices(
    seed: int, padding: int, flip: bool, height: int, width: int, mode: str
) -> None:
    images = noise(5, 3, height, width, seed % 1000)
    plain_strong = Strong(padding=padding, flip=flip, operations=0, cutout=0.0)
    view: View = plain_strong if mode == "reflect" else Weak(padding=padding, flip=flip)
    made = view(images, np.random.default_rng(seed))
    uniforms = np.random.default_rng(seed).random((5, view.draws))
    for image, ours, u in zip(images.numpy(), made.numpy(), uniforms, strict=True):
        top, left = int(u[0] * (2 * padding + 1)), int(u[1] * (2 * padding + 1))
        expected = pad(image, padding, mode)[:, top : top + height, left : left + width]
        if flip and u[2] < 0.5:
            expected = expected[:, :, ::-1]
        assert np.array_equal(ours, expected)


def test_weak_reaches_every_offset_equally_and_flips_half() -> None:
    made = Weak(padding=2)(gradient(5000, 6, 7), np.random.default_rng(3))[:, 0].int()
    centre = made[:, 3, 3] - 1  # never black: two rows and columns of padding cannot reach it
    rows, columns = centre // 16, centre % 16
    mirrored = made[:, 3, 2] > made[:, 3, 4]
    for offsets in (rows, columns):
        assert sorted(offsets.unique().tolist()) == [1, 2, 3, 4, 5]
        share = torch.bincount(offsets, minlength=6)[1:] / 5000
        assert (share - 0.2).abs().max() < 5 * math.sqrt(0.2 * 0.8 / 5000)
    assert abs(mirrored.float().mean().item() - 0.5) < 5 * math.sqrt(0.25 / 5000)


def test_weak_crop_of_a_size() -> None:
    images = noise(50, 1, 10, 13)
    view = Weak(padding=0, flip=False, size=7)
    made = view(images, np.random.default_rng(8))
    uniforms = np.random.default_rng(8).random((50, view.draws))
    for image, ours, u in zip(images, made, uniforms, strict=True):
        top, left = int(u[0] * 4), int(u[1] * 7)
        assert torch.equal(ours, image[:, top : top + 7, left : left + 7])


def test_rotations_are_pillows_within_the_range() -> None:
    images = noise(40, 3, 11, 16)
    for view, column in ((Rotate(30.0), 0), (Weak(padding=0, flip=False, rotate=30.0), 3)):
        made = view(images, np.random.default_rng(6))
        angles = 60 * np.random.default_rng(6).random((40, view.draws))[:, column] - 30
        for image, ours, angle in zip(images, made, angles, strict=True):
            expected = Image.fromarray(np.moveaxis(image.numpy(), 0, 2)).rotate(angle)
            assert np.array_equal(np.moveaxis(ours.numpy(), 0, 2), np.asarray(expected))


@pytest.mark.parametrize(("channels", "colour"), [(3, CUTOUT_COLOUR), (1, (123,))])
def test_cutout_of_the_strong_view(channels: int, colour: tuple[int, ...]) -> None:
    """(125, 123, 114) has the grey level 0.299 * 125 + 0.587 * 123 + 0.114 * 114 = 122.6 -> 123."""
    images = noise(200, channels, 20, 24)
    view = Strong(padding=0, flip=False, operations=0, cutout=0.5)
    made = view(images, np.random.default_rng(9))
    uniforms = np.random.default_rng(9).random((200, view.draws))
    for image, ours, u in zip(images, made, uniforms, strict=True):
        side, row, column = u[3] * 0.5 * 20, u[4] * 20, u[5] * 24
        top, left = int(max(0, row - side / 2)), int(max(0, column - side / 2))
        picture = Image.fromarray(np.moveaxis(image.numpy(), 0, 2).squeeze())
        box = (left, top, min(24, left + side), min(20, top + side))
        ImageDraw.Draw(picture).rectangle(box, colour if channels == 3 else colour[0])
        assert np.array_equal(np.moveaxis(ours.numpy(), 0, 2).squeeze(), np.asarray(picture))


@pytest.mark.parametrize(
    ("strong", "bare", "before"),
    [
        (Strong(), Strong(operations=0, cutout=0.0), 3),
        (StrongResized(14), StrongResized(14, operations=0, cutout=0.0), 23),
    ],
    ids=["strong", "resized"],
)
def test_strong_views_are_crop_then_operations_then_cutout(
    strong: View, bare: View, before: int
) -> None:
    """Each part is checked against Pillow on its own; here, that they are put together in order."""
    images = noise(300, 3, 16, 14)
    made = strong(images, np.random.default_rng(21))
    u = np.random.default_rng(21).random((300, before + 3 + 3 + 3))
    cropped = bare.apply(images, np.hstack([u[:, :before], u[:, -3:]]))
    operations, magnitudes = randaugment(u[:, before : before + 3], u[:, before + 3 : before + 6])
    expected = apply_operations(cropped, operations, magnitudes)
    height, width = expected.shape[2:]
    fill = torch.tensor([125, 123, 114], dtype=torch.uint8).view(1, 3, 1, 1)
    side, row, column = u[:, -3:].T
    places = (side * 0.5 * min(height, width), row * height, column * width)
    assert torch.equal(made, geometry.cutout(expected, *places, fill))


def test_resized_crop_boxes() -> None:
    """Without the operations, the view is Pillow's resize of the first try that fits."""
    images = noise(60, 3, 24, 30)
    view = StrongResized(12, operations=0, cutout=0.0)
    made = view(images, np.random.default_rng(11))
    uniforms = np.random.default_rng(11).random((60, view.draws))
    for image, ours, u in zip(images, made, uniforms, strict=True):
        for share, shape in zip(u[:10], u[10:20], strict=True):
            area = 24 * 30 * (0.08 + share * 0.92)
            ratio = math.exp(math.log(3 / 4) + shape * (math.log(4 / 3) - math.log(3 / 4)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if width <= 30 and height <= 24:
                break
        top, left = int(u[20] * (24 - height + 1)), int(u[21] * (30 - width + 1))
        picture = Image.fromarray(np.moveaxis(image.numpy(), 0, 2))
        cut = picture.crop((left, top, left + width, top + height))
        bilinear = Image.Resampling.BILINEAR
        expected = np.asarray(cut.resize((12, height), bilinear).resize((12, 12), bilinear))
        if u[22] < 0.5:
            expected = expected[:, ::-1]
        assert np.array_equal(np.moveaxis(ours.numpy(), 0, 2), expected)


@pytest.mark.parametrize(
    ("shape", "expected"), [((4, 40), (4, 5)), ((40, 4), (5, 4)), ((12, 12), (12, 12))]
)
def test_resized_crop_that_never_fits_is_as_large_as_allowed(
    shape: tuple[int, int], expected: tuple[int, int]
) -> None:
    """The whole area with a ratio in [3/4, 4/3] fits no long image: 4 * 4/3 = 5.33 -> 5 pixels."""
    view = StrongResized(3, scale=(1.0, 1.0), flip=False, operations=0, cutout=0.0)
    image = noise(1, 1, *shape)
    uniforms = np.full((1, view.draws), 0.9)
    made = view.apply(image, uniforms)
    top, left = (int(0.9 * (side - cut + 1)) for side, cut in zip(shape, expected, strict=True))
    picture = Image.fromarray(image[0, 0].numpy())
    cut = picture.crop((left, top, left + expected[1], top + expected[0]))
    bilinear = Image.Resampling.BILINEAR
    resized = np.asarray(cut.resize((3, expected[0]), bilinear).resize((3, 3), bilinear))
    assert np.array_equal(made[0, 0].numpy(), resized)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="Pillow's blend may be built with fused multiply-add here and round differently",
)
def test_simclr_is_pillows_jitter_in_random_order() -> None:
    images = noise(250, 3, 6, 8)
    view = SimClr()
    made = view(images, np.random.default_rng(13))
    uniforms = np.random.default_rng(13).random((250, view.draws))
    orders = set()
    for image, ours, u in zip(images, made, uniforms, strict=True):
        picture = Image.fromarray(np.moveaxis(image.numpy(), 0, 2))
        if u[0] < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if u[1] < 0.8:
            order = np.argsort(u[3:7])
            orders.add(tuple(order.tolist()))
            for step in order:
                factor = 0.2 + u[7 + step] * 1.6
                if step == 3:
                    hue, saturation, value = picture.convert("HSV").split()
                    turned = np.asarray(hue).astype(int) + int((u[10] * 0.4 - 0.2) * 255)
                    plane = Image.fromarray((turned % 256).astype(np.uint8))
                    picture = Image.merge("HSV", (plane, saturation, value)).convert("RGB")
                else:
                    enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
                    picture = enhance[step](picture).enhance(factor)
        if u[2] < 0.2:
            picture = picture.convert("L").convert("RGB")
        assert np.array_equal(np.moveaxis(ours.numpy(), 0, 2), np.asarray(picture))
    assert len(orders) == 24


def test_simclr_on_one_channel_knows_only_brightness_and_contrast() -> None:
    images = noise(50, 1, 6, 8)
    colours_only = SimClr(brightness=0.0, contrast=0.0, grey=1.0, jitter=1.0, flip=False)
    assert torch.equal(colours_only(images, np.random.default_rng(0)), images)
    assert not torch.equal(SimClr(flip=False)(images, np.random.default_rng(0)), images)


def test_simclr_factors_are_never_negative() -> None:
    view = SimClr(brightness=3.0, contrast=0, saturation=0, hue=0, jitter=1, grey=0, flip=False)
    uniforms = np.zeros((1, view.draws))
    assert view.apply(noise(1, 3, 4, 4), uniforms).max() == 0


def test_chain_gives_each_view_its_own_numbers() -> None:
    images = noise(30, 3, 9, 12)
    weak, rotate = Weak(padding=2), Rotate(25.0)
    uniforms = np.random.default_rng(5).random((30, 5))
    expected = rotate.apply(weak.apply(images, uniforms[:, :4]), uniforms[:, 4:])
    assert torch.equal(Chain((weak, rotate))(images, np.random.default_rng(5)), expected)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Weak(padding=-1), "padding"),
        (lambda: Weak(rotate=-5.0), "degrees"),
        (lambda: Weak(rotate=math.nan), "degrees"),
        (lambda: Weak(size=0), "size"),
        (lambda: Strong(padding=-1), "padding"),
        (lambda: Strong(operations=-1), "operations"),
        (lambda: Strong(cutout=1.5), "cutout"),
        (lambda: StrongResized(0), "size"),
        (lambda: StrongResized(8, scale=(0.5, 0.1)), "scale"),
        (lambda: StrongResized(8, scale=(0.0, 1.0)), "scale"),
        (lambda: StrongResized(8, aspect=(2.0, 1.0)), "aspect"),
        (lambda: StrongResized(8, cutout=-0.1), "cutout"),
        (lambda: Rotate(181.0), "degrees"),
        (lambda: CentreCrop(0), "size"),
        (lambda: Resize(0), "size"),
        (lambda: SimClr(brightness=-0.1), "brightness"),
        (lambda: SimClr(hue=0.6), "hue"),
        (lambda: SimClr(jitter=1.1), "jitter"),
        (lambda: SimClr(grey=-0.1), "grey"),
        (lambda: Chain(()), "at least one view"),
    ],
)
def test_bad_parameters_are_refused_when_made(make: Callable[[], View], word: str) -> None:
    with pytest.raises(FedsieveError, match=word):
        make()


@pytest.mark.parametrize(
    ("view", "images", "word"),
    [
        (Raw(), torch.zeros(2, 3, 4, 4), "uint8"),
        (Raw(), torch.zeros(3, 4, 4, dtype=torch.uint8), "shape"),
        (Raw(), torch.zeros(2, 4, 4, 4, dtype=torch.uint8), "1 or 3"),
        (CentreCrop(5), torch.zeros(2, 3, 4, 8, dtype=torch.uint8), "5 x 5"),
        (Weak(size=13), torch.zeros(2, 3, 4, 8, dtype=torch.uint8), "crop"),
        (Strong(padding=4), torch.zeros(2, 3, 4, 8, dtype=torch.uint8), "padding"),
    ],
)
def test_images_that_do_not_fit_are_refused(view: View, images: torch.Tensor, word: str) -> None:
    with pytest.raises(FedsieveError, match=word):
        view(images, np.random.default_rng(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("view", VIEWS, ids=repr)
@pytest.mark.parametrize("channels", [1, 3])
def test_cuda_makes_the_same_view(view: View, channels: int) -> None:
    images = noise(500, channels, 32, 28)
    here = view(images, np.random.default_rng(7))
    there = view(images.cuda(), np.random.default_rng(7))
    assert there.device.type == "cuda"
    assert torch.equal(here, there.cpu())
