"""A method on a stage: what an engine would give it, run by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fedsieve.methods.contract import Federation, Method
from fedsieve.recipe import Recipe
from fedsieve.serial import decode, encode
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.world import (
    Job,
    Result,
    World,
    initial_weights,
    make_setup,
    make_world,
    scene_of,
)
from fedsieve.types import SERVER, Shard, Streams
from helpers import NEEDED, few_digits, tiny_recipe

QUICK: Mapping[str, Mapping[str, Any]] = {
    "fedcoteaching": {**NEEDED["fedcoteaching"], "ramp_rounds": 1},
    "rofl": {**NEEDED["rofl"], "ramp_rounds": 1, "pseudo_label_round": 1},
    "feddividemix": {"warmup_rounds": 1},
    "fedgr": {"warmup_rounds": 1},
    "fedes": {"pretrain_rounds": 2},
    "feddiv": {"warmup_passes": 0},  # a pass of its warm-up is as many rounds as there are clients
    "fedjointopt": {"begin_epoch": 3, "history_epochs": 1},
    "fedcorr": {"iterations": 1, "walk_clients": 6, "fine_tuning_rounds": 0},
    # By raw images none of the sites that the third round asks is found noisy, and none is taught.
    "fednoro": {"warmup_rounds": 0, "ramp_from": 0, "ramp_to": 2, "evaluation_view": "weak"},
}
"""Settings with which three short rounds see all phases of a method; others need none."""


def recipe_for(method: Method, **settings: Any) -> Recipe:
    """Three rounds of three of six sites with a few digits each."""
    table = {"name": method.name, **QUICK.get(method.name, {})}
    return tiny_recipe(
        table,
        **{"rounds": 3, "sgd": {"epochs": 2, "batch_size": 16, "lr": 0.05, "momentum": 0.5}}
        | settings,
    )


@dataclass(frozen=True)
class Stage:
    """A method with the parts that an engine would give it."""

    method: Method
    recipe: Recipe
    world: World
    runner: InProcess

    def first_server(self) -> Any:
        sizes = tuple(len(held) for held in self.world.clients)
        federation = Federation(sizes, self.recipe.clients_per_round, self.recipe.rounds, 10)
        weights = initial_weights(self.runner.bench._setup)
        return self.method.init_server(self.recipe.method, weights, federation)

    def round(
        self, server: Any, states: Mapping[int, Any], round: int, clients: Iterable[int]
    ) -> tuple[Any, dict[int, Result]]:
        """The server after a round with these clients, trained in this order; their results."""
        cfg = self.recipe.method
        jobs = [Job(k, states.get(k), self.method.send(cfg, server, round, k)) for k in clients]
        results = {result.client: result for result in self.runner.train(round, jobs)}
        ups = {k: results[k].up for k in sorted(results)}
        after, _ = self.method.merge(cfg, server, round, ups)
        return after, results

    def select(self, server: Any, round: int) -> tuple[int, ...]:
        streams = Streams(self.recipe.seed, round, SERVER)
        return self.method.select(self.recipe.method, server, round, streams)


@cache
def stage_of(method: Method, **settings: Any) -> Stage:
    recipe = recipe_for(method)
    recipe = replace(recipe, sgd=replace(recipe.sgd, **settings))
    data = few_digits()
    world = make_world(data, scene_of(recipe, data), torch.device("cpu"))
    setup = make_setup(recipe, data)
    return Stage(method, recipe, world, InProcess(recipe, world, setup))


@dataclass(frozen=True)
class Progress:
    """A federation after some rounds."""

    server: Any
    states: Mapping[int, Any]
    results: Mapping[int, Result]
    """Of the last round."""


def federate(
    stage: Stage, rounds: int = 3, *, backwards: bool = False, through_bytes: bool = False
) -> Progress:
    """Some rounds by hand: clients in either order, every record as it is or through its bytes."""
    method = stage.method

    def passed(kind: type[Any], record: Any) -> Any:
        return decode(kind, encode(record)) if through_bytes else record

    server = stage.first_server()
    states: dict[int, Any] = {}
    results: dict[int, Result] = {}
    for round in range(rounds):
        selected = sorted(stage.select(server, round), reverse=backwards)
        cfg = stage.recipe.method
        jobs = [
            Job(k, states.get(k), passed(method.down, method.send(cfg, server, round, k)))
            for k in selected
        ]
        results = {result.client: result for result in stage.runner.train(round, jobs)}
        ups = {k: passed(method.up, results[k].up) for k in sorted(results)}
        server, _ = method.merge(cfg, server, round, ups)
        server = passed(method.server, server)
        states |= {k: passed(method.client, result.state) for k, result in results.items()}
    return Progress(server, states, results)


def shard_of(stage: Stage, client: int, size: int | None = None) -> Shard:
    """The shard of a client, or its first `size` samples."""
    shard = stage.world.shard(client)
    if size is None:
        return shard
    return replace(
        shard, images=shard.images[:size], labels=shard.labels[:size], ids=shard.ids[:size]
    )
