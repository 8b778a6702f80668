"""The simulated federation: shards, models, update checks, counting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benches import CLASSES, Linear, bench_of, images_of, weights_of
from fedsieve.data.sources.digits import load_digits
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import Setup
from fedsieve.local.plan import Sgd
from fedsieve.methods import METHODS
from fedsieve.methods.fedavg import Down, Up
from fedsieve.models import Dropout2d, ModelConfig
from fedsieve.simulate.slots import fits_graphs
from fedsieve.simulate.world import (
    Job,
    World,
    client_memory,
    first_unusable,
    initial_weights,
    make_setup,
    make_world,
    pick_device,
    right_by_class,
    run_client,
    scene_of,
)
from fedsieve.types import Streams, Weights
from helpers import assert_same_weights, tiny_recipe

CPU = torch.device("cpu")


def tiny_world() -> World:
    recipe, data = tiny_recipe(), load_digits()
    return make_world(data, scene_of(recipe, data), CPU)


def test_a_shard_is_what_the_scene_deals_with_the_given_labels() -> None:
    recipe, data = tiny_recipe(), load_digits()
    scene = scene_of(recipe, data)
    world = make_world(data, scene, CPU)
    wrong = 0
    for client, held in enumerate(scene.clients):
        shard = world.shard(client)
        assert shard.client == client
        assert shard.ids.tolist() == held.tolist()
        assert torch.equal(shard.images, data.train_images[torch.tensor(held)])
        assert shard.labels.tolist() == scene.given[held].tolist()
        assert shard.num_classes == 10
        wrong += int((shard.labels != data.train_labels[shard.ids]).sum())
    assert wrong / len(data.train_labels) == pytest.approx(
        scene.overall_noise(data.train_labels.numpy())
    )
    assert wrong > 0


def test_a_world_holds_no_true_training_labels() -> None:
    assert {field.name for field in fields(World)} == {
        "images",
        "given",
        "test_images",
        "test_labels",
        "clients",
        "num_classes",
    }
    data, world = load_digits(), tiny_world()
    assert not torch.equal(world.given, data.train_labels)


def test_the_model_of_a_run_is_drawn_from_its_seed_alone() -> None:
    data = load_digits()
    recipe = tiny_recipe()
    torch.manual_seed(1)
    first = initial_weights(make_setup(recipe, data))
    torch.manual_seed(2)
    assert_same_weights(first, initial_weights(make_setup(tiny_recipe("fedprox"), data)))
    other = initial_weights(make_setup(replace(recipe, seed=4), data))
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_a_bench_is_set_up_from_the_recipe_and_the_data() -> None:
    data = load_digits()
    recipe = replace(tiny_recipe(), model=ModelConfig(head="mlp"), precision="bf16")
    setup = make_setup(recipe, data)
    assert (setup.mean, setup.std) == (data.mean, data.std)
    assert (setup.sgd, setup.precision) == (recipe.sgd, "bf16")
    model = setup.make_model()
    assert model(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 10)
    assert "head.project.weight" in model.state_dict()


def test_images_are_as_large_as_their_views_make_them() -> None:
    """Views that crop to 224 need a model for 224 pixels, whatever the stored size."""
    data = load_digits()
    large = torch.zeros(4, 1, 256, 256, dtype=torch.uint8)
    large[:, :, ::2] = 9
    photos = replace(
        data,
        train_images=large,
        train_labels=torch.arange(4),
        test_images=large,
        test_labels=torch.arange(4),
        views="clothing1m",
    )
    setup = make_setup(tiny_recipe(), photos)
    model = setup.make_model()
    assert model(torch.zeros(2, 1, 224, 224)).logits.shape == (2, 10)
    maker: Any = setup.make_model
    assert (maker.channels, maker.height, maker.width) == (1, 224, 224)


def test_a_client_runs_with_its_own_stream_and_state() -> None:
    recipe, data, world = tiny_recipe(), load_digits(), tiny_world()
    setup = make_setup(recipe, data)
    seen: list[tuple[Any, Streams]] = []

    def train(
        cfg: Any, client: Any, down: Any, shard: Any, bench: Any, rng: Streams
    ) -> tuple[Any, Any, Any]:
        seen.append((client, rng))
        return "after", Up(down.weights, len(shard)), {"x": 1.0}

    watched = replace(METHODS["fedavg"], init_client=lambda cfg, shard: "new", train=train)
    before = METHODS["fedavg"]
    METHODS["fedavg"] = watched
    try:
        for state in (None, "kept"):
            job = Job(4, state, Down(initial_weights(setup)))
            result = run_client(recipe, world, bench_of(Linear), 2, job)
            assert (result.client, result.state, result.metrics) == (4, "after", {"x": 1.0})
            assert result.up.samples == len(world.clients[4])
    finally:
        METHODS["fedavg"] = before
    assert seen == [("new", Streams(3, 2, 4)), ("kept", Streams(3, 2, 4))]


# ------------------------------------------------------------------------------ update checks


@dataclass(frozen=True)
class Mixed:
    weights: dict[str, Tensor]
    counts: Tensor
    empty: Tensor


def mixed(**tensors: list[float]) -> Mixed:
    weights = {name: torch.tensor(values) for name, values in tensors.items()}
    return Mixed(weights, torch.tensor([2**62, 2**62]), torch.zeros(0))


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    assert first_unusable(mixed(a=[1.0, 2.0], b=[3.0])) is None
    assert first_unusable(mixed(a=[1.0], b=[math.nan], c=[math.nan])) == "weights.b"
    assert first_unusable(mixed(a=[1.0], b=[math.inf, 1.0])) == "weights.b"
    assert first_unusable(mixed(a=[math.inf, -math.inf])) == "weights.a"


def test_large_but_finite_values_pass() -> None:
    """The sum of three times 3e38 is no float32, yet every value is one."""
    assert first_unusable(mixed(a=[3e38, 3e38, 3e38], b=[-3e38, -3e38])) is None


def test_an_update_without_floats_is_usable() -> None:
    @dataclass(frozen=True)
    class Counts:
        counts: Tensor

    assert first_unusable(Counts(torch.tensor([1, 2]))) is None


# ------------------------------------------------------------------------------------ counting


def test_counting_what_a_model_gets_right() -> None:
    images = images_of(300)
    weights = weights_of(Linear, 1)
    x = (images.numpy().reshape(300, 4) / 255 - 0.25) / 0.5
    z = x @ weights["layer.weight"].numpy().T + weights["layer.bias"].numpy()
    predicted = z.argmax(axis=1)
    labels = predicted.copy()
    labels[:40] = (labels[:40] + 1) % CLASSES
    labels[-1] = CLASSES  # a class that the model does not know
    found = right_by_class(
        bench_of(Linear), [weights], images, torch.from_numpy(labels), CLASSES + 2
    )
    right = predicted[40:-1]
    assert found == (*(int((right == c).sum()) for c in range(CLASSES)), 0, 0)
    assert sum(found) == 259
    assert len(np.unique(predicted)) > 1


def test_networks_are_counted_by_what_they_say_together() -> None:
    """A model whose logits are opposite takes back what the other says, or a part of it."""
    images, weights = images_of(300), weights_of(Linear, 1)
    opposite = {name: -tensor for name, tensor in weights.items()}
    bench, labels = bench_of(Linear), torch.zeros(300, dtype=torch.int64)

    def right(*networks: Weights) -> tuple[int, ...]:
        return right_by_class(bench, networks, images, labels, 2)

    alone = right(weights)
    assert 0 < alone[0] < 300
    assert right(weights, opposite) == (300, 0)  # all 0: the first
    assert right(opposite, weights, weights) == alone


def test_memory_for_states_is_what_is_asked_for_or_what_suits_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert client_memory(3, CPU) == 3 * 1024 * 1024
    assert client_memory(0, CPU) == 2 * 1024**3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1001, 5000))
    assert client_memory(0, torch.device("cuda")) == 500
    assert client_memory(3, torch.device("cuda")) == 3 * 1024 * 1024


@pytest.mark.parametrize("name", ["tpu", "meta", "", "cudda"])
def test_a_device_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(FedsieveError, match=r"engine\.device must be cpu, cuda or auto, not "):
        pick_device(name)


def test_a_number_that_is_not_finite_makes_an_update_unusable() -> None:
    @dataclass(frozen=True)
    class Scored:
        samples: int
        score: float
        more: Mapping[str, tuple[float, ...]]

    assert first_unusable(Scored(3, 0.5, {"a": (1.0,)})) is None
    assert first_unusable(Scored(3, math.nan, {"a": (1.0,)})) == "score"
    assert first_unusable(Scored(3, 0.5, {"a": (1.0, math.inf)})) == "more.a.1"


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        (torch.nn.Linear(2, 2), True),
        (torch.nn.Sequential(torch.nn.Dropout(0.5)), False),
        (Dropout2d(0.5, always_on=False), True),
        (Dropout2d(0.5, always_on=True), True),
    ],
)
def test_models_that_draw_on_their_own_are_not_captured(model: torch.nn.Module, fits: bool) -> None:
    setup = Setup(lambda: model, view_set("plain"), (0.5,), (0.5,), Sgd())
    assert fits_graphs(setup) is fits


def test_a_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    with pytest.raises(FedsieveError, match="this machine has no usable GPU; use cpu or auto"):
        pick_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with pytest.raises(FedsieveError, match="has only 2 GPUs"):
        pick_device("cuda:2")
    assert pick_device("auto") == torch.device("cuda")
    assert current == [], "a GPU without a number is the one that is in use anyway"
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]
