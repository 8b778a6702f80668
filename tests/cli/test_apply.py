"""`fedsieve apply`, and own data in `fedsieve data` and `fedsieve run`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.data.own import export as export_module
from fedsieve.data.own import read_own
from fedsieve.data.own.tables import write_rows
from fedsieve.data.sources import load
from fedsieve.scenes import load_scene
from helpers import few_digits

REVIEW_DOC = Path(__file__).parents[2] / "docs" / "review.md"
COLUMNS = ("id", "site", "given", "verdict", "new_label")


@pytest.fixture
def animals() -> Path:
    for value, name in enumerate(["cat/0", "cat/1", "dog/0", "dog/1"]):
        file = Path("animals", f"{name}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.arange(value, value + 64, dtype=np.uint8).reshape(8, 8)).save(file)
    return Path("animals")


def test_verdicts_are_applied(cli, animals: Path):
    rows = [
        ("cat/0.png", "", "cat", "relabel", "dog"),
        ("dog/1.png", "all", "dog", "drop", ""),
        ("cat/1.png", "", "cat", "skip", ""),
    ]
    write_rows(Path("verdicts.csv"), COLUMNS, rows)
    answer = cli("apply", "verdicts.csv", animals, "--out", "new")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out == (
        "Wrote new: labels changed: 1, images left out: 1, as they were: 2. animals is untouched.\n"
    )
    assert read_own(Path("new")).ids == ("cat/1.png", "dog/0-from-cat.png", "dog/0.png")


def test_the_tables_of_several_sites_make_one_copy(cli, animals: Path):
    write_rows(Path("a.csv"), COLUMNS, [("cat/0.png", "", "cat", "relabel", "dog")])
    write_rows(Path("b.csv"), COLUMNS, [("dog/1.png", "", "dog", "drop", "")])
    write_rows(Path("c.csv"), COLUMNS, [("cat/1.png", "", "cat", "drop", "")])
    answer = cli("apply", "a.csv", animals, "--also", "b.csv", "c.csv", "--out", "new")
    assert (answer.status, answer.err) == (0, "")
    assert read_own(Path("new")).ids == ("dog/0-from-cat.png", "dog/0.png")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Please set verdicts and data and --out."),
        (["v.csv", "animals"], "Please set --out."),
        (["gone.csv", "animals", "--out", "new"], "There is no table gone.csv; give"),
        (["v.csv", "gone", "--out", "new"], "There is nothing at gone"),
        (["animals", "v.csv", "--out", "new"], "animals is a folder; give the path of a table."),
        (["v.csv", "animals", "--out", "animals/new"], "animals/new lies in the data"),
        (["v.csv", "animals", "--out", "new", "--kind", "tabel"], "kind must be one of"),
        (["v.csv", "animals", "--out", "new", "--kind", "npz"], "animals is not a file"),
    ],
)
def test_mistakes(cli, animals: Path, argv: list[str], words: str):
    write_rows(Path("v.csv"), COLUMNS, [])
    answer = cli("apply", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")
    assert not Path("new").exists()


def test_own_data_are_described(cli, animals: Path):
    Path("animals/cat/note.txt").write_text("hello")
    answer = cli("data", "info", animals)
    lines = [line.split() for line in answer.out.splitlines() if line.strip()]
    assert lines[0] == ["data", "animals,", "read", "as", "folder"]
    assert ["cat", "2"] in lines
    assert ["all", "classes", "4"] in lines
    assert ["not", "an", "image", "file", "1", "'cat/note.txt'"] in lines
    assert cli("data", "info", "folder", "--path", animals).out == answer.out
    assert "is not a folder" in cli("data", "info", "sites", "--path", "tiny.toml").err


def test_classes_that_only_capitals_tell_apart_are_pointed_out(cli, animals: Path):
    assert "Only capitals" not in cli("data", "info", animals).out
    Path("animals/cat").rename("animals/Dog")
    assert "Only capitals tell 'Dog' and 'dog' apart" in cli("data", "info", animals).out


def test_data_that_are_called_like_a_source_can_be_described(cli, monkeypatch):
    monkeypatch.setattr(export_module, "load_digits", few_digits)
    assert cli("data", "export", "digits", "digits").out.endswith("fedsieve data info ./digits\n")
    built_in = cli("data", "info", "digits").out
    assert built_in.startswith("source        digits")
    assert built_in.endswith("for what lies here: fedsieve data info ./digits\n")
    assert "read as sites" in cli("data", "info", "./digits").out


def test_one_named_site_is_no_data_to_deal_out(cli, animals: Path):
    animals.rename("hospital")
    Path("all-sites").mkdir()
    Path("hospital").rename("all-sites/hospital")
    command = cli("data", "info", "all-sites").out.splitlines()[-1]
    assert command.endswith("--data.path all-sites --scene.clients 1 --clients_per_round 1")
    assert cli("data", "info", "all-sites/hospital").out.splitlines()[-1].endswith("kind iid")


def test_the_example_of_a_review_page_runs(cli, monkeypatch):
    monkeypatch.setattr(export_module, "load_digits", few_digits)
    cli("data", "export", "digits", "my-digits")
    page = REVIEW_DOC.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "review.md", "exec"), {})
    page = Path("review.html").read_text(encoding="utf-8")
    first = read_own(Path("my-digits")).ids[:20]
    assert [page.count(sample_id) for sample_id in first] == [1] * 20


def test_a_split_is_described_as_training_takes_it(cli, monkeypatch):
    monkeypatch.setattr(export_module, "load_digits", few_digits)  # 290 of them
    for split, seed in (("train", "1"), ("test", "2")):
        place = Path("split", split)
        assert cli("data", "export", "digits", place, "--sites", "2", "--seed", seed).status == 0
    answer = cli("data", "info", "split")
    lines = [line.split() for line in answer.out.splitlines() if line.strip()]
    assert ["data", "split/train,", "read", "as", "sites"] in lines
    assert ["test", "split/test,", "read", "as", "sites"] in lines
    assert lines.count(["all", "classes", "290", "145", "145"]) == 2
    assert answer.out.splitlines()[-1] == (
        "Train on it with: fedsieve run own --data.source sites --data.path split "
        "--scene.clients 2 --clients_per_round 2"
    )
    assert load("sites", Path("split")).site_names == ("site-1", "site-2")  # as it says
    assert cli("data", "info", "sites", "--path", "split").out == answer.out
    # One of its sites is a split of folders.
    Path("split/train/site-1").rename("train")
    Path("split/test/site-1").rename("test")
    Path("plain").mkdir()
    Path("train").rename("plain/train")
    Path("test").rename("plain/test")
    answer = cli("data", "info", "plain")
    assert "test     plain/test, read as folder" in answer.out
    assert "--data.source folder --data.path plain --scene" in answer.out.splitlines()[-1]


def test_an_audit_of_a_split_is_told_what_to_take(cli):
    for value, split in enumerate(("train", "test")):
        for name in ("a", "b"):
            file = Path("split", split, "north", name, "0.png")
            file.parent.mkdir(parents=True)
            Image.new("L", (8, 8), value).save(file)
    for kind in ((), ("--kind", "sites")):
        answer = cli("audit", "split", *kind)
        assert answer.status == 2
        assert "give split/train (`fedsieve audit` also takes --test split/test;" in answer.err
    assert not Path("audit").exists()


def test_many_sites_are_counted_together(cli):
    for site in range(12):
        for name in ("a", "b"):
            file = Path("many", f"s{site}", name, "0.png")
            file.parent.mkdir(parents=True)
            Image.new("L", (8, 8), site).save(file)
    answer = cli("data", "info", "many")
    assert "all 12 sites" in answer.out
    assert "s11" not in answer.out
    assert answer.out.splitlines()[-1].endswith("--scene.clients 12 --clients_per_round 10")


def test_digits_are_exported_described_and_trained_on(cli, monkeypatch):
    monkeypatch.setattr(export_module, "load_digits", few_digits)  # 290 of them
    answer = cli("data", "export", "digits", "my digits", "--sites", "2", "--noise", "0.1", "0.3")
    assert answer.status == 0
    assert Path("my digits-truth.csv").is_file()
    described = cli("data", "info", "my digits").out
    assert ["all", "classes", "290", "145", "145"] in [
        line.split() for line in described.splitlines()
    ]
    command = described.splitlines()[-1]
    assert command == (
        "Train on it with: fedsieve run own --data.source sites --data.path 'my digits' "
        "--scene.clients 2 --clients_per_round 2"
    )
    run = ("--rounds", "2", "--sgd.epochs", "1", "--method.name", "fedavg", "--engine.workers", "1")
    answer = cli(
        *("run", "own", "--data.path", "my digits", "--scene.clients", "2"),
        *("--clients_per_round", "2", "--out", "r", *run, "--engine.device", "cpu"),
    )
    assert answer.status == 0, answer.err
    scene = load_scene(Path("r/scene.safetensors"))
    # 145 samples each, less what is held out
    assert scene.sizes.tolist() == [
        sum(n - (n + 2) // 5 for n in counts) for counts in counts_of(Path("my digits"))
    ]
    summary = json.loads(Path("r/summary.json").read_text())
    assert "noise" not in summary  # nobody knows which labels are wrong


def counts_of(data: Path) -> list[list[int]]:
    """Files per class folder, for each site."""
    return [
        [len(list(folder.iterdir())) for folder in sorted(site.iterdir())]
        for site in sorted(data.iterdir())
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["own", "--scene.clients", "4"], "sites must name each of the clients 0 … 3"),
        (["own", "--scene.partition.kind", "iid"], "this data set says who holds what"),
        (
            ["own", "--scene.noise.kind", "symmetric", "--scene.noise.low", "0.5"],
            "The labels of sites are your own, and no noise is added to them",
        ),
        (["--data.source", "sites"], "The labels of sites are your own"),
    ],
)
def test_a_scene_that_does_not_fit_own_data(cli, argv: list[str], words: str):
    for value in range(18):  # three images of each of two classes at three sites
        file = Path("d", f"site-{value % 3}", "ab"[value % 2], f"{value}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), value).save(file)
    answer = cli("run", *argv, "--data.path", "d", "--out", "r")
    assert answer.status == 2
    assert answer.err.strip().splitlines()[-1].startswith(f"fedsieve: {words}")


def test_the_built_in_digits_are_not_trained_on_for_ones_own(cli, animals: Path):
    refused = "fedsieve: digits is built in and takes no path; leave it out, or for images of"
    for path in (animals, "/nonexist"):
        answer = cli("run", "--data.path", path, "--out", "r")
        assert (answer.status, answer.out) == (2, "")
        assert answer.err.startswith(refused)
    assert not Path("r").exists()
    assert cli("run", "tiny.toml", "--rounds", "1", "--out", "r").status == 0
    # The recipe of that run names its source, but no path.
    assert cli("run", "r/config.toml", "--out", "again").status == 0
    answer = cli("run", "r/config.toml", "--data.path", animals, "--out", "s")
    assert answer.err.startswith(refused)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", "cifar10", "x"], "Only digits can be exported"),
        (["export", "digits"], "Give the new folder: fedsieve data export digits FOLDER"),
        (["export", "digits", "x", "--noise", "2"], "A noise level is a share"),
        (["export", "digits", "."], ". is no name for a new folder; give another place."),
        (["export", "digits", "/"], "/ is no name for a new folder"),
        (["export", "digits", "x/.."], "x/.. is no name for a new folder"),
    ],
)
def test_mistakes_with_an_export(cli, argv: list[str], words: str):
    answer = cli("data", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")
