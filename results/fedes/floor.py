"""FedES with and without a lower bound of ρ: accuracy by round and, at the end, by class.

    fedsieve run results/fedes/floor.toml --seeds 1 2 3 --out runs/fedes-floor
    python results/fedes/floor.py runs/fedes-floor results/fedes/floor

writes results/fedes/floor.csv (rounds), floor-classes.csv (the final models, class by class) and
floor.png, and prints the means of the last ten rounds, seed by seed. "lost" is the client with
ρ = 0, "held" the share of a class's rightly labelled samples that it has, "owner" the client that
has most of them.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt

from fedsieve.local.bench import EagerBench
from fedsieve.methods import fedes
from fedsieve.recipe import Recipe
from fedsieve.scenes import load_scene
from fedsieve.serial import decode
from fedsieve.simulate.directory import MODEL, SCENE, Model, RunDirectory
from fedsieve.simulate.world import load_data, make_setup
from fedsieve.types import SERVER, rng_for

STYLES = {"FedAvg": "--", "ρ ≥ 0": "-", "ρ ≥ 0.1": ":"}
STAGE_ONE = (10, 2)
LIMITS = {"Dirichlet(0.5), 20 clients": (75, 100), "one owner per class, 5 clients": (0, 75)}
GAP = 0.06
"""Between the labels of two curves that end close together, in heights of a panel."""


def scene_of(recipe: Recipe) -> str:
    kind = recipe.scene.partition.kind
    return list(LIMITS)[kind == "classes"]


def variant_of(recipe: Recipe) -> str:
    is_fedes = recipe.method.name == "fedes"
    return f"ρ ≥ {recipe.method.quality_floor:g}" if is_fedes else "FedAvg"


def class_accuracy(run: RunDirectory) -> np.ndarray:
    """(classes,) test accuracy of the final model in %, class by class."""
    recipe = run.recipe()
    data = load_data(recipe)
    bench = EagerBench(make_setup(recipe, data), torch.device("cpu"))
    weights = decode(Model, (run.path / MODEL).read_bytes()).weights
    raw = bench.view("raw", data.test_images, rng_for(0, 0, SERVER, "raw"))
    right = bench.forward(weights, raw).logits.argmax(dim=1) == data.test_labels
    classes = range(len(data.classes))
    return np.array([100 * right[data.test_labels == c].double().mean().item() for c in classes])


def holders(run: RunDirectory) -> tuple[tuple[int, int, int, float], list[tuple[float, ...]]]:
    """The client with the least ρ: its number, its size, how many clients are smaller, its noise.

    And for each class, of the rightly labelled samples: the share that this client has; the client
    that has most, its share and its ρ.
    """
    qualities = run.load_server(run.last_checkpoint(), fedes.Server).qualities
    lost = min(qualities, key=qualities.__getitem__)
    scene, true = load_scene(run.path / SCENE), load_data(run.recipe()).train_labels.numpy()
    right = [held[scene.given[held] == true[held]] for held in scene.clients]
    counts = np.array([np.bincount(true[held], minlength=10) for held in right])
    shares = counts / counts.sum(axis=0)
    size, noise = scene.sizes[lost], scene.true_rates(true)[lost]
    about = (lost, int(size), int((scene.sizes < size).sum()), round(float(noise), 3))
    owners = shares.argmax(axis=0).tolist()
    return about, [
        (round(column[lost], 3), owner, round(column[owner], 3), round(qualities[owner], 3))
        for column, owner in zip(shares.T, owners, strict=True)
    ]


def write(path: Path, header: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(folder: str, name: str) -> None:
    runs = {}
    for path in sorted(Path(folder).glob("*/config.toml")):
        run = RunDirectory(path.parent)
        recipe = run.recipe()
        variant = variant_of(recipe)
        # FedAvg has no stage 1: one run is compared with both of FedES's.
        stages = STAGE_ONE if variant == "FedAvg" else (recipe.method.pretrain_rounds,)
        for stage_one in stages:
            runs[scene_of(recipe), stage_one, variant, recipe.seed] = run

    rows = []
    curves: dict[tuple[str, int, str], list[list[float]]] = defaultdict(list)
    for (scene, stage_one, variant, seed), run in sorted(runs.items()):
        lines = run.lines()
        curves[scene, stage_one, variant].append([line["accuracy"] for line in lines])
        if variant != "FedAvg" or stage_one == STAGE_ONE[0]:
            where = (scene, "" if variant == "FedAvg" else stage_one, variant, seed)
            rows += [(*where, line["round"], round(line["accuracy"], 2)) for line in lines]
    header = ("scene", "pretrain_rounds", "variant", "seed", "round", "accuracy")
    write(Path(f"{name}.csv"), header, rows)
    for key, accuracies in curves.items():
        last10 = ", ".join(f"{np.mean(accuracy[-10:]):.1f}" for accuracy in accuracies)
        print(*key, "mean of the last 10 rounds:", last10, sep="; ")

    rows = []
    final = {run.path: class_accuracy(run) for run in runs.values()}
    for (scene, stage_one, variant, seed), run in sorted(runs.items()):
        if variant != "ρ ≥ 0":
            continue
        about, classes = holders(run)
        by_variant = [final[runs[scene, stage_one, other, seed].path] for other in STYLES]
        for label, holding in enumerate(classes):
            accuracy = [round(of_class[label], 1) for of_class in by_variant]
            rows.append((scene, stage_one, seed, *about, label, *holding, *accuracy))
    header = ("scene", "pretrain_rounds", "seed", "lost", "size", "smaller_clients", "noise")
    header += ("class", "held", "owner", "owner_share", "owner_quality", *STYLES)
    write(Path(f"{name}-classes.csv"), header, rows)
    draw(curves, Path(f"{name}.png"))


def draw(curves: dict[tuple[str, int, str], list[list[float]]], picture: Path) -> None:
    figure, axes = plt.subplots(
        2, 2, figsize=(10, 6), sharex=True, sharey="row", layout="constrained"
    )
    for row, (scene, (low, high)) in zip(axes, LIMITS.items(), strict=True):
        for axis, stage_one in zip(row, STAGE_ONE, strict=True):
            ends = []
            for variant, style in STYLES.items():
                seeds = np.array(curves[scene, stage_one, variant])
                for seed in seeds:
                    axis.plot(seed, style, color="grey", linewidth=0.6)
                axis.plot(seeds.mean(axis=0), style, color="black", linewidth=2)
                ends.append((seeds[:, -1].mean(), variant))
            height = 0.0
            for end, variant in sorted(ends):
                height = max(end, height + GAP * (high - low))
                axis.annotate(f" {variant}", (39, height), fontsize=8, va="center")
            axis.axvline(stage_one, color="grey", linewidth=0.6)
            axis.set_title(f"{scene}; stage 2 from round {stage_one} on", fontsize=10)
            axis.set(xlim=(0, 45), ylim=(low, high))
    figure.supylabel("test accuracy, %", fontsize=9)
    figure.supxlabel("round (thin: seeds 1, 2, 3; thick: their mean)", fontsize=9)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
