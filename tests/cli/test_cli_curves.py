"""`fedsieve curves` draws what runs logged, or writes it as numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image


def log(folder: str, accuracy: list[float], **clients: float) -> None:
    Path(folder).mkdir(parents=True)
    lines = [{"round": t, "accuracy": a} for t, a in enumerate(accuracy)]
    Path(folder, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if clients:
        line = {"round": 0, "client": 0, **clients}
        Path(folder, "clients.jsonl").write_text(json.dumps(line) + "\n")


def table(path: str) -> list[list[str]]:
    return list(csv.reader(Path(path).read_text().splitlines()))


def test_the_picture_is_written(cli) -> None:
    log("runs/x", [10.0, 50.0])
    answer = cli("curves", "runs", "--out", "new/picture.png")
    assert (answer.status, answer.out) == (0, "1 curve in new/picture.png\n")
    assert Image.open("new/picture.png").size[0] > 500
    assert cli("curves", "--out", "b.SVG").status == 0
    assert "<svg" in Path("b.SVG").read_text()


def test_the_numbers_are_written(cli) -> None:
    log("runs/x", [10.0, 50.5])
    log("runs/=1+1", [3.0])
    assert cli("curves", "runs", "--out", "c.csv").status == 0
    assert table("c.csv")[1:] == [
        ["accuracy", "'=1+1", "1", "1", "", "3.0", "3.0", "3.0"],
        ["accuracy", "x", "1", "1", "", "10.0", "10.0", "10.0"],
        ["accuracy", "x", "1", "2", "", "50.5", "50.5", "50.5"],
    ]


def test_what_a_real_run_logged_of_its_clients(cli) -> None:
    """Two of four clients a round, two rounds; the simulation knows the noise of each."""
    assert cli("run", "tiny.toml", "--engine.client_lines", "true", "--out", "run").status == 0
    assert cli("curves", "run", "--of", "loss", "--over", "clients", "--out", "c.csv").status == 0
    _, *rows = table("c.csv")
    lines = [json.loads(line) for line in Path("run/clients.jsonl").read_text().splitlines()]
    last = {str(line["client"]): line["loss"] for line in lines}
    assert {row[3]: float(row[5]) for row in rows} == last
    noise = [float(row[4]) for row in rows]
    assert noise == sorted(noise)
    assert noise[0] > 0
    # Two clients of a quarter of the data each, one epoch a round: half a pass.
    assert cli("curves", "run", "--over", "passes", "--out", "p.csv").status == 0
    assert [float(row[4]) for row in table("p.csv")[1:]] == pytest.approx([0.5, 1.0], abs=0.01)


def test_what_lines_leave_out_is_said(cli) -> None:
    for name, accuracy in (("s1/x", [1.0, 2.0]), ("s2/x", [3.0]), ("s2/y", [4.0])):
        log(f"runs/{name}", accuracy, f1=0.5)
        method = "fedavg" if name[-1] == "x" else "fedprox"
        Path("runs", name, "config.toml").write_text(
            f'seed = {name[1]}\n[method]\nname = "{method}"\n'
        )
    answer = cli("curves", "--mean", "true")
    assert (answer.status, answer.out) == (0, "2 curves in curves.png\n")
    assert answer.err == (
        "x ends after 1 round of 2: not all of its 2 seeds have accuracy beyond.\n"
    )
    answer = cli("curves", "--over", "clients", "--of", "f1", "--after", "2")
    assert (answer.status, answer.out) == (0, "1 curve in curves.png\n")
    assert answer.err == "".join(
        f"{name} is left out after 2 rounds: it ends after 1 round.\n" for name in ("s2/x", "s2/y")
    )
    assert cli("curves").err == ""


def test_folders_behind_the_names_of_numbers_are_told_apart(cli) -> None:
    """Whether the default folder is there or not."""
    log("mine/x", [1.0])
    sentence = "mine is a folder, but --of takes names of numbers; put folders before the options"
    assert sentence in cli("curves", "--of", "accuracy", "mine").err
    log("runs/x", [1.0])
    assert sentence in cli("curves", "--of", "accuracy", "mine").err
    Path("accuracy").mkdir()
    assert cli("curves", "--of", "accuracy").status == 0, "a number comes first"


def test_many_lines_fit_a_table_only(cli) -> None:
    for i in range(25):
        log(f"runs/{i}", [1.0])
    answer = cli("curves", "runs")
    assert answer.status == 2
    assert "25 curves are too many for one picture" in answer.err
    assert cli("curves", "runs", "--out", "c.csv").status == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["nowhere"], "There is no folder nowhere; give"),
        (["runs", "nowhere"], "There is no folder nowhere; give"),
        (["empty"], "There is no run below empty; start one"),
        (["--out", "c.gif"], "must end in .png, .svg, .pdf or .csv, not c.gif"),
        (["--of"], "--of needs the name of a number"),
        (["--of", "accurcy"], "did you mean 'accuracy'?"),
        (["--after", "3"], "--after goes with --over clients"),
        (["--over", "clients", "--mean", "true"], "--mean goes with --over rounds"),
        (["runs/x", "--over", "clients"], "None of these runs has logged its clients"),
        (["--over", "clients"], "Say with --of what to draw over clients: f1, loss."),
        (["--over", "clients", "--of", "f2"], "choose one of f1, loss."),
        (["--over", "clients", "--of", "f1", "--after", "500"], "No run has logged 500 rounds"),
    ],
)
def test_mistakes_are_told_in_a_sentence(options: list[str], sentence: str, cli) -> None:
    log("runs/x", [1.0])
    log("runs/y", [1.0], f1=0.5, loss=0.1)
    Path("empty").mkdir()
    answer = cli("curves", *options)
    assert (answer.status, answer.out) == (2, "")
    assert sentence in answer.err
    assert not Path("curves.png").exists()
