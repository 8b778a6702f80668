"""`fedsieve table`: the finished runs of some folders in Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.errors import check
from fedsieve.formulas import ESCAPED_STARTS
from fedsieve.simulate.results import (
    Arranged,
    Outcome,
    Score,
    arrange,
    find_outcomes,
    once_per_seed,
)

FORMATS = {
    "last10": ".2f",
    "best": ".2f",
    "final": ".2f",
    "worst_class_accuracy": ".2f",
    "suspect_auroc": ".3f",
}
"""What a run's summary knows, and how it is written."""
LOGGED = ".4g"
"""How any other number is written."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Gather finished runs into a table: a row per method, a column per scene, mean ± standard
    deviation over the seeds."""

    folders: tuple[Path, ...] = field(default=(), metadata=POSITIONAL)
    """Folders that runs were written to, or that hold such folders."""
    format: Literal["markdown", "latex", "csv"] = "markdown"
    """How the table is written. CSV has a column for the mean and one for the deviation."""
    metric: str = "last10"
    """Test accuracy in %: last10, the mean of the last 10 rounds, or that of the best or the final
    one; worst_class_accuracy, the final one on the class that is recognised worst; suspect_auroc,
    the AUROC of the suspected labels; or any number from metrics.jsonl, such as noise_mse, as it
    was logged last."""


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
    outcomes, metric = with_metric(outcomes, options.metric)
    arranged = arrange(outcomes)
    if short := fewer_seeds(arranged, metric):
        print(short, file=sys.stderr)
    writers = {"markdown": markdown, "latex": latex, "csv": csv_text}
    print(writers[options.format](arranged, metric), end="")
    return 0


def fewer_seeds(arranged: Arranged, metric: str) -> str | None:
    """A sentence on the entries that are means of fewer seeds than others; a table does not show
    it."""
    scores = {place: arranged.score(*place, metric) for place in arranged.entries}
    seeds = {place: score.seeds for place, score in scores.items() if score is not None}
    most = max(seeds.values(), default=0)
    fewer = [f"{row}, {column} ({n})" for (row, column), n in seeds.items() if n < most]
    return f"Means of fewer than {most} seeds: {'; '.join(fewer)}." if fewer else None


def with_metric(outcomes: list[Outcome], asked: str) -> tuple[list[Outcome], str]:
    """The outcomes with a number in their summaries that may have to come from their logs, and its
    full name."""
    if asked in FORMATS:
        return outcomes, asked
    # Not above: they import torch, and most tables need nothing of them.
    from fedsieve.simulate.directory import METRICS, read_lines
    from fedsieve.simulate.logged import full_name, names_in, points

    logs = [[] if o.folder is None else read_lines(o.folder / METRICS) for o in outcomes]
    metric = full_name(asked, [*FORMATS, *names_in([line for lines in logs for line in lines])])
    found = [points(lines, metric) for lines in logs]
    return [
        replace(o, summary={**o.summary, metric: values[-1][1]}) if values else o
        for o, values in zip(outcomes, found, strict=True)
    ], metric


def markdown(arranged: Arranged, metric: str) -> str:
    rows = _cells(arranged, metric, missing="–", between=" ± ")
    lines = [f"| {' | '.join(escape_markdown(cell) for cell in row)} |" for row in rows]
    lines.insert(1, "|" + " --- |" + " ---: |" * len(arranged.columns))
    return "\n".join(lines) + "\n"


def latex(arranged: Arranged, metric: str) -> str:
    """A tabular for the package booktabs."""
    header, *body = _cells(arranged, metric, missing="--", between=r" \pm ")
    # Only names are escaped: the entries are our own LaTeX.
    lines = [" & ".join(escape_latex(cell) for cell in header)]
    for name, *entries in body:
        shown = [entry if entry == "--" else f"${entry}$" for entry in entries]
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


def csv_text(arranged: Arranged, metric: str) -> str:
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


def score_text(score: Score | None, form: str, *, missing: str, between: str) -> str:
    """ "mean ± std", or the value alone where there is one seed only."""
    if score is None:
        return missing
    mean = f"{score.mean:{form}}"
    return mean if score.std is None else f"{mean}{between}{score.std:{form}}"


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
    return f"'{text}" if text.startswith(ESCAPED_STARTS) else text


def _cells(arranged: Arranged, metric: str, *, missing: str, between: str) -> list[list[str]]:
    rows = [["method", *arranged.columns]]
    for row in arranged.rows:
        scores = [arranged.score(row, column, metric) for column in arranged.columns]
        texts = [
            score_text(score, FORMATS.get(metric, LOGGED), missing=missing, between=between)
            for score in scores
        ]
        rows.append([row, *texts])
    return rows
