"""Verdicts carried out on a copy: what changes, what does not, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_files import class_folders, close, save

from fedsieve.data.own import (
    Correction,
    OwnData,
    Reading,
    Verdict,
    apply_verdicts,
    read_own,
    read_verdicts,
)
from fedsieve.data.own import corrected as corrected_module
from fedsieve.data.own.tables import read_rows, write_rows
from fedsieve.errors import FedsieveError

NAMES = ["0.png", "a,b.png", "=x.png", "new\nline.png", "back\\slash.png", os.fsdecode(b"\xe9.png")]
LABELS = ["cat", "=dog", "é", "T-shirt top"]


def verdict(sample_id: str, given: str, word: str, new_label: str = "", site: str = "") -> Verdict:
    return Verdict(sample_id, site, given, word, new_label)  # type: ignore[arg-type]


def given_names(own: OwnData) -> dict[str, str]:
    return {i: own.classes[label] for i, label in zip(own.ids, own.labels.tolist(), strict=True)}


def assert_same_reading(one: OwnData, other: OwnData) -> None:
    assert (one.kind, one.classes, one.ids) == (other.kind, other.classes, other.ids)
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.labels, other.labels)
    assert {k: v.tolist() for k, v in one.sites.items()} == {
        k: v.tolist() for k, v in other.sites.items()
    }


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder and the digest of its bytes."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def refused(verdicts, data: Path, out: Path) -> str:
    before = contents(data) if data.is_dir() else {}
    others = set(out.parent.iterdir())
    with pytest.raises(FedsieveError) as caught:
        apply_verdicts(verdicts, data, out)
    assert (contents(data) if data.is_dir() else {}) == before
    assert set(out.parent.iterdir()) == others
    return str(caught.value)


# ------------------------------------------------------------------------------------- folders


def test_a_folder_is_corrected(tmp_path: Path):
    data = class_folders(tmp_path / "data", {"cat": 3, "dog": 2})
    before = contents(data)
    verdicts = [
        verdict("cat/0.png", "cat", "relabel", "dog"),
        verdict("cat/2.png", "cat", "relabel", "dog"),
        verdict("dog/1.png", "dog", "drop"),
        verdict("cat/1.png", "cat", "keep", "dog"),
        verdict("dog/0.png", "dog", "skip"),
    ]
    done = apply_verdicts(verdicts, data, tmp_path / "new")
    assert done == Correction(kept=2, relabelled=2, dropped=1)
    assert contents(data) == before
    assert contents(tmp_path / "new") == {
        "cat/1.png": before["cat/1.png"],
        "dog/0.png": before["dog/0.png"],
        "dog/0-from-cat.png": before["cat/0.png"],
        "dog/2.png": before["cat/2.png"],
    }


def test_clashes_are_solved_also_without_regard_to_case(tmp_path: Path):
    data = tmp_path / "data"
    names = ["x/1.PNG", "y/1.png", "z/1.png", "z/1-from-y.png"]
    for value, name in enumerate(names):
        save(data / name, value)
    verdicts = [verdict(name, name[0], "relabel", "z") for name in names[:2]]
    apply_verdicts(verdicts, data, tmp_path / "new")
    assert set(contents(tmp_path / "new")) == {
        "z/1.png",
        "z/1-from-y.png",
        "z/1-from-x.PNG",
        "z/1-from-y-2.png",
        "classes.txt",
    }
    assert read_own(tmp_path / "new").classes == ("x", "y", "z")


def test_a_site_gets_a_folder_for_a_class_that_it_did_not_have(tmp_path: Path):
    data = tmp_path / "data"
    class_folders(data / "a", {"cat": 2})
    save(data / "b" / "deep" / "0.png", 9)
    save(data / "b" / "dog" / "0.png", 8)
    (data / "classes.txt").write_text("dog\ncat\ndeep\n")
    apply_verdicts([verdict("a/cat/1.png", "cat", "relabel", "dog", "a")], data, tmp_path / "new")
    own = read_own(tmp_path / "new")
    assert own.classes == ("dog", "cat", "deep")
    assert given_names(own)["a/dog/1.png"] == "dog"
    assert list(own.sites) == ["a", "b"]


def test_folders_below_a_class_stay(tmp_path: Path):
    data = tmp_path / "data"
    class_folders(data, {"cat": 1, "dog": 1})
    save(data / "cat" / "day 1" / "x.png", 7)
    verdicts = [verdict("cat/day 1/x.png", "cat", "relabel", "dog")]
    apply_verdicts(verdicts, data, tmp_path / "new", Reading(kind="folder"))
    assert "dog/day 1/x.png" in contents(tmp_path / "new")


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", ".."])
def test_a_class_that_no_folder_can_be_called(tmp_path: Path, name: str):
    data = class_folders(tmp_path / "data", {"cat": 1, "dog": 1})
    (data / "classes.txt").write_text(f"cat\ndog\n{name}\n")
    sentence = refused([verdict("cat/0.png", "cat", "relabel", name)], data, tmp_path / "new")
    assert "No folder can be called" in sentence


def test_what_cannot_be_read_is_copied_all_the_same(tmp_path: Path):
    data = class_folders(tmp_path / "data", {"cat": 1, "dog": 1, "none": 0})
    (data / "cat" / "broken.png").write_bytes(b"?")
    (data / "dog" / "link.png").symlink_to(data / "dog" / "0.png")
    (data / "notes.txt").write_text("hello")
    apply_verdicts([], data, tmp_path / "new")
    assert_same_reading(read_own(data), read_own(tmp_path / "new"))
    assert read_own(data).skipped == read_own(tmp_path / "new").skipped
    assert not (tmp_path / "new" / "dog" / "link.png").is_symlink()
    assert not (tmp_path / "new" / "notes.txt").exists()


# -------------------------------------------------------------------------------------- tables


def test_a_table_is_corrected(tmp_path: Path):
    data = tmp_path / "data"
    for number in range(4):
        save(data / "img" / f"{number}.png", number)
    (data / "mine.csv").write_text(
        "age;image;class;site\n70;img/0.png; cat;n\n60;img/1.png;dog;n\n50;img/2.png;cat;s\n"
        "40;img/3.png;dog;s\n70;./img/0.png;cat;n\n30;img/gone.png;dog;n\n"
    )
    before = contents(data)
    verdicts = [
        verdict("img/0.png", "cat", "relabel", "dog", "n"),
        verdict("img/3.png", "dog", "drop", "", "s"),
    ]
    done = apply_verdicts(verdicts, data / "mine.csv", tmp_path / "new")
    assert done == Correction(kept=2, relabelled=1, dropped=1)
    assert contents(data) == before
    assert read_rows(tmp_path / "new" / "labels.csv") == (
        ("age", "image", "class", "site"),
        [
            ("70", "img/0.png", "dog", "n"),
            ("60", "img/1.png", "dog", "n"),
            ("50", "img/2.png", "cat", "s"),
            ("70", "./img/0.png", "dog", "n"),
            ("30", "img/gone.png", "dog", "n"),
        ],
    )
    own = read_own(tmp_path / "new")
    assert given_names(own) == {"img/0.png": "dog", "img/1.png": "dog", "img/2.png": "cat"}
    assert not (tmp_path / "new" / "img" / "3.png").exists()


def test_a_class_that_lost_its_images_stays_a_class(tmp_path: Path):
    data = tmp_path / "data"
    save(data / "0.png", 0)
    save(data / "1.png", 1)
    save(data / "2.png", 2)
    (data / "labels.csv").write_text("path,label\n0.png,a\n1.png,b\n2.png,c\n")
    apply_verdicts([verdict("0.png", "a", "relabel", "c")], data, tmp_path / "new")
    own = read_own(tmp_path / "new")
    assert own.classes == ("a", "b", "c")
    assert own.labels.tolist() == [2, 1, 2]


# ------------------------------------------------------------------------------------ .npz files


def pixels(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, 8, 8), dtype=np.uint8)


def test_an_npz_file_is_corrected(tmp_path: Path):
    file = tmp_path / "mine.npz"
    x, y = pixels(5), np.array([0, 1, 2, 0, 1], np.uint8)
    extra = {
        "file": np.arange(5) * 10,
        "classes": np.array(["a", "b", "c", "d", "e"]),
        "x_test": pixels(5),
        "y_test": y,
    }
    np.savez(tmp_path / "without.npz", x=x, y=y, **{k: v for k, v in extra.items() if k != "file"})
    shutil.copy(tmp_path / "without.npz", file)
    with zipfile.ZipFile(file, "a") as archive, archive.open("file.npy", "w") as member:
        np.lib.format.write_array(member, extra["file"])
    verdicts = [verdict("row-1", "b", "drop"), verdict("row-3", "a", "relabel", "e")]
    apply_verdicts(verdicts, file, tmp_path / "new")
    with np.load(tmp_path / "new" / "mine.npz") as new:
        assert np.array_equal(new["x"], x[[0, 2, 3, 4]])
        assert new["y"].tolist() == [0, 2, 4, 1]
        assert new["file"].tolist() == [0, 20, 30, 40]
        assert new["classes"].tolist() == ["a", "b", "c", "d", "e"]
        assert np.array_equal(new["x_test"], extra["x_test"])
        assert len(new["y_test"]) == 5


def test_names_and_numbers_as_labels(tmp_path: Path):
    np.savez(tmp_path / "names.npz", x=pixels(3), y=np.array(["a", "b", "a"]))
    apply_verdicts(
        [verdict("row-0", "a", "relabel", "b")], tmp_path / "names.npz", tmp_path / "new"
    )
    assert given_names(read_own(tmp_path / "new" / "names.npz")) == {
        "row-0": "b",
        "row-1": "b",
        "row-2": "a",
    }
    np.savez(tmp_path / "numbers.npz", x=pixels(12), y=np.arange(12))
    apply_verdicts(
        [verdict("row-11", "11", "relabel", "2"), verdict("row-10", "10", "drop")],
        tmp_path / "numbers.npz",
        tmp_path / "new2",
    )
    own = read_own(tmp_path / "new2" / "numbers.npz")
    assert own.classes == tuple(map(str, range(12)))
    assert own.labels.tolist() == [*range(10), 2]


def test_numbers_that_classes_txt_names(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "n.npz", x=pixels(3), y=[0, 2, 1])
    (data / "classes.txt").write_text("c\nb\na\n")
    verdicts = [verdict("row-2", "b", "relabel", "a")]
    apply_verdicts(verdicts, data / "n.npz", tmp_path / "new")
    with np.load(tmp_path / "new" / "n.npz") as new:
        assert set(new.files) == {"x", "y"}
        assert new["y"].tolist() == [0, 2, 2]
    assert read_own(tmp_path / "new" / "n.npz").classes == ("c", "b", "a")


def test_sites_of_npz_files(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    np.savez(data / "a.npz", x=pixels(2), y=[0, 1], classes=np.array(["cat", "dog"]))
    np.savez(data / "b.npz", x=pixels(3), y=[0, 1, 0], classes=np.array(["dog", "emu"]))
    np.savez(data / "c.npz", x=pixels(1), y=[0], classes=np.array(["dog"]))
    verdicts = [
        verdict("a/row-0", "cat", "relabel", "emu", "a"),
        verdict("b/row-0", "dog", "drop", site="b"),
        verdict("c/row-0", "dog", "drop", site="c"),
    ]
    apply_verdicts(verdicts, data, tmp_path / "new")
    own = read_own(tmp_path / "new")
    assert own.classes == ("cat", "dog", "emu")
    assert given_names(own) == {
        "a/row-0": "emu",
        "a/row-1": "dog",
        "b/row-0": "emu",
        "b/row-1": "dog",
    }
    assert list(own.sites) == ["a", "b"]


def test_python_objects_are_not_copied(tmp_path: Path):
    file = tmp_path / "a.npz"
    np.savez(file, x=pixels(2), y=[0, 1], odd=np.array([{}], dtype=object))
    assert "an array of Python objects" in refused([], file, tmp_path / "new")


# ------------------------------------------------------------------------------------- refusals


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "data", {"cat": 2, "dog": 2})


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (verdict("cat/9.png", "cat", "drop"), "1 verdicts are about samples that are not in the"),
        (verdict("cat/0.png", "dog", "drop"), "about the label 'dog', but it is 'cat' now"),
        (verdict("cat/0.png", "cat", "drop", "", "x"), "names the site 'x', but it is at 'all'"),
        (
            verdict("cat/0.png", "cat", "relabel", "dgo"),
            "no class of the data; did you mean 'dog'?",
        ),
        (verdict("cat/0.png", "cat", "relabel", ""), "possible are 'cat', 'dog'."),
    ],
)
def test_verdicts_about_other_data_are_refused(animals: Path, one: Verdict, words: str):
    assert words in refused([one], animals, animals.parent / "new")


def test_some_of_many_strange_ids_are_listed(animals: Path):
    verdicts = [verdict(f"cat/{n}.png", "cat", "drop") for n in range(10, 20)]
    sentence = refused(verdicts, animals, animals.parent / "new")
    assert sentence.startswith("10 verdicts")
    assert "'cat/14.png' and 5 more" in sentence


def test_contradictions_are_refused_and_repetitions_are_not(animals: Path):
    drop = verdict("cat/0.png", "cat", "drop")
    sentence = refused([drop, replace(drop, verdict="keep")], animals, animals.parent / "new")
    assert "two different verdicts on 'cat/0.png'" in sentence
    assert apply_verdicts([drop, drop], animals, animals.parent / "new").dropped == 1


def test_dropping_everything_is_refused(animals: Path):
    verdicts = [verdict(f"{c}/{n}.png", c, "drop") for c in ("cat", "dog") for n in range(2)]
    assert "drop every image" in refused(verdicts, animals, animals.parent / "new")


def test_the_place_must_be_new_and_outside(animals: Path, tmp_path: Path, monkeypatch):
    assert "lies in the data" in refused([], animals, animals / "new")
    assert "lies in the data" in refused([], animals, animals)
    (tmp_path / "link").symlink_to(animals)
    assert "lies in the data" in refused([], animals, tmp_path / "link" / "new")
    full = tmp_path / "full"
    save(full / "x.png")
    assert "not an empty folder" in refused([], animals, full)
    (tmp_path / "file").write_text("x")
    assert "not an empty folder" in refused([], animals, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    apply_verdicts([], animals, tmp_path / "empty")
    assert_same_reading(read_own(animals), read_own(tmp_path / "empty"))
    apply_verdicts([], animals, tmp_path / "some" / "where" / "new")
    assert (tmp_path / "some" / "where" / "new" / "cat").is_dir()


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (errno.ENOSPC, FedsieveError, r"not enough space for \S*new, so nothing was written"),
        (errno.EIO, OSError, "No luck"),
    ],
)
def test_a_copy_that_fails_leaves_nothing(animals: Path, monkeypatch, code, error, words):
    copied = []

    def fail_at_third(source, target):
        copied.append(source)
        if len(copied) == 3:
            raise OSError(code, "No luck", str(source))
        Path(target).write_bytes(b"")

    monkeypatch.setattr(corrected_module.shutil, "copyfile", fail_at_third)
    with pytest.raises(error, match=words):
        apply_verdicts([], animals, animals.parent / "new")
    assert list(animals.parent.iterdir()) == [animals]


def test_files_that_links_fetch_from_outside_are_not_copied(animals: Path, tmp_path: Path):
    (tmp_path / "secret.txt").write_text("cat\ndog\n")
    (animals / "classes.txt").symlink_to(tmp_path / "secret.txt")
    assert "classes.txt is a link that leads out" in refused([], animals, tmp_path / "new")


# ------------------------------------------------------------------------------------ round trip


@st.composite
def parts(draw):
    """How one site (or all data) looks: a kind, and the samples as (file name, label)."""
    kind = draw(st.sampled_from(["folder", "table", "npz"]))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=2, max_size=5, unique=True))
    if kind == "table":  # a table is text, so that it cannot name every file
        names = [name for name in names if name.isprintable() or name.startswith("new")]
        names = names or ["0.png"]
    return kind, [(name, draw(st.sampled_from(LABELS))) for name in names]


def write_part(root: Path, name: str, kind: str, samples) -> None:
    if kind == "npz":
        root.mkdir(parents=True, exist_ok=True)
        np.savez(root / f"{name}.npz", x=pixels(len(samples)), y=np.array([c for _, c in samples]))
        return
    for value, (file, label) in enumerate(samples):
        save(root / name / (label if kind == "folder" else "images") / file, value)
    if kind == "table":
        rows = [(f"images/{file}", label) for file, label in samples]
        write_rows(root / name / "labels.csv", ("path", "label"), rows)


@settings(max_examples=25, deadline=None)
@given(st.lists(parts(), min_size=1, max_size=3), st.booleans())
def test_without_verdicts_the_reading_stays(tmp_path_factory, sites, with_file):
    folder = tmp_path_factory.mktemp("round-trip")
    data, out = folder / "data", folder / "new"
    for number, (kind, samples) in enumerate(sites):
        write_part(data, f"site-{number}", kind, samples)
    reading = Reading(kind="sites")
    if with_file or len({label for _, samples in sites for _, label in samples}) < 2:
        (data / "classes.txt").write_text("\n".join(LABELS[::-1]), encoding="utf-8")
    before = contents(data)
    done = apply_verdicts([], data, out, reading)
    own = read_own(data, reading)
    assert_same_reading(own, read_own(out, reading))
    assert done == Correction(kept=len(own), relabelled=0, dropped=0)
    assert contents(data) == before


def test_a_site_that_may_not_be_opened_is_not_in_the_copy(tmp_path: Path, monkeypatch):
    data, out = tmp_path / "data", tmp_path / "new"
    for site in ("a", "b"):
        class_folders(data / site, {"cat": 1, "dog": 1})
    close(data / "b", monkeypatch)
    done = apply_verdicts([], data, out)
    assert done == Correction(kept=2, relabelled=0, dropped=0)
    assert sorted(contents(out)) == ["a/cat/0.png", "a/dog/0.png"]


# ------------------------------------------------------------------------------------- the table


def test_verdicts_are_read_by_the_names_of_columns(tmp_path: Path):
    file = tmp_path / "v.csv"
    header = ("verdict", "note", "new_label", "id", "given", "site")
    write_rows(file, header, [("Relabel ", "-", "=dog", "=a.png", "cat", "n")])
    assert read_verdicts(file) == (Verdict("=a.png", "n", "cat", "relabel", "=dog"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,site,given\nx,a,b\n", "no column verdict or new_label"),
        ("id,site,given,verdict,new_label\nx,a,b,maybe,c\n", "row 1: the verdict must be keep"),
    ],
)
def test_a_bad_table_of_verdicts(tmp_path: Path, text: str, words: str):
    (tmp_path / "v.csv").write_text(text)
    with pytest.raises(FedsieveError, match=words):
        read_verdicts(tmp_path / "v.csv")
