"""FedDiv's two states on a part of Fashion-MNIST that is small enough for a CPU.

    python results/feddiv/fashion_part.py make data fashion-part.npz
    python results/feddiv/fashion_part.py tabulate runs/part-1 runs/part-2 runs/part-3

The first writes 12,500 of the training images of the Fashion-MNIST in `data`, of which a run holds
every fifth out. The second makes fashion-part.csv of the folders of feddiv.md's three runs.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from fedsieve.data.sources import load
from fedsieve.sieve.gmm import Mixture, clean_posterior
from fedsieve.simulate.directory import CLIENTS, RunDirectory

SIZE = 12_500
BLOCK = 25
TABLE = Path(__file__).parent / "fashion-part.csv"
HEADER = (
    "seed",
    "first_round",
    "last_round",
    "accuracy",
    "worst_class_accuracy",
    "trusted",
    "mean_level_of_right",
    "least_level_of_right",
    "least_level_of_wrong",
    "boundary",
)
"""Accuracies in %, of all classes and of the one recognised worst; `trusted` is the share of
visits; a level is δ̂ of a client whose labels are all right, or not; the boundary is the scaled loss
from which the global filter judges a label wrong."""


def make(data: str, out: str) -> None:
    dataset = load("fashion-mnist", Path(data))
    images, labels = dataset.train_images.squeeze(1).numpy(), dataset.train_labels.numpy()
    rows = np.random.default_rng(0).permutation(len(images))[:SIZE]
    np.savez(out, x=images[rows], y=labels[rows])


def tabulate(*folders: str) -> None:
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for folder in folders:
            writer.writerows(blocks(RunDirectory(Path(folder))))


def blocks(run: RunDirectory) -> Iterator[tuple[object, ...]]:
    """A row for every full block of rounds after the walk."""
    seed, rounds = run.recipe().seed, run.lines()
    with (run.path / CLIENTS).open(encoding="utf-8") as file:
        visits = [line for line in map(json.loads, file) if "noise_level" in line]
    for first in range(visits[0]["round"], len(rounds) - BLOCK + 1, BLOCK):
        seen = [visit for visit in visits if first <= visit["round"] < first + BLOCK]
        right = [visit["noise_level"] for visit in seen if visit["true_rate"] == 0]
        wrong = [visit["noise_level"] for visit in seen if visit["true_rate"] > 0]
        numbers = (
            *(
                fmean(line[score] for line in rounds[first : first + BLOCK])
                for score in ("accuracy", "worst_class_accuracy")
            ),
            fmean(visit["trusted"] for visit in seen),
            fmean(right),
            min(right),
            min(wrong),
            fmean(boundary(line["server"]) for line in rounds[first : first + BLOCK]),
        )
        yield (seed, first + 1, first + BLOCK, *(round(number, 3) for number in numbers))


def boundary(said: Mapping[str, float]) -> float:
    """Between the means of the two components, where either is as likely."""
    mixture = Mixture(
        means=(said["mixture_mean_clean"], said["mixture_mean_noisy"]),
        variances=(said["mixture_variance_clean"], said["mixture_variance_noisy"]),
        shares=(said["mixture_share_clean"], 1 - said["mixture_share_clean"]),
        converged=True,
        iterations=0,
    )
    between = np.linspace(*mixture.means, 10_001, dtype=np.float32)
    return float(between[clean_posterior(mixture, between) >= 0.5][-1])


def main(action: str, *paths: str) -> None:
    {"make": make, "tabulate": tabulate}[action](*paths)


if __name__ == "__main__":
    main(*sys.argv[1:])
