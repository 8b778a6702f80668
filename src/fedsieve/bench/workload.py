"""The round that CPU speed is measured on, and that round as a bare PyTorch loop."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.data.sources import Dataset
from fedsieve.local.bench import EVALUATION_CHUNK
from fedsieve.local.plan import Sgd, schedule
from fedsieve.methods import fedavg
from fedsieve.methods.contract import choose_uniformly
from fedsieve.models import read_weights
from fedsieve.recipe import EngineConfig, Recipe
from fedsieve.scenes import SceneConfig
from fedsieve.simulate.directory import RunDirectory
from fedsieve.simulate.rounds import Simulation
from fedsieve.simulate.world import make_setup
from fedsieve.types import SERVER, ClientId, Outputs, Streams, Weights

NEVER = 10**9
"""Rounds or seconds that no measurement reaches: a checkpoint is no part of a round."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """FedAvg with the small model on random grey images; one epoch a round."""

    clients: int = 100
    per_round: int = 10
    samples: int = 60
    """Images at each client."""
    side: int = 28
    test_images: int = 1000
    classes: int = 10
    sgd: Sgd = field(default_factory=lambda: Sgd(batch_size=32, lr=0.05))
    seed: int = 1

    def recipe(self, *, workers: int = 1) -> Recipe:
        """The round's recipe; more than one worker means as many processes."""
        return Recipe(
            name="speed",
            seed=self.seed,
            rounds=NEVER,
            clients_per_round=self.per_round,
            scene=SceneConfig(clients=self.clients),
            sgd=self.sgd,
            method=fedavg.Config(),
            engine=EngineConfig(device="cpu", workers=workers, checkpoint_seconds=NEVER),
        )

    def data(self) -> Dataset:
        """Random images without augmentation (speed does not depend on what they show)."""
        generator = torch.Generator().manual_seed(self.seed)

        def split(n: int) -> tuple[Tensor, Tensor]:
            shape = (n, 1, self.side, self.side)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            return images, torch.randint(0, self.classes, (n,), generator=generator)

        train_images, train_labels = split(self.clients * self.samples)
        test_images, test_labels = split(self.test_images)
        return Dataset(
            name="random",
            classes=tuple(str(number) for number in range(self.classes)),
            train_images=train_images,
            train_labels=train_labels,
            test_images=test_images,
            test_labels=test_labels,
            mean=(0.5,),
            std=(0.25,),
            views="plain",
        )

    def batches(self, round: int, client: ClientId) -> list[Tensor]:
        """The rows of each batch that fedsieve draws for `client` in `round`."""
        drawn = schedule(self.samples, self.sgd, Streams(self.seed, round, client)("batches"))
        return [torch.from_numpy(rows) for rows in drawn.rows]

    def clients_of(self, round: int) -> tuple[ClientId, ...]:
        """The clients that FedAvg selects in `round`."""
        rng = Streams(self.seed, round, SERVER)("select")
        return choose_uniformly(self.clients, self.per_round, rng)

    def plan_of(self, round: int) -> list[tuple[ClientId, list[Tensor]]]:
        """Who trains on which batches in `round`."""
        return [(client, self.batches(round, client)) for client in self.clients_of(round)]


@contextlib.contextmanager
def opened(recipe: Recipe, data: Dataset) -> Iterator[Simulation]:
    """fedsieve's simulation of `recipe`, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fedsieve-bench-") as folder:
        directory = RunDirectory(Path(folder))
        with directory.lock():
            simulation = Simulation.open(recipe, directory, data)
            try:
                yield simulation
            finally:
                simulation.runner.close()


class BareLoop:
    """The same rounds as one would write them by hand, without any framework.

    The clients' images lie ready, and who trains on which batches is handed over: what is left is
    loading weights, SGD, the weighted mean and the evaluation.
    """

    def __init__(self, recipe: Recipe, data: Dataset, clients: Sequence[np.ndarray]) -> None:
        self._sgd = recipe.sgd
        self.shards = [
            (data.train_images[rows], data.train_labels[rows])
            for rows in map(torch.tensor, clients)
        ]
        self.test = (data.test_images, data.test_labels)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (data.mean, data.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self.model = make_setup(recipe, data).make_model()
        self.weights: Weights = read_weights(self.model)

    def round(self, batches: Sequence[tuple[ClientId, Sequence[Tensor]]]) -> float:
        """Train these clients on these batches, average them; the result is the test accuracy."""
        mean: dict[str, Tensor] = {}
        total = 0
        for client, rows in batches:
            trained, samples = self.train(client, rows)
            total += samples
            mean = mean or trained
            for name, tensor in mean.items():
                tensor.lerp_(trained[name], samples / total)
        self.weights = mean
        return self.accuracy()

    def train(self, client: ClientId, batches: Sequence[Tensor]) -> tuple[dict[str, Tensor], int]:
        """One client's weights after SGD from `self.weights`, and the number of its samples."""
        images, labels = self.shards[client]
        self.model.load_state_dict(self.weights, strict=False)
        self.model.train()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self._sgd.lr)
        for rows in batches:
            loss = self.loss(images[rows], labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return read_weights(self.model), len(labels)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Per cent of the test images that `self.weights` classify rightly."""
        self.model.load_state_dict(self.weights, strict=False)
        self.model.eval()
        chunks = zip(
            *(torch.split(part, EVALUATION_CHUNK["cpu"]) for part in self.test), strict=True
        )
        correct = sum(self.correct(images, labels) for images, labels in chunks)
        return 100 * correct / len(self.test[1])

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(images), labels)

    def correct(self, images: Tensor, labels: Tensor) -> int:
        return int((self._logits(images).argmax(dim=1) == labels).sum())

    def _logits(self, images: Tensor) -> Tensor:
        outputs: Outputs = self.model(images.float().mul_(self._scale).add_(self._shift))
        return outputs.logits
