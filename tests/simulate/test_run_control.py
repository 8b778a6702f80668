"""Watching a run, stopping it, and letting it get help from worker processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsieve.data.sources import Dataset
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import Setup
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate.control import RunInterruptedError, Silent
from fedsieve.simulate.directory import METRICS, RunDirectory, read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.world import World
from helpers import REMEMBERING, assert_same_run, tiny_recipe, with_engine


class Watcher(Silent):
    """Notes what it is told, and may do something after a round."""

    def __init__(self, after: Callable[[int], None] = lambda round: None) -> None:
        self.starts: list[int] = []
        self.rounds: list[int] = []
        self._after = after

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self.starts.append(rounds_done)

    def finished_round(self, line: Mapping[str, Any]) -> None:
        self.rounds.append(line["round"])
        self._after(line["round"])


def test_a_reporter_is_told_of_every_round(tmp_path: Path) -> None:
    watcher = Watcher()
    run(tiny_recipe(), tmp_path, watcher)
    assert (watcher.starts, watcher.rounds) == ([0], [0, 1, 2, 3])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reporter_is_told_of_every_client_before_its_round(tmp_path: Path, workers: int) -> None:
    """Three a round; with worker processes a round is told while the next one trains."""

    class Told(Watcher):
        def trained_clients(self, done: int, of: int) -> None:
            told.append((len(self.rounds), done, of))

    told: list[tuple[int, int, int]] = []
    run(with_engine(tiny_recipe(rounds=2), workers=workers), tmp_path, Told())
    assert told == [(round, done, 3) for round in (0, 1) for done in (1, 2, 3)]


def test_a_run_may_stop_after_some_time_and_go_on(tmp_path: Path) -> None:
    run(tiny_recipe(), tmp_path / "at once")
    hasty = with_engine(tiny_recipe(), stop_after_minutes=0.0)
    watcher = Watcher()
    for done in (1, 2, 3):
        with pytest.raises(RunInterruptedError) as caught:
            run(hasty, tmp_path / "in parts", watcher)
        assert str(caught.value) == (
            f"Stopped after round {done} of 4; the same command goes on from there."
        )
    run(hasty, tmp_path / "in parts", watcher)
    assert (watcher.starts, watcher.rounds) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert_same_run(tmp_path / "at once", tmp_path / "in parts")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_round_finish_and_saves(tmp_path: Path, number: signal.Signals) -> None:
    run(tiny_recipe(), tmp_path / "at once")

    def send(round: int) -> None:
        if round == 1:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(RunInterruptedError, match="Stopped after round 2 of 4"):
        run(tiny_recipe(), tmp_path / "in parts", Watcher(send))
    assert signal.getsignal(number) is before
    watcher = Watcher()
    run(tiny_recipe(), tmp_path / "in parts", watcher)
    assert watcher.rounds == [2, 3]
    assert_same_run(tmp_path / "at once", tmp_path / "in parts")


def test_a_signal_in_the_last_round_lets_the_run_finish_and_is_passed_on(tmp_path: Path) -> None:
    def send(round: int) -> None:
        if round == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunInterruptedError, match="is finished"):
        run(tiny_recipe(), tmp_path, Watcher(send))
    assert run(tiny_recipe(), tmp_path)["rounds"] == 4


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def send(round: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tiny_recipe(), tmp_path, Watcher(send))


def test_a_run_outside_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    summaries: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: summaries.append(run(tiny_recipe(), tmp_path)))
    thread.start()
    thread.join()
    assert summaries[0]["rounds"] == 4


# --------------------------------------------------------------------------------------- workers


class Spy:
    """Stands in for worker processes and notes how many there would be."""

    started: list[int]

    def __init__(
        self, recipe: Recipe, world: World, setup: Setup, count: int, folder: Path
    ) -> None:
        self._real = InProcess(recipe, world, setup)
        self.started.append(count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize(
    ("may", "asked", "cores", "seconds", "expected"),
    [
        (True, 0, 4, -1.0, [3]),  # no more workers than clients in a round
        (True, 0, 2, -1.0, [2]),
        (False, 0, 4, -1.0, []),  # a script that cannot be imported anew
        (True, 1, 4, -1.0, []),  # the user said one
        (True, 0, 1, -1.0, []),  # one core
        (True, 0, 4, 3600.0, []),  # not worth it
    ],
)
def test_a_long_run_gets_workers_by_itself(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    may: bool,
    asked: int,
    cores: int,
    seconds: float,
    expected: list[int],
) -> None:
    Spy.started = []
    monkeypatch.setattr(rounds_module, "Workers", Spy)
    monkeypatch.setattr(rounds_module, "LONG_RUN_SECONDS", seconds)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    recipe = with_engine(tiny_recipe(rounds=3), workers=asked)
    run(recipe, tmp_path, may_fork_out=may)
    assert Spy.started == expected


def test_the_runner_is_what_the_engine_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spy.started = []
    monkeypatch.setattr(rounds_module, "Workers", Spy)
    run(with_engine(tiny_recipe(rounds=1), workers=5), tmp_path)
    assert Spy.started == [5]


def stopped_after(rounds: int, recipe: Recipe, folder: Path) -> None:
    with pytest.raises(RunInterruptedError):
        run(with_engine(recipe, stop_after_rounds=rounds), folder)


def test_a_run_that_is_to_stop_after_a_round_stays_there(tmp_path: Path) -> None:
    """However often it is asked; it goes on when the setting is left out, or set higher."""
    stopped_after(2, tiny_recipe(), tmp_path)
    for rounds in (2, 1):
        watcher = Watcher()
        with pytest.raises(RunInterruptedError, match=r"without engine.stop_after_rounds goes on"):
            run(with_engine(tiny_recipe(), stop_after_rounds=rounds), tmp_path, watcher)
        assert watcher.rounds == []
    stopped_after(3, tiny_recipe(), tmp_path)
    run(tiny_recipe(), tmp_path)
    assert [line["round"] for line in read_lines(tmp_path / METRICS)] == [0, 1, 2, 3]


def test_a_fork_with_the_same_settings_ends_as_the_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "remembering", REMEMBERING)
    recipe = tiny_recipe("remembering")
    run(recipe, tmp_path / "whole")
    stopped_after(2, recipe, tmp_path / "trunk")
    watcher = Watcher()
    run(recipe, tmp_path / "fork", watcher, fork=tmp_path / "trunk")
    assert (watcher.starts, watcher.rounds) == ([2], [2, 3])
    assert_same_run(tmp_path / "whole", tmp_path / "fork")
    record = json.loads((tmp_path / "fork" / "env.json").read_text())
    assert record["forked_from"].endswith("trunk, round 2")


def test_a_fork_goes_its_own_way_and_leaves_the_trunk_alone(tmp_path: Path) -> None:
    gentle, harsh = (tiny_recipe({"name": "fedprox", "mu": mu}) for mu in (0.0, 5.0))
    run(gentle, tmp_path / "gentle")
    stopped_after(2, gentle, tmp_path / "trunk")
    run(harsh, tmp_path / "harsh", fork=tmp_path / "trunk")
    first, gentle_end, harsh_end = (
        [line["client"]["loss"] for line in read_lines(tmp_path / name / METRICS)]
        for name in ("trunk", "gentle", "harsh")
    )
    assert first == gentle_end[:2] == harsh_end[:2]
    assert gentle_end[2:] != harsh_end[2:]
    run(gentle, tmp_path / "trunk")  # goes on as if nobody had forked
    assert_same_run(tmp_path / "gentle", tmp_path / "trunk")


def test_a_fork_that_fails_leaves_nothing_that_another_run_could_take_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that cannot be read, and a kill just before the fork is complete."""
    stopped_after(1, tiny_recipe(), tmp_path / "trunk")
    out, other = tmp_path / "out", replace(tiny_recipe(), seed=77)

    def lost(recipe: Recipe) -> Dataset:
        raise FedsieveError("There are no such data.")

    with monkeypatch.context() as patched:
        patched.setattr("fedsieve.simulate.run.load_data", lost)
        with pytest.raises(FedsieveError, match="no such data"):
            run(tiny_recipe(), out, fork=tmp_path / "trunk")
    run(other, out)
    run(other, tmp_path / "alone")
    assert_same_run(out, tmp_path / "alone")

    cut = tmp_path / "cut"
    RunDirectory(cut).begin_as_fork(RunDirectory(tmp_path / "trunk"), tiny_recipe())
    (cut / "config.toml").unlink()
    with pytest.raises(FedsieveError, match=r"holds a checkpoint, but no config.toml"):
        run(other, cut)
    (cut / "checkpoint" / "commit.json").unlink()
    run(other, cut)
    assert_same_run(cut, tmp_path / "alone")
    assert "forked_from" not in json.loads((cut / "env.json").read_text())


def test_a_fork_that_was_begun_goes_on_where_it_is(tmp_path: Path) -> None:
    stopped_after(1, tiny_recipe(), tmp_path / "trunk")
    hasty = with_engine(tiny_recipe(), stop_after_rounds=3)
    with pytest.raises(RunInterruptedError):
        run(hasty, tmp_path / "fork", fork=tmp_path / "trunk")
    watcher = Watcher()
    run(tiny_recipe(), tmp_path / "fork", watcher, fork=tmp_path / "trunk")
    assert watcher.starts == [3]


def test_several_may_fork_at_once_but_not_from_a_run_that_goes_on(tmp_path: Path) -> None:
    trunk = tmp_path / "trunk"
    stopped_after(1, tiny_recipe(), trunk)
    with RunDirectory(trunk).lock(reading=True):  # as another fork does while it begins
        run(tiny_recipe(), tmp_path / "fork", fork=trunk)
        with pytest.raises(FedsieveError, match="Another fedsieve process is running"):
            run(tiny_recipe(), trunk)
    with (
        RunDirectory(trunk).lock(),
        pytest.raises(FedsieveError, match="Another fedsieve process is running"),
    ):
        run(tiny_recipe(), tmp_path / "other", fork=trunk)


def test_a_fork_must_share_scene_model_and_method(tmp_path: Path) -> None:
    stopped_after(1, tiny_recipe(), tmp_path / "trunk")
    with pytest.raises(FedsieveError, match=r"is a run with seed = .* settings of the method only"):
        run(replace(tiny_recipe(), seed=77), tmp_path / "fork", fork=tmp_path / "trunk")
    with pytest.raises(FedsieveError, match=r"is a run with method.name = 'fedavg'"):
        run(tiny_recipe({"name": "fedprox"}), tmp_path / "fork", fork=tmp_path / "trunk")


def test_there_is_nothing_to_fork_from_in_an_empty_folder_or_a_finished_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run(tiny_recipe(), tmp_path / "finished")
    for origin in ("empty", "finished"):
        with pytest.raises(FedsieveError, match=r"could fork from; .*\(engine.stop_after_rounds\)"):
            run(tiny_recipe(), tmp_path / "fork", fork=tmp_path / origin)
