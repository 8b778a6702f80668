"""CIFAR from small files of both editions, from archives, and from the real CIFAR-10."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsieve.data.sources import CIFAR100_SUPERCLASS_OF, CIFAR100_SUPERCLASSES, load
from fedsieve.data.sources.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES
from fedsieve.errors import FedsieveError

# The published table: coarse label of fine labels 0..99.
COARSE = [
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
]

Samples = tuple[NDArray[np.uint8], NDArray[np.uint8]]
FOLDERS = {
    ("cifar10", "binary"): ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ("cifar10", "python"): ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    ("cifar100", "binary"): ("cifar-100-binary", "cifar-100-binary.tar.gz"),
    ("cifar100", "python"): ("cifar-100-python", "cifar-100-python.tar.gz"),
}


def samples(seed: int, count: int, classes: int) -> Samples:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, rng.integers(0, classes, count, dtype=np.uint8)


def files_of(name: str, edition: str) -> tuple[dict[str, bytes], Samples, Samples]:
    """The files of a small set, and what its train and test splits should be."""
    classes = 10 if name == "cifar10" else 100
    stems = [f"data_batch_{i}" for i in range(1, 6)] if name == "cifar10" else ["train"]
    test_stem = "test_batch" if name == "cifar10" else "test"
    parts = {stem: samples(i, 4 + i, classes) for i, stem in enumerate([*stems, test_stem])}
    files = {}
    for stem, (pixels, labels) in parts.items():
        if edition == "binary":
            coarse = [] if name == "cifar10" else [np.array(COARSE, np.uint8)[labels][:, None]]
            records = np.concatenate([*coarse, labels[:, None], pixels], axis=1)
            files[f"{stem}.bin"] = records.tobytes()
        elif name == "cifar10":
            files[stem] = pickle.dumps({"data": pixels, "labels": labels.tolist()}, protocol=2)
        else:
            table = {
                b"data": pixels,
                b"fine_labels": labels.tolist(),
                b"coarse_labels": [COARSE[label] for label in labels],
                b"filenames": [b"a.png"] * len(labels),
            }
            files[stem] = pickle.dumps(table, protocol=4)
    train = (
        np.concatenate([parts[stem][0] for stem in stems]),
        np.concatenate([parts[stem][1] for stem in stems]),
    )
    return files, train, parts[test_stem]


def write_folder(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_archive(archive: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=1) as pack:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            pack.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("place", ["inside", "itself", "archive", "archive itself", "./archive"])
@pytest.mark.parametrize(("name", "edition"), list(FOLDERS))
def test_both_editions_are_read_wherever_they_lie(
    name: str, edition: str, place: str, tmp_path: Path
) -> None:
    files, train, test = files_of(name, edition)
    folder, archive = FOLDERS[name, edition]
    if "archive" in place:
        prefix = "./" if place == "./archive" else ""
        write_archive(tmp_path / archive, {f"{prefix}{folder}/{k}": v for k, v in files.items()})
    else:
        write_folder(tmp_path / folder, files)
    path = {"itself": tmp_path / folder, "archive itself": tmp_path / archive}.get(place, tmp_path)
    dataset = load(name, path)
    assert np.array_equal(dataset.train_images.numpy().reshape(-1, 3072), train[0])
    assert dataset.train_labels.tolist() == train[1].tolist()
    assert np.array_equal(dataset.test_images.numpy().reshape(-1, 3072), test[0])
    assert dataset.test_labels.tolist() == test[1].tolist()
    assert dataset.train_images.shape[1:] == (3, 32, 32)
    assert dataset.views == name
    expected = (0.4914, 0.4822, 0.4465) if name == "cifar10" else (0.507, 0.487, 0.441)
    assert dataset.mean == expected


def test_a_folder_goes_before_an_archive(tmp_path: Path) -> None:
    files, train, _ = files_of("cifar10", "python")
    write_folder(tmp_path / "cifar-10-batches-py", files)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"broken")
    assert load("cifar10", tmp_path).train_labels.tolist() == train[1].tolist()


def test_class_names_and_superclasses_are_the_official_ones() -> None:
    assert CIFAR10_CLASSES[3] == "cat"
    assert len(set(CIFAR100_CLASSES)) == 100
    named = {0: "apple", 1: "aquarium_fish", 29: "dinosaur", 47: "maple_tree", 99: "worm"}
    assert {i: CIFAR100_CLASSES[i] for i in named} == named
    assert list(CIFAR100_SUPERCLASS_OF) == COARSE
    assert all(CIFAR100_SUPERCLASS_OF.count(i) == 5 for i in range(20))
    assert list(CIFAR100_SUPERCLASSES) == sorted(CIFAR100_SUPERCLASSES)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("data_batch_3.bin", None, r"data_batch_3\.bin cannot be read .*fedsieve data get cifar10"),
        ("data_batch_3.bin", b"", "no whole number of records"),
        ("test_batch.bin", b"\0" * 3072, "3072 bytes are no whole number of records of 3073"),
        ("test_batch.bin", b"\x0a" + b"\0" * 3072, "test split: labels run from 10 to 10"),
    ],
)
def test_a_damaged_binary_file_is_named(
    file: str, content: bytes | None, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    write_folder(folder, files_of("cifar10", "binary")[0])
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(FedsieveError, match=words):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("fine", [0, 200])
def test_fine_labels_that_contradict_the_coarse_are_refused(fine: int, tmp_path: Path) -> None:
    files, _, _ = files_of("cifar100", "binary")
    write_folder(tmp_path, files | {"test.bin": bytes([5, fine]) + b"\0" * 3072})
    with pytest.raises(FedsieveError, match="contradict each other"):
        load("cifar100", tmp_path)


PIXELS = np.zeros((2, 3072), dtype=np.uint8)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"labels": [1, 2]}, "no `data` array"),
        ({"data": PIXELS.astype(np.int16), "labels": [1, 2]}, "no `data` array of uint8"),
        ({"data": PIXELS[:, :100], "labels": [1, 2]}, "with 3072 columns"),
        ({"data": PIXELS}, "no list of whole numbers named `labels`"),
        ({"data": PIXELS, "labels": [0.5, 1.0]}, "whole numbers"),
        ({"data": PIXELS, "labels": [[1], [2, 3]]}, "whole numbers"),
    ],
)
def test_a_python_file_with_the_wrong_content_is_refused(
    table: dict[str, object], words: str, tmp_path: Path
) -> None:
    files, _, _ = files_of("cifar10", "python")
    write_folder(tmp_path, files | {"data_batch_2": pickle.dumps(table)})
    with pytest.raises(FedsieveError, match=words):
        load("cifar10", tmp_path)


def test_an_archive_is_read_without_unpacking_and_links_in_it_are_not_followed(
    tmp_path: Path,
) -> None:
    files, _, _ = files_of("cifar10", "binary")
    folder, archive = FOLDERS["cifar10", "binary"]
    (tmp_path / "secret").write_bytes(files["test_batch.bin"])
    members = {f"{folder}/{k}": v for k, v in files.items() if k != "test_batch.bin"}
    write_archive(tmp_path / archive, members | {"../escaped": b"x", "readme.html": b"x"})
    with pytest.raises(FedsieveError, match=r"holds no file test_batch.bin"):
        load("cifar10", tmp_path)
    with tarfile.open(tmp_path / archive, "w:gz", compresslevel=1) as pack:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            pack.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo(f"{folder}/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        pack.addfile(link)
    with pytest.raises(FedsieveError, match=r"holds no file test_batch.bin"):
        load("cifar10", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [archive, "secret"]
    assert not (tmp_path.parent / "escaped").exists()


def test_a_member_too_large_to_be_official_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsieve.data.sources.cifar.LARGEST_MEMBER", 1000)
    folder, archive = FOLDERS["cifar100", "binary"]
    write_archive(tmp_path / archive, {f"{folder}/train.bin": b"\0" * 3074})
    with pytest.raises(FedsieveError, match="too large to be official"):
        load("cifar100", tmp_path)


def test_a_cut_off_archive_is_refused(tmp_path: Path) -> None:
    files, _, _ = files_of("cifar10", "binary")
    folder, name = FOLDERS["cifar10", "binary"]
    archive = tmp_path / name
    write_archive(archive, {f"{folder}/{k}": v for k, v in files.items()})
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive", b""):
        archive.write_bytes(content)
        with pytest.raises(FedsieveError, match="cannot be read"):
            load("cifar10", tmp_path)


def test_the_real_cifar10_is_read_whole(cifar10_dir: Path) -> None:
    dataset = load("cifar10", cifar10_dir)
    assert torch.bincount(dataset.train_labels).tolist() == [5000] * 10
    assert torch.bincount(dataset.test_labels).tolist() == [1000] * 10
    raw = (cifar10_dir / "cifar-10-batches-bin" / "data_batch_2.bin").read_bytes()
    assert int(dataset.train_labels[10_007]) == raw[7 * 3073]
    assert dataset.train_images[10_007].numpy().tobytes() == raw[7 * 3073 + 1 : 8 * 3073]
    # the published channel means of the training set, which the constants abbreviate
    means = [dataset.train_images[:, channel].numpy().mean() / 255 for channel in range(3)]
    np.testing.assert_allclose(means, dataset.mean, atol=1e-4)
