"""Files that are either whole or absent, and folders that one process holds at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fedsieve.errors import FedsieveError


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that a crash at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def remove_drafts(folder: Path) -> None:
    """Remove what a process that died while writing left in `folder` itself."""
    for draft in folder.glob(".*.draft"):
        if re.fullmatch(r"\..+\.\d+\.draft", draft.name):
            draft.unlink()


@contextlib.contextmanager
def locked(folder: Path, busy: str | None = None, *, reading: bool = False) -> Iterator[None]:
    """Hold `folder`, made where it is missing; the lock dies with its process.

    While another process holds it, this one is refused with the sentence `busy`, or waits if there
    is none. Those that are only `reading` hold it together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = fcntl.LOCK_SH if reading else fcntl.LOCK_EX
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, kind if busy is None else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FedsieveError(busy) from None
        yield
