"""FedES's indicators and what becomes of them, on CIFAR-10 with a ResNet-18, as a picture.

    python results/fedes/cifar10_resnet18.py runs/es

writes cifar10-resnet18.csv from the runs of cifar10.toml in that folder, and then draws
cifar10-resnet18.png from it and from indicators.csv. Without a folder it only draws.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fedsieve.simulate.directory import RunDirectory

HERE = Path(__file__).parent
INDICATORS = HERE / "indicators.csv"
RUNS = HERE / "cifar10-resnet18.csv"
STYLES = {
    "signed_emd": ("-", "black"),
    "mean": (":", "black"),
    "cosine": ("--", "tab:blue"),
    "signed_emd-s10": ("-", "black"),
    "cosine-s10": ("--", "tab:blue"),
    "cosine-s5": ("-", "tab:blue"),
    "oracle-s10": ("-", "tab:green"),
    "FedAvg": ("-.", "tab:red"),
}
RANKED = ("signed_emd", "mean", "cosine")
TRAINED = ("signed_emd-s10", "cosine-s10", "cosine-s5", "oracle-s10", "FedAvg")


def write(folder: str) -> None:
    with RUNS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "round", "accuracy", "memorised", "seconds"))
        for run in TRAINED:
            for line in RunDirectory(Path(folder) / f"{run}-seed1").lines():
                memorised = line["diagnostics"].get("memorised")
                share = "" if memorised is None else f"{memorised:.4f}"
                seconds = sum(line["seconds"].values())
                writer.writerow((run, line["round"] + 1, line["accuracy"], share, f"{seconds:.2f}"))


def curves(path: Path, key: str, round: str, number: str) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row[round] and row[number]:
                found[row[key]].append((int(row[round]), float(row[number])))
    return found


def plot(axis: Axes, found: dict[str, list[tuple[int, float]]], names: tuple[str, ...]) -> None:
    for name in names:
        line, colour = STYLES[name]
        axis.plot(*zip(*found[name], strict=True), line, color=colour, linewidth=1.4, label=name)


def draw() -> None:
    figure, (ranks, accuracies, shares) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    plot(ranks, curves(INDICATORS, "indicator", "pretrain_rounds", "spearman"), RANKED)
    ranks.axhline(0, color="grey", linewidth=0.5)
    ranks.set(ylim=(-1.05, 1.05), xticks=range(1, 11), xlabel="pre-training rounds")
    ranks.set_ylabel("rank correlation of ρ with the true quality")
    ranks.legend(loc="lower left", fontsize=9)

    plot(accuracies, curves(RUNS, "run", "round", "accuracy"), TRAINED)
    accuracies.axvline(10, color="grey", linestyle=":", linewidth=0.8)
    accuracies.set(ylim=(70, 84), xlabel="round", ylabel="test accuracy, %")
    accuracies.legend(loc="lower center", fontsize=9, ncols=2)

    memorised = curves(RUNS, "run", "round", "memorised")
    plot(shares, memorised, tuple(name for name in TRAINED if len(memorised[name]) > 1))
    shares.set(ylim=(0, None), xlabel="round", ylabel="wrong labels learnt by heart, share")
    figure.savefig(HERE / "cifar10-resnet18.png", dpi=110)


def main(*folder: str) -> None:
    for one in folder:
        write(one)
    draw()


if __name__ == "__main__":
    main(*sys.argv[1:])
