"""FedDiv on CIFAR-10 with a ResNet-18: two runs, and three forks of the first, as tables and a
picture.

    python results/feddiv/cifar10_resnet18.py "second=runs/second" "0.1=runs/div"

puts these runs into cifar10-resnet18.csv and cifar10-resnet18-levels.csv, in place of what the
tables say of them, and then draws cifar10-resnet18.png. Without folders it only draws.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.simulate.directory import CLIENTS, RunDirectory

HERE = Path(__file__).parent
ROUNDS = HERE / "cifar10-resnet18.csv"
LEVELS = HERE / "cifar10-resnet18-levels.csv"
BEGINNINGS = {"second": 0, "0.1": 0, "0.2": 955, "0.1 again": 1155, "persist": 955}
"""Rounds that a run has from the one it was forked from."""
STYLES = {
    "second": ("tab:green", "second run: noisy_above = 0.1"),
    "0.1": ("black", "first run: noisy_above = 0.1"),
    "0.2": ("tab:blue", "fork at 955: noisy_above = 0.2"),
    "0.1 again": ("tab:red", "fork of that at 1155: 0.1 again"),
    "persist": ("tab:orange", "fork at 955: persist_relabels"),
}
PUBLISHED = 93.41
WALK = 500
BLOCK = 50
OF_CLIENTS = ("noise_level", "trusted", "chosen_share")
DIAGNOSTICS = ("sieve_accuracy", "refined_accuracy")
KINDS = ("right labels only", "wrong labels, too")


def row_of(run: str, line: dict[str, Any]) -> tuple[object, ...]:
    said = [line["client"].get(name) for name in OF_CLIENTS]
    said += [line["diagnostics"].get(name) for name in DIAGNOSTICS]
    numbers = ("" if value is None else round(value, 4) for value in said)
    return (run, line["round"] + 1, line["accuracy"], *numbers)


def level_rows(run: str, clients: Path) -> list[tuple[object, ...]]:
    """Noise levels, block by block of rounds, where all labels are right and where they are not."""
    levels: dict[tuple[int, int], list[float]] = defaultdict(list)
    done = 0
    with clients.open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            done = max(done, line["round"] + 1)
            if "noise_level" in line:
                levels[line["round"] // BLOCK, line["true_rate"] > 0].append(line["noise_level"])
    rows = []
    for (block, noisy), found in sorted(levels.items()):
        numbers = (round(number, 4) for number in (fmean(found), min(found), max(found)))
        first = block * BLOCK + 1
        last = min(first + BLOCK - 1, done)
        rows.append((run, first, last, KINDS[noisy], len(found), *numbers))
    return rows


def replace_run(path: Path, run: str, rows: list[tuple[object, ...]]) -> None:
    """Put these rows where the table has those of the run, or at its end."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *held = csv.reader(file)
    where = next((i for i, row in enumerate(held) if row[0] == run), len(held))
    others = [row for row in held if row[0] != run]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header, *others[:where], *rows, *others[where:]])


def draw() -> None:
    curves: dict[str, list[dict[str, str]]] = defaultdict(list)
    with ROUNDS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            curves[row["run"]].append(row)
    figure, axes = plt.subplots(
        2,
        2,
        figsize=(12, 5.5),
        sharex="col",
        layout="constrained",
        height_ratios=(2, 1),
        width_ratios=(5, 4),
    )
    for run, (colour, label) in STYLES.items():
        rows = curves[run]
        accuracy = [(int(row["round"]), float(row["accuracy"])) for row in rows]
        trusted = [(int(row["round"]), float(row["trusted"])) for row in rows if row["trusted"]]
        for top, bottom in axes.T:
            top.plot(*zip(*accuracy, strict=True), color=colour, linewidth=0.9, label=label)
            bottom.plot(*zip(*trusted, strict=True), color=colour, linewidth=0.9)
            bottom.set_ylim(-0.04, 1)
    for top in axes[0]:
        top.axhline(PUBLISHED, color="grey", linestyle="--", linewidth=0.8)
    whole, end = axes[0]
    whole.set(ylim=(10, 97), xlim=(0, 1450))
    whole.set_ylabel("test accuracy, %")
    whole.annotate(f"published, best round: {PUBLISHED}", (8, 94.1), fontsize=8, color="dimgrey")
    whole.annotate(" the walk ends", (WALK, 22), fontsize=8, color="dimgrey")
    for axis in axes[:, 0]:
        axis.axvline(WALK, color="grey", linestyle=":", linewidth=0.8)
    end.set(ylim=(80.5, 94), xlim=(925, 1175))
    end.legend(loc="center right", fontsize=8)
    axes[1, 0].set_ylabel("share of the clients\nthat is trusted")
    figure.supxlabel("round (of one client in the walk, of ten afterwards)", fontsize=9)
    figure.savefig(HERE / "cifar10-resnet18.png", dpi=110)


def main(*given: str) -> None:
    for run, _, folder in (each.partition("=") for each in given):
        lines = RunDirectory(Path(folder)).lines()
        beginning = BEGINNINGS[run]
        replace_run(ROUNDS, run, [row_of(run, x) for x in lines if x["round"] >= beginning])
        if beginning == 0:
            replace_run(LEVELS, run, level_rows(run, Path(folder) / CLIENTS))
    draw()


if __name__ == "__main__":
    main(*sys.argv[1:])
