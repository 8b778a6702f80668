"""How the command line writes: for a terminal, or as plain text for a file or a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 200
"""Columns of a table that goes to a file or pipe, where lines need not fit a window."""


def is_live(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which a progress bar can move."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (standard output), without control characters unless it is live."""
    stream = stream or sys.stdout
    live = is_live(stream)
    return Console(
        file=stream,
        force_terminal=live,
        width=None if live else PIPE_WIDTH,
        no_color=None if live else True,
        markup=False,
        highlight=False,
        emoji=False,
    )


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """Rows below a header on standard output, between a title and a caption."""
    out = console()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    with out.capture() as drawn:
        out.print(table)
    # Rich fills every line up with blanks, which a file or a pipe has no use for.
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    print("\n".join([*([title] if title else []), *lines, *([caption] if caption else [])]))
