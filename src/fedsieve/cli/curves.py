"""`fedsieve curves`: accuracy against rounds, a line per run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.errors import check
from fedsieve.simulate.directory import METRICS, read_lines

STYLES = ("-", "--", ":", "-.")
MOST_RUNS = 24
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True)
class CurvesOptions:
    """Draw the test accuracy of runs, finished or not, round by round."""

    folders: tuple[Path, ...] = field(default=(Path("runs"),), metadata=POSITIONAL)
    """Folders that hold runs."""
    out: Path = Path("curves.png")
    """The picture: .png, .svg or .pdf."""


def main(argv: Sequence[str]) -> int:
    options = parse(CurvesOptions, "fedsieve curves", argv)
    runs = find_curves(options.folders)
    check(
        len(runs) > 0,
        f"There is no run below {', '.join(map(str, options.folders))}; start one with "
        "`fedsieve run`.",
    )
    check(
        len(runs) <= MOST_RUNS,
        f"{len(runs)} curves are too many for one picture; give folders with at most {MOST_RUNS} "
        "runs.",
    )
    kinds = (".png", ".svg", ".pdf")
    check(
        options.out.suffix.lower() in kinds,
        f"--out must end in {', '.join(kinds)}, not {options.out}.",
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(options.out, dpi=150)
    print(f"{len(runs)} runs drawn in {options.out}")
    return 0


def find_curves(folders: Sequence[Path]) -> Mapping[str, list[float]]:
    """Name of each run below the folders (its path there) → accuracy by round."""
    found = {}
    for top in folders:
        for log in sorted(top.rglob(METRICS)):
            below = log.parent.relative_to(top)
            name = str(below if len(folders) == 1 and below.parts else top / below)
            accuracy = [line["accuracy"] for line in read_lines(log) if "accuracy" in line]
            if accuracy:
                found[name] = accuracy
    return found


def draw(runs: Mapping[str, Sequence[float]]) -> Figure:
    """The curves, told apart by line and marker as well as by colour."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    looks = itertools.cycle(itertools.product(STYLES, MARKERS))
    for (name, accuracy), (style, marker) in zip(runs.items(), looks, strict=False):
        every = max(1, len(accuracy) // 10)
        rounds = range(1, len(accuracy) + 1)
        axes.plot(rounds, accuracy, style, marker=marker, markevery=every, markersize=4, label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
