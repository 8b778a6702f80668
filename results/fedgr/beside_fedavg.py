"""FedGR and FedAvg in three cells of Table 1, round by round, in one picture.

python results/fedgr/beside_fedavg.py     draws beside-fedavg.png from the tables in its folder
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
CELLS = {
    "IID, symmetric": ("iid-symmetric-phi1", "fedavg-iid-symmetric-phi1"),
    "IID, mixed": ("iid-mixed-phi1", "fedavg-iid-mixed-phi1"),
    "Dirichlet(0.3), symmetric": (
        "dirichlet-symmetric-phi1-authors",
        "fedavg-dirichlet-symmetric-phi1",
    ),
}


def accuracies(name: str) -> list[float]:
    with (HERE / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return [float(row["accuracy"]) for row in csv.DictReader(file)]


def main() -> None:
    figure, axes = plt.subplots(
        1, len(CELLS), figsize=(4 * len(CELLS), 3.2), sharey=True, layout="constrained"
    )
    for axis, (title, (fedgr, fedavg)) in zip(axes, CELLS.items(), strict=True):
        axis.plot(accuracies(fedgr), "-", color="black", linewidth=0.8, label="FedGR")
        axis.plot(accuracies(fedavg), "--", color="tab:red", linewidth=0.8, label="FedAvg")
        axis.axvline(100, color="grey", linewidth=0.5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round (grey: FedGR's warm-up ends)")
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(loc="upper left", fontsize=8)
    figure.savefig(HERE / "beside-fedavg.png", dpi=110)


if __name__ == "__main__":
    main()
