"""Own data in every layout, with everything that people and file systems put into them."""

from __future__ import annotations

import csv
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from own_files import class_folders, close, picture, save
from PIL import Image

from fedsieve.data.own import OwnData, Reading, Skipped, read_own
from fedsieve.data.own import layout as layout_module
from fedsieve.data.own.names import id_of, path_of
from fedsieve.data.own.pixels import Look
from fedsieve.data.own.read import chosen_size
from fedsieve.errors import FedsieveError

LATIN = os.fsdecode(b"caf\xe9.png")
HOSTILE = [
    "a,b.png",
    "q\"uo'te.png",
    "new\nline.png",
    "<script>alert(1)</script>.png".replace("/", "_"),
    "=cmd|' _C calc'!A0.png",
    "back\\slash.png",
    "日本.png",
    LATIN,
    r"caf\xe9.png",
]


def given_names(own: OwnData) -> dict[str, str]:
    return {i: own.classes[label] for i, label in zip(own.ids, own.labels.tolist(), strict=True)}


def reasons(own: OwnData) -> dict[str, str]:
    return {skipped.id: skipped.reason for skipped in own.skipped}


def refused(path: Path, reading: Reading | None = None) -> str:
    with pytest.raises(FedsieveError) as caught:
        read_own(path, reading or Reading())
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# ------------------------------------------------------------------------------------ a folder


def test_a_folder_for_each_class(tmp_path: Path):
    class_folders(tmp_path, {"dog": 2, "cat": 3})
    own = read_own(tmp_path)
    assert (own.kind, own.root, own.classes, len(own)) == ("folder", tmp_path, ("cat", "dog"), 5)
    assert own.ids == ("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png")
    assert own.labels.tolist() == [0, 0, 0, 1, 1]
    assert list(own.sites) == ["all"]
    assert own.sites["all"].tolist() == [0, 1, 2, 3, 4]
    assert own.skipped == ()
    # dogs were drawn first, with the values 0 and 1
    expected = np.stack([np.asarray(picture(value)) for value in (2, 3, 4, 0, 1)])
    assert np.array_equal(own.images.numpy(), expected[:, None])
    assert (own.images.dtype, own.labels.dtype) == (torch.uint8, torch.int64)


def test_deeper_folders_belong_to_the_class_when_the_kind_is_named(tmp_path: Path):
    class_folders(tmp_path, {"cat": 1, "dog": 1})
    save(tmp_path / "cat" / "more" / "x.png")
    sentence = refused(tmp_path)
    assert '"folder" if its folders are classes and "sites" if they are sites' in sentence
    own = read_own(tmp_path, Reading(kind="folder"))
    assert given_names(own)["cat/more/x.png"] == "cat"
    assert read_own(tmp_path, Reading(kind="sites", classes=("more", "x"))).ids == (
        "cat/more/x.png",
    )


def test_the_order_of_the_file_system_does_not_matter(tmp_path: Path, monkeypatch):
    class_folders(tmp_path, {"a": 3, "b": 12})
    usual = read_own(tmp_path)
    listed = layout_module._listed
    monkeypatch.setattr(layout_module, "_listed", lambda folder: listed(folder)[::-1])
    turned = read_own(tmp_path)
    assert turned.ids == usual.ids == tuple(sorted(usual.ids))
    assert torch.equal(turned.images, usual.images)
    assert torch.equal(turned.labels, usual.labels)


def test_progress_is_told(tmp_path: Path):
    class_folders(tmp_path, {"a": 40, "b": 40})
    told: list[tuple[int, int | None]] = []
    read_own(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(64, 80), (80, 80)]


def test_what_is_left_out_and_why(tmp_path: Path):
    outside = save(tmp_path / "outside.png")
    (tmp_path / "elsewhere").mkdir()
    save(tmp_path / "elsewhere" / "x.png")
    root = class_folders(tmp_path / "data", {"cat": 2, "dog": 2, "empty": 0})
    (root / "cat" / "notes.txt").write_text("hello")
    (root / "cat" / "empty.png").write_bytes(b"")
    (root / "cat" / "broken.jpg").write_bytes(b"no image")
    (root / "cat" / ".hidden.png").write_bytes(b"")
    whole = save(root / "cat" / "cut.png", size=(40, 40)).read_bytes()
    (root / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "round.png").symlink_to(root / "round.png")
    (root / "astray").symlink_to(root / "gone")
    (root / "other-readme").symlink_to(root / "README")
    (root / "cat" / "Thumbs.db").write_bytes(b"")
    (root / ".git").mkdir()
    save(root / ".git" / "x.png")
    (root / "README").write_text("hello")
    save(root / "loose.png")
    (root / "dog" / "out.png").symlink_to(outside)
    (root / "dog" / "inside.png").symlink_to(root / "cat" / "0.png")
    (root / "dog" / "nowhere.png").symlink_to(root / "gone.png")
    (root / "dog" / "round.png").symlink_to(root / "dog" / "round.png")
    (root / "dog" / "up").symlink_to(root)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(root / "dog" / "pipe.png")
    own = read_own(root)
    assert own.ids == ("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png", "dog/inside.png")
    assert own.classes == ("cat", "dog", "empty")
    link = "a link that leads nowhere or out of the data folder"
    assert reasons(own) == {
        "cat/notes.txt": "not an image file",
        "cat/empty.png": "an empty file",
        "cat/broken.jpg": "not an image of a known format",
        "loose.png": "not in the folder of a class",
        "round.png": link,
        "astray": link,
        "cat/cut.png": "a damaged image",
        "dog/out.png": link,
        "dog/nowhere.png": link,
        "dog/round.png": link,
        "dog/up": "a link to a folder, which is not followed",
        "linked": "a link to a folder, which is not followed",
        "dog/pipe.png": "not a plain file",
    }
    assert [skipped.id for skipped in own.skipped] == sorted(reasons(own))
    sentence = refused(root, Reading(strict=True))
    assert "13 files or rows cannot be used" in sentence
    assert "(the first is 'astray': a link that leads nowhere" in sentence


def test_a_decompression_bomb_is_not_decoded(tmp_path: Path):
    class_folders(tmp_path, {"a": 1, "b": 1})
    save(tmp_path / "a" / "big.png", size=(100, 101))
    own = read_own(tmp_path, Reading(max_pixels=10_000))
    assert own.skipped == (Skipped("a/big.png", "101 x 100 pixels, more than 10,000"),)
    assert own.images.shape[2:] == (8, 8)


def test_a_folder_that_may_not_be_opened(tmp_path: Path, monkeypatch):
    class_folders(tmp_path, {"a": 1, "b": 1, "0secret": 1})
    scandir = os.scandir

    def refuse(folder):
        if Path(folder).name == "0secret":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    own = read_own(tmp_path)
    assert own.skipped == (Skipped("0secret", "a folder that you may not open"),)
    assert own.classes == ("0secret", "a", "b")
    assert read_own(tmp_path, Reading(kind="folder")).ids == ("a/0.png", "b/0.png")


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ({}, "holds no images where they were looked for"),
        ({"a": 0, "b": 0}, "holds no images where they were looked for"),
        ({"a": 3}, "has one class only, 'a'"),
    ],
)
def test_too_little_is_refused(tmp_path: Path, classes: dict[str, int], words: str):
    assert words in refused(class_folders(tmp_path, classes))


def test_nothing_at_all_and_nothing_readable(tmp_path: Path):
    assert "There is nothing at" in refused(tmp_path / "gone")
    assert "There is nothing at" in refused(tmp_path / "gone", Reading(kind="folder"))
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(b"")
    sentence = refused(tmp_path)
    assert "no image that can be used, 2 were left out (the first is 'a/x.png'" in sentence
    file = tmp_path / "a.docx"
    file.write_bytes(b"")
    assert "neither a table" in refused(file)


def test_names_of_every_kind(tmp_path: Path):
    for value, name in enumerate(HOSTILE):
        save(tmp_path / "cat" / name, value)
    class_folders(tmp_path, {"dog": 1})
    own = read_own(tmp_path)
    assert len(set(own.ids)) == len(HOSTILE) + 1
    assert {path_of(i) for i in own.ids} == {f"cat/{name}" for name in HOSTILE} | {"dog/0.png"}
    for sample_id in own.ids:
        sample_id.encode()  # every writer can write it
    assert r"cat/caf\xe9.png" in own.ids
    assert r"cat/caf\\xe9.png" in own.ids
    value = {path_of(i): own.images[k, 0, -1, 0].item() for k, i in enumerate(own.ids)}
    assert value[f"cat/{LATIN}"] == HOSTILE.index(LATIN)


def test_ids_and_paths():
    assert id_of("a/b c.png") == "a/b c.png"
    assert id_of("a\\b\udcff") == "a\\\\b\\xff"
    for path in ("\\xff", "\\\\xff", "\udc80\\", "x\\x", "\\\udcfe\\xfe"):
        assert path_of(id_of(path)) == path


def test_class_names_of_every_kind(tmp_path: Path):
    for name in ("<b>x", "=cmd", os.fsdecode(b"\xff"), unicodedata.normalize("NFD", "é")):
        save(tmp_path / name / "x.png")
    (tmp_path / "classes.txt").write_text("\ufeffé\n\n=cmd\n<b>x\n\\xff\n", encoding="utf-8")
    own = read_own(tmp_path)
    assert own.classes == ("é", "=cmd", "<b>x", "\\xff")
    assert sorted(own.labels.tolist()) == [0, 1, 2, 3]


def test_a_class_without_a_name_is_refused(tmp_path: Path):
    class_folders(tmp_path, {"a": 1, " ": 1})
    assert "the name of a class or site is missing" in refused(tmp_path)


def test_a_class_with_a_line_break_is_refused(tmp_path: Path):
    class_folders(tmp_path, {"a": 1, "b\nc": 1})
    assert "holds a control character" in refused(tmp_path)


# -------------------------------------------------------------------------- classes and size


def test_classes_are_fixed_by_a_file_or_by_the_reading(tmp_path: Path):
    class_folders(tmp_path, {"cat": 1, "dog": 1})
    (tmp_path / "classes.txt").write_text("dog\r\nbird\r\ncat\r\n")
    own = read_own(tmp_path)
    assert (own.classes, own.labels.tolist()) == (("dog", "bird", "cat"), [2, 0])
    named = read_own(tmp_path, Reading(classes=("cat", "dog")))
    assert (named.classes, named.labels.tolist()) == (("cat", "dog"), [0, 1])


def test_an_unknown_class_is_refused_with_candidates(tmp_path: Path):
    class_folders(tmp_path, {"cat": 1, "dgo": 1})
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    sentence = refused(tmp_path)
    assert "'dgo/0.png' is of class 'dgo'" in sentence
    assert sentence.endswith("did you mean 'dog'?")
    assert refused(tmp_path, Reading(classes=("x", "y"))).endswith("possible are 'x', 'y'.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cat\n", "at least two classes"),
        (b"cat\ncat\n", "only once"),
        (b"cat\n\xff\n", "not a text file in UTF-8"),
    ],
)
def test_a_bad_list_of_classes(tmp_path: Path, content: bytes, words: str):
    class_folders(tmp_path, {"cat": 1, "dog": 1})
    (tmp_path / "classes.txt").write_bytes(content)
    assert words in refused(tmp_path)


def test_a_single_class_is_enough_where_all_are_named(tmp_path: Path):
    own = read_own(class_folders(tmp_path, {"cat": 2}), Reading(classes=("cat", "dog")))
    assert own.labels.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(8, 8)], (8, 8)),
        ([(28, 20), (30, 20), (90, 20)], (30, 20)),
        ([(128, 96)], (64, 48)),
        ([(4000, 3)], (64, 1)),
        ([(10, 10), (13, 10)], (12, 10)),  # 11.5 rounds to the even 12
    ],
)
def test_the_size_is_the_median_up_to_64(sizes, expected):
    assert chosen_size([Look(h, w, is_grey=True) for h, w in sizes]) == expected


def test_mixed_sizes_and_modes_become_one(tmp_path: Path):
    save(tmp_path / "a" / "0.png", size=(8, 12))
    save(tmp_path / "a" / "1.jpg", size=(20, 20))
    save(tmp_path / "b" / "0.bmp", size=(10, 16), mode="RGB")
    own = read_own(tmp_path)
    assert tuple(own.images.shape) == (3, 3, 10, 16)
    grey = read_own(tmp_path, Reading(size=(5, 7), channels=1))
    assert tuple(grey.images.shape) == (3, 1, 5, 7)


def test_grey_stays_grey_and_can_be_made_colour(tmp_path: Path):
    class_folders(tmp_path, {"a": 1, "b": 1})
    assert read_own(tmp_path).images.shape[1] == 1
    assert read_own(tmp_path, Reading(channels=3)).images.shape[1] == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": (0, 8)}, "a height and a width"),
        ({"channels": 2}, "1 \\(grey\\), 3 \\(colour\\) or auto"),
        ({"max_pixels": 0}, "max_pixels must be at least 1"),
        ({"classes": ("a",)}, "at least two classes"),
        ({"classes": ("a", "a")}, "at least two classes"),
    ],
)
def test_a_reading_is_checked(settings, words):
    with pytest.raises(FedsieveError, match=words):
        Reading(**settings)


# ------------------------------------------------------------------------------------- a table


def table(folder: Path, text: str, name: str = "labels.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("header", ["path,label", "Filename,TARGET", "y,image", "class;x;file"])
def test_a_table_with_usual_names(tmp_path: Path, header: str):
    save(tmp_path / "images" / "1.png", 1)
    save(tmp_path / "2.png", 2)
    delimiter = ";" if ";" in header else ","
    names = header.split(delimiter)
    rows = []
    for path, label in (("images/1.png", "cat"), ("./2.png", " dog ")):
        is_path = [n.lower() in ("path", "filename", "image", "file") for n in names]
        is_label = [n.lower() in ("label", "target", "y", "class") for n in names]
        cells = [path if p else label if q else "–" for p, q in zip(is_path, is_label, strict=True)]
        rows.append(delimiter.join(cells))
    table(tmp_path, "\n".join([header, *rows]))
    own = read_own(tmp_path)
    assert (own.kind, own.classes) == ("table", ("cat", "dog"))
    assert given_names(own) == {"2.png": "dog", "images/1.png": "cat"}
    assert list(own.sites) == ["all"]


def test_a_table_by_its_path_and_with_sites(tmp_path: Path):
    for number in range(4):
        save(tmp_path / f"{number}.png", number)
    file = table(
        tmp_path,
        "path,label,site\n0.png,a,north\n1.png,b,south\n2.png,b,north\n3.png,a,south\n",
        "mine.tsv",
    )
    own = read_own(file)
    assert own.root == tmp_path
    assert {name: held.tolist() for name, held in own.sites.items()} == {
        "north": [0, 2],
        "south": [1, 3],
    }
    assert "There is no table in" in refused(tmp_path, Reading(kind="table"))


def test_rows_that_are_left_out(tmp_path: Path):
    save(tmp_path / "0.png", 0)
    save(tmp_path / "1.png", 1)
    (tmp_path / "folder.png").mkdir()
    table(
        tmp_path,
        "path,label\n0.png,a\n1.png,b\ngone.png,a\n0.png,a\n2.png,\nfolder.png,a\n"
        + "x" * 300
        + ".png,a\n",
    )
    own = read_own(tmp_path)
    assert own.ids == ("0.png", "1.png")
    assert reasons(own) == {
        "gone.png": "there is no such file",
        "0.png": "listed more than once",
        "2.png": "without a label",
        "folder.png": "there is no such file",
        "x" * 300 + ".png": "there is no such file",
    }


def test_paths_as_windows_writes_them(tmp_path: Path):
    save(tmp_path / "cats" / "1.png")
    save(tmp_path / "back\\slash.png")
    table(tmp_path, "path,label\ncats\\1.png,a\nback\\slash.png,b\n cats/1.png ,a\n")
    own = read_own(tmp_path)
    assert own.ids == ("back\\\\slash.png", "cats/1.png")


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "/secret.png",
        "a/../../secret.png",
        "C:\\secret.png",
        "\\x.png",
        "",
        "..\\secret.png",
        "link.png",
        "folder/secret.png",
        "loop.png",
    ],
)
def test_a_path_cannot_leave_the_folder(tmp_path: Path, path: str):
    save(tmp_path / "secret.png")
    data = tmp_path / "data"
    save(data / "0.png")
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    (data / "folder").symlink_to(tmp_path)
    (data / "loop.png").symlink_to(data / "loop.png")
    table(data, f"path,label\n0.png,a\n{path},b\n")
    sentence = refused(data)
    assert "row 2" in sentence
    assert "inside the folder of the table" in sentence or "a link that leads" in sentence


def test_a_nul_in_a_path_names_no_file(tmp_path: Path):
    save(tmp_path / "0.png")
    save(tmp_path / "1.png")
    table(tmp_path, "path,label\n0.png,a\n1.png,b\nx\0.png,a\n")
    assert reasons(read_own(tmp_path)) == {"x\0.png": "there is no such file"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name,label\n0.png,a\n", "no column path or file or filename or image"),
        ("path,name\n0.png,a\n", "no column label or class or target or y"),
        ("path,label\n0.png,a\n0.png,b\n", "row 2: '0.png' is listed again with another label"),
        ("path,label,site\n0.png,a,\n", "row 1: the name of a class or site is missing"),
        ("path,label\n", "has no class"),
        ("path,label\n0.png,a\x07b\n", "row 1: the name 'a\\x07b' holds a control character"),
    ],
)
def test_a_table_that_cannot_be_meant(tmp_path: Path, text: str, words: str):
    save(tmp_path / "0.png")
    table(tmp_path, text)
    assert words in refused(tmp_path)


# ----------------------------------------------------------------------------------- .npz files


def arrays(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def test_an_npz_file_with_names_inside(tmp_path: Path):
    x = arrays(12, 6, 5)
    file = tmp_path / "mine.npz"
    np.savez(file, x=x, y=np.arange(12) % 3, classes=np.array(["b", "a", "never", "c"]))
    own = read_own(file)
    assert (own.kind, own.root, own.classes) == ("npz", tmp_path, ("b", "a", "never", "c"))
    assert own.ids == tuple(f"row-{row}" for row in range(12))
    assert own.labels.tolist() == [0, 1, 2] * 4
    assert np.array_equal(own.images.numpy(), x[:, None])


def test_an_npz_file_with_names_beside_or_none_or_as_labels(tmp_path: Path):
    file = tmp_path / "mine.npz"
    np.savez(file, x=arrays(12, 3, 9, 9), y=np.arange(12))
    assert read_own(file).classes == tuple(map(str, range(12)))  # 10 after 9, not after 1
    np.savez(file, x=arrays(4, 9, 9, 3), y=np.array(["dog", "cat", "dog", "cat"]))
    own = read_own(file)
    assert (own.classes, own.labels.tolist()) == (("cat", "dog"), [1, 0, 1, 0])
    np.savez(file, x=arrays(4, 9, 9, 3), y=np.array([0, 1, 1, 0]))
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    assert given_names(read_own(file))["row-1"] == "two"
    np.savez(file, x=arrays(4, 9, 9, 3), y=np.array([0, 1, 2, 0]))
    assert "y reaches 2, but there are only 2 classes" in refused(file)
    np.savez(file, x=arrays(4, 9, 9, 3), y=np.array([0, 1, 1]))
    assert "x holds 4 images, but y 3 labels" in refused(file)
    np.savez(file, x=arrays(4, 9, 9, 3), y=np.array([None] * 4), classes=np.array(["a", "b"]))
    assert "without Python objects" in refused(file)
    assert "is not a file" in refused(tmp_path, Reading(kind="npz"))


# ---------------------------------------------------------------------------------------- sites


def test_a_ready_federation_of_every_kind(tmp_path: Path):
    class_folders(tmp_path / "site-a", {"cat": 2, "dog": 1})
    save(tmp_path / "site-b" / "pictures" / "x.png", 7, size=(9, 9))
    save(tmp_path / "site-b" / "y.png", 8)
    table(tmp_path / "site-b", "path,label,site\npictures/x.png,bird,n\ny.png,cat,s\n")
    np.savez(
        tmp_path / "site-c.npz", x=arrays(11, 10, 10), y=np.array(["dog", "emu"] * 5 + ["dog"])
    )
    (tmp_path / "notes.md").write_text("hello")
    own = read_own(tmp_path)
    assert own.kind == "sites"
    assert own.classes == ("bird", "cat", "dog", "emu")
    assert own.ids[:5] == (
        "site-a/cat/0.png",
        "site-a/cat/1.png",
        "site-a/dog/0.png",
        "site-b/pictures/x.png",
        "site-b/y.png",
    )
    assert own.ids[5:] == tuple(f"site-c/row-{row}" for row in range(11))
    assert {name: held.tolist() for name, held in own.sites.items()} == {
        "site-a": [0, 1, 2],
        "site-b": [3, 4],
        "site-c": list(range(5, 16)),
    }
    assert tuple(own.images.shape[1:]) == (1, 10, 10)
    assert own.skipped == ()


def test_classes_of_sites_are_matched_by_name(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=arrays(2, 8, 8), y=[0, 1], classes=np.array(["cat", "dog"]))
    np.savez(tmp_path / "b.npz", x=arrays(2, 8, 8), y=[0, 1], classes=np.array(["dog", "emu"]))
    own = read_own(tmp_path)
    assert own.labels.tolist() == [0, 1, 1, 2]
    (tmp_path / "classes.txt").write_text("emu\ndog\ncat\n")
    assert read_own(tmp_path).labels.tolist() == [2, 1, 1, 0]
    (tmp_path / "classes.txt").write_text("cat\nemu\n")
    assert "'a/row-1' is of class 'dog'" in refused(tmp_path)


def test_a_site_without_images_and_two_of_one_name(tmp_path: Path):
    class_folders(tmp_path / "a", {"cat": 1, "dog": 1})
    (tmp_path / "b").mkdir()
    own = read_own(tmp_path)
    assert list(own.sites) == ["a"]
    assert own.skipped == (Skipped("b", "a site without images"),)
    np.savez(tmp_path / "a.npz", x=arrays(2, 8, 8), y=[0, 1])
    assert "two sites called 'a'" in refused(tmp_path)


def test_a_site_that_may_not_be_opened(tmp_path: Path, monkeypatch):
    for site in ("a", "b", "c"):
        class_folders(tmp_path / site, {"cat": 1, "dog": 1})
    close(tmp_path / "b", monkeypatch)
    own = read_own(tmp_path)
    assert list(own.sites) == ["a", "c"]
    assert own.skipped == (Skipped("b", "a folder that you may not open"),)
    assert read_own(tmp_path, Reading(kind="sites")).skipped == own.skipped
    with pytest.raises(PermissionError):
        read_own(tmp_path / "b")


def nested(root: Path, classes: dict[str, int], *, sites: tuple[str, ...], folder: str) -> Path:
    """Three sites with the same classes, which at some `sites` lie in a further folder."""
    for site in ("a", "b", "c"):
        class_folders(root / site / folder if site in sites else root / site, classes)
    return root


@pytest.mark.parametrize("sites", [("b",), ("b", "c")])
def test_a_site_whose_classes_lie_too_deep_is_refused(tmp_path: Path, sites: tuple[str, ...]):
    nested(tmp_path, {"cat": 1, "dog": 1}, sites=sites, folder="train")
    save(tmp_path / "a" / "train.txt" / "x.png")  # a class of another name
    sentence = refused(tmp_path)
    assert sentence.startswith(f"{tmp_path / 'b' / 'train'} holds folders that are classes at")
    assert "('cat', 'dog'); move them up into" in sentence
    assert refused(tmp_path, Reading(kind="sites")) == sentence
    # What is written down is meant.
    (tmp_path / "classes.txt").write_text("cat\ndog\ntrain\ntrain.txt\n")
    assert given_names(read_own(tmp_path))["b/train/cat/0.png"] == "train"


def test_one_class_that_lies_too_deep_is_enough(tmp_path: Path):
    nested(tmp_path, {"cat": 1, "dog": 1}, sites=(), folder="")
    (tmp_path / "b" / "more").mkdir()
    (tmp_path / "b" / "dog").rename(tmp_path / "b" / "more" / "dog")
    assert "('dog'); move them up" in refused(tmp_path)


def test_ordinary_folders_of_a_class_at_a_site_are_read(tmp_path: Path):
    nested(tmp_path, {"cat": 1, "dog": 1}, sites=(), folder="")
    save(tmp_path / "a" / "cat" / "dog" / "x.png")  # a class that all sites have
    save(tmp_path / "a" / "emu" / "2021" / "x.png")
    save(tmp_path / "a" / "fox" / "emu" / "x.png")  # no other site has emus
    given = given_names(read_own(tmp_path))
    assert given["a/cat/dog/x.png"] == "cat"
    assert given["a/emu/2021/x.png"] == "emu"
    assert given["a/fox/emu/x.png"] == "fox"


def test_a_split_is_not_taken_for_sites(tmp_path: Path):
    for split in ("train", "test"):
        class_folders(tmp_path / split, {"cat": 1, "dog": 1})
    sentence = refused(tmp_path)
    assert "a split into train and test" in sentence
    assert f"give {tmp_path / 'train'} (`fedsieve audit` also takes --test" in sentence
    assert list(read_own(tmp_path, Reading(kind="sites")).sites) == ["test", "train"]
    for folder in (tmp_path / "test" / "cat", tmp_path / "test" / "dog"):
        (folder / "0.png").unlink()
    assert refused(tmp_path) == sentence


def test_a_split_of_sites_is_not_taken_for_sites(tmp_path: Path):
    for split in ("train", "test"):
        class_folders(tmp_path / split / "north", {"cat": 1, "dog": 1})
        np.savez(tmp_path / split / "south.npz", x=arrays(2, 8, 8), y=np.array(["cat", "dog"]))
    sentence = refused(tmp_path)
    assert f"a split into train and test, which are no sites: give {tmp_path / 'train'}" in sentence
    assert "if you mean it" not in sentence  # its sites would then be classes
    assert refused(tmp_path, Reading(kind="sites")) == sentence
    assert list(read_own(tmp_path / "train").sites) == ["north", "south"]


def test_sites_that_are_split_are_told_how_to_split(tmp_path: Path):
    class_folders(tmp_path / "a", {"cat": 1, "dog": 1})
    for split in ("train", "test"):
        class_folders(tmp_path / "b" / split, {"cat": 1, "dog": 1})
    for reading in (Reading(), Reading(kind="sites")):
        sentence = refused(tmp_path, reading)
        assert sentence.startswith(f"{tmp_path / 'b'} holds a split into train and test")
        assert f"{tmp_path}/train/b and {tmp_path}/test/b" in sentence


def test_a_split_that_may_not_be_opened_is_no_site(tmp_path: Path, monkeypatch):
    for split in ("train", "test"):
        class_folders(tmp_path / split / "north", {"cat": 1, "dog": 1})
    close(tmp_path / "train", monkeypatch)
    with pytest.raises(PermissionError):
        read_own(tmp_path, Reading(kind="sites"))


@pytest.mark.parametrize("folder", [".", "images"])
def test_a_table_says_itself_what_a_split_holds(tmp_path: Path, folder: str):
    for split in ("train", "test"):
        class_folders(tmp_path / folder / split, {"cat": 1, "dog": 1})
    table(tmp_path, f"path,label\n{folder}/train/cat/0.png,a\n{folder}/test/dog/0.png,b\n")
    own = read_own(tmp_path)
    assert (own.kind, own.classes) == ("table", ("a", "b"))


def test_links_to_sites_are_not_followed_but_listed(tmp_path: Path):
    root = tmp_path / "data"
    class_folders(root / "a", {"cat": 1, "dog": 1})
    class_folders(tmp_path / "b", {"cat": 1, "dog": 1})
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 8, 8), np.uint8), y=np.array([0, 1]))
    (root / "b").symlink_to(tmp_path / "b")
    (root / "c.npz").symlink_to(tmp_path / "c.npz")
    (root / "d").symlink_to(tmp_path / "gone")
    save(root / "loose.png")
    (root / "notes.txt").write_text("hello")
    own = read_own(root)
    assert list(own.sites) == ["a"]
    assert reasons(own) == {
        "b": "a link to a folder, which is not followed",
        "c.npz": "a link to an .npz file, which is not followed",
        "d": "a link that leads nowhere or out of the data folder",
        "loose.png": "not in the folder of a class",
    }


def test_nothing_but_links_is_explained(tmp_path: Path):
    class_folders(tmp_path / "real", {"cat": 1, "dog": 1})
    (tmp_path / "data").mkdir()
    assert "not followed" not in refused(tmp_path / "data")
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "real" / name)
    assert "links to folders are not followed" in refused(tmp_path / "data")


def test_a_table_or_list_of_classes_from_outside_is_refused(tmp_path: Path):
    root = class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    (tmp_path / "labels.csv").write_text("path,label\ncat/0.png,cat\ndog/0.png,secret\n")
    (tmp_path / "classes.txt").write_text("cat\ndog\nsecret\n")
    for name in ("labels.csv", "classes.txt"):
        (root / name).symlink_to(tmp_path / name)
        assert f"{name} is a link that leads out of" in refused(root)
        (root / name).unlink()
    (root / "names").write_text("dog\ncat\n")
    (root / "classes.txt").symlink_to("names")
    assert read_own(root).classes == ("dog", "cat")


def test_classes_that_are_read_as_sites(tmp_path: Path):
    class_folders(tmp_path, {"cat": 1, "dog": 1})
    sentence = refused(tmp_path, Reading(kind="sites"))
    assert 'laid out as "sites" needs them; it looks like "folder"' in sentence
    assert sentence.endswith(
        "(for `fedsieve run`: --data.source folder --scene.partition.kind iid)."
    )


def test_kinds_that_do_not_fit(tmp_path: Path):
    file = save(tmp_path / "a.png")
    assert "is not a folder" in refused(file, Reading(kind="folder"))
    (tmp_path / "empty").mkdir()
    assert "holds no site" in refused(tmp_path / "empty", Reading(kind="sites"))


def test_threads_change_nothing(tmp_path: Path, monkeypatch):
    class_folders(tmp_path, {"a": 70, "b": 70})
    usual = read_own(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    alone = read_own(tmp_path)
    assert torch.equal(usual.images, alone.images)
    assert usual.ids == alone.ids


def test_ids_can_be_written_by_the_plainest_writer(tmp_path: Path):
    for value, name in enumerate(HOSTILE):
        save(tmp_path / "cat" / name, value)
    class_folders(tmp_path, {"dog": 1})
    own = read_own(tmp_path)
    with (tmp_path / "ids.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([i] for i in own.ids)
    with Image.open(tmp_path / path_of(own.ids[0])) as image:
        assert image.size == (8, 8)
