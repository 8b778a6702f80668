"""FedES's indicators and what follows from them, on CIFAR-10 with a ResNet-18, as a picture.

    python results/fedes/cifar10_resnet18.py runs/es runs/signed runs/cosine runs/fedavg runs/oracle

writes cifar10-resnet18-forks.csv from the folders of fedes.md's stage 1 and of its four forks, and
then draws cifar10-resnet18.png from it and from indicators.csv. Without folders it only draws.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.simulate.directory import RunDirectory

HERE = Path(__file__).parent
INDICATORS = HERE / "indicators.csv"
FORKS = HERE / "cifar10-resnet18-forks.csv"
TRUNK = "stage 1"
FORKED_AFTER = 9
NAMES = (TRUNK, "signed_emd", "cosine", "FedAvg", "oracle")
SHOWN = {"signed_emd": ("-", "black"), "mean": (":", "black"), "cosine": ("--", "tab:blue")}
STYLES = {
    "signed_emd": ("-", "black"),
    "cosine": ("--", "tab:blue"),
    "FedAvg": ("-.", "tab:red"),
    "oracle": (":", "tab:green"),
}


def write(*folders: str) -> None:
    with FORKS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "round", "accuracy"))
        for name, folder in zip(NAMES, folders, strict=True):
            for line in RunDirectory(Path(folder)).lines():
                if name == TRUNK or line["round"] >= FORKED_AFTER:
                    writer.writerow((name, line["round"] + 1, line["accuracy"]))


def table(path: Path, key: str, round: str, number: str) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row[round]:
                curves[row[key]].append((int(row[round]), float(row[number])))
    return curves


def draw() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    ranks = table(INDICATORS, "indicator", "pretrain_rounds", "spearman")
    for indicator, (line, colour) in SHOWN.items():
        points = zip(*ranks[indicator], strict=True)
        left.plot(*points, line, color=colour, linewidth=1.6, label=indicator)
    left.axhline(0, color="grey", linewidth=0.5)
    left.set(ylim=(-1.05, 1.05), xticks=range(1, 11), xlabel="pre-training rounds")
    left.set_ylabel("rank correlation of ρ with the true quality")
    left.legend(loc="lower left", fontsize=9)

    accuracies = table(FORKS, "run", "round", "accuracy")
    trunk = accuracies[TRUNK]
    right.plot(*zip(*trunk[-3:], strict=True), color="grey", linewidth=1.6)
    for name, (line, colour) in STYLES.items():
        points = [trunk[-1], *accuracies[name]]
        right.plot(*zip(*points, strict=True), line, color=colour, linewidth=1.6)
        end, accuracy = points[-1]
        right.annotate(f" {name}", (end, accuracy), fontsize=9, va="center", color=colour)
    right.axvline(10, color="grey", linestyle=":", linewidth=0.8)
    right.annotate(" stage 2", (10, 80.6), fontsize=9, color="dimgrey")
    right.annotate("stage 1 ", (10, 80.6), fontsize=9, color="dimgrey", ha="right")
    right.set(xlim=(6.8, 15.8), ylim=(75, 81), xticks=range(7, 15), xlabel="round")
    right.set_ylabel("test accuracy, %")
    figure.savefig(HERE / "cifar10-resnet18.png", dpi=110)


def main(*folders: str) -> None:
    if folders:
        write(*folders)
    draw()


if __name__ == "__main__":
    main(*sys.argv[1:])
