"""Runs a recipe in a process of its own, which a test may kill at any moment.

As a script: `python crash_driver.py METHOD FOLDER WORKERS PAUSE`. In a child process: `carry_out`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsieve.recipe import Recipe
from fedsieve.simulate.control import RunInterruptedError, Silent
from fedsieve.simulate.run import run
from helpers import register_remembering, tiny_recipe, with_engine

STOPPED = 3
"""Exit status of a run that was asked to stop and did so in good order."""
ROUNDS = 8


def recipe_of(method: str, checkpoint_rounds: int = 2, workers: int = 1) -> Recipe:
    register_remembering()
    recipe = replace(tiny_recipe(method), rounds=ROUNDS)
    return with_engine(recipe, checkpoint_rounds=checkpoint_rounds, workers=workers)


class Slow(Silent):
    """A reporter that makes rounds long enough to be interrupted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def finished_round(self, line: Mapping[str, Any]) -> None:
        time.sleep(self._seconds)


def carry_out(
    recipe: Recipe,
    folder: Path,
    die_in: tuple[str, int] | None = None,
    pause: float = 0.03,
    disk_pause: float = 0.0,
) -> None:
    """Run; with `die_in` = (what, n) kill this process without a word in the n-th such call. Every
    file takes `disk_pause` seconds more than it would."""
    # Forked from a server that may have been started for workers, which do not hear Ctrl-C.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    register_remembering()
    if die_in is not None:
        die_at_call(*die_in)
    if disk_pause:
        slow_down_files(disk_pause)
    try:
        run(recipe, folder, Slow(pause))
    except RunInterruptedError:
        sys.exit(STOPPED)


def die_at_call(what: str, number: int) -> None:
    """Before the data of the n-th file is on disk ("fsync"), or just after its "replace"."""
    owner, name = (os, "fsync") if what == "fsync" else (Path, "replace")
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)  # of several threads

    def counting(*arguments: Any) -> Any:
        call = next(calls)
        result = original(*arguments) if what == "replace" else None
        if call == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments) if what == "fsync" else result

    setattr(owner, name, counting)


def slow_down_files(seconds: float) -> None:
    """Let every file need so long until it is safe."""
    fsync = os.fsync

    def slow(file: int) -> None:
        time.sleep(seconds)
        fsync(file)

    os.fsync = slow  # type: ignore[assignment]


if __name__ == "__main__":
    _, method, folder, workers, pause = sys.argv
    carry_out(recipe_of(method, workers=int(workers)), Path(folder), pause=float(pause))
