"""Runs a recipe in a process of its own, which a test may kill at any moment.

As a script: `python crash_driver.py METHOD FOLDER WORKERS PAUSE`. In a child process: `carry_out`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsieve.recipe import Recipe
from fedsieve.simulate.run import RunInterruptedError, run
from helpers import register_remembering, tiny_recipe, with_engine

STOPPED = 3
"""Exit status of a run that was asked to stop and did so in good order."""
ROUNDS = 8


def recipe_of(method: str, checkpoint_rounds: int = 2, workers: int = 1) -> Recipe:
    register_remembering()
    recipe = replace(tiny_recipe(method), rounds=ROUNDS)
    return with_engine(recipe, checkpoint_rounds=checkpoint_rounds, workers=workers)


class Slow:
    """A reporter that makes rounds long enough to be interrupted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        pass

    def finished_round(self, line: Mapping[str, Any]) -> None:
        time.sleep(self._seconds)


def carry_out(
    recipe: Recipe, folder: Path, die_in: tuple[str, int] | None = None, pause: float = 0.03
) -> None:
    """Run; with `die_in` = (what, n) kill this process without a word in the n-th such call."""
    # Forked from a server that may have been started for workers, which do not hear Ctrl-C.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    register_remembering()
    if die_in is not None:
        die_at_call(*die_in)
    try:
        run(recipe, folder, Slow(pause))
    except RunInterruptedError:
        sys.exit(STOPPED)


def die_at_call(what: str, number: int) -> None:
    """Before the data of the n-th file is on disk ("fsync"), or just after its "replace"."""
    owner, name = (os, "fsync") if what == "fsync" else (Path, "replace")
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments) if what == "replace" else None
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments) if what == "fsync" else result

    setattr(owner, name, counting)


if __name__ == "__main__":
    _, method, folder, workers, pause = sys.argv
    carry_out(recipe_of(method, workers=int(workers)), Path(folder), pause=float(pause))
