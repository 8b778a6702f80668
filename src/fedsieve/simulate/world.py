"""The simulated federation: every client's data on one machine, and how a client is run on it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.data.sources import CIFAR100_SUPERCLASS_OF, SOURCES, Dataset, load
from fedsieve.data.views import view_set
from fedsieve.errors import check
from fedsieve.local.bench import Bench, Setup, joint_logits
from fedsieve.methods import method
from fedsieve.models import ModelConfig, build_model
from fedsieve.models.weights import read_weights
from fedsieve.recipe import Recipe
from fedsieve.scenes import Scene, build_scene
from fedsieve.serial import values_of
from fedsieve.types import SERVER, ClientId, Metrics, Shard, Streams, Weights, rng_for


@dataclass(frozen=True)
class World:
    """The images and *given* labels of all clients, and the test set. No true training labels."""

    images: Tensor
    given: Tensor
    test_images: Tensor
    test_labels: Tensor
    clients: Sequence[np.ndarray]
    num_classes: int

    @property
    def device(self) -> torch.device:
        return self.images.device

    def shard(self, client: ClientId) -> Shard:
        """What `client` holds; sample ids are positions in the data set."""
        ids = torch.from_numpy(self.clients[client]).to(self.device)
        return Shard(client, self.images[ids], self.given[ids], ids, self.num_classes)


def load_data(recipe: Recipe) -> Dataset:
    return load(recipe.data.source, recipe.data.path)


def scene_of(recipe: Recipe, data: Dataset) -> Scene:
    """The recipe's scene: drawn from its seed alone, so every method of that seed shares it."""
    check(
        not SOURCES[recipe.data.source].is_own or recipe.scene.noise.kind == "none",
        f"The labels of {recipe.data.source} are your own, and no noise is added to them; set "
        'scene.noise.kind = "none".',
    )
    return build_scene(
        recipe.scene,
        data.train_labels.numpy(),
        len(data.classes),
        recipe.seed,
        class_names=data.classes,
        superclass_of=CIFAR100_SUPERCLASS_OF if len(data.classes) == 100 else None,
        sites=data.sites,
    )


def make_world(data: Dataset, scene: Scene, device: torch.device) -> World:
    return World(
        images=data.train_images.to(device),
        given=torch.tensor(scene.given, dtype=torch.int64, device=device),
        test_images=data.test_images.to(device),
        test_labels=data.test_labels.to(device),
        clients=[np.array(indices, dtype=np.int64) for indices in scene.clients],
        num_classes=len(data.classes),
    )


@dataclass(frozen=True)
class ModelMaker:
    """Makes fresh models of one kind; sent to worker processes, so it holds nothing heavy."""

    config: ModelConfig
    channels: int
    height: int
    width: int
    num_classes: int
    seed: int

    def __call__(self) -> nn.Module:
        rng = rng_for(self.seed, 0, SERVER, "model")
        return build_model(
            self.config, self.channels, self.height, self.width, self.num_classes, rng
        )


def make_setup(recipe: Recipe, data: Dataset) -> Setup:
    """The workbench's parts for this recipe on these data."""
    return setup_for(resolved(recipe, data), tuple(data.train_images.shape[1:]), len(data.classes))


def resolved(recipe: Recipe, data: Dataset) -> Recipe:
    """The recipe with the views and the normalisation that it leaves to the source written out."""
    own = recipe.data
    return replace(
        recipe,
        data=replace(
            own,
            views=own.views or data.views,
            mean=own.mean or data.mean,
            std=own.std or data.std,
        ),
    )


def setup_for(recipe: Recipe, shape: tuple[int, ...], num_classes: int) -> Setup:
    """The workbench's parts for a resolved recipe and images of shape (channels, height, width);
    the size that the model sees is what the views make of it."""
    data = recipe.data
    assert data.views is not None
    assert data.mean is not None
    assert data.std is not None
    views = view_set(data.views)
    blank = torch.zeros((1, *shape), dtype=torch.uint8)
    sample = views.raw(blank, rng_for(recipe.seed, 0, SERVER, "image size"))
    _, channels, height, width = sample.shape
    check(
        len(data.mean) == len(data.std) == channels,
        f"data.mean and data.std must have one number for each of the {channels} channels.",
    )
    maker = ModelMaker(recipe.model, channels, height, width, num_classes, recipe.seed)
    return Setup(maker, views, data.mean, data.std, recipe.sgd, recipe.precision)


def initial_weights(setup: Setup) -> Weights:
    return read_weights(setup.make_model())


@dataclass(frozen=True)
class Job:
    """One client's part in a round."""

    client: ClientId
    state: Any | None
    """Its state after its last round, or None before its first."""
    down: Any


@dataclass(frozen=True)
class Result:
    client: ClientId
    state: Any
    up: Any
    metrics: Metrics


def run_client(recipe: Recipe, world: World, bench: Bench, round: int, job: Job) -> Result:
    """Everything that happens at one site in one round."""
    return run_site(recipe, world.shard(job.client), bench, round, job)


def run_site(recipe: Recipe, shard: Shard, bench: Bench, round: int, job: Job) -> Result:
    """The same, for a site that holds nothing but its own shard."""
    chosen = method(recipe.method.name)
    state = chosen.init_client(recipe.method, shard) if job.state is None else job.state
    rng = Streams(recipe.seed, round, job.client)
    state, up, metrics = chosen.train(recipe.method, state, job.down, shard, bench, rng)
    return Result(job.client, state, up, metrics)


def first_unusable(up: Any) -> str | None:
    """The name of the first value of `up` that is or holds NaN or infinity, or None."""
    tensors, numbers = values_of(up, packed=True)
    for name, number in numbers.items():
        if not math.isfinite(number):
            return name
    if all(_finite(list(tensors.values()))):
        return None
    tensors, _ = values_of(up)
    return list(tensors)[_finite(list(tensors.values())).index(False)]


def _finite(tensors: list[Tensor]) -> list[bool]:
    """Of each tensor whether all of it is finite; the device is waited for once."""
    floats = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if not floats:
        return [True] * len(tensors)
    finite = iter(torch.stack(torch._foreach_norm(floats, math.inf)).isfinite().tolist())
    return [next(finite) if t.is_floating_point() and t.numel() else True for t in tensors]


def right_by_class(
    bench: Bench, networks: Sequence[Weights], images: Tensor, labels: Tensor, classes: int
) -> tuple[int, ...]:
    """How many of the images of each class the networks together classify as labelled."""
    raw = bench.view("raw", images, rng_for(0, 0, SERVER, "raw"))
    right = (joint_logits(bench, networks, raw).argmax(dim=1) == labels).cpu()
    return tuple(torch.bincount(labels.cpu()[right], minlength=classes).tolist())


def client_memory(megabytes: int, device: torch.device) -> int:
    """Bytes of client states to keep in memory; 0 asks for what suits the device."""
    if megabytes:
        return megabytes * 2**20
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**31


def prepare_cuda() -> None:
    """Set what CUDA reads when it starts, as it does when anyone asks whether there is a GPU: with
    its default of eight queues, ten slots share them."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a GPU where there is one."""
    prepare_cuda()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    check(device.type in ("cpu", "cuda"), f"engine.device must be cpu, cuda or auto, not {name!r}.")
    check(
        device.type == "cpu" or torch.cuda.is_available(),
        f"engine.device is {name!r}, but this machine has no usable GPU; use cpu or auto.",
    )
    if device.index is not None and device.type == "cuda":
        count = torch.cuda.device_count()
        check(
            device.index < count,
            f"engine.device is {name!r}, but this machine has only {count} GPUs.",
        )
        torch.cuda.set_device(device)
    return device
