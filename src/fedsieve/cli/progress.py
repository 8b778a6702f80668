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
from fedsieve.simulate.rounds import processes_for
from fedsieve.simulate.world import pick_device

LINE_SECONDS = 300.0
"""Without a terminal a line is written at least this often (and at every tenth of the rounds) …"""
QUIET_SECONDS = 2.0
"""… but never sooner than this after the last one."""
SLOW_ROUND_SECONDS = 10.0
"""Of a round that takes longer, the clients are told that are done."""
LONG_RUN_SECONDS = 3 * 3600.0
"""A run on a CPU that takes longer is one for a GPU."""


class Watcher(Reporter, Protocol):
    """A reporter for all runs of a command."""

    def shown(self) -> AbstractContextManager[Any]:
        """Within it the runs are carried out."""

    def skipped(self, path: Path) -> None:
        """The run in `path` was finished before."""


def watcher(measure: str = "accuracy", advice: str = "") -> Watcher:
    """A bar or lines on standard error, whichever it can show; `measure` is what a round's line
    calls accuracy, and `advice` is given once if a run takes many hours on a CPU."""
    if is_live(sys.stderr):
        return Bars(measure, advice=advice)
    return Lines(measure=measure, advice=advice)


class Forecast:
    """How far the clients of a slow round are, and how long the run will take at this pace."""

    def __init__(self, clock: Callable[[], float], advice: str = "") -> None:
        self._clock = clock
        self._advice = advice
        self._rounds = self._first = self._done = 0
        self._started_at = 0.0
        self._is_on_cpu = False
        self._processes = 1

    def started(self, recipe: Recipe, rounds_done: int) -> None:
        device = pick_device(recipe.engine.device)
        self._rounds = recipe.rounds
        self._first = self._done = rounds_done
        self._started_at = self._clock()
        self._is_on_cpu = device.type == "cpu"
        self._processes = processes_for(recipe, device)

    def finished_round(self, done: int) -> None:
        self._done = done

    def clients(self, done: int, of: int) -> str | None:
        """What to say when so many are trained; None in a round that is soon over."""
        so_far = self._done - self._first + done / of
        if done == of or self._per_round(so_far) < SLOW_ROUND_SECONDS:
            return None
        left = duration(self._left(so_far))
        return f"{done} of {of} clients of round {self._done + 1}, about {left} left"

    def advice(self, done: int, of: int) -> str | None:
        """What to do about a run that will take many hours on a CPU; it is said once."""
        left = self._left(self._done - self._first + done / of)
        if not self._is_on_cpu or left < LONG_RUN_SECONDS:
            return None
        advice, self._advice = self._advice, ""
        return advice or None

    def _per_round(self, so_far: float) -> float:
        return (self._clock() - self._started_at) / so_far

    def _left(self, so_far: float) -> float:
        """Seconds. The first two rounds of a process show whether others are worth starting."""
        rounds = self._rounds - self._first
        alone = max(0.0, min(2, rounds) - so_far)
        faster = self._processes if alone else 1  # else measured with them
        return self._per_round(so_far) * (alone + (rounds - so_far - alone) / faster)


class Bars:
    """A bar per run: rounds, accuracy, time left."""

    def __init__(
        self,
        measure: str = "accuracy",
        clock: Callable[[], float] = time.monotonic,
        advice: str = "",
    ) -> None:
        self._measure = measure
        self._forecast = Forecast(clock, advice)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[accuracy]}"),
            TextColumn("{task.fields[clients]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console(sys.stderr),
        )
        self._task = TaskID(0)

    def shown(self) -> AbstractContextManager[Any]:
        return self._progress

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self._task = self._progress.add_task(
            path.name, total=recipe.rounds, completed=rounds_done, accuracy="", clients=""
        )
        self._forecast.started(recipe, rounds_done)

    def cautioned(self, sentence: str) -> None:
        self._progress.console.print(sentence)

    def trained_clients(self, done: int, of: int) -> None:
        told = self._forecast.clients(done, of)
        if told is None:
            return
        self._progress.update(self._task, clients=told)
        if advice := self._forecast.advice(done, of):
            self._progress.console.print(advice)

    def finished_round(self, line: Mapping[str, Any]) -> None:
        self._forecast.finished_round(line["round"] + 1)
        self._progress.update(
            self._task,
            completed=line["round"] + 1,
            accuracy=f"{self._measure} {line['accuracy']:.2f} %",
            clients="",
        )

    def skipped(self, path: Path) -> None:
        self._progress.console.print(already_finished(path))


class Lines:
    """A line when a run starts, about every tenth of its rounds, and at its end; and while slow
    rounds go on, on their clients."""

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: str = "accuracy",
        advice: str = "",
    ) -> None:
        self._measure = measure
        self._forecast = Forecast(clock, advice)
        self._has_told_clients = False
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
        self._forecast.started(recipe, rounds_done)
        self._has_told_clients = False

    def cautioned(self, sentence: str) -> None:
        self._write(f"{self._name}: {sentence}")

    def trained_clients(self, done: int, of: int) -> None:
        told, now = self._forecast.clients(done, of), self._clock()
        is_due = not self._has_told_clients or now - self._last_at >= LINE_SECONDS
        if told is None or not is_due:
            return
        self._has_told_clients, self._last_at = True, now
        self._write(f"{self._name}: {told}")
        if advice := self._forecast.advice(done, of):
            self._write(advice)

    def finished_round(self, line: Mapping[str, Any]) -> None:
        done, now = int(line["round"]) + 1, self._clock()
        self._forecast.finished_round(done)
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
