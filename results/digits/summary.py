"""All methods on digits: every run's numbers as a table, and the accuracies as a picture.

    python results/digits/summary.py runs/digits-* results/digits/runs

writes results/digits/runs.csv and .png. A dot is a run, a line the mean of a method's runs.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.labels import load_labels
from fedsieve.simulate.directory import RunDirectory

REFERENCE = "FedAvg"
COLUMNS = ("scene", "method", "seed", "last10", "best", "final", "suspect_auroc", "wrong_labels")


def main(*arguments: str) -> None:
    *folders, name = arguments
    runs = [RunDirectory(path.parent) for f in folders for path in Path(f).glob("*/summary.json")]
    rows, places = [], {}
    for run in runs:
        (label,) = load_labels(run.path)
        summary = run.summary()
        scene = summary["name"].removeprefix("digits-")
        auroc = summary.get("suspect_auroc")
        places[label.text] = label.place
        accuracies = (round(summary[key], 2) for key in ("last10", "best", "final"))
        found = "" if auroc is None else round(auroc, 4)
        wrong = round(summary["noise"], 4)
        rows.append((scene, label.text, summary["seed"], *accuracies, found, wrong))
    rows.sort(key=lambda row: (row[0], places[row[1]], row[2]))
    with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    of_scenes: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for scene, method, _, last10, *_ in rows:
        of_scenes[scene][method].append(last10)
    draw(of_scenes, sorted(places, key=places.__getitem__), Path(f"{name}.png"))


def draw(of_scenes: dict[str, dict[str, list[float]]], methods: list[str], picture: Path) -> None:
    figure, axes = plt.subplots(
        1,
        len(of_scenes),
        figsize=(1.5 + 3 * len(of_scenes), 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (scene, of_scene) in zip(axes[0], of_scenes.items(), strict=True):
        axis.axvline(np.mean(of_scene[REFERENCE]), color="grey", linewidth=0.8, linestyle="--")
        for method, found in of_scene.items():
            height = methods.index(method)
            axis.plot(found, [height] * len(found), "o", color="black", alpha=0.5, markersize=4)
            axis.plot([np.mean(found)] * 2, [height - 0.35, height + 0.35], color="black")
        axis.set_title(scene, fontsize=10)
        axis.grid(axis="y", linewidth=0.3)
    axes[0, 0].set_yticks(range(len(methods)), methods)
    axes[0, 0].invert_yaxis()
    figure.supxlabel(
        f"test accuracy, %, mean of the last ten rounds (dots: seeds; dashed: {REFERENCE}'s mean)",
        fontsize=9,
    )
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
