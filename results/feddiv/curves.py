"""FedDiv on digits under Dirichlet(0.3): accuracy of every round, as a table and a picture.

    fedsieve run feddiv/digits-dirichlet --seeds 1 2 3 --out runs/feddiv-digits
    python results/feddiv/curves.py runs/feddiv-digits results/feddiv/digits-dirichlet

writes results/feddiv/digits-dirichlet.csv and .png. Rounds differ in length (one client in the
walk, three afterwards), so the picture counts the clients that have trained.
"""

import csv
import sys
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.simulate.directory import RunDirectory

PANELS = ("FedDiv, η = 1", "FedDiv, η = 0", "without filter, η = 1", "FedAvg")
REFERENCE = "FedAvg"
GAP = 4
"""Points of accuracy between the labels of two seeds that end close together."""


def variant_of(method: object) -> str:
    if method.name == "fedavg":
        return REFERENCE
    kind = "without filter" if method.noisy_above == 1 else "FedDiv"
    return f"{kind}, η = {method.eta:g}"


def main(folder: str, name: str) -> None:
    runs = [RunDirectory(path.parent) for path in sorted(Path(folder).glob("*/config.toml"))]
    rows = []
    curves: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for run in runs:
        recipe, lines = run.recipe(), run.lines()
        variant = variant_of(recipe.method)
        trained = list(accumulate(len(line["clients"]) for line in lines))
        accuracy = [line["accuracy"] for line in lines]
        curves[variant][recipe.seed] = np.array([trained, accuracy])
        rows += [
            (variant, recipe.seed, line["round"], visits, round(line["accuracy"], 2))
            for line, visits in zip(lines, trained, strict=True)
        ]
    with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("variant", "seed", "round", "clients_trained", "accuracy"))
        writer.writerows(sorted(rows))
    draw(curves, Path(f"{name}.png"))


def draw(curves: dict[str, dict[int, np.ndarray]], picture: Path) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), sharey=True, layout="constrained")
    # All seeds of a variant have trained as many clients after a round: their mean is a curve.
    means = {variant: np.mean(list(seeds.values()), axis=0) for variant, seeds in curves.items()}
    for axis, panel in zip(axes, PANELS, strict=True):
        if panel != REFERENCE:
            axis.plot(*means[REFERENCE], "--", color="grey", linewidth=1.2)
            axis.axvline(50, color="grey", linewidth=0.6, linestyle=":")
            axis.annotate("end of the walk", (52, 2), fontsize=7, color="dimgrey")
        height = -GAP
        for seed, curve in sorted(curves[panel].items(), key=lambda item: item[1][1, -1]):
            axis.plot(*curve, color="black", linewidth=0.5)
            height = max(curve[1, -1], height + GAP)
            axis.annotate(f" {seed}", (curve[0, -1], height), fontsize=7, va="center")
        axis.plot(*means[panel], color="black", linewidth=2)
        axis.set_title(panel, fontsize=10)
        axis.set_xlim(0, 245)
    axes[0].set_ylim(0, 100)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].annotate("mean of FedAvg", (75, 91), fontsize=8, color="dimgrey")
    figure.supxlabel(
        "clients that have trained (thin: seeds 1, 2, 3; thick: their mean; dashed: FedAvg's mean)",
        fontsize=9,
    )
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
