"""Rounds that are described while the next one trains: no line is lost, none is written twice.

On a CPU only worker processes leave the main thread time for it; here a runner in this process
does, so that whatever may cut a run can be tried at every round.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate import run as run_module
from fedsieve.simulate.control import RunInterruptedError, Silent
from fedsieve.simulate.directory import METRICS, RunDirectory, read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.store import Snapshot
from fedsieve.simulate.world import Job, Result
from fedsieve.types import nothing
from helpers import (
    REMEMBERING,
    Cut,
    CutAfter,
    assert_same_run,
    few_digits,
    tiny_recipe,
    with_engine,
)

ROUNDS = 6


class Idle(InProcess):
    """Clients in this process, and whatever else there is to do after them."""

    idle_while_training = True

    def train(
        self,
        round: int,
        jobs: Sequence[Job],
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int], None] = nothing,
    ) -> list[Result]:
        results = super().train(round, jobs, trained=trained)
        meanwhile()
        return results


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "remembering", REMEMBERING)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: few_digits())


@pytest.fixture
def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose rounds are described at once; those after it are described later."""
    run(a_recipe(), tmp_path / "at once")
    monkeypatch.setattr(rounds_module, "InProcess", Idle)
    return tmp_path / "at once"


def a_recipe(**engine: Any) -> Recipe:
    return with_engine(replace(tiny_recipe("remembering"), rounds=ROUNDS), **engine)


class Watcher(Silent):
    """Does something when it hears of a round."""

    def __init__(self, action: Callable[[int], None]) -> None:
        self._action = action

    def finished_round(self, line: Any) -> None:
        self._action(line["round"])


def interrupt(at: int, times: int) -> Watcher:
    def action(round: int) -> None:
        if round == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    return Watcher(action)


def rounds_in(folder: Path) -> list[int]:
    return [line["round"] for line in read_lines(folder / METRICS)]


@pytest.mark.parametrize(
    "engine",
    [
        {"stop_after_rounds": 2},
        {"stop_after_rounds": 2, "checkpoint_rounds": 1},
        {"stop_after_minutes": 0.0},
    ],
)
def test_a_run_that_stops_by_itself(at_once: Path, tmp_path: Path, engine: dict[str, Any]) -> None:
    stopped, left = 0, dict(engine)
    while stopped <= ROUNDS:
        try:
            run(a_recipe(**left), tmp_path / "later")
            break
        except RunInterruptedError:
            stopped += 1
            left.pop("stop_after_rounds", None)
            done = RunDirectory(tmp_path / "later").last_checkpoint()
            assert done is not None
            assert rounds_in(tmp_path / "later") == list(range(done.rounds_done))
    assert stopped == (1 if "stop_after_rounds" in engine else ROUNDS - 1)
    assert_same_run(at_once, tmp_path / "later")
    assert rounds_in(tmp_path / "later") == list(range(ROUNDS))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("at", range(ROUNDS))
def test_ctrl_c_at_any_round(at_once: Path, tmp_path: Path, at: int, times: int) -> None:
    with pytest.raises((RunInterruptedError, KeyboardInterrupt)):
        run(a_recipe(checkpoint_rounds=2), tmp_path / "later", interrupt(at, times))
    run(a_recipe(checkpoint_rounds=2), tmp_path / "later")
    assert_same_run(at_once, tmp_path / "later")
    assert rounds_in(tmp_path / "later") == list(range(ROUNDS))


@pytest.mark.parametrize("at", range(ROUNDS))
def test_a_failure_at_any_round(at_once: Path, tmp_path: Path, at: int) -> None:
    with pytest.raises(Cut):
        run(a_recipe(checkpoint_rounds=2), tmp_path / "later", CutAfter(at))
    run(a_recipe(checkpoint_rounds=2), tmp_path / "later")
    assert_same_run(at_once, tmp_path / "later")
    assert rounds_in(tmp_path / "later") == list(range(ROUNDS))


def test_who_presses_ctrl_c_twice_does_not_wait_for_a_whole_checkpoint(
    at_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is being written, file by file, and the second one comes while clients train."""
    begun: list[int] = []
    write = Snapshot.write

    def slowly(snapshot: Snapshot, client: int) -> None:
        begun.append(client)
        time.sleep(1.5)
        write(snapshot, client)

    monkeypatch.setattr(Snapshot, "write", slowly)
    with pytest.raises(KeyboardInterrupt):
        run(a_recipe(checkpoint_seconds=0.0), tmp_path / "later", interrupt(2, times=2))
    assert len(begun) == 1  # of three
