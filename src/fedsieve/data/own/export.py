"""The built-in digits as image folders, to try things out on files like one's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsieve.data.own.folders import new_folder
from fedsieve.data.own.pixels import image_of
from fedsieve.data.own.tables import write_rows
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import check
from fedsieve.types import SERVER, rng_for

TRUTH_HEADER = ("id", "site", "given", "true")


def truth_file(out: Path) -> Path:
    """Where the true labels of the export `out` go: beside it, where its readers do not look."""
    return out.with_name(f"{out.name}-truth.csv")


def export_digits(
    out: Path, *, sites: int = 3, noise: Sequence[float] = (0.2,), seed: int = 1
) -> Path:
    """Write the 1,797 digits to `out`/<site>/<given digit>/<name>.png, and the truth beside it.

    The digits are shuffled and dealt evenly. Site k has floor(n·noise_k) wrong labels, each uniform
    over the other nine digits; one number in `noise` counts for all sites. The result is the path
    of the truth, a table with the columns id, site, given and true.
    """
    check(sites >= 1, f"There must be at least 1 site, not {sites}.")
    levels = tuple(noise) * sites if len(noise) == 1 else tuple(noise)
    check(
        len(levels) == sites,
        f"Give one noise level, or one for each of the {sites} sites, not {len(levels)}.",
    )
    check(
        all(0 <= level <= 1 for level in levels),
        f"A noise level is a share between 0 and 1, not {', '.join(map(str, levels))}.",
    )
    check(out.name not in ("", ".."), f"{out} is no name for a new folder; give another place.")
    truth = truth_file(out)
    check(not truth.exists(), f"{truth} is there already; give another place.")
    data = load_digits()
    images = np.concatenate([data.train_images.numpy(), data.test_images.numpy()])
    true = np.concatenate([data.train_labels.numpy(), data.test_labels.numpy()])
    dealt = rng_for(seed, 0, SERVER, "export").permutation(len(true))
    check(sites <= len(true), f"{sites} sites cannot share {len(true):,} digits; ask for fewer.")
    rows = []
    with new_folder(out) as draft:
        for number, (held, level) in enumerate(
            zip(np.array_split(dealt, sites), levels, strict=True)
        ):
            site = f"site-{number + 1:0{len(str(sites))}d}"
            rng = rng_for(seed, 0, number, "export")
            given = true[held]
            wrong = rng.permutation(len(held))[: int(len(held) * level)]
            given[wrong] = (given[wrong] + rng.integers(1, 10, size=len(wrong))) % 10
            for digit in range(10):
                (draft / site / str(digit)).mkdir(parents=True)
            for sample, label in zip(held, given, strict=True):
                sample_id = f"{site}/{label}/digit-{sample:04d}.png"
                image_of(images[sample]).save(draft / sample_id)
                rows.append((sample_id, site, str(label), str(true[sample])))
        write_rows(truth, TRUTH_HEADER, sorted(rows))
    return truth
