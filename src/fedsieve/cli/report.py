"""`fedsieve report`: runs as one page for the browser, side by side."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.errors import check
from fedsieve.files import write_atomically
from fedsieve.pages import report_page
from fedsieve.simulate.directory import CONFIG, METRICS
from fedsieve.simulate.results import holds_run


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write a page on runs, finished or not: accuracy, noise per site, suspects, what left the
    sites, settings. It is one file that any browser opens."""

    folders: tuple[Path, ...] = field(default=(), metadata=POSITIONAL)
    """Folders that runs were written to, or that hold such folders."""
    out: Path = Path("report.html")
    """The page."""


def main(argv: Sequence[str]) -> int:
    options = parse(ReportOptions, "fedsieve report", argv)
    check(bool(options.folders), "Give the folders of the runs, such as: fedsieve report runs/demo")
    check(
        options.out.suffix.lower() in (".html", ".htm"),
        f"--out must end in .html, not {options.out}.",
    )
    runs = find_runs(options.folders)
    places = ", ".join(map(str, options.folders))
    check(bool(runs), f"There is no run in {places}; start one with `fedsieve run`.")
    page = report_page(runs, command=shlex.join(["fedsieve", "report", *argv]))
    write_atomically(options.out, page.encode())
    print(
        f"{len(runs)} runs reported in {options.out}" if len(runs) > 1 else f"Wrote {options.out}"
    )
    return 0


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The folders of runs below `folders`, each once, finished or not."""
    found: dict[Path, Path] = {}
    for top in folders:
        check(top.is_dir(), f"There is no folder {top}; give the folder that a run was written to.")
        for name, below, files in os.walk(top):
            below.sort()
            if METRICS in files or (CONFIG in files and holds_run(files)):
                found.setdefault(Path(name).resolve(), Path(name))
    return list(found.values())
