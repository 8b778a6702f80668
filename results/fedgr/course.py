"""How a run went: accuracy and the sieve, round by round, as a table and a picture.

python results/fedgr/course.py RUN NAME     writes NAME.csv and, for a method that sieves, NAME.png
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.simulate.directory import RunDirectory

DIAGNOSTICS = (
    "noise_pearson",
    "sieve_auroc",
    "sieve_precision",
    "sieve_recall",
    "refined_share",
    "refined_accuracy",
)
MIXTURE = (
    "noise_ratio",
    "mixture_mean_clean",
    "mixture_mean_noisy",
    "mixture_variance_clean",
    "mixture_variance_noisy",
    "mixture_share_clean",
)


def row_of(line: dict[str, Any]) -> dict[str, float | str]:
    values = {name: line["diagnostics"].get(name) for name in DIAGNOSTICS}
    values |= {name: line["server"].get(name) for name in MIXTURE}
    values |= {"seconds": sum(line["seconds"].values())}
    rounded = {name: "" if v is None else round(v, 4) for name, v in values.items()}
    return {"round": line["round"], "accuracy": line["accuracy"], **rounded}


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    rounds = [row["round"] for row in rows]
    top.plot(rounds, [row["accuracy"] for row in rows], color="black", linewidth=0.8)
    top.set_ylabel("test accuracy, %")
    for name, style in (
        ("noise_pearson", "-"),
        ("sieve_auroc", "--"),
        ("sieve_precision", "-."),
        ("sieve_recall", ":"),
    ):
        known = [(row["round"], row[name]) for row in rows if row[name] != ""]
        bottom.plot(*zip(*known, strict=True), style, label=name.replace("_", " "), linewidth=0.9)
    bottom.axhline(0, color="grey", linewidth=0.5)
    bottom.set_xlabel("round")
    bottom.legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=110)


def main(run: str, name: str) -> None:
    rows = [row_of(line) for line in RunDirectory(Path(run)).lines()]
    known = [column for column in rows[0] if any(row[column] != "" for row in rows)]
    with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, known, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if "sieve_auroc" in known:
        draw(rows, Path(f"{name}.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
