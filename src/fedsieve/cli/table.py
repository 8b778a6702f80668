"""`fedsieve table`: the finished runs of some folders in Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.errors import check
from fedsieve.simulate.results import Arranged, Score, arrange, find_outcomes, once_per_seed

Metric: TypeAlias = Literal["last10", "best", "final", "suspect_auroc"]
Rows: TypeAlias = Sequence[Sequence[str]]

DECIMALS: dict[Metric, int] = {"last10": 2, "best": 2, "final": 2, "suspect_auroc": 3}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Gather finished runs into a table: a row per method, a column per scene, mean ± standard
    deviation over the seeds."""

    folders: tuple[Path, ...] = field(default=(), metadata=POSITIONAL)
    """Folders that runs were written to, or that hold such folders."""
    format: Literal["markdown", "latex", "csv"] = "markdown"
    """How the table is written. CSV has a column for the mean and one for the deviation."""
    metric: Metric = "last10"
    """Test accuracy in %: the mean of the last 10 rounds, the best or the final round; or the AUROC
    of the suspected labels."""


def main(argv: Sequence[str]) -> int:
    options = parse(TableOptions, "fedsieve table", argv)
    check(bool(options.folders), "Give the folders of the runs, such as: fedsieve table runs/demo")
    found, unfinished = find_outcomes(options.folders)
    places = ", ".join(map(str, options.folders))
    check(bool(found), f"There is no finished run in {places} ({unfinished} unfinished).")
    outcomes = once_per_seed(found)
    if unfinished:
        print(f"Left out: {unfinished} unfinished.", file=sys.stderr)
    if len(outcomes) < len(found):
        print(f"Left out: {len(found) - len(outcomes)} that repeat a seed.", file=sys.stderr)
    writers = {"markdown": markdown, "latex": latex, "csv": csv_text}
    print(writers[options.format](arrange(outcomes), options.metric), end="")
    return 0


def markdown(arranged: Arranged, metric: Metric) -> str:
    rows = _cells(arranged, metric, missing="–", between=" ± ")
    lines = [f"| {' | '.join(escape_markdown(cell) for cell in row)} |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * len(arranged.columns))
    return "\n".join(lines) + "\n"


def latex(arranged: Arranged, metric: Metric) -> str:
    """A tabular for the package booktabs."""
    header, *body = _cells(arranged, metric, missing="--", between=r" \pm ")
    # Only names are escaped: the entries are our own LaTeX.
    lines = [" & ".join(escape_latex(cell) for cell in header)]
    for name, *entries in body:
        shown = [f"${entry}$" if entry[0].isdigit() else entry for entry in entries]
        lines.append(" & ".join([escape_latex(name), *shown]))
    rows = [line + r" \\" for line in lines]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * len(arranged.columns)}}}",
            r"\toprule",
            rows[0],
            r"\midrule",
            *rows[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def csv_text(arranged: Arranged, metric: Metric) -> str:
    """Two columns per scene: mean, and standard deviation (empty for a single seed)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name for column in arranged.columns for name in (column, f"{column} std")]
    writer.writerow([escape_csv(name) for name in ("method", *names)])
    for row in arranged.rows:
        cells = [escape_csv(row)]
        for column in arranged.columns:
            score = arranged.score(row, column, metric)
            numbers = (None, None) if score is None else (score.mean, score.std)
            cells += ["" if number is None else f"{number:.6g}" for number in numbers]
        writer.writerow(cells)
    return text.getvalue()


def score_text(score: Score | None, decimals: int, *, missing: str, between: str) -> str:
    """ "mean ± std", or the value alone where there is one seed only."""
    if score is None:
        return missing
    mean = f"{score.mean:.{decimals}f}"
    return mean if score.std is None else f"{mean}{between}{score.std:.{decimals}f}"


def escape_markdown(text: str) -> str:
    """`text` as it is in a cell of a Markdown table; underscores inside words need no escape."""
    text = re.sub(r"([\\|*`<>\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in " ".join(text.split()))


def escape_csv(text: str) -> str:
    """`text` with an apostrophe in front where a spreadsheet would take it for a formula."""
    text = " ".join(text.split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _cells(arranged: Arranged, metric: Metric, *, missing: str, between: str) -> list[list[str]]:
    rows = [["method", *arranged.columns]]
    for row in arranged.rows:
        scores = [arranged.score(row, column, metric) for column in arranged.columns]
        texts = [
            score_text(score, DECIMALS[metric], missing=missing, between=between)
            for score in scores
        ]
        rows.append([row, *texts])
    return rows
