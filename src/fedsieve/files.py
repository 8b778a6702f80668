"""Files that are either whole or absent."""

from __future__ import annotations

import os
import re
from pathlib import Path


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
