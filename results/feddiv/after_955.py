"""What other filters, and other BatchNorm statistics, would have made of a stopped run's model.

    python results/feddiv/after_955.py runs/div data

The first is the folder of `fedsieve run feddiv/table1 … --engine.stop_after_rounds 955`, with its
checkpoint; the second is where CIFAR-10 lies. Nothing is trained.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.local.bench import EagerBench
from fedsieve.losses import SievingLoss, sieving_loss
from fedsieve.methods import feddiv
from fedsieve.scenes import load_scene
from fedsieve.sieve.gmm import clean_posterior
from fedsieve.simulate.directory import SCENE, RunDirectory
from fedsieve.simulate.world import load_data, make_setup, make_world

ROUNDS, PER_ROUND = 60, 10
"""Of fitting local filters and averaging them, with the model as it is."""
LOOKED_AT, RECALIBRATED_BY = 1_500, 2_000
"""Training images."""


def main(run: str, data: str) -> None:
    directory = RunDirectory(Path(run))
    recipe = directory.recipe()
    recipe = replace(recipe, data=replace(recipe.data, path=Path(data)), precision="fp32")
    checkpoint = directory.last_checkpoint()
    assert checkpoint is not None, f"{run} holds no checkpoint"
    server = directory.load_server(checkpoint, feddiv.Server)
    dataset, scene = load_data(recipe), load_scene(directory.path / SCENE)
    world = make_world(dataset, scene, torch.device("cpu"))
    bench = EagerBench(make_setup(recipe, dataset), torch.device("cpu"))
    model = bench.load(0, server.weights)
    recalibrate(bench, model, dataset.train_images, dataset.train_labels)
    shards = [world.shard(client) for client in range(len(world.clients))]
    logits = [bench.forward(server.weights, shard.images).logits for shard in shards]
    given = [shard.labels for shard in shards]
    right = [dataset.train_labels[shard.ids] == shard.labels for shard in shards]
    for loss, weights, iterations in product(
        ("bounded", "cross_entropy"), ("share", "squared_share"), (0, 3)
    ):
        filters(logits, given, right, loss, weights, iterations, scaled=True)
    for iterations in (0, 3):
        filters(logits, given, right, "cross_entropy", "share", iterations, scaled=False)


def filters(
    logits: list[Tensor],
    given: list[Tensor],
    right: list[Tensor],
    loss: SievingLoss,
    weights: feddiv.VarianceWeights,
    iterations: int,
    *,
    scaled: bool,
) -> None:
    """Noise levels after local filters were fitted and averaged until they stay."""
    cfg = feddiv.Config(filter_loss=loss, variance_weights=weights, em_iterations=iterations)
    losses = [sieving_loss(z, y, loss).numpy() for z, y in zip(logits, given, strict=True)]
    if scaled:
        losses = [feddiv.scaled(values) for values in losses]
    joint, cache, rng = feddiv.FIRST_FILTER, {}, np.random.default_rng(0)
    for _ in range(ROUNDS):
        for client in rng.choice(len(losses), PER_ROUND, replace=False):
            mixture = feddiv.fitted_mixture(cfg, losses[client], joint)
            own = feddiv.Filter(mixture.means, mixture.variances, mixture.shares)
            cache[int(client)] = feddiv.CachedFilter(own, len(losses[client]))
        joint = feddiv.aggregated(cache, weights)
    levels = np.array([(clean_posterior(joint.mixture, values) < 0.5).mean() for values in losses])
    clean = np.array([bool(each.all()) for each in right])
    print(
        f"{loss:13} {weights:13} EM {iterations or 'until convergence'!s:17} "
        f"{'scaled' if scaled else 'raw':6} right labels only: {levels[clean].mean():.3f}, "
        f"trusted {(levels[clean] <= 0.1).sum()}; the others: {levels[~clean].mean():.3f}",
        flush=True,
    )


def recalibrate(bench: EagerBench, model: nn.Module, images: Tensor, true: Tensor) -> None:
    """The model's accuracy with statistics of mixed and of unmixed images."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    seen, used = order[:LOOKED_AT], order[-RECALIBRATED_BY:]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    tell("as trained", bench, model, images[seen], true[seen])
    for kind in ("mixed", "unmixed", "both"):
        rng = np.random.default_rng(1)
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        model.train()
        with torch.no_grad():
            for rows in used.split(10):
                x = bench.normalise(bench.view("weak", images[rows], rng))
                lam, other = float(rng.beta(1, 1)), torch.from_numpy(rng.permutation(len(rows)))
                if kind != "mixed":
                    model(x)
                if kind != "unmixed":
                    model(lam * x + (1 - lam) * x[other])
        tell(f"statistics of {kind} images", bench, model, images[seen], true[seen])


@torch.no_grad()
def tell(what: str, bench: EagerBench, model: nn.Module, images: Tensor, true: Tensor) -> None:
    model.eval()
    logits = torch.cat([model(bench.normalise(part)).logits for part in images.split(250)])
    right = logits.argmax(dim=1) == true
    sure = logits.softmax(dim=1).gather(1, true[:, None]).squeeze(1)
    print(
        f"{what:30} wrong: {1 - right.float().mean():.3f}, "
        f"right class below one half: {(sure < 0.5).float().mean():.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
