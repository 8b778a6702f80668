"""Who may compile, capture and try kernels, while other threads work on the same GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Work that several threads may do side by side, and work that one must do alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._side_by_side = 0
        self._alone = False

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._side_by_side += 1
        try:
            yield
        finally:
            with self._changed:
                self._side_by_side -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._side_by_side)
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


CAPTURE = threading.Lock()
"""Compiling and capturing are done by one thread at a time."""
TRIALS = Turns()
"""Side by side cuDNN tries kernels outside of that lock; alone it must not, in any thread."""
