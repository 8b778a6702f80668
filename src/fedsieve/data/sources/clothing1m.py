"""Clothing1M: a million shop photographs with labels read from their captions, wrong by nature.

The images do not fit in memory, so they are decoded once into a cache file of raw pixels that the
tensors map. The cache is written to a `.part` file that takes its final name when it is whole; an
interrupted build goes on from the last whole image.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedsieve.data.sources.dataset import Dataset, Progress
from fedsieve.errors import FedsieveError, check

SIDE = 256
IMAGE_SHAPE = (3, SIDE, SIDE)
IMAGE_BYTES = 3 * SIDE * SIDE
CACHE_FOLDER = ".fedsieve-cache"
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")
DECODED_AT_ONCE = 256

CATEGORY_FILE = "category_names_eng.txt"
SPLITS = {
    "train": ("noisy_train_key_list.txt", "noisy_label_kv.txt"),
    "validation": ("clean_val_key_list.txt", "clean_label_kv.txt"),
    "test": ("clean_test_key_list.txt", "clean_label_kv.txt"),
}
"""The official list of images of each split, and the file that gives their labels."""

LAYOUT = (
    "images/",
    CATEGORY_FILE,
    *dict.fromkeys(file for pair in SPLITS.values() for file in pair),
)


def load_clothing1m(
    path: Path, *, cache: Path | None = None, progress: Progress | None = None
) -> Dataset:
    """Noisy training labels, clean validation and test labels, images resized to 256x256.

    The first use writes 192 KiB for each image into `cache` (PATH/.fedsieve-cache unless told
    otherwise), about 200 GB for the whole set; `progress` hears of images. A cache belongs to the
    list of images that it was made from; delete it after changing an image in place.
    """
    classes = tuple(_lines(path, CATEGORY_FILE))
    keys = {split: _keys(path, list_file) for split, (list_file, _) in SPLITS.items()}
    labels = {
        split: _labels(path, label_file, keys[split]) for split, (_, label_file) in SPLITS.items()
    }
    images = _cached_images(path, cache or path / CACHE_FOLDER, keys, progress)
    return Dataset(
        name="clothing1m",
        classes=classes,
        train_images=images["train"],
        train_labels=labels["train"],
        test_images=images["test"],
        test_labels=labels["test"],
        mean=(0.6959, 0.6537, 0.6371),
        std=(0.3113, 0.3192, 0.3214),
        views="clothing1m",
        train_labels_are_noisy=True,
        validation_images=images["validation"],
        validation_labels=labels["validation"],
    )


def _lines(path: Path, name: str) -> list[str]:
    file = next((f for f in (path / name, path / "annotations" / name) if f.is_file()), None)
    if file is None:
        raise FedsieveError(
            f"clothing1m is not in {path}: looked for {name} there and in annotations/; the folder "
            f"must hold {', '.join(LAYOUT)} (see `fedsieve data get clothing1m`)."
        )
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise FedsieveError(f"{file} cannot be read ({error}): get it again.") from error
    return [line for line in lines if line]


def _keys(path: Path, name: str) -> list[str]:
    """The image paths of a list file, refused where one would lead out of the folder."""
    keys = _lines(path, name)
    check(bool(keys), f"{name} in {path} names no image: get it again.")
    for key in keys:
        parts = PurePosixPath(key).parts
        check(
            parts[:1] == ("images",) and ".." not in parts and not {"\\", "\0"} & set(key),
            f"{name} in {path} names {key!r}, which is not a path inside images/: get the "
            "official file.",
        )
    return keys


def _labels(path: Path, name: str, keys: Sequence[str]) -> Tensor:
    label_of: dict[str, int] = {}
    for line in _lines(path, name):
        key, label = [*line.rsplit(maxsplit=1), ""][:2]
        check(
            re.fullmatch("[0-9]{1,4}", label) is not None,
            f"{name} in {path} has the line {line!r}, which is not an image path and a label.",
        )
        label_of[key] = int(label)
    unlabelled = next((key for key in keys if key not in label_of), None)
    check(unlabelled is None, f"{name} in {path} gives no label for {unlabelled}: get it again.")
    return torch.tensor([label_of[key] for key in keys], dtype=torch.int64)


def _cached_images(
    path: Path, cache: Path, keys: Mapping[str, Sequence[str]], progress: Progress | None
) -> dict[str, Tensor]:
    """Map the cache file of each split, after making those that are missing."""
    files = {split: cache / _cache_name(split, names) for split, names in keys.items()}
    missing = [split for split, file in files.items() if not _is_whole(file, len(keys[split]))]
    if missing:
        _prepare(cache, {files[split]: len(keys[split]) for split in missing})
    total = sum(len(keys[split]) for split in missing)
    before = 0
    for split in missing:
        _build(path, files[split], keys[split], progress, before, total)
        before += len(keys[split])
    return {split: _mapped(file, len(keys[split])) for split, file in files.items()}


def _cache_name(split: str, keys: Sequence[str]) -> str:
    digest = hashlib.blake2b("\n".join(keys).encode(), digest_size=8).hexdigest()
    return f"{split}-{len(keys)}x3x{SIDE}x{SIDE}-{digest}.uint8"


def _part(file: Path) -> Path:
    return file.with_name(file.name + ".part")


def _is_whole(file: Path, images: int) -> bool:
    return file.is_file() and file.stat().st_size == images * IMAGE_BYTES


def _prepare(cache: Path, images_of: Mapping[Path, int]) -> None:
    """Make the cache folder and see that the files will fit."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedsieveError(
            f"The cache folder {cache} cannot be made ({error.strerror}): make it a link to a "
            "folder that you can write to."
        ) from error
    needed = sum(
        images * IMAGE_BYTES - (_part(file).stat().st_size if _part(file).is_file() else 0)
        for file, images in images_of.items()
    )
    free = shutil.disk_usage(cache).free
    check(
        needed <= free,
        f"The cache of clothing1m needs {needed / 1e9:.1f} GB, but {cache} has only "
        f"{free / 1e9:.1f} GB left: make it a link to a folder with more room.",
    )


def _build(
    path: Path,
    file: Path,
    keys: Sequence[str],
    progress: Progress | None,
    before: int,
    total: int,
) -> None:
    """Decode the images in the order of `keys` into `file`, from where an earlier build stopped.

    What stands at a place depends on the list alone, so two builds at once write the same bytes.
    """
    part = _part(file)
    try:
        part.touch()
        done = min(part.stat().st_size // IMAGE_BYTES, len(keys))
        with part.open("r+b") as stream, ThreadPoolExecutor(os.cpu_count()) as pool:
            stream.seek(done * IMAGE_BYTES)
            while done < len(keys):
                chunk = keys[done : done + DECODED_AT_ONCE]
                for pixels in pool.map(_decode, [path / key for key in chunk]):
                    stream.write(pixels.tobytes())
                done += len(chunk)
                if progress is not None:
                    progress(before + done, total)
            stream.truncate(len(keys) * IMAGE_BYTES)
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        raise FedsieveError(
            f"The cache file {part} cannot be written ({error.strerror}): make {part.parent} a "
            "link to a folder with room that you can write to."
        ) from error


def _decode(file: Path) -> NDArray[np.uint8]:
    """(3, 256, 256) pixels of an image file, resized without regard to its proportions."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    except FileNotFoundError as error:
        raise FedsieveError(
            f"The image {file} is missing: put it back and start again; the images done so far "
            "are kept."
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedsieveError(
            f"The image {file} cannot be read ({error}): replace it and start again; the images "
            "done so far are kept."
        ) from error
    return np.asarray(small).transpose(2, 0, 1)


def _mapped(file: Path, images: int) -> Tensor:
    pixels = np.memmap(file, dtype=np.uint8, mode="r", shape=(images, *IMAGE_SHAPE))
    with warnings.catch_warnings():
        # Nothing writes to a dataset's images, and a writable private mapping of 200 GB would be
        # refused on machines with less memory than that.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(pixels)
