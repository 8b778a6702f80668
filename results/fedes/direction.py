"""Which way FedES's indicators point, pre-training round by round, as a table and a picture.

    fedsieve run fedes/direction --seeds 1 2 3 --out runs/fedes-direction
    python results/fedes/direction.py runs/fedes-direction results/fedes/direction

writes results/fedes/direction.csv and .png.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.recipe import Recipe
from fedsieve.simulate.directory import RunDirectory

STYLES = {"signed_emd": "-", "cosine": "--", "signed_emd, per step": ":"}
DIAGNOSTICS = ("noise_spearman", "noise_mse", "noise_size_spearman")
GAP = 0.16
"""Between the labels of two curves that end close together."""


def scene_of(recipe: Recipe) -> str:
    partition, noise = recipe.scene.partition, recipe.scene.noise
    who = "IID" if partition.kind == "iid" else f"Dirichlet({partition.alpha:g})"
    return f"{who}, {noise.kind}, μ = {noise.mean:g}"


def indicator_of(recipe: Recipe) -> str:
    return recipe.method.indicator + (", per step" if recipe.method.normalise_steps else "")


def main(folder: str, name: str) -> None:
    rows = []
    for path in sorted(Path(folder).glob("*/config.toml")):
        run = RunDirectory(path.parent)
        recipe = run.recipe()
        for line in run.lines():
            found = [round(line["diagnostics"][key], 4) for key in DIAGNOSTICS]
            positive = round(line["server"]["positive_distances"], 4)
            where = (scene_of(recipe), indicator_of(recipe), recipe.seed, line["round"] + 1)
            rows.append((*where, *found, positive))
    rows.sort()
    with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        kinds = (*DIAGNOSTICS, "positive_distances")
        writer.writerow(("scene", "indicator", "seed", "pretrain_rounds", *kinds))
        writer.writerows(rows)
    curves: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for scene, indicator, seed, _, spearman, *_ in rows:
        curves[scene][indicator][seed].append(spearman)
    draw(curves, Path(f"{name}.png"))


def draw(curves: dict[str, dict[str, dict[int, list[float]]]], picture: Path) -> None:
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 6), sharex=True, sharey=True, layout="constrained"
    )
    order = sorted(curves, key=lambda scene: (not scene.startswith("IID"), "asym" in scene))
    for axis, scene in zip(axes.flat, order, strict=True):
        ends = []
        for indicator, style in STYLES.items():
            if scene.startswith("IID") and indicator == "signed_emd, per step":
                continue  # clients of one size make equally many steps: it is signed_emd
            seeds = np.array(list(curves[scene][indicator].values()))
            rounds = np.arange(1, seeds.shape[1] + 1)
            for seed in seeds:
                axis.plot(rounds, seed, style, color="grey", linewidth=0.6)
            axis.plot(rounds, seeds.mean(axis=0), style, color="black", linewidth=2)
            ends.append((seeds[:, -1].mean(), indicator))
        height = -2.0
        for end, indicator in sorted(ends):
            height = max(end, height + GAP)
            axis.annotate(f" {indicator}", (rounds[-1], height), fontsize=8, va="center")
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(scene, fontsize=10)
        axis.set_xlim(0.8, rounds[-1] + 5.2)
        axis.set_xticks(rounds)
    axes[0][0].set_ylim(-1, 1)
    figure.supylabel("rank correlation of ρ with the true quality", fontsize=9)
    figure.supxlabel("pre-training rounds (thin: seeds 1, 2, 3; thick: their mean)", fontsize=9)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
