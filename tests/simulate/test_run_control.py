"""Watching a run, stopping it, and letting it get help from worker processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsieve.local.bench import Setup
from fedsieve.recipe import Recipe
from fedsieve.simulate import run as run_module
from fedsieve.simulate.run import RunInterruptedError, run
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.world import World
from helpers import assert_same_run, tiny_recipe, with_engine


class Watcher:
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
    monkeypatch.setattr(run_module, "Workers", Spy)
    monkeypatch.setattr(run_module, "LONG_RUN_SECONDS", seconds)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    recipe = with_engine(tiny_recipe(rounds=3), workers=asked)
    run(recipe, tmp_path, may_fork_out=may)
    assert Spy.started == expected


def test_the_runner_is_what_the_engine_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spy.started = []
    monkeypatch.setattr(run_module, "Workers", Spy)
    run(with_engine(tiny_recipe(rounds=1), workers=5), tmp_path)
    assert Spy.started == [5]
