"""`fedsieve curves`: accuracy, or any other number that runs logged, over rounds or clients."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.table import escape_csv
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.pages.curves import Logs, OverClients, OverRounds, Row, find_logs
from fedsieve.simulate.logged import full_name, names_in

MOST_LINES = 24
PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class CurvesOptions:
    """Draw what runs logged, finished or not: their test accuracy or any other number, round by
    round or client by client."""

    folders: tuple[Path, ...] = field(default=(Path("runs"),), metadata=POSITIONAL)
    """Folders that hold runs."""
    of: tuple[str, ...] = ()
    """Which numbers: names from metrics.jsonl, or over clients from clients.jsonl, such as drift or
    diagnostics.noise_spearman, of which the last part will do. Each has a panel, but over clients
    all share one. (left out: accuracy; over clients it must be given)"""
    over: Literal["rounds", "passes", "clients"] = "rounds"
    """What the lines run over: rounds; passes through the data, which make runs comparable whose
    rounds train unequally much; or clients in the order of their true noise, each with what was
    logged of it last, by runs with --engine.client_lines true."""
    after: tuple[int, ...] = ()
    """Over clients: as it was after so many rounds, with a panel for each (left out: at the end)"""
    mean: bool = False
    """Over rounds or passes: runs that differ in nothing but their seed become one line, their
    mean, in a band from the least to the largest."""
    out: Path = Path("curves.png")
    """The picture: .png, .svg or .pdf; or .csv for the numbers."""


def main(argv: Sequence[str]) -> int:
    options = parse(CurvesOptions, "fedsieve curves", argv)
    kind = options.out.suffix.lower()
    check(
        kind in (*PICTURES, ".csv"),
        f"--out must end in {', '.join(PICTURES)} or .csv, not {options.out}.",
    )
    check(
        bool(options.of) or "--of" not in argv,
        "--of needs the name of a number, such as accuracy.",
    )
    if not all(folder.is_dir() for folder in options.folders):
        refuse_folders(options.of)
    runs = find_logs(options.folders, with_clients=options.over == "clients")
    check(
        len(runs) > 0,
        f"There is no run below {', '.join(map(str, options.folders))}; start one with "
        "`fedsieve run`.",
    )
    chart = over_clients(runs, options) if options.over == "clients" else over_rounds(runs, options)
    count = len(chart.lines)
    check(
        count <= MOST_LINES or kind == ".csv",
        f"{count} curves are too many for one picture; give folders with at most {MOST_LINES} "
        "runs, or have them written as numbers with --out curves.csv.",
    )
    for note in chart.notes:
        print(note, file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".csv":
        write(chart.rows(), options.out)
    else:
        chart.draw().savefig(options.out, dpi=150)
    print(f"{count} {'curve' if count == 1 else 'curves'} in {options.out}")
    return 0


def over_rounds(runs: Sequence[Logs], options: CurvesOptions) -> OverRounds:
    check(not options.after, "--after goes with --over clients; leave it out.")
    known = {name for run in runs for name in names_in(run.rounds)}
    names = full_names(options.of or ("accuracy",), known)
    by_passes = options.over == "passes"
    return OverRounds.of(runs, names, mean=options.mean, by_passes=by_passes)


def over_clients(runs: Sequence[Logs], options: CurvesOptions) -> OverClients:
    check(not options.mean, "--mean goes with --over rounds or passes; leave it out.")
    known = {name for run in runs for name in names_in(run.clients)}
    check(
        bool(known),
        "None of these runs has logged its clients; run them with --engine.client_lines true.",
    )
    check(
        bool(options.of),
        f"Say with --of what to draw over clients: {', '.join(sorted(known))}.",
    )
    names = full_names(options.of, known)
    return OverClients.of(runs, names, options.after)


def full_names(asked: Sequence[str], known: Collection[str]) -> list[str]:
    """The numbers that are meant; a folder among them stands at the wrong place."""
    names = []
    for name in asked:
        try:
            names.append(full_name(name, known))
        except FedsieveError:
            refuse_folders([name])
            raise
    return names


def refuse_folders(words: Iterable[str]) -> None:
    """--of takes every word behind it, the folders of who writes them last, too."""
    for word in words:
        check(
            not Path(word).is_dir(),
            f"{word} is a folder, but --of takes names of numbers; put folders before the "
            f"options: fedsieve curves {word} --of …",
        )


def write(rows: Iterable[Row], path: Path) -> None:
    """A CSV file that a spreadsheet cannot take for formulas."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([escape_csv(cell) if isinstance(cell, str) else cell for cell in row])
    write_atomically(path, text.getvalue().encode())
