"""Predictions for every sample by a model that has never seen its label: federated cross-fitting.

Each site deals its samples into F folds (`fedsieve.audit.folds`). F federations follow one another.
In the f-th one every site trains on all its samples but those of fold f, and looks at those with
the final global model. So no label can have been learnt by heart by the model that judges it,
whatever the method, and the method's own defences against wrong labels work as usual. It costs as
many epochs as a cross-validation with F folds on pooled data, and nothing leaves a site but what
the method's `Up` declares.

Every federation is a run in a folder of its own: after a kill the same call goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.data.sources import Dataset
from fedsieve.local.bench import EagerBench
from fedsieve.recipe import Recipe
from fedsieve.scenes import Partition
from fedsieve.serial import decode
from fedsieve.simulate.control import Reporter
from fedsieve.simulate.directory import MODEL, Model
from fedsieve.simulate.run import run
from fedsieve.simulate.world import make_setup, pick_device
from fedsieve.types import SERVER, Weights, rng_for

Labels = NDArray[np.int64]


def held_out_logits(
    recipe: Recipe,
    data: Dataset,
    fold_of: Labels,
    folder: Path,
    reporter: Reporter | None = None,
    *,
    may_fork_out: bool = False,
) -> NDArray[np.float32]:
    """(n, classes) logits of each training image of `data`, which says who holds what.

    The recipe names the method, the model, the rounds and the solver of each federation.
    """
    logits = np.empty((len(fold_of), len(data.classes)), dtype=np.float32)
    for name, part, held_out in federations(data, fold_of):
        fold_recipe = fitted_to(recipe, part, name)
        run(fold_recipe, folder / name, reporter, may_fork_out=may_fork_out, data=part)
        weights = trained_weights(folder / name)
        logits[held_out] = logits_of(fold_recipe, part, weights)
    return logits


def federations(data: Dataset, fold_of: Labels) -> Iterator[tuple[str, Dataset, Labels]]:
    """For each fold its name, the data without it (it is the test set), and its samples."""
    for fold in range(int(fold_of.max()) + 1):
        held_out = np.flatnonzero(fold_of == fold)
        yield fold_name(fold), without(data, held_out), held_out


def fold_name(fold: int) -> str:
    """What the run of a fold (from 0) is called."""
    return f"fold-{fold + 1}"


def without(data: Dataset, held_out: Labels) -> Dataset:
    """The data without these samples, which become the test set with the labels they have."""
    chosen = torch.from_numpy(held_out)
    return replace(
        only(data, np.setdiff1d(np.arange(len(data.train_labels)), held_out)),
        test_images=data.train_images[chosen],
        test_labels=data.train_labels[chosen],
    )


def only(data: Dataset, kept: Labels) -> Dataset:
    """The data with only these samples to train on; a site that has none of them is not there."""
    assert data.sites is not None
    chosen = torch.from_numpy(kept)
    there, sites = np.unique(data.sites[kept], return_inverse=True)
    return replace(
        data,
        train_images=data.train_images[chosen],
        train_labels=data.train_labels[chosen],
        sites=sites.astype(np.int64),
        site_names=tuple(data.site_names[site] for site in there) if data.site_names else (),
        train_labels_are_noisy=True,
    )


def fitted_to(recipe: Recipe, data: Dataset, name: str) -> Recipe:
    """The recipe for the sites that `data` name."""
    assert data.sites is not None
    clients = int(data.sites.max()) + 1
    return replace(
        recipe,
        name=name,
        clients_per_round=min(recipe.clients_per_round, clients),
        scene=replace(recipe.scene, clients=clients, partition=Partition(kind="sites")),
    )


def trained_weights(folder: Path) -> Weights:
    """The global model of the finished run in `folder`."""
    return decode(Model, (folder / MODEL).read_bytes()).weights


def logits_of(recipe: Recipe, data: Dataset, weights: Weights) -> NDArray[np.float32]:
    """(n, classes) what the model makes of the test images of `data`."""
    device = pick_device(recipe.engine.device)
    bench = EagerBench(make_setup(recipe, data), device)
    on_device = {name: tensor.to(device) for name, tensor in weights.items()}
    raw = bench.view("raw", data.test_images.to(device), rng_for(0, 0, SERVER, "raw"))
    logits: NDArray[np.float32] = bench.forward(on_device, raw).logits.numpy(force=True)
    return logits
