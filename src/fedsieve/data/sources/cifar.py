"""CIFAR-10 and CIFAR-100, from the binary or the Python edition, unpacked or as an archive."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.data.sources.dataset import Dataset
from fedsieve.data.sources.unpickle import read_pickled_table
from fedsieve.errors import FedsieveError, check

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

CIFAR100_SUPERCLASSES: dict[str, tuple[str, ...]] = {
    "aquatic_mammals": ("beaver", "dolphin", "otter", "seal", "whale"),
    "fish": ("aquarium_fish", "flatfish", "ray", "shark", "trout"),
    "flowers": ("orchid", "poppy", "rose", "sunflower", "tulip"),
    "food_containers": ("bottle", "bowl", "can", "cup", "plate"),
    "fruit_and_vegetables": ("apple", "mushroom", "orange", "pear", "sweet_pepper"),
    "household_electrical_devices": ("clock", "keyboard", "lamp", "telephone", "television"),
    "household_furniture": ("bed", "chair", "couch", "table", "wardrobe"),
    "insects": ("bee", "beetle", "butterfly", "caterpillar", "cockroach"),
    "large_carnivores": ("bear", "leopard", "lion", "tiger", "wolf"),
    "large_man-made_outdoor_things": ("bridge", "castle", "house", "road", "skyscraper"),
    "large_natural_outdoor_scenes": ("cloud", "forest", "mountain", "plain", "sea"),
    "large_omnivores_and_herbivores": ("camel", "cattle", "chimpanzee", "elephant", "kangaroo"),
    "medium_mammals": ("fox", "porcupine", "possum", "raccoon", "skunk"),
    "non-insect_invertebrates": ("crab", "lobster", "snail", "spider", "worm"),
    "people": ("baby", "boy", "girl", "man", "woman"),
    "reptiles": ("crocodile", "dinosaur", "lizard", "snake", "turtle"),
    "small_mammals": ("hamster", "mouse", "rabbit", "shrew", "squirrel"),
    "trees": ("maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"),
    "vehicles_1": ("bicycle", "bus", "motorcycle", "pickup_truck", "train"),
    "vehicles_2": ("lawn_mower", "rocket", "streetcar", "tank", "tractor"),
}
"""The official coarse classes in label order, and the fine classes of each."""

CIFAR100_CLASSES = tuple(sorted(fine for five in CIFAR100_SUPERCLASSES.values() for fine in five))
"""The official fine classes: label order is alphabetical order."""

CIFAR100_SUPERCLASS_OF: tuple[int, ...] = tuple(
    next(i for i, five in enumerate(CIFAR100_SUPERCLASSES.values()) if fine in five)
    for fine in CIFAR100_CLASSES
)
"""The index of the superclass of each of the 100 fine classes."""

PIXELS = 3 * 32 * 32
LARGEST_MEMBER = 256 * 2**20

Batch: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""(n, 3072) pixels, channel by channel, and (n,) labels"""


def load_cifar10(path: Path) -> Dataset:
    """50,000 + 10,000 photographs of 32x32 pixels in 10 classes."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    return _load("cifar10", path, CIFAR10_EDITIONS, CIFAR10_CLASSES, mean, std)


def load_cifar100(path: Path) -> Dataset:
    """50,000 + 10,000 photographs of 32x32 pixels in 100 fine classes."""
    mean, std = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)
    return _load("cifar100", path, CIFAR100_EDITIONS, CIFAR100_CLASSES, mean, std)


def _decode_binary10(raw: bytes, source: str) -> Batch:
    """Records of one label byte and the pixels."""
    records = _records(raw, 1, source)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _decode_binary100(raw: bytes, source: str) -> Batch:
    """Records of a coarse label byte, a fine label byte and the pixels."""
    records = _records(raw, 2, source)
    fine = records[:, 1].astype(np.int64)
    _check_coarse(records[:, 0], fine, source)
    return records[:, 2:], fine


def _records(raw: bytes, label_bytes: int, source: str) -> NDArray[np.uint8]:
    length = label_bytes + PIXELS
    check(
        len(raw) > 0 and len(raw) % length == 0,
        f"{source} is damaged: {len(raw)} bytes are no whole number of records of {length} bytes; "
        "get it again.",
    )
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, length)


def _check_coarse(coarse: NDArray[np.generic], fine: NDArray[np.int64], source: str) -> None:
    known = fine[(fine >= 0) & (fine < 100)]
    check(
        len(known) == len(fine) == len(coarse)
        and bool((np.array(CIFAR100_SUPERCLASS_OF)[fine] == coarse).all()),
        f"{source} is damaged: its fine and coarse labels contradict each other; get it again.",
    )


def _decode_python10(raw: bytes, source: str) -> Batch:
    table = read_pickled_table(raw, source)
    return _pixels(table, source), _labels(table, "labels", source)


def _decode_python100(raw: bytes, source: str) -> Batch:
    table = read_pickled_table(raw, source)
    fine = _labels(table, "fine_labels", source)
    _check_coarse(_labels(table, "coarse_labels", source), fine, source)
    return _pixels(table, source), fine


def _pixels(table: dict[str, object], source: str) -> NDArray[np.uint8]:
    data = table.get("data")
    if not (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[1] == PIXELS
    ):
        raise FedsieveError(f"{source} holds no `data` array of uint8 with {PIXELS} columns.")
    return data


def _labels(table: dict[str, object], key: str, source: str) -> NDArray[np.int64]:
    try:
        labels = np.asarray(table.get(key))
    except ValueError:  # nested lists of unequal length
        labels = np.empty(0)
    check(
        labels.ndim == 1 and labels.dtype.kind in "iu",
        f"{source} holds no list of whole numbers named `{key}`.",
    )
    return labels.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Edition:
    """One official way to publish a set: a folder of files, or the archive of that folder."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    decode: Callable[[bytes, str], Batch]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


CIFAR10_EDITIONS = (
    _Edition(
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        decode=_decode_binary10,
    ),
    _Edition(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        decode=_decode_python10,
    ),
)
CIFAR100_EDITIONS = (
    _Edition(
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        train=("train.bin",),
        test="test.bin",
        decode=_decode_binary100,
    ),
    _Edition(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test="test",
        decode=_decode_python100,
    ),
)


def _load(
    name: str,
    path: Path,
    editions: tuple[_Edition, ...],
    classes: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Dataset:
    edition, batches = _read(name, path, editions)
    train_images, train_labels = _joined([batches[file] for file in edition.train])
    test_images, test_labels = _joined([batches[edition.test]])
    return Dataset(
        name=name,
        classes=classes,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        mean=mean,
        std=std,
        views=name,
    )


def _joined(batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    pixels = np.concatenate([pixels for pixels, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32)), torch.from_numpy(labels)


def _read(
    name: str, path: Path, editions: tuple[_Edition, ...]
) -> tuple[_Edition, dict[str, Batch]]:
    """The first edition that `path` holds, and its batches by file name.

    `path` may be the folder that holds an edition's folder or archive, that folder itself, or the
    archive. An unpacked folder goes before an archive.
    """
    for edition in editions:
        for folder in (path / edition.folder, path):
            if (folder / edition.train[0]).is_file():
                return edition, _read_folder(name, folder, edition)
    for edition in editions:
        for archive in (path / edition.archive, path):
            if archive.name == edition.archive and archive.is_file():
                return edition, _read_archive(archive, edition)
    wanted = " or ".join(f"{edition.folder}/ or {edition.archive}" for edition in editions)
    raise FedsieveError(
        f"{name} is not in {path}: looked for {wanted}; put one of them there or run "
        f"`fedsieve data get {name}`."
    )


def _read_folder(name: str, folder: Path, edition: _Edition) -> dict[str, Batch]:
    batches = {}
    for file in edition.files:
        try:
            raw = (folder / file).read_bytes()
        except OSError as error:
            raise FedsieveError(
                f"{name} is incomplete: {folder / file} cannot be read ({error.strerror}); put it "
                f"there or run `fedsieve data get {name}`."
            ) from error
        batches[file] = edition.decode(raw, str(folder / file))
    return batches


def _read_archive(archive: Path, edition: _Edition) -> dict[str, Batch]:
    """Decode the expected regular files of the archive in memory; nothing is unpacked to disk."""
    wanted = {f"{edition.folder}/{file}": file for file in edition.files}
    batches = {}
    try:
        with tarfile.open(archive, "r:gz") as pack:
            for member in pack:
                file = wanted.get(member.name.removeprefix("./"))
                if file is None or not member.isreg():
                    continue
                check(
                    member.size <= LARGEST_MEMBER,
                    f"{archive}: {member.name} is too large to be official; get the archive again.",
                )
                stream = pack.extractfile(member)
                assert stream is not None  # it is a regular file
                batches[file] = edition.decode(stream.read(), f"{archive}: {member.name}")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise FedsieveError(f"{archive} cannot be read ({error}): get it again.") from error
    missing = [file for file in edition.files if file not in batches]
    check(not missing, f"{archive} holds no file {', '.join(missing)}: get it again.")
    return batches
