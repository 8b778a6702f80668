"""What several test files share: tiny recipes, a method with a memory, and comparisons."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedsieve.data.sources import Dataset
from fedsieve.data.sources.digits import load_digits
from fedsieve.local.bench import Bench
from fedsieve.methods import METHODS, contract, fedavg
from fedsieve.methods.contract import Method
from fedsieve.methods.fedavg import Down, Up
from fedsieve.recipe import Recipe, recipe_from_table
from fedsieve.scenes import Scene, SceneConfig, fingerprint_of
from fedsieve.simulate.control import Silent
from fedsieve.simulate.directory import METRICS, MODEL, read_lines
from fedsieve.types import Metrics, Shard, Streams, Weights

NEEDED: Mapping[str, Mapping[str, Any]] = {
    "fedcoteaching": {"forget_rate": 0.5},
    "rofl": {"forget_rate": 0.5},
}
"""Settings that have no default."""


def tiny_recipe(method: str | Mapping[str, Any] = "fedavg", **settings: Any) -> Recipe:
    """A federation of 6 sites with digits whose labels are half wrong; a round takes some 20 ms."""
    table: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "rounds": 4,
        "clients_per_round": 3,
        "scene": {
            "clients": 6,
            "partition": {"kind": "balanced-dirichlet", "alpha": 5.0},
            "noise": {"kind": "symmetric", "low": 0.3, "high": 0.7},
        },
        "sgd": {"epochs": 1, "batch_size": 64, "lr": 0.05, "momentum": 0.5},
        "method": {"name": method} if isinstance(method, str) else method,
        "engine": {"device": "cpu", "workers": 1},
    }
    return recipe_from_table(table | settings)


@cache
def few_digits() -> Dataset:
    """240 digits to train on and 50 to test."""
    data = load_digits()
    return replace(
        data,
        train_images=data.train_images[:240],
        train_labels=data.train_labels[:240],
        test_images=data.test_images[:50],
        test_labels=data.test_labels[:50],
    )


def with_engine(recipe: Recipe, **settings: Any) -> Recipe:
    """The same run carried out in another way."""
    return replace(recipe, engine=replace(recipe.engine, **settings))


# ------------------------------------------------------------------- a method that remembers


@dataclass(frozen=True, kw_only=True)
class RememberingConfig(contract.Config):
    name: Literal["remembering"] = "remembering"


@dataclass(frozen=True)
class Memory:
    rounds: tuple[int, ...]
    """The rounds in which the client took part."""
    weights: Weights | None
    """Its own model after the last of them."""


def _remember(cfg: Any, shard: Shard) -> Memory:
    return Memory((), None)


def _train_from_memory(
    cfg: Any, client: Memory, down: Down, shard: Shard, bench: Bench, rng: Streams
) -> tuple[Memory, Up, Metrics]:
    """FedAvg from the middle between the global and the client's last own model."""
    start = down.weights
    if client.weights is not None:
        own = client.weights
        start = {name: (tensor + own[name]) / 2 for name, tensor in start.items()}
    _, up, metrics = fedavg.train(fedavg.Config(), fedavg.Client(), Down(start), shard, bench, rng)
    memory = Memory((*client.rounds, rng.round), up.weights)
    return memory, up, {**metrics, "visits": float(len(memory.rounds))}


REMEMBERING: Method = replace(
    fedavg.METHOD,
    name="remembering",
    config=RememberingConfig,
    client=Memory,
    init_client=_remember,
    train=_train_from_memory,
)
"""A method whose result depends on every bit of the clients' states between rounds."""


def register_remembering() -> None:
    METHODS["remembering"] = REMEMBERING


# ------------------------------------------------------------------------------ interruptions


class Cut(BaseException):
    """As if the machine had lost its power: nothing of ours catches it."""


class CutAfter(Silent):
    """A reporter that ends everything after a round."""

    def __init__(self, round: int) -> None:
        self._round = round

    def finished_round(self, line: Mapping[str, Any]) -> None:
        if line["round"] == self._round:
            raise Cut


# ------------------------------------------------------------------------------- comparisons


def final_bytes(folder: Path) -> bytes:
    """The final global model of a run, as it was saved: equal bytes are equal weights."""
    return (folder / MODEL).read_bytes()


def timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without what a clock had a say in."""
    return {key: value for key, value in line.items() if key != "seconds"}


def timeless_lines(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    return [timeless(line) for line in read_lines(folder / name)]


def timeless_summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    del summary["minutes"]
    return summary


def assert_same_run(one: Path, other: Path) -> None:
    """Two finished runs agree: weights bit for bit, every line of metrics, and the summary."""
    assert timeless_lines(one) == timeless_lines(other)
    assert final_bytes(one) == final_bytes(other)
    assert timeless_summary(one) == timeless_summary(other)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and every bit agree (NaN equals NaN, 0.0 is not −0.0)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)


def assert_same_weights(one: Weights, other: Weights) -> None:
    assert set(one) == set(other)
    for name in one:
        assert same_bits(one[name], other[name]), name


def hand_made_scene(clients: tuple[np.ndarray, ...], given: np.ndarray, true: np.ndarray) -> Scene:
    """A scene whose clients, given labels and truth a test has written down."""
    return Scene(
        clients=clients,
        given=given.copy(),
        levels=np.zeros(len(clients)),
        kinds=("none",) * len(clients),
        config=SceneConfig(clients=len(clients)),
        seed=0,
        num_classes=int(true.max()) + 1,
        fingerprint=fingerprint_of(true),
    )
