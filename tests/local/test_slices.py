"""A slice is a smaller GPU: it trains to the same weights, beside others that do the same."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stage import a_plan, a_setup, assert_close, needs_gpu

from fedsieve.local import slices
from fedsieve.local.bench import EagerBench
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Fitted
from fedsieve.local.slices import (
    Slice,
    SlicingError,
    carve,
    size_of_slices,
    thread_in,
    whole,
)
from fedsieve.local.together import ViewsTogether
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import set_gpu_arithmetic
from helpers import tiny_recipe

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("multiprocessors", "count", "size"),
    [(132, 10, 12), (132, 5, 26), (132, 3, 40), (132, 2, 64), (132, 4, 32), (7, 3, 2), (7, 4, 0)],
)
def test_small_slices_come_in_pairs_and_large_ones_in_groups_of_eight(
    multiprocessors: int, count: int, size: int
) -> None:
    assert size_of_slices(multiprocessors, count) == size


def test_too_many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "whole", lambda device: Slice(device, 7))
    with pytest.raises(SlicingError, match="too few multiprocessors for 4 slices"):
        carve(CPU, 4)


class Driver:
    """A CUDA driver that gives fewer slices than asked for, or refuses."""

    def __init__(self, groups: int, status: int = 0) -> None:
        self.groups, self.status = groups, status
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.called.append(name)
            if name == "cuDevSmResourceSplitByCount":
                arguments[1]._obj.value = self.groups
            return self.status

        return function


@pytest.fixture
def on_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    def install(driver: object) -> None:
        def load(name: str) -> object:
            if driver is None:
                raise OSError(name)
            return driver

        everything = Slice(torch.device("cuda", 0), 132)
        monkeypatch.setattr(slices, "whole", lambda device: everything)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("ctypes.CDLL", load)

    slices._carved.cache_clear()
    yield install
    slices._carved.cache_clear()  # what a stand-in gave is no good elsewhere


@pytest.mark.parametrize(
    ("driver", "sentence"),
    [
        (None, "a CUDA driver without green contexts"),
        (object(), "a CUDA driver without green contexts"),
        (Driver(groups=8), "a GPU that gives 8 slices instead of 11"),
        (Driver(groups=11, status=801), "cuDeviceGet failed with status 801"),
    ],
)
def test_a_driver_that_cannot(
    on_driver: Callable[[object], None], driver: object, sentence: str
) -> None:
    on_driver(driver)
    with pytest.raises(SlicingError, match=sentence):
        carve(torch.device("cuda"), 11)


def test_a_green_context_for_every_slice(on_driver: Callable[[object], None]) -> None:
    driver = Driver(groups=11)
    on_driver(driver)
    made = carve(torch.device("cuda"), 11)
    assert len(made) == driver.called.count("cuGreenCtxCreate") == 11
    assert all(place.context is not None for place in made)
    assert carve(torch.device("cuda"), 11) is made


def test_a_thread_stays_in_its_place() -> None:
    """Whoever comes next finds the thread, and not the remains of one that ended."""
    places = [Slice(CPU, 4, ctypes.c_void_p(n)) for n in (0, 1)]
    entered: list[int] = []

    def ident(place: Slice, name: str) -> int:
        return thread_in(place, name).submit(threading.get_ident).result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slice, "enter", lambda place: entered.append(places.index(place)))
        first, other, second = (ident(*at) for at in zip(places[:1] * 3, "aba", strict=True))
        elsewhere = ident(places[1], "a")
    assert first == second
    assert len({first, other, elsewhere}) == 3
    assert entered == [0, 0, 1]


def test_setting_its_device_leaves_a_thread_in_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled code does before anything else; another device, or another thread, is set."""
    devices: list[Any] = []
    monkeypatch.setattr(slices, "_set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(groups=0))

    def in_a_slice() -> None:
        Slice(torch.device("cuda", 1), 8, ctypes.c_void_p(1)).enter()
        devices.clear()
        for device in (1, "cuda:1", torch.device("cuda", 1), 0, "cuda:0"):
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(in_a_slice).result()
    assert devices == [0, "cuda:0"]
    torch.cuda.set_device(1)
    assert devices == [0, "cuda:0", 1]


@needs_gpu
@pytest.mark.gpu
def test_a_compiled_model_does_not_leave_its_slice() -> None:
    device = torch.device("cuda")
    (place, _) = carve(device, 2)

    def multiply() -> bool:
        with torch.cuda.stream(place.stream()):
            left = torch.randn(32, 48, device=device)
            torch.compile(lambda a: (a @ a.T).relu() + 1)(left)
        current = ctypes.c_void_p()
        slices._call("cuCtxGetCurrent", ctypes.byref(current))
        assert place.context is not None
        return current.value == place.context.value

    assert thread_in(place, "slot").submit(multiply).result()


def multiply(place: Slice, device: torch.device) -> float:
    with torch.cuda.stream(place.stream()):
        ones = torch.ones(64, 64, device=device)
        return float((ones @ ones).sum())


@needs_gpu
@pytest.mark.gpu
def test_what_a_run_leaves_behind_does_not_keep_the_next_one_from_its_slices() -> None:
    """Handles of cuBLAS that a thread left when it ended would not work in another context."""
    device = torch.device("cuda")
    for count in (4, 2, 4):
        for place in (whole(device), *carve(device, count)):
            product = thread_in(place, "slot").submit(multiply, place, device).result()
            assert product == 64**3


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "partition", [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.5, "min_size": 64}]
)
def test_two_runs_in_one_process_train_in_slices(
    tmp_path: Path, partition: dict[str, Any], precision: str
) -> None:
    scene = {"clients": 6, "partition": partition, "noise": {"kind": "none"}}
    engine = {"device": "cuda", "slices": "always"}  # it would not go on without them
    held = []
    for seed in (1, 2):
        recipe = tiny_recipe(seed=seed, rounds=10, scene=scene, engine=engine, precision=precision)
        assert run(recipe, tmp_path / str(seed))["final"] > 35
        held.append(torch.cuda.memory_allocated())
    assert held[1] <= held[0] + 2**20, "the first run has not given back what it held"


@needs_gpu
@pytest.mark.gpu
def test_two_slices_side_by_side_train_as_the_plain_loop_does() -> None:
    set_gpu_arithmetic("fp32")
    device = torch.device("cuda")
    plan, setup = a_plan(), a_setup()
    eager = EagerBench(setup, device).fit(plan)
    torch.cuda.synchronize()
    places = carve(device, 4)
    assert sum(place.multiprocessors for place in places) <= whole(device).multiprocessors
    views = ViewsTogether(whole(device))

    def train(place: Slice) -> Fitted:
        bench = GraphBench(setup, device, compile_model=False, views=views, place=place)
        with torch.cuda.stream(bench.stream), views.preparing():
            fitted = bench.fit(plan)
        bench.stream.synchronize()
        return fitted

    for training in [thread_in(place, "slot").submit(train, place) for place in places[:2]]:
        assert_close(plan, eager, training.result())
    views.close()
