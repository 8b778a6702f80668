"""Whoever runs the clients, in whatever order: the same results, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import Setup
from fedsieve.methods import METHODS
from fedsieve.methods.contract import Federation
from fedsieve.recipe import Recipe
from fedsieve.serial import encode
from fedsieve.simulate.rounds import usable_cores
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import InProcess, Runner, one_thread
from fedsieve.simulate.workers import SharedWorld, Workers
from fedsieve.simulate.world import (
    Job,
    Result,
    World,
    initial_weights,
    make_setup,
    make_world,
    right_by_class,
    scene_of,
)
from helpers import assert_same_run, assert_same_weights, tiny_recipe, with_engine

RECIPE = tiny_recipe({"name": "fedgr", "warmup_rounds": 1})
"""A method with states, whose second round does more than its first."""


@cache
def stage() -> tuple[Recipe, World, Setup]:
    data = load_digits()
    world = make_world(data, scene_of(RECIPE, data), torch.device("cpu"))
    return RECIPE, world, make_setup(RECIPE, data)


@pytest.fixture(scope="module", params=[2, 3])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    pool = Workers(*stage(), request.param)
    yield pool
    pool.close()


def two_rounds(runner: Runner, order: list[int]) -> list[dict[int, Result]]:
    """Two rounds with these clients in this order, the second from the states of the first."""
    recipe, world, setup = stage()
    method, cfg = METHODS["fedgr"], recipe.method
    sizes = tuple(len(held) for held in world.clients)
    server = method.init_server(cfg, initial_weights(setup), Federation(sizes, 3, 4, 10))
    states: dict[int, Any] = {}
    rounds = []
    for round in range(2):
        jobs = [Job(k, states.get(k), method.send(cfg, server, round, k)) for k in order]
        results = runner.train(round, jobs)
        assert [result.client for result in results] == order
        found = {result.client: result for result in results}
        server, _ = method.merge(cfg, server, round, {k: found[k].up for k in sorted(found)})
        states = {k: result.state for k, result in found.items()}
        rounds.append(found)
    return rounds


def assert_same_rounds(one: list[dict[int, Result]], other: list[dict[int, Result]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert set(mine) == set(theirs)
        for client, result in mine.items():
            assert encode(result.up) == encode(theirs[client].up)
            assert encode(result.state) == encode(theirs[client].state)
            assert result.metrics == theirs[client].metrics


@cache
def reference() -> list[dict[int, Result]]:
    return two_rounds(InProcess(*stage()), [0, 2, 3, 5])


def test_worker_processes_give_what_this_process_gives(workers: Workers) -> None:
    assert_same_rounds(two_rounds(workers, [0, 2, 3, 5]), reference())


def test_the_order_of_clients_does_not_matter(workers: Workers) -> None:
    assert_same_rounds(two_rounds(InProcess(*stage()), [5, 0, 3, 2]), reference())
    assert_same_rounds(two_rounds(workers, [3, 5, 2, 0]), reference())


def test_workers_count_right_answers_together(workers: Workers) -> None:
    _, world, setup = stage()
    alone = InProcess(*stage())
    one, other = (reference()[1][k].up.weights for k in (0, 2))
    found = []
    for networks in ([one], [other], [one, other]):
        expected = right_by_class(
            alone.bench, networks, world.test_images, world.test_labels, world.num_classes
        )
        assert workers.examine(networks)() == alone.examine(networks)() == expected
        found.append(sum(expected))
    assert 0 < min(found) < max(found) < len(world.test_labels)
    assert isinstance(workers.bench, type(alone.bench))
    assert_same_weights(initial_weights(setup), initial_weights(setup))


def test_one_thread_is_enough_and_the_others_come_back() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(KeyError), one_thread():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_worker_reaches_the_user(workers: Workers) -> None:
    recipe, _, setup = stage()
    weights = initial_weights(setup)
    weights = {name: tensor for name, tensor in weights.items() if name != "hidden.bias"}
    federation = Federation((1,) * 6, 3, 4, 10)
    method = METHODS["fedgr"]
    server = method.init_server(recipe.method, weights, federation)
    job = Job(0, None, method.send(recipe.method, server, 0, 0))
    with pytest.raises(FedsieveError, match=r"Tensor 'hidden\.bias' of the model is missing"):
        workers.train(0, [job])
    assert_same_rounds(two_rounds(workers, [0, 2, 3, 5]), reference())


def test_a_worker_that_dies_is_named_as_such() -> None:
    pool = Workers(*stage(), 2)
    two_rounds(pool, [0, 2, 3, 5])
    (victim, *_) = pool._pool._processes
    os.kill(victim, signal.SIGKILL)

    def until_noticed() -> None:
        for _ in range(50):
            two_rounds(pool, [0])

    with pytest.raises(FedsieveError) as caught:
        until_noticed()
    assert str(caught.value).startswith("A worker process died, most likely for want of memory;")
    folder = Path(pool._folder.name)
    assert folder.exists()
    pool.close()
    assert not folder.exists()


def test_a_world_survives_its_files(tmp_path: Path) -> None:
    _, world, _ = stage()
    clients = [*world.clients[:2], np.array([], dtype=np.int64), *world.clients[2:]]
    world = replace(world, clients=clients)
    back = SharedWorld.save(world, tmp_path).load()
    for name in ("images", "given", "test_images", "test_labels"):
        assert torch.equal(getattr(back, name), getattr(world, name))
    assert back.num_classes == 10
    assert [held.tolist() for held in back.clients] == [held.tolist() for held in clients]
    back.given[0] += 1
    assert not torch.equal(back.given, SharedWorld(tmp_path, 10).load().given), "a private copy"


def test_a_whole_run_does_not_depend_on_its_workers(tmp_path: Path) -> None:
    recipe = tiny_recipe({"name": "fedgr", "warmup_rounds": 2})
    run(recipe, tmp_path / "one")
    run(with_engine(recipe, workers=2), tmp_path / "two")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_workers_are_born_deaf_to_ctrl_c() -> None:
    """In a process that has not used multiprocessing before, in which more has to be started."""
    program = (
        "from multiprocessing import forkserver\n"
        "from fedsieve.simulate import workers\n"
        "workers._start_forkserver()\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "print(open(f'/proc/{server}/status').read())\n"
    )
    status = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert int(blocked, 16) & 1 << (signal.SIGINT - 1)


def test_the_server_adds_up_in_the_same_order_on_any_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a merge sees is one thread; a sum over more of them has other last bits."""
    seen = []
    method = METHODS["fedavg"]

    def merge(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return method.merge(*arguments)

    def send(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return method.send(*arguments)

    monkeypatch.setitem(METHODS, "fedavg", replace(method, merge=merge, send=send))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(tiny_recipe(rounds=1), tmp_path)
    finally:
        torch.set_num_threads(before)
    assert seen[:4] == [1] * 4  # three clients are sent to, and one merge


def test_where_the_system_does_not_say_all_cores_are_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert usable_cores() == 3
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable_cores() == 1
