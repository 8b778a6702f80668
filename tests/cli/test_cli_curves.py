"""`fedsieve curves` draws what the runs logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from fedsieve.cli import main
from fedsieve.cli.curves import draw, find_curves


def log(folder: Path, accuracy: list[float]) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"round": t, "accuracy": a}) + "\n" for t, a in enumerate(accuracy)]
    # A run that was killed in the middle of a line is still drawn up to there.
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"round": 9, "acc')


def test_every_run_below_the_folder_is_found_by_its_path(tmp_path: Path) -> None:
    log(tmp_path / "a" / "fedavg-seed1", [10.0, 20.0])
    log(tmp_path / "b", [30.0])
    log(tmp_path / "empty", [])
    assert find_curves([tmp_path]) == {"a/fedavg-seed1": [10.0, 20.0], "b": [30.0]}
    assert find_curves([tmp_path / "b"]) == {str(tmp_path / "b"): [30.0]}
    both = find_curves([tmp_path / "a", tmp_path / "b"])
    assert both == {
        str(tmp_path / "a" / "fedavg-seed1"): [10.0, 20.0],
        str(tmp_path / "b"): [30.0],
    }


def test_a_line_per_run_with_its_accuracies(tmp_path: Path) -> None:
    (axes,) = draw({"one": [1.0, 2.0, 4.0], "two": [3.0]}).axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 2.0, 4.0], [3.0]]
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == 2, "the lines cannot be told apart without colour"


def test_the_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(tmp_path / "runs" / "x", [10.0, 50.0])
    out = tmp_path / "new" / "picture.png"
    assert main(["curves", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert Image.open(out).size[0] > 500
    assert "1 runs drawn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "out", "sentence"),
    [(0, "c.png", "no run below"), (1, "c.gif", "must end in"), (25, "c.png", "too many")],
)
def test_mistakes_are_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, out: str, sentence: str
) -> None:
    top = tmp_path / "runs"
    top.mkdir()
    for i in range(count):
        log(top / str(i), [1.0])
    assert main(["curves", str(top), "--out", str(tmp_path / out)]) == 2
    assert sentence in capsys.readouterr().err
