"""Files that are either whole or absent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` so that a crash at any moment leaves the old file or the new one."""
    with draft_of(path) as draft:
        draft.write_bytes(content)


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A name to write a new version of `path` to; it takes the place of `path` once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except Exception:
        draft.unlink(missing_ok=True)
        raise


def remove_drafts(folder: Path) -> None:
    """Remove what a process that died while writing left in `folder`."""
    for draft in folder.rglob(".*.draft"):
        draft.unlink()
