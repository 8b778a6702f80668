"""`fedsieve run` from end to end, on runs that take a fraction of a second."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from fedsieve import files
from fedsieve.cli import run as command
from fedsieve.cli.run import result_rows
from fedsieve.errors import FedsieveError
from fedsieve.labels import load_labels
from fedsieve.simulate.control import RunInterruptedError
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.results import Outcome, arrange
from fedsieve.simulate.rounds import Simulation

CONTROL = {chr(code) for code in range(32)} - {"\n"}


def test_a_single_run_says_what_it_did_and_where(cli):
    answer = cli("run", "tiny.toml", "--out", "here")
    assert answer.status == 0
    assert "fedavg-seed1" not in answer.err
    assert "here: round 2/2, accuracy" in answer.err
    assert "Accuracy on the test set in %" in answer.out
    assert "of labels wrong" in answer.out
    assert "suspects' AUROC: how well" in answer.out
    listed = answer.out.split("Results in here\n")[1]
    for name in ("summary.json", "metrics.jsonl", "model.safetensors", "config.toml"):
        assert f"  {name}" in listed
        assert Path("here", name).is_file()
    assert "clients.jsonl" not in listed
    assert not CONTROL & set(answer.out + answer.err)
    summary = json.loads(Path("here/summary.json").read_text())
    assert f"{summary['last10']:.1f} ({summary['best']:.1f})" in answer.out


def test_the_same_command_again_skips_what_is_finished(cli):
    first = cli("run", "tiny.toml", "--rounds", "1")
    (folder,) = Path("runs").glob("tiny-??????/fedavg-seed1")
    written = (folder / "metrics.jsonl").read_bytes()
    again = cli("run", "tiny.toml", "--rounds", "1")
    assert again.err == "fedavg-seed1: already finished\n"
    assert again.out == first.out
    assert (folder / "metrics.jsonl").read_bytes() == written


def test_a_grid_over_methods_noise_and_seeds(cli):
    sweep = """
    [sweep]
    "method.name" = ["fedavg", "fedprox"]
    "scene.noise" = [
      { label = "noisy", "scene.noise.kind" = "symmetric" },
      { label = "clean", "scene.noise" = { kind = "none" } },
    ]
    """
    with Path("tiny.toml").open("a") as recipe:
        recipe.write(sweep.replace("\n    ", "\n"))
    answer = cli("run", "tiny.toml", "--rounds", "1", "--seeds", "3", "4", "--out", "grid")
    assert answer.status == 0
    cells = ("fedavg-noisy", "fedavg-clean", "fedprox-noisy", "fedprox-clean")
    expected = {f"{cell}-seed{seed}" for cell in cells for seed in (3, 4)}
    assert {folder.name for folder in Path("grid").iterdir()} == expected
    header = answer.out.partition("─")[0]
    assert header.index("symmetric noise") < header.index("no noise")
    assert "all labels right" in header
    rows = [line.split() for line in answer.out.splitlines() if line.startswith(" fed")]
    assert [row[0] for row in rows] == ["fedavg", "fedprox"]
    finals = [
        json.loads(Path("grid", f"fedavg-clean-seed{seed}", "summary.json").read_text())["last10"]
        for seed in (3, 4)
    ]
    assert f"{sum(finals) / 2:.1f} ± " in answer.out
    assert answer.out.endswith("Results in grid\n")
    config = tomllib.loads(Path("grid/fedprox-clean-seed4/config.toml").read_text())
    assert config["method"]["name"] == "fedprox"
    assert config["scene"]["noise"]["kind"] == "none"
    assert (config["seed"], config["rounds"]) == (4, 1)


def test_a_finished_runs_config_is_a_recipe(cli):
    cli("run", "tiny.toml", "--rounds", "1", "--out", "a")
    assert cli("run", "a/config.toml", "--out", "b").status == 0
    answer = cli("run", "a", "--out", "c")
    assert answer.err == "fedsieve: a is a folder of a run; the recipe in it is a/config.toml.\n"
    first, second = (read_lines(Path(name, "metrics.jsonl")) for name in "ab")
    assert [line["accuracy"] for line in first] == [line["accuracy"] for line in second]


def test_settings_on_the_command_line_reach_the_run(cli):
    cli("run", "tiny.toml", "--method.name", "fedprox", "--method.mu", "0.25", "--out", "x")
    config = tomllib.loads(Path("x/config.toml").read_text())
    assert config["method"] == {"name": "fedprox", "mu": 0.25}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nope"], "There is no recipe 'nope'"),
        (["nope.toml"], "There is no recipe 'nope.toml': neither a file"),
        (
            ["tiny.toml", "--method.name", "fedcoteaching"],
            "Please set method.forget_rate: fedcoteaching has no default for it",
        ),
        (["tiny.toml", "--sgd.lr", "-1"], "sgd.lr must be above 0"),
        (["tiny.toml", "--clients_per_round", "9"], "clients_per_round is 9"),
        (["tiny.toml", "--scene.noise.low", "2"], "scene.noise.low must be between 0 and 1"),
        (["tiny.toml", "--model.name", "cnn9"], "cnn9 needs images of at least 28×28"),
        (["tiny.toml", "--data.source", "cifar10"], "cifar10 is read from files"),
        (["tiny.toml", "--data.source", "cifar11"], "There is no source 'cifar11'"),
        (["tiny.toml", "--engine.device", "abacus"], "engine.device must be cpu, cuda or auto"),
        (["tiny.toml", "--out", "tiny.toml"], "tiny.toml"),
        (["tiny.toml", "--out", "tiny.toml/x"], ""),
    ],
)
def test_mistakes_are_one_sentence(argv, words, cli):
    answer = cli("run", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")
    assert answer.err.count("\n") == 1


def test_a_folder_that_holds_another_run(cli):
    cli("run", "tiny.toml", "--rounds", "1", "--out", "x")
    before = Path("x/summary.json").read_bytes()
    answer = cli("run", "tiny.toml", "--rounds", "1", "--sgd.lr", "0.5", "--out", "x")
    assert answer.status == 2
    assert answer.err.startswith("fedsieve: x already holds a run with sgd.lr = 0.05 (not 0.5)")
    assert Path("x/summary.json").read_bytes() == before


def test_a_folder_in_use(cli):
    Path("x").mkdir()
    with Path("x/.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = cli("run", "tiny.toml", "--out", "x")
    assert answer.status == 2
    assert answer.err.startswith("fedsieve: Another fedsieve process is running in x")


def stop_after_one_round(cli) -> None:
    answer = cli("run", "tiny.toml", "--out", "x", "--engine.stop_after_minutes", "0.0")
    assert answer.status == 130
    assert answer.err.endswith(
        "fedsieve: Stopped after round 1 of 2; the same command goes on from there.\n"
    )


def test_a_stopped_run_goes_on(cli):
    stop_after_one_round(cli)
    answer = cli("run", "tiny.toml", "--out", "x")
    assert answer.status == 0
    assert "x: 2 rounds of fedavg, going on after round 1\n" in answer.err
    assert [line["round"] for line in read_lines(Path("x/metrics.jsonl"))] == [0, 1]


WARM_UP = ("--engine.stop_after_rounds", "1")


def test_a_grid_that_is_to_stop_stops_every_run_and_succeeds(cli):
    """So that `warm-up && forks` works in a shell."""
    for _ in range(2):  # the second time nothing is left to do
        answer = cli("run", "tiny.toml", "--seeds", "1", "2", "--out", "warm", *WARM_UP)
        assert answer.status == 0
        for seed in (1, 2):
            assert f"fedavg-seed{seed}: Stopped after round 1 of 2; the same command without" in (
                answer.err
            )
            assert len(read_lines(Path(f"warm/fedavg-seed{seed}/metrics.jsonl"))) == 1
    assert "Results in warm" in answer.out


def test_forks_of_a_grid_find_their_trunks(cli):
    """Each seed goes on from the warm-up with its own scene, as a run in one piece would."""
    prox = ("run", "tiny.toml", "--method.name", "fedprox", "--seeds", "1", "2")
    assert cli(*prox, "--out", "warm", *WARM_UP).status == 0
    assert cli(*prox, "--out", "whole").status == 0
    answer = cli(*prox, "--fork", "warm", "--out", "forks")
    assert answer.status == 0
    for seed in (1, 2):
        run = f"fedprox-seed{seed}"
        record = json.loads(Path("forks", run, "env.json").read_text())
        assert record["forked_from"] == f"warm/{run}, round 1"
        model = Path("forks", run, "model.safetensors").read_bytes()
        assert model == Path("whole", run, "model.safetensors").read_bytes()
    assert cli(*prox, "--fork", "warm", "--out", "forks").status == 0, "finished forks stay so"


def test_a_fork_without_a_trunk_is_refused_before_anything_is_trained(cli):
    cli("run", "tiny.toml", "--seeds", "1", "--out", "warm", *WARM_UP)
    answer = cli("run", "tiny.toml", "--seeds", "1", "2", "--fork", "warm", "--out", "forks")
    assert answer.status == 2
    assert answer.err.startswith(
        "fedsieve: fedavg-seed2 cannot fork from any run below warm: warm/fedavg-seed1, for one, "
        "has seed = 1 (not 2), and a fork may differ in settings of the method only.\n"
    )
    assert not Path("forks").exists()


def test_a_grid_that_cannot_fork_hears_why(cli):
    grid = ("run", "tiny.toml", "--seeds", "1", "2")
    cli(*grid, "--out", "warm", *WARM_UP)
    answer = cli(*grid, "--method.name", "fedprox", "--fork", "warm", "--out", "forks")
    assert "has method.name = 'fedavg' (not 'fedprox')" in answer.err
    cli(*grid, "--out", "again/warm", *WARM_UP)
    Path("warm").rename("again/other")
    Path("again/other/fedavg-seed1").rename("again/other/one")
    Path("again/warm/fedavg-seed1").rename("again/warm/one")
    answer = cli(*grid, "--fork", "again", "--out", "forks")
    assert "fedavg-seed1 could fork from again/other/one or again/warm/one; give" in answer.err
    cli(*grid, "--out", "done")
    answer = cli(*grid, "--fork", "done", "--out", "forks")
    assert answer.err.startswith("fedsieve: No run below done has a checkpoint to fork from;")
    assert not Path("forks").exists()


def test_forks_go_on_when_their_trunks_are_finished(cli):
    grid = ("run", "tiny.toml", "--seeds", "1", "2")
    cli(*grid, "--out", "warm", *WARM_UP)
    cli(*grid, "--fork", "warm", "--out", "forks", *WARM_UP)
    assert cli(*grid, "--out", "warm").status == 0
    assert cli(*grid, "--fork", "warm", "--out", "forks").status == 0
    for name in ("fedavg-seed1", "fedavg-seed2"):
        assert Path("forks", name, "summary.json").exists()


def test_a_run_that_began_by_itself_is_not_taken_for_a_fork(cli):
    for name in ("one", "other"):
        cli("run", "tiny.toml", "--out", name, *WARM_UP)
    cli("run", "tiny.toml", "--out", "x")
    answer = cli("run", "tiny.toml", "--fork", "one", "--out", "x")
    assert answer.status == 2
    assert "x already holds a run that did not fork from one" in answer.err
    assert cli("run", "tiny.toml", "--fork", "one", "--out", "y").status == 0
    assert cli("run", "tiny.toml", "--fork", Path("one").resolve(), "--out", "y").status == 0
    answer = cli("run", "tiny.toml", "--fork", "other", "--out", "y")
    assert "y already holds a run that did not fork from other" in answer.err
    answer = cli("run", "tiny.toml", "--fork", "nowhere", "--out", "z")
    assert answer.err.startswith("fedsieve: There is no folder nowhere;")


def test_a_finished_run_leaves_a_fork_nothing_to_do(cli):
    """Its result would be the trunk's, under the name of another variant."""
    cli("run", "tiny.toml", "--out", "x", "--engine.keep_states", "true")
    answer = cli("run", "tiny.toml", "--fork", "x", "--out", "y")
    assert answer.status == 2
    assert "x has done all 2 rounds, so that a fork has none left" in answer.err


def test_a_fork_is_no_seed_of_the_run_that_began_by_itself(cli):
    prox = ("run", "tiny.toml", "--method.name", "fedprox")
    cli(*prox, "--out", "runs/warm", *WARM_UP, "--method.mu", "9.0")
    cli(*prox, "--fork", "runs/warm", "--out", "runs/forked")
    cli(*prox, "--out", "runs/whole")
    rows = [row.split(" | ")[0] for row in cli("table", "runs").out.splitlines()[2:]]
    assert sorted(rows) == ["| fedprox", "| fedprox fork=round 1"]


def test_forks_of_different_rounds_are_no_repeated_seed(cli):
    longer = ("run", "tiny.toml", "--rounds", "3")
    for rounds in ("1", "2"):
        cli(*longer, "--out", f"warm{rounds}", "--engine.stop_after_rounds", rounds)
        cli(*longer, "--fork", f"warm{rounds}", "--out", f"runs/after{rounds}")
    rows = [row.split(" | ")[0] for row in cli("table", "runs").out.splitlines()[2:]]
    assert rows == ["| fedavg fork=round 1", "| fedavg fork=round 2"]


def test_forks_of_different_trunks_are_no_seeds_of_one_entry(cli):
    """Those of one kind of trunk are, whichever folder it lay in."""
    prox = ("run", "tiny.toml", "--method.name", "fedprox", "--seed")
    for seed, mu in ((1, 9.0), (2, 9.0), (3, 0.5)):
        cli(*prox, f"{seed}", "--out", f"warm{seed}", *WARM_UP, "--method.mu", f"{mu}")
        cli(*prox, f"{seed}", "--fork", f"warm{seed}", "--out", f"runs/after{seed}")
    cli(*prox, "1", "--out", "runs/whole")
    table = cli("table", "runs", "--format", "csv").out.splitlines()[1:]
    assert {row.split(",")[0]: row.split(",")[2] != "" for row in table} == {
        "fedprox": False,
        "fedprox trunk's mu=9.0 fork=round 1": True,  # a mean of two seeds
        "fedprox trunk's mu=0.5 fork=round 1": False,
    }


def test_labels_are_there_from_the_beginning(cli, monkeypatch):
    """Of a run that is killed in its first round, and of a fork likewise; a finished run gets those
    that its sweep has by now."""
    cli("run", "tiny.toml", "--out", "trunk", *WARM_UP)
    recipe = Path("tiny.toml")
    recipe.write_text(recipe.read_text() + '[sweep]\nrow = [{ label = "a" }]\n')

    def killed(self, *rest):
        raise FedsieveError("Killed.")

    for begin in ((), ("--fork", "trunk")):
        out = Path("runs", *begin)
        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "go_on", killed)
            assert cli("run", "tiny.toml", "--out", out, *begin).status == 2
        assert load_labels(out / "a-seed1")[0].axis == "row"
        recipe.write_text(recipe.read_text().replace("row = ", "variant = "))
        assert cli("run", "tiny.toml", "--out", out, *begin).status == 0
        assert load_labels(out / "a-seed1")[0].axis == "variant"
        recipe.write_text(recipe.read_text().replace("variant = ", "row = "))
        assert cli("run", "tiny.toml", "--out", out, *begin).status == 0
        assert load_labels(out / "a-seed1")[0].axis == "row"


def test_a_refused_run_leaves_the_labels_of_the_other_alone(cli):
    with Path("tiny.toml").open("a") as recipe:
        recipe.write('[sweep]\nrow = [{ label = "a" }]\n')
    assert cli("run", "tiny.toml", "--out", "runs").status == 0
    before = Path("runs/a-seed1/labels.json").read_bytes()
    Path("tiny.toml").write_text(Path("tiny.toml").read_text().replace("row = ", "other = "))
    assert cli("run", "tiny.toml", "--sgd.lr", "0.5", "--out", "runs").status == 2
    assert Path("runs/a-seed1/labels.json").read_bytes() == before


def test_a_part_of_a_grid(cli):
    with Path("tiny.toml").open("a") as recipe:
        recipe.write('[sweep]\n"sgd.lr" = [0.1, 0.2]\n')
    assert "--only needs a label" in cli("run", "tiny.toml", "--only").err
    assert cli("run", "tiny.toml", "--only", "lr0.2", "--out", "grid").status == 0
    assert [folder.name for folder in Path("grid").iterdir()] == ["lr0.2-seed1"]


def test_a_damaged_checkpoint(cli):
    stop_after_one_round(cli)
    (server,) = Path("x/checkpoint").glob("server-*.safetensors")
    server.write_bytes(b"nonsense")
    answer = cli("run", "tiny.toml", "--out", "x")
    assert answer.status == 2
    assert f"The checkpoint {server} cannot be read" in answer.err
    assert answer.err.count("\n") == 1


def test_a_damaged_checkpoint_of_a_grid_costs_one_run(cli):
    """What the refusal says to do is enough: the same command, and only that run is repeated."""
    grid = ("run", "tiny.toml", "--seeds", "1", "2", "--out", "grid")
    cli(*grid, *WARM_UP)
    one, other = (Path("grid", f"fedavg-seed{seed}") for seed in (1, 2))
    Path(one, "checkpoint", "commit.json").write_bytes(b"nonsense")
    answer = cli(*grid)
    assert answer.status == 2
    assert "delete the folder of that run, or move it away, and its command begins" in answer.err
    one.rename("aside")
    answer = cli(*grid)
    assert answer.status == 0
    assert f"{one.name}: 2 rounds of fedavg\n" in answer.err
    assert f"{other.name}: 2 rounds of fedavg, going on after round 1\n" in answer.err


def test_a_full_disk_loses_nothing(cli, monkeypatch):
    stop_after_one_round(cli)
    saved = {path: path.read_bytes() for path in Path("x/checkpoint").rglob("*.*")}

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(files.Path, "replace", full)
        answer = cli("run", "tiny.toml", "--out", "x")
    assert answer.status == 2
    assert "fedsieve: The disk is full" in answer.err
    assert "Traceback" not in answer.err
    assert {path: path.read_bytes() for path in Path("x/checkpoint").rglob("*.*")} == saved
    assert cli("run", "tiny.toml", "--out", "x").status == 0


def test_missing_permission(cli, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    answer = cli("run", "tiny.toml", "--out", "x")
    assert answer.status == 2
    assert answer.err.startswith("fedsieve: Permission denied (x)")


def test_a_full_gpu(cli, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(command, "run", full)
    answer = cli("run", "tiny.toml")
    assert answer.status == 2
    assert "The GPU has not enough memory; try a smaller --engine.slots" in answer.err


def test_the_rest_of_a_grid_is_not_started_after_an_interruption(cli, monkeypatch):
    started = []

    def interrupted(recipe, folder, *args, **kwargs):
        started.append(folder.name)
        raise RunInterruptedError("Stopped.")

    monkeypatch.setattr(command, "run", interrupted)
    answer = cli("run", "tiny.toml", "--seeds", "1", "2")
    assert (answer.status, answer.out, answer.err) == (130, "", "fedsieve: Stopped.\n")
    assert started == ["fedavg-seed1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number):
    argv = ["run", "tiny.toml", "--rounds", "10000", "--out", "x"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsieve", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    metrics, deadline = Path("x/metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "fedsieve: Stopped after round" in err
    assert "Traceback" not in err
    done = json.loads(Path("x/checkpoint/commit.json").read_text())["rounds_done"]
    assert len(metrics.read_text().splitlines()) == done


def outcome(method, noise, last10, auroc, seed=1):
    config = {
        "seed": seed,
        "data": {"source": "digits"},
        "scene": {"noise": {"kind": "none" if noise == 0 else "symmetric"}},
        "method": {"name": method},
    }
    summary = {"last10": last10, "best": last10 + 1, "suspect_auroc": auroc, "noise": noise}
    return Outcome.of(config, summary)


def test_rows_of_the_closing_table():
    """Mean of 80 and 84: 82, standard deviation √((2² + 2²) / 1) = 2.8; one entry is missing."""
    outcomes = [
        outcome("fedavg", 0.7, 80.0, 0.9, seed=1),
        outcome("fedavg", 0.7, 84.0, 0.9, seed=2),
        outcome("fedavg", 0.0, 95.0, None),
        outcome("fedprox", 0.0, 94.0, None),
    ]
    header, rows = result_rows(arrange(outcomes))
    assert header == [
        "method",
        "symmetric noise\n70% of labels wrong",
        "suspects'\nAUROC",
        "no noise\nall labels right",
    ]
    assert rows == [
        ["fedavg", "82.0 ± 2.8 (83.0 ± 2.8)", "0.900 ± 0.000", "95.0 (96.0)"],
        ["fedprox", "–", "–", "94.0 (95.0)"],
    ]


def test_a_lost_class_in_the_closing_words(cli, monkeypatch):
    known = [{"last10": 50.0, "best": 60.0} for _ in range(4)]
    known[0]["lost_classes"] = known[2]["lost_classes"] = {"[b]shirt": 9}
    monkeypatch.setattr(command, "run", lambda *args, **kwargs: known.pop())

    def told(*arguments: str) -> str:
        return " ".join(cli("run", "tiny.toml", *arguments).out.split())

    assert "no longer recognises" not in told("--out", "x")
    assert (
        "1 of 2 runs have lost a class; the final model of fedavg-seed1 no longer recognises any "
        "test image of '[b]shirt' (since round 9)" in told("--seeds", "1", "2", "--out", "y")
    )
    assert "The final model no longer recognises any test image of" in told("--out", "z")


def test_unknown_truth_and_refused_updates_in_the_closing_words(cli, monkeypatch):
    summary = {"last10": 50.0, "best": 60.0, "refused_updates": 3}
    monkeypatch.setattr(command, "run", lambda *args, **kwargs: summary)
    answer = cli("run", "tiny.toml", "--out", "x")
    assert "AUROC" not in answer.out
    assert "labels wrong" not in answer.out
    assert "3 updates were not finite and were left out" in answer.out
