"""`fedsieve audit` on a few digits: what it prints and writes, and mistakes in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.audit.suspects import read_suspects
from fedsieve.cli import audit as command
from fedsieve.cli.audit import OneBar
from fedsieve.data.own import read_own
from fedsieve.data.sources.digits import load_digits
from fedsieve.simulate.control import RunInterruptedError


@pytest.fixture
def folder() -> Path:
    """60 digits at each of two sites, with right labels."""
    data, folder = load_digits(), Path("data")
    folder.mkdir()
    for number, name in enumerate(("north", "south")):
        rows = slice(60 * number, 60 * number + 60)
        np.savez(
            folder / f"{name}.npz",
            x=data.train_images[rows, 0].numpy(),
            y=data.train_labels[rows].numpy(),
            classes=np.array([f"digit {c}" for c in range(10)]),
        )
    return folder


QUICK = ("--rounds", "2", "--folds", "2", "--device", "cpu")


def test_from_a_folder_to_pages(folder: Path, cli: Any) -> None:
    answer = cli("audit", folder, "--out", "found", "--test", folder, *QUICK)
    assert answer.status == 0
    assert "images   120 in 10 classes, grey, 8x8 pixels (--size)" in answer.out
    assert "rounds   2 in each federation (--rounds)" in answer.out
    assert "sites    2 sites (the data)" in answer.out
    assert "all sites   120" in answer.out
    assert "% of the test images" in answer.out
    assert "round 6/6" in answer.err
    for site in ("north", "south"):
        assert len(read_suspects(Path("found/sites", site, "suspects.csv"))) == 60
        assert Path("found/sites", site, "review.html").exists()
    assert "fedsieve audit data --out found" in Path("found/report.html").read_text("utf-8")

    again = cli("audit", folder, "--out", "found", "--test", folder, *QUICK)
    assert again.status == 0
    assert "round" not in again.err, "all was finished before"


def test_one_file_is_one_site_in_virtual_parts(folder: Path, cli: Any) -> None:
    answer = cli("audit", folder / "north.npz", "--virtual_sites", "3", *QUICK)
    assert answer.status == 0
    assert "sites    3 virtual sites, for the data name none (--virtual_sites)" in answer.out
    assert "all sites" not in answer.out
    assert len(read_suspects(Path("audit/sites/all/suspects.csv"))) == 60


def test_models_that_learnt_too_little_are_said_to_have(folder: Path, cli: Any) -> None:
    answer = cli("audit", folder, "--rounds", "1", "--folds", "2", "--device", "cpu")
    assert answer.status == 0
    assert "models agree" in answer.out
    assert "too weak to tell wrong labels from mistakes of their own" in answer.out


def test_left_out_files_are_mentioned(folder: Path) -> None:
    (folder / "empty").mkdir()
    own = read_own(folder, command.Reading(kind="sites"))
    settings = command.choose(own, command.Asked(device="cpu"))
    assert "1 files left out" in command.setting_lines(own, settings)[0]


def test_mistakes_are_told_in_a_sentence(folder: Path, cli: Any) -> None:
    for words, sentence in {
        ("nowhere",): "nowhere",
        (folder, "--folds", "1"): "An audit needs at least 2 folds, not 1.",
        (folder, "--method", "fedgrr"): "fedgrr",
        (folder, "--out", folder / "audit"): "data/audit lies in the data",
    }.items():
        answer = cli("audit", *words)
        assert answer.status == 2
        assert sentence in answer.err
        assert len(answer.err.strip().splitlines()) == 1
    assert not Path("audit").exists()


def test_stopped_is_not_failed(folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise RunInterruptedError(
            "Stopped after round 1 of 2; the same command goes on from there."
        )

    monkeypatch.setattr(command, "audit", stop)
    answer = cli("audit", folder, *QUICK)
    assert (answer.status, answer.err) == (
        130,
        "fedsieve: Stopped; the same command goes on from there.\n",
    )


class Heard:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.words: list[tuple[int, ...]] = []

    def started(self, recipe: Any, path: Path, rounds_done: int) -> None:
        self.words.append((recipe.rounds, rounds_done))

    def finished_round(self, line: Any) -> None:
        self.words.append((line["round"],))


def test_federations_finished_before_count_in_the_bar(folder: Path) -> None:
    """Two folds of 2 rounds were done: the model's first round is the fifth of six."""
    own = read_own(folder)
    settings = command.choose(own, command.Asked(device="cpu", rounds=2, folds=2))
    heard = Heard()
    bar = OneBar(heard, Path("found"), settings)  # type: ignore[arg-type]
    bar.started(settings.recipe(), Path("found/runs/model"), 0)
    bar.finished_round({"round": 0, "accuracy": 50.0})
    assert heard.words == [(6, 4), (4,)]


def test_data_are_not_written_into_where_that_would_be_read(
    folder: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of an audit or a run would be one more class or site for the next one."""
    monkeypatch.chdir(folder)
    answer = cli("audit", ".", *QUICK)
    assert answer.status == 2
    assert "audit lies in the data, which are only read; give a place outside ." in answer.err
    two = ("--scene.clients", "2", "--clients_per_round", "2")
    answer = cli("run", "own", "--data.path", ".", *two)
    assert answer.status == 2
    assert "lies in the data" in answer.err
    assert sorted(path.name for path in Path().iterdir()) == ["north.npz", "south.npz"]


def test_beside_a_table_there_is_room_for_an_audit(folder: Path, cli: Any) -> None:
    """A table names its images, so nothing beside it is taken for one."""
    Path("labels.csv").write_text("path,label\n1.png,a\n2.png,b\n", encoding="utf-8")
    answer = cli("audit", ".", "--kind", "table", *QUICK)
    assert "lies in the data" not in answer.err
