"""Who watches a run, and how it is asked to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fedsieve.errors import FedsieveError
from fedsieve.recipe import Recipe


class Reporter(Protocol):
    """Someone who watches a run."""

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None: ...

    def cautioned(self, sentence: str) -> None:
        """What someone should know of the run that has just started."""

    def trained_clients(self, done: int, of: int) -> None:
        """So many clients of the round that goes on are trained."""

    def finished_round(self, line: Mapping[str, Any]) -> None: ...


class Silent:
    """A reporter that says nothing."""

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        pass

    def cautioned(self, sentence: str) -> None:
        pass

    def trained_clients(self, done: int, of: int) -> None:
        pass

    def finished_round(self, line: Mapping[str, Any]) -> None:
        pass


class RunInterruptedError(FedsieveError):
    """The run was asked to stop, and did so after saving everything."""


class RunPausedError(RunInterruptedError):
    """The run came to the round at which it was told to stop."""


class Interrupt:
    """Notes Ctrl-C and termination instead of dying, so that a round can finish; twice dies."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
