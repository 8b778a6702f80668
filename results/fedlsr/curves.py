"""Accuracy round by round of several runs, as a table and a picture with one panel per noise.

python results/fedlsr/curves.py NAME RUN RUN …     writes NAME.csv and NAME.png
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.simulate.directory import RunDirectory

STYLES = {"fedavg": "--", "fedlsr": "-"}


def main(name: str, *runs: str) -> None:
    panels: dict[str, dict[str, list[float]]] = defaultdict(dict)
    rows = []
    for run in runs:
        config = tomllib.loads((Path(run) / "config.toml").read_text(encoding="utf-8"))
        noise, method = config["scene"]["noise"], config["method"]["name"]
        panel = f"{noise['kind']} {noise['rate']}"
        lines = RunDirectory(Path(run)).lines()
        panels[panel][method] = [line["accuracy"] for line in lines]
        rows += [
            (
                panel,
                method,
                line["round"],
                line["accuracy"],
                round(sum(line["seconds"].values()), 3),
            )
            for line in lines
        ]
    with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("noise", "method", "round", "accuracy", "seconds"))
        writer.writerows(rows)
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4 * len(panels), 3),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (panel, curves) in zip(axes[0], panels.items(), strict=True):
        for method, accuracies in curves.items():
            axis.plot(accuracies, STYLES[method], color="black", linewidth=0.9, label=method)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("round")
    axes[0][0].set_ylabel("test accuracy, %")
    axes[0][0].legend(loc="lower left", fontsize=8)
    figure.savefig(f"{name}.png", dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
