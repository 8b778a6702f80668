"""What a person sees while a run goes on: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedsieve.cli.output import console, is_live
from fedsieve.recipe import Recipe
from fedsieve.simulate.control import Reporter

LINE_SECONDS = 300.0
"""Without a terminal a line is written at least this often (and at every tenth of the rounds) …"""
QUIET_SECONDS = 2.0
"""… but never sooner than this after the last one."""


class Watcher(Reporter, Protocol):
    """A reporter for all runs of a command."""

    def shown(self) -> AbstractContextManager[Any]:
        """Within it the runs are carried out."""

    def skipped(self, path: Path) -> None:
        """The run in `path` was finished before."""


def watcher(measure: str = "accuracy") -> Watcher:
    """A bar or lines on standard error, whichever it can show; `measure` is what a round's line
    calls accuracy."""
    return Bars(measure) if is_live(sys.stderr) else Lines(measure=measure)


class Bars:
    """A bar per run: rounds, accuracy, time left."""

    def __init__(self, measure: str = "accuracy") -> None:
        self._measure = measure
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console(sys.stderr),
        )
        self._task = TaskID(0)

    def shown(self) -> AbstractContextManager[Any]:
        return self._progress

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self._task = self._progress.add_task(
            path.name, total=recipe.rounds, completed=rounds_done, accuracy=""
        )

    def finished_round(self, line: Mapping[str, Any]) -> None:
        self._progress.update(
            self._task,
            completed=line["round"] + 1,
            accuracy=f"{self._measure} {line['accuracy']:.2f} %",
        )

    def skipped(self, path: Path) -> None:
        self._progress.console.print(already_finished(path))


class Lines:
    """A line when a run starts, about every tenth of its rounds, and at its end."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: str = "accuracy",
    ) -> None:
        self._measure = measure
        self._write = write or _to_stderr
        self._clock = clock
        self._name = ""
        self._rounds = self._first_round = self._last_round = 0
        self._started_at = self._last_at = 0.0

    def shown(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self._name, self._rounds = path.name, recipe.rounds
        self._first_round = self._last_round = rounds_done
        self._started_at = self._last_at = self._clock()
        after = f", going on after round {rounds_done}" if rounds_done else ""
        self._write(f"{self._name}: {recipe.rounds} rounds of {recipe.method.name}{after}")

    def finished_round(self, line: Mapping[str, Any]) -> None:
        done, now = int(line["round"]) + 1, self._clock()
        waited = now - self._last_at
        a_tenth = 10 * (done - self._last_round) >= self._rounds
        due = (a_tenth or waited >= LINE_SECONDS) and waited >= QUIET_SECONDS
        if not due and done < self._rounds:
            return
        self._last_round, self._last_at = done, now
        per_round = (now - self._started_at) / (done - self._first_round)
        left = (
            f", {duration(per_round * (self._rounds - done))} left" if done < self._rounds else ""
        )
        self._write(
            f"{self._name}: round {done}/{self._rounds}, {self._measure} "
            f"{line['accuracy']:.2f} %{left}"
        )

    def skipped(self, path: Path) -> None:
        self._write(already_finished(path))


def already_finished(path: Path) -> str:
    return f"{path.name}: already finished"


def duration(seconds: float) -> str:
    """A time span in words, to two digits or so."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 99.5 else f"{minutes / 60:.1f} h"


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
