"""What an audit's probabilities are worth when its models are weak: rows for docs/audit.md.

    python results/audit/weak.py [CIFAR]

audits scikit-learn's digits at three sites, a fifth of their labels wrong, with models that were
trained ever longer; and a part of CIFAR-10, if CIFAR is the folder with its official files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsieve.audit.crossfit import held_out_logits
from fedsieve.audit.noise import Evidence, fit_noise
from fedsieve.audit.run import federated, folds_of
from fedsieve.audit.score import scores_of
from fedsieve.audit.settings import Asked, choose
from fedsieve.audit.suspects import FLAG
from fedsieve.data.own import OwnData, Reading, read_own
from fedsieve.data.sources import load

SITES, SHARE, SEED = 3, 0.2, 1
PART = 2_100
"""Images of CIFAR-10."""
BINS = 15


def site_files(folder: Path, source: str, path: Path | None, most: int) -> NDArray[np.int64]:
    """Write an .npz file for each site; the true labels, site after site."""
    data, rng = load(source, path), np.random.default_rng(SEED)
    chosen = rng.permutation(len(data.train_labels))[:most]
    images, true = data.train_images[chosen].numpy(), data.train_labels[chosen].numpy()
    shift = np.where(rng.random(len(true)) < SHARE, rng.integers(1, 10, len(true)), 0)
    for site, held in enumerate(np.array_split(np.arange(len(true)), SITES)):
        labels = (true[held] + shift[held]) % 10
        np.savez(folder / f"site-{site}.npz", x=images[held], y=labels)
    return true


def row(own: OwnData, true: NDArray[np.int64], what: str, rounds: int | None) -> str:
    settings = choose(own, Asked(rounds=rounds))
    with tempfile.TemporaryDirectory() as runs:
        logits = held_out_logits(
            settings.recipe(), federated(own, None, settings), folds_of(own, settings), Path(runs)
        )
    given = own.labels.numpy()
    evidence = {n: Evidence(logits[h].astype(np.float64), given[h]) for n, h in own.sites.items()}
    shared = fit_noise(tuple(evidence.values())).shared
    p = np.empty(len(own))
    for name, held in own.sites.items():
        p[held] = scores_of(evidence[name], shared).p_wrong
    wrong, flagged = given != true, p >= FLAG
    agree, place = (
        (logits.argmax(axis=1) == given).mean(),
        np.minimum(p * BINS, BINS - 1).astype(int),
    )
    bins = [place == number for number in np.unique(place)]
    error = sum(abs(p[held].mean() - wrong[held].mean()) * held.mean() for held in bins)
    found = f"{wrong[flagged].mean():.0%} of {flagged.sum()}" if flagged.any() else "none flagged"
    return (
        f"| {what} | {settings.rounds} | {agree:.0%} | {agree / (1 - p).mean():.0%} | "
        f"{p.mean():.1%} ({wrong.mean():.1%}) | {found} | {error:.3f} |"
    )


def main(cifar: str | None = None) -> None:
    asked = [("digits", None, PART, (1, 2, 3, 4, 6, 10, 20, None))]
    if cifar is not None:
        asked.append(("cifar10", Path(cifar), PART, (20, None)))
    for source, path, most, rounds in asked:
        with tempfile.TemporaryDirectory() as folder:
            true = site_files(Path(folder), source, path, most)
            own = read_own(Path(folder), Reading())
            for number in rounds:
                print(row(own, true, f"{len(own):,}, {source}", number), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
