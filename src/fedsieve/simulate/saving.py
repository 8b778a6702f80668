"""Checkpoints that are written while the next rounds train."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Any

import torch

from fedsieve.errors import FedsieveError
from fedsieve.local.slices import Slice, whole
from fedsieve.simulate.directory import Checkpoint, RunDirectory
from fedsieve.simulate.store import ClientStore, Snapshot


class Saver:
    """Writes the checkpoints of a run, one at a time, in a thread of its own.

    That thread has nothing but a snapshot, of which no part ever changes. What became of it is
    noted in the thread of the run, so the store and the logs belong to that one alone.
    """

    def __init__(self, directory: RunDirectory, store: ClientStore, device: torch.device) -> None:
        self._directory = directory
        self._store = store
        self._place = whole(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "checkpoint", _enter, (self._place,))
        self._writing: Future[float] | None = None
        self._in_a_hurry = threading.Event()
        self.saved_at = time.monotonic()
        """When the last checkpoint was found complete; before the first, when the run began."""
        self.last_took = 0.0
        """Seconds that it took; those of a GPU run with large client states are many."""

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Nobody else may have the folder before the checkpoint under way is done with it."""
        if isinstance(error, KeyboardInterrupt):
            self._in_a_hurry.set()
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(str(failure))
        finally:
            self._thread.shutdown()

    def begin(self, rounds_done: int, server: Any) -> None:
        """Let the run as it is now be written, after what is being written."""
        self.wait()
        states = self._store.snapshot()
        checkpoint = self._directory.checkpoint(rounds_done, states.rounds)
        if self._place is not None:  # what the states hold must be there before others read it
            torch.cuda.synchronize(self._place.device)
        self._writing = self._thread.submit(self._write, checkpoint, server, states)

    def is_writing(self) -> bool:
        """Whether a checkpoint is under way; one that failed is an error, now at the latest."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is not None

    def wait(self) -> None:
        """Until the checkpoint under way, if any, is complete; one that failed is an error."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            wait_for([writing])
        except KeyboardInterrupt:
            self._in_a_hurry.set()
            wait_for([writing])
            raise
        took = writing.result()
        if not self._in_a_hurry.is_set():  # else it may have been given up
            self.last_took, self.saved_at = took, time.monotonic()
            self._store.saved()

    def abandon(self) -> None:
        """Stop writing the checkpoint under way, if any; the one before it stays. Whether it could
        have been written does not matter any more."""
        self._in_a_hurry.set()
        with contextlib.suppress(FedsieveError):
            self.wait()

    def _write(self, checkpoint: Checkpoint, server: Any, states: Snapshot) -> float:
        """Write new files, then the commit that names them, and only then remove the old ones."""
        began = time.monotonic()
        try:
            for client in states.unsaved:
                if self._in_a_hurry.is_set():  # the checkpoint before this one stays
                    return time.monotonic() - began
                states.write(client)
            self._directory.save_server(checkpoint.rounds_done, server)
            self._directory.commit(checkpoint)
            states.remove_older()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise FedsieveError(
                f"The checkpoint after round {checkpoint.rounds_done} cannot be written ({error}); "
                f"{'free some space' if full else 'put that right'} and give the same command "
                "again, it goes on from what was saved."
            ) from None
        return time.monotonic() - began


def _enter(place: Slice | None) -> None:
    """Let the calling thread copy from a GPU in a stream of its own, beside the training.

    One stream for all checkpoints: PyTorch has few, and would some day hand out one in which a
    client trains.
    """
    if place is not None:
        place.enter()
        torch.cuda.set_stream(place.stream())
