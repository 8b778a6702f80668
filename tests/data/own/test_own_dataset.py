"""Own data as a data set, as small pictures, and the digits as own data."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from own_files import class_folders, save
from PIL import Image

from fedsieve.data.own import OwnData, Reading, as_dataset, export_digits, read_own, thumbnail
from fedsieve.data.own import export as export_module
from fedsieve.data.own.export import truth_file
from fedsieve.data.own.tables import read_rows
from fedsieve.data.sources import SOURCES, load
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.types import rng_for
from helpers import few_digits


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    class_folders(tmp_path / "data" / "b-site", {"cat": 2, "dog": 3}, start=10)
    class_folders(tmp_path / "data" / "a-site", {"cat": 8, "dog": 1})
    return tmp_path / "data"


# ----------------------------------------------------------------------------------- a data set


def test_the_third_of_every_five_of_a_class_at_a_site_is_held_out(federation: Path):
    own = read_own(federation)
    data = as_dataset(own, None)
    # a-site: cats 0-7 (held out: 2 and 7), dog 8; b-site: cats 9-10, dogs 11-13 (held out: 13)
    test = [2, 7, 13]
    train = [i for i in range(14) if i not in test]
    assert torch.equal(data.test_images, own.images[test])
    assert torch.equal(data.train_images, own.images[train])
    assert data.test_labels.tolist() == [0, 0, 1]
    assert data.sites is not None
    assert data.sites.tolist() == [0] * 7 + [1] * 4
    assert data.site_names == ("a-site", "b-site")
    assert (data.name, data.classes) == ("data", ("cat", "dog"))
    assert data.train_labels_are_noisy
    scaled = own.images[train].numpy() / 255
    np.testing.assert_allclose(data.mean, scaled.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(data.std, scaled.std(axis=(0, 2, 3)))


def test_data_without_sites_name_none(tmp_path: Path):
    data = as_dataset(read_own(class_folders(tmp_path, {"a": 3, "b": 3})), None)
    assert data.sites is None
    assert data.site_names == ()


def test_too_few_to_hold_any_out(tmp_path: Path):
    own = read_own(class_folders(tmp_path, {"a": 2, "b": 2}))
    with pytest.raises(FedsieveError, match="no class has the three samples"):
        as_dataset(own, None)


def test_a_test_set_of_ones_own(tmp_path: Path):
    own = read_own(class_folders(tmp_path / "one", {"a": 2, "b": 2}))
    test = read_own(class_folders(tmp_path / "two", {"a": 1, "b": 1}, start=50))
    data = as_dataset(own, test)
    assert torch.equal(data.train_images, own.images)
    assert torch.equal(data.test_images, test.images)
    with pytest.raises(FedsieveError, match="read with the classes and the size"):
        as_dataset(own, replace(test, classes=("b", "a")))
    with pytest.raises(FedsieveError, match="read with the classes and the size"):
        as_dataset(own, replace(test, images=test.images[:, :, :4]))


@pytest.mark.parametrize(
    ("shape", "views"),
    [
        ((1, 7, 9), "plain"),
        ((1, 8, 8), "digits"),
        ((3, 23, 40), "digits"),
        ((1, 24, 24), "mnist"),
        ((3, 64, 48), "cifar10"),
    ],
)
def test_views_suit_the_size(tmp_path: Path, shape: tuple[int, int, int], views: str):
    images = torch.randint(0, 256, (6, *shape), dtype=torch.uint8)
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    ids = tuple(map(str, range(6)))
    own = OwnData(tmp_path, "folder", ("a", "b"), images, labels, ids, {"all": np.arange(6)}, ())
    data = as_dataset(own, None)
    assert data.views == views
    for name in ("raw", "weak", "strong", "aug"):
        assert view_set(views)[name](images, rng_for(0, 0, 0, name)).shape == images.shape


# -------------------------------------------------------------------------------------- sources


def test_every_kind_is_a_source(federation: Path, tmp_path: Path):
    assert [name for name, source in SOURCES.items() if source.is_own] == [
        "folder",
        "table",
        "sites",
    ]
    assert load("sites", federation).site_names == ("a-site", "b-site")
    assert load("folder", federation / "b-site").classes == ("cat", "dog")
    (federation / "b-site" / "labels.csv").write_text(
        "path,label\n"
        + "".join(f"dog/{n}.png,{'xy'[n % 2]}\ncat/0.png,x\n" for n in range(1))
        + "dog/1.png,x\ndog/2.png,x\ncat/1.png,y\n"
    )
    assert load("table", federation / "b-site").classes == ("x", "y")


def test_folders_train_and_test_are_the_splits(federation: Path, tmp_path: Path):
    root = tmp_path / "split"
    shutil.copytree(federation, root / "train")
    class_folders(root / "test", {"cat": 1, "dog": 2}, start=90, size=(16, 16))
    (root / "classes.txt").write_text("dog\ncat\n")
    data = load("sites", root)
    assert data.classes == ("dog", "cat")
    assert len(data.train_labels) == 14
    assert data.test_labels.tolist() == [1, 0, 0]
    assert data.test_images.shape[1:] == data.train_images.shape[1:]
    assert data.site_names == ("a-site", "b-site")


def test_a_table_beside_folders_train_and_test_is_read_whole(tmp_path: Path):
    for split in ("train", "test"):
        class_folders(tmp_path / split, {"cat": 3, "dog": 3})
    listed = [
        f"{split}/{name}/{n}.png,{name}"
        for split in ("train", "test")
        for name in ("cat", "dog")
        for n in range(3)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *listed]))
    data = load("table", tmp_path)
    # of the six of each class the third is held out
    assert (len(data.train_labels), len(data.test_labels)) == (10, 2)
    assert len(load("folder", tmp_path).test_labels) == 6


def test_a_split_within_sites_is_not_trained_on(tmp_path: Path):
    for site in ("a", "b"):
        for split in ("train", "test"):
            class_folders(tmp_path / site / split, {"cat": 3, "dog": 3})
    with pytest.raises(FedsieveError, match="put the split above the sites"):
        load("sites", tmp_path)


def test_classes_may_be_called_train_and_test(tmp_path: Path):
    class_folders(tmp_path, {"train": 3, "test": 3})
    assert load("folder", tmp_path).classes == ("test", "train")


# --------------------------------------------------------------------------------- small pictures


def opened(png: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    return image


def test_a_thumbnail_keeps_the_proportions_of_the_original(tmp_path: Path):
    save(tmp_path / "a" / "0.png", 40, size=(100, 200), mode="RGB")
    save(tmp_path / "b" / "0.png", 90, size=(10, 20))
    own = read_own(tmp_path, Reading(size=(8, 8)))
    assert opened(thumbnail(own, 0)).size == (96, 48)
    small = opened(thumbnail(own, 1))
    assert small.size == (80, 40)  # four times as large
    assert np.array_equal(
        np.asarray(small)[::4, ::4], np.asarray(Image.open(tmp_path / own.ids[1]))
    )
    assert opened(thumbnail(own, 1, side=10)).size == (10, 5)


def test_a_thumbnail_tells_nothing_but_pixels(tmp_path: Path):
    note = Image.Exif()
    note[0x010E] = "the patient's name"
    for name in "ab":
        (tmp_path / name).mkdir()
        photo = Image.new("L", (99, 99))
        photo.save(tmp_path / name / "0.jpg", exif=note, comment=b"secret", icc_profile=b"camera")
    own = read_own(tmp_path)
    png = thumbnail(own, 0)
    assert b"patient" not in png
    assert b"secret" not in png
    assert not opened(png).getexif()
    assert opened(png).info == {}, "a colour profile, for one, would be copied into the PNG"


def test_a_thumbnail_without_its_file_shows_what_was_read(tmp_path: Path):
    class_folders(tmp_path / "data", {"a": 2, "b": 1})
    own = read_own(tmp_path / "data")
    pixels = own.images[:, 0].numpy()
    (tmp_path / "data" / "a" / "0.png").unlink()
    (tmp_path / "data" / "a" / "1.png").write_bytes(b"changed")
    secret = save(tmp_path / "secret.png", 200)
    (tmp_path / "data" / "b" / "0.png").unlink()
    (tmp_path / "data" / "b" / "0.png").symlink_to(secret)
    for index in range(3):
        shown = np.asarray(opened(thumbnail(own, index)))
        assert np.array_equal(shown[::12, ::12], pixels[index])


def test_a_thumbnail_of_a_colour_row(tmp_path: Path):
    x = np.random.default_rng(1).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1])
    shown = np.asarray(opened(thumbnail(read_own(tmp_path / "a.npz"), 1)))
    assert np.array_equal(shown[::2, ::2], x[1])


# ------------------------------------------------------------------------------------- the digits


def test_the_digits_are_exported_with_the_truth_apart(tmp_path: Path, monkeypatch):
    digits = few_digits()
    monkeypatch.setattr(export_module, "load_digits", lambda: digits)
    out = tmp_path / "digits"
    truth = export_digits(out, sites=3, noise=(0.0, 0.25, 1.0), seed=4)
    assert truth == truth_file(out) == tmp_path / "digits-truth.csv"
    header, rows = read_rows(truth)
    assert header == ("id", "site", "given", "true")
    own = read_own(out)
    assert tuple(row[0] for row in rows) == own.ids
    assert own.classes == tuple("0123456789")
    assert [row[2] for row in rows] == [own.classes[label] for label in own.labels]
    wrong = np.array([row[2] != row[3] for row in rows])
    # 290 digits at three sites are 97, 97 and 96, and floor(97/4) = 24
    assert [len(held) for held in own.sites.values()] == [97, 97, 96]
    assert [int(wrong[held].sum()) for held in own.sites.values()] == [0, 24, 96]
    images = torch.cat([digits.train_images, digits.test_images]).numpy()
    true = torch.cat([digits.train_labels, digits.test_labels]).numpy()
    for index in (0, 150, 289):
        number = int(own.ids[index].rpartition("-")[2].removesuffix(".png"))
        assert np.array_equal(own.images[index].numpy(), images[number])
        assert rows[index][3] == str(true[number])
    again = tmp_path / "again"
    export_digits(again, sites=3, noise=(0.0, 0.25, 1.0), seed=4)
    assert truth_file(again).read_bytes() == truth.read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sites": 0}, "at least 1 site"),
        ({"sites": 1798}, "cannot share 1,797 digits"),
        ({"sites": 3, "noise": (0.1, 0.2)}, "one for each of the 3 sites"),
        ({"noise": (1.5,)}, "a share between 0 and 1"),
    ],
)
def test_mistakes_in_an_export(tmp_path: Path, options, words):
    with pytest.raises(FedsieveError, match=words):
        export_digits(tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_nothing(tmp_path: Path):
    truth_file(tmp_path / "x").write_text("mine")
    with pytest.raises(FedsieveError, match="is there already"):
        export_digits(tmp_path / "x")
    save(tmp_path / "y" / "0.png")
    with pytest.raises(FedsieveError, match="not an empty folder"):
        export_digits(tmp_path / "y")
    assert not truth_file(tmp_path / "y").exists()
