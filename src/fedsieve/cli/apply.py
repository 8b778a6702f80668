"""`fedsieve apply`: carry out what people decided about labels, on a copy of their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.config import OPTION
from fedsieve.data.own import Reading, apply_verdicts, read_verdicts
from fedsieve.data.own.reading import KindOrAuto


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """Write a corrected copy of your data. The data themselves are only read."""

    verdicts: Path = field(metadata=POSITIONAL)
    """A table with the columns id, site, given, verdict (keep, relabel, drop or skip) and
    new_label."""
    data: Path = field(metadata=POSITIONAL)
    """The data that were audited: a folder, a table or an .npz file."""
    also: tuple[Path, ...] = ()
    """More such tables, where every site has its own."""
    out: Path = field(metadata=OPTION)
    """The new folder; it must not be there yet, or be empty."""
    kind: KindOrAuto = "auto"
    """How the data are laid out, where that cannot be told by looking."""


def main(argv: Sequence[str]) -> int:
    options = parse(ApplyOptions, "fedsieve apply", argv)
    tables = (options.verdicts, *options.also)
    verdicts = [verdict for table in tables for verdict in read_verdicts(table)]
    done = apply_verdicts(verdicts, options.data, options.out, Reading(kind=options.kind))
    print(
        f"Wrote {options.out}: labels changed: {done.relabelled:,}, images left out: "
        f"{done.dropped:,}, as they were: {done.kept:,}. {options.data} is untouched."
    )
    return 0
