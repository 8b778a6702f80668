"""New folders that are either whole or absent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsieve.errors import FedsieveError, check


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A draft of the folder `out` to fill; it takes its name when all went well, else it goes.

    `out` must not be there yet, or be an empty folder.
    """
    is_free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    check(is_free, f"{out} is there already and not an empty folder; give another place.")
    place = out.resolve()
    draft = place.with_name(f".{place.name}.{os.getpid()}.draft")
    draft.mkdir(parents=True)
    try:
        yield draft
        if place.is_dir():
            place.rmdir()
        draft.rename(place)
    except OSError as error:
        # The error may name the file that was being copied, which lies on another disk.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FedsieveError(
                f"There is not enough space for {out}, so nothing was written; free some, or give "
                "another place."
            ) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
