"""Clothing1M from a small tree in the official layout."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedsieve.data.sources import clothing1m as module
from fedsieve.data.sources import load, load_clothing1m
from fedsieve.errors import FedsieveError

NAMES = (
    *("T-Shirt", "Shirt", "Knitwear", "Chiffon", "Sweater", "Hoodie", "Windbreaker"),
    *("Jacket", "Downcoat", "Suit", "Shawl", "Dress", "Vest", "Underwear"),
)
COUNTS = {"noisy_train": 20, "clean_val": 3, "clean_test": 4}


def make_tree(root: Path) -> dict[str, list[str]]:
    """Images of several sizes and modes, with a comma in their names as in the official set."""
    rng = np.random.default_rng(5)
    keys: dict[str, list[str]] = {}
    labels: dict[str, list[str]] = {"noisy": [], "clean": []}
    for split, count in COUNTS.items():
        keys[split] = [f"images/{i % 10}/{i}/{split},{i}.jpg" for i in range(count)]
        for i, key in enumerate(keys[split]):
            file = root / key
            file.parent.mkdir(parents=True, exist_ok=True)
            size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
            image = Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8))
            (image.convert("L") if i % 5 == 4 else image).save(
                file, "PNG" if i % 3 == 2 else "JPEG"
            )
            labels[split.split("_")[0]].append(f"{key} {(i * 3) % 14}")
        (root / f"{split}_key_list.txt").write_text("\n".join(keys[split]) + "\n")
    # the official label files also know images of other lists, in another order
    labels["noisy"].append("images/0/1/elsewhere.jpg 2")
    for kind, lines in labels.items():
        (root / f"{kind}_label_kv.txt").write_text("\n".join(reversed(lines)) + "\n")
    (root / "category_names_eng.txt").write_text("\n".join(NAMES) + "\n")
    return keys


def by_pillow(file: Path) -> torch.Tensor:
    with Image.open(file) as image:
        small = image.convert("RGB").resize((256, 256), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


@pytest.fixture
def tree(tmp_path: Path) -> tuple[Path, dict[str, list[str]]]:
    root = tmp_path / "clothing1m"
    root.mkdir()
    return root, make_tree(root)


Tree = tuple[Path, dict[str, list[str]]]


def test_the_splits_are_the_official_lists(tree: Tree) -> None:
    root, keys = tree
    calls: list[tuple[int, int | None]] = []
    dataset = load_clothing1m(root, progress=lambda done, total: calls.append((done, total)))
    assert dataset.classes == NAMES
    assert dataset.train_labels_are_noisy
    assert dataset.views == "clothing1m"
    assert dataset.validation_images is not None
    assert dataset.validation_labels is not None
    assert dataset.train_labels.tolist() == [(i * 3) % 14 for i in range(20)]
    assert dataset.validation_labels.tolist() == [0, 3, 6]
    assert dataset.test_labels.tolist() == [0, 3, 6, 9]
    for split, images in (
        ("noisy_train", dataset.train_images),
        ("clean_val", dataset.validation_images),
        ("clean_test", dataset.test_images),
    ):
        assert images.shape == (COUNTS[split], 3, 256, 256)
        for i in (0, 2, COUNTS[split] - 1):
            assert torch.equal(images[i], by_pillow(root / keys[split][i]))
    assert calls == [(20, 27), (23, 27), (27, 27)]


def test_the_cache_is_made_once_and_then_mapped(tree: Tree) -> None:
    root, keys = tree
    first = load("clothing1m", root).train_images
    files = sorted((root / ".fedsieve-cache").iterdir())
    assert [file.stat().st_size for file in files] == [n * 196608 for n in (4, 20, 3)]
    for names in keys.values():
        for key in names:
            (root / key).unlink()
    assert torch.equal(load("clothing1m", root).train_images, first)


def test_the_cache_may_lie_elsewhere_and_the_lists_in_annotations(
    tree: Tree, tmp_path: Path
) -> None:
    root, _ = tree
    (root / "annotations").mkdir()
    for file in root.glob("*.txt"):
        file.rename(root / "annotations" / file.name)
    dataset = load_clothing1m(root, cache=tmp_path / "fast" / "disk")
    assert len(list((tmp_path / "fast" / "disk").iterdir())) == 3
    assert not (root / ".fedsieve-cache").exists()
    assert len(dataset.train_labels) == 20


def test_an_interrupted_build_goes_on_where_it_stopped(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, keys = tree
    monkeypatch.setattr(module, "DECODED_AT_ONCE", 8)

    def interrupt(done: int, total: int | None) -> None:
        if done == 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_clothing1m(root, progress=interrupt)
    (part,) = (root / ".fedsieve-cache").iterdir()
    assert part.suffix == ".part"
    assert part.stat().st_size == 16 * 196608
    # half an image more, as a crash in the middle of a write would leave it
    with part.open("ab") as stream:
        stream.write(b"\x99" * 1000)
    (root / keys["noisy_train"][3]).write_bytes(b"not looked at again")
    calls: list[int] = []
    dataset = load_clothing1m(root, progress=lambda done, total: calls.append(done))
    assert calls == [20, 23, 27]
    for i in (0, 15, 16, 19):
        assert torch.equal(dataset.train_images[i], by_pillow(root / keys["noisy_train"][i]))
    assert not list((root / ".fedsieve-cache").glob("*.part"))


def test_a_changed_list_gets_its_own_cache_and_a_short_cache_is_made_anew(tree: Tree) -> None:
    root, keys = tree
    load_clothing1m(root)
    turned = list(reversed(keys["noisy_train"]))
    (root / "noisy_train_key_list.txt").write_text("\n".join(turned))
    images = load_clothing1m(root).train_images
    assert torch.equal(images[0], by_pillow(root / turned[0]))
    (short,) = (root / ".fedsieve-cache").glob("test-*")
    short.write_bytes(b"short")
    images = load_clothing1m(root).test_images
    assert torch.equal(images[3], by_pillow(root / keys["clean_test"][3]))


@pytest.mark.parametrize(
    ("content", "words"), [(None, "is missing"), (b"", "cannot be read"), (b"GIF89a", "cannot be")]
)
def test_a_bad_image_is_named_and_the_build_goes_on_after_repair(
    tree: Tree, content: bytes | None, words: str
) -> None:
    root, keys = tree
    file = root / keys["noisy_train"][7]
    good = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FedsieveError, match=words) as caught:
        load_clothing1m(root)
    assert str(file) in str(caught.value)
    (part,) = (root / ".fedsieve-cache").iterdir()
    assert part.stat().st_size == 7 * 196608
    file.write_bytes(good)
    assert torch.equal(load_clothing1m(root).train_images[7], by_pillow(file))


def test_an_image_cut_off_in_its_data_is_named(tree: Tree) -> None:
    root, keys = tree
    file = root / keys["clean_test"][0]
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(FedsieveError, match=r"clean_test,0.jpg cannot be read"):
        load_clothing1m(root)


@pytest.mark.parametrize(
    "key",
    [
        *("../outside.jpg", "images/../../outside.jpg", "/etc/passwd", "elsewhere/a.jpg", "."),
        *("images/..\\outside.jpg", "images/a\0.jpg"),
    ],
)
def test_a_path_that_leaves_the_folder_is_refused(tree: Tree, key: str) -> None:
    root, _ = tree
    with (root / "noisy_train_key_list.txt").open("a") as stream:
        stream.write(key + "\n")
    with pytest.raises(FedsieveError, match="not a path inside images/"):
        load_clothing1m(root)
    assert not (root / ".fedsieve-cache").exists()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("noisy_label_kv.txt", "images/0/0/noisy_train,0.jpg three\n", "not an image path and a"),
        ("noisy_label_kv.txt", "images/0/0/noisy_train,0.jpg\n", "not an image path and a label"),
        ("noisy_label_kv.txt", "images/a.jpg 99999\n", "not an image path and a label"),
        ("clean_label_kv.txt", "images/a.jpg 1\n", "no label for images/0/0/clean_val,0.jpg"),
        ("clean_val_key_list.txt", "\n", "names no image"),
        ("category_names_eng.txt", "a\nb\n", "0..1 for 2 classes"),
        ("clean_test_key_list.txt", None, "looked for clean_test_key_list.txt"),
        ("category_names_eng.txt", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_list_is_named(
    tree: Tree, file: str, content: str | bytes | None, words: str
) -> None:
    root, _ = tree
    (root / file).unlink()
    if content is not None:
        (root / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(FedsieveError, match=words):
        load_clothing1m(root)


def test_a_cache_without_room_is_refused_before_the_work(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = tree
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9, 27 * 196608 - 1))
    with pytest.raises(FedsieveError, match=r"needs 0\.0 GB, but .* has only 0\.0 GB left"):
        load_clothing1m(root)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9, 27 * 196608))
    load_clothing1m(root)


def test_a_cache_that_cannot_be_written_is_refused(tree: Tree) -> None:
    root, _ = tree
    blocked = root / "a file"
    blocked.write_text("x")
    with pytest.raises(FedsieveError, match=r"cannot be made .*make it a link"):
        load_clothing1m(root, cache=blocked)
    cache = root / "cache"
    cache.mkdir()
    load_clothing1m(root, cache=cache)
    (train,) = cache.glob("train-*")
    train.unlink()
    train.with_name(train.name + ".part").mkdir()
    with pytest.raises(FedsieveError, match="cannot be written"):
        load_clothing1m(root, cache=cache)
