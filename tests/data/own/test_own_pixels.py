"""Images of every kind become pixels of one size, or a reason why not."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.data.own.pixels import Look, UnreadableError, decode, look_at

RNG = np.random.default_rng(5)
MANY = 10**6


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("ending", ["png", "bmp", "tif", "webp", "gif", "pgm"])
def test_grey_pixels_come_back_exactly(tmp_path: Path, ending: str):
    pixels = noise(9, 7)
    file = tmp_path / f"a.{ending}"
    image = Image.fromarray(pixels)
    if ending == "webp":
        image.convert("RGB").save(file, lossless=True)
    else:
        image.save(file)
    looked = look_at(file, MANY)
    assert (looked.height, looked.width) == (9, 7)
    assert np.array_equal(decode(file, (9, 7), 1, MANY), pixels[None])
    assert np.array_equal(decode(file, (9, 7), 3, MANY), np.stack([pixels] * 3))


def test_colour_pixels_come_back_exactly(tmp_path: Path):
    pixels = noise(6, 8, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert look_at(tmp_path / "a.png", MANY) == Look(6, 8, is_grey=False)
    assert np.array_equal(decode(tmp_path / "a.png", (6, 8), 3, MANY), pixels.transpose(2, 0, 1))


def test_a_palette_is_looked_up(tmp_path: Path):
    image = Image.fromarray(np.array([[0, 1]], np.uint8), mode=None).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", (1, 2), 3, MANY).tolist() == [
        [[10, 200]],
        [[20, 100]],
        [[30, 50]],
    ]


def test_one_bit(tmp_path: Path):
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "a.png")
    assert look_at(tmp_path / "a.png", MANY).is_grey
    assert decode(tmp_path / "a.png", (1, 2), 1, MANY).tolist() == [[[255, 0]]]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_sixteen_bits_become_eight(tmp_path: Path, ending: str):
    # v · 255 / 65535 = v / 257, to the nearest: 128.4 and 128.6 of 257ths fall on either side
    values = np.array([[0, 128, 129, 257, 32896, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{ending}")
    assert look_at(tmp_path / f"a.{ending}", MANY).is_grey
    assert decode(tmp_path / f"a.{ending}", (1, 6), 1, MANY).tolist() == [[[0, 0, 1, 1, 128, 255]]]


def test_cmyk(tmp_path: Path):
    Image.new("CMYK", (2, 2), (0, 255, 255, 0)).save(tmp_path / "a.tif")  # no cyan: red
    red, green, blue = decode(tmp_path / "a.tif", (2, 2), 3, MANY)
    assert (red.min(), green.max(), blue.max()) == (255, 0, 0)


def test_what_is_transparent_lies_on_white(tmp_path: Path):
    rgba = np.array([[[9, 9, 9, 0], [9, 9, 9, 255], [0, 0, 0, 128]]], np.uint8)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    # black at 128/255: 255 · 127/255 = 127
    assert decode(tmp_path / "a.png", (1, 3), 3, MANY)[0].tolist() == [[255, 9, 127]]
    Image.fromarray(rgba[:, :, [0, 3]], "LA").save(tmp_path / "b.png")
    assert look_at(tmp_path / "b.png", MANY).is_grey
    assert decode(tmp_path / "b.png", (1, 3), 1, MANY)[0].tolist() == [[255, 9, 127]]


def test_a_transparent_colour_of_a_palette(tmp_path: Path):
    image = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.save(tmp_path / "a.gif", transparency=0)
    assert decode(tmp_path / "a.gif", (1, 2), 3, MANY)[:, 0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_the_cameras_orientation_is_applied(tmp_path: Path, ending: str):
    """6: the camera stood on its side; what is at the left belongs to the top."""
    pixels = np.zeros((16, 32), np.uint8)
    pixels[:, :16] = 255
    note = Image.Exif()
    note[0x0112] = 6
    file = tmp_path / f"a.{ending}"
    Image.fromarray(pixels).save(file, exif=note)
    assert look_at(file, MANY) == Look(32, 16, is_grey=ending != "webp")
    upright = decode(file, (32, 16), 1, MANY)[0]
    assert upright[:15].min() > 240
    assert upright[17:].max() < 15


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "note",
    [
        b"MM\0*\xff\xff\xff\xff",  # a table beyond the end
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02x\0\0\0\0\0\0\0",  # the text "x"
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0\0",  # the number 9
    ],
)
def test_a_damaged_orientation_spoils_nothing(tmp_path: Path, note: bytes):
    pixels = noise(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=b"Exif\0\0" + note)
    assert look_at(tmp_path / "a.png", MANY) == Look(8, 8, is_grey=True)
    assert np.array_equal(decode(tmp_path / "a.png", (8, 8), 1, MANY)[0], pixels)


def test_a_large_jpeg_is_like_its_small_self(tmp_path: Path):
    ramp = np.tile(np.linspace(0, 255, 512).astype(np.uint8), (512, 1))
    Image.fromarray(ramp).save(tmp_path / "a.jpg", quality=95)
    small = decode(tmp_path / "a.jpg", (8, 8), 1, MANY)[0]
    off = np.abs(small - (np.arange(8) * 64 + 31.5) / 511 * 255)
    assert off[:, 1:-1].max() < 2
    assert off.max() < 6  # the filter has one flank only at the edges


def test_images_are_stretched(tmp_path: Path):
    Image.fromarray(np.repeat(np.array([[0, 200]], np.uint8), 4, axis=0)).save(tmp_path / "a.png")
    assert decode(tmp_path / "a.png", (2, 2), 1, MANY).tolist() == [[[0, 200], [0, 200]]]


def test_rows_of_arrays():
    grey = noise(1, 4, 4)
    assert look_at(grey, MANY) == Look(4, 4, is_grey=True)
    assert np.array_equal(decode(grey, (4, 4), 1, MANY), grey)
    assert np.array_equal(decode(grey, (4, 4), 3, MANY), np.repeat(grey, 3, axis=0))
    colour = noise(3, 4, 4)
    assert not look_at(colour, MANY).is_grey
    assert np.array_equal(decode(colour, (4, 4), 3, MANY), colour)
    with pytest.raises(UnreadableError, match="4 x 4 pixels, more than 15"):
        look_at(colour, 15)


def png_of(width: int, height: int) -> bytes:
    """A small file that promises any number of pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def whole_jpeg(folder: Path) -> bytes:
    Image.fromarray(noise(32, 32)).save(folder / "whole.jpg")
    return (folder / "whole.jpg").read_bytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda folder: b"", "an empty file"),
        (lambda folder: b"no image at all", "not an image of a known format"),
        (lambda folder: whole_jpeg(folder)[:200], "a damaged image"),
        (lambda folder: png_of(30_000, 20_000), "too many pixels"),
        (lambda folder: png_of(1001, 1000), "1001 x 1000 pixels, more than 1,000,000"),
        (lambda folder: png_of(900, 900), "a damaged image"),
        (lambda folder: b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image of a known format"),
    ],
)
def test_a_reason_for_every_unreadable_file(tmp_path: Path, content, reason: str):
    file = tmp_path / "a.png"
    file.write_bytes(content(tmp_path))
    with pytest.raises(UnreadableError, match=f"^{reason}"):
        decode(file, (8, 8), 1, MANY)


def test_fractions_are_no_pixels(tmp_path: Path):
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(UnreadableError, match="fractions"):
        decode(tmp_path / "a.tif", (4, 4), 1, MANY)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch):
    Image.fromarray(noise(4, 4)).save(tmp_path / "a.png")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/secret/place")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError, match=r"^a file that you may not read$"):
        look_at(tmp_path / "a.png", MANY)


def test_too_little_memory_is_not_the_files_fault(tmp_path: Path, monkeypatch):
    Image.fromarray(noise(4, 4)).save(tmp_path / "a.png")

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        look_at(tmp_path / "a.png", MANY)


def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(UnreadableError, match="not a plain file"):
        look_at(tmp_path / "a.png", MANY)
