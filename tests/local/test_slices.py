"""A slice is a smaller GPU: it trains to the same weights, beside others that do the same."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_stage import a_plan, a_setup, assert_close, needs_gpu

from fedsieve.errors import FedsieveError
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
from fedsieve.recipe import EngineConfig, Recipe, Slicing
from fedsieve.simulate import runners
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import (
    Places,
    Slots,
    failed_call,
    refuses_slices,
    set_gpu_arithmetic,
    slot_places,
    unevenness,
)
from fedsieve.simulate.world import Job, Result, World
from fedsieve.types import Weights
from helpers import tiny_recipe

CPU = torch.device("cpu")


def world_of(sizes: list[int]) -> World:
    nothing = torch.zeros(0)
    starts = np.cumsum([0, *sizes])
    clients = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    return World(nothing, nothing, nothing, nothing, clients, num_classes=2)


def test_equal_clients_are_even() -> None:
    assert unevenness(world_of([7, 7, 7]), 2) == pytest.approx(1)


def test_unevenness_is_the_expected_largest_over_the_mean() -> None:
    # Two draws from {1, 3}: the larger is 1 with probability 1/4, else 3; the mean size is 2.
    assert unevenness(world_of([3, 1]), 2) == pytest.approx((0.25 * 1 + 0.75 * 3) / 2)


def test_one_drawn_client_is_as_large_as_the_mean() -> None:
    assert unevenness(world_of([1, 2, 9]), 1) == pytest.approx(1)


def test_a_kernel_that_cannot_be_launched_is_told_from_other_failures() -> None:
    launch = RuntimeError("raised:\nCUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling it\n")
    assert refuses_slices(launch)
    assert failed_call(launch) == "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling it"
    assert not refuses_slices(RuntimeError("CUDA error: out of memory"))


class Done:
    """A stream with nothing to wait for."""

    def synchronize(self) -> None:
        pass


class Scripted(Slots):
    """Slots whose clients take a moment each, or fail; nothing is trained."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, sizes: list[int], fails: int | None
    ) -> None:
        monkeypatch.setattr(Slice, "enter", lambda place: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Done())
        self._world, self._fails = world_of(sizes), fails
        self._threads = [thread_in(Slice(CPU, 1), f"slot {i}") for i in range(3)]
        self.sliced = False
        self.begun: list[tuple[int, str]] = []

    def _run(self, round: int, job: Job, ready: threading.Event) -> Result:
        ready.set()
        self.begun.append((job.client, threading.current_thread().name))
        if job.client == self._fails:
            raise RuntimeError("out of memory")
        time.sleep(0.01)
        return Result(job.client, None, None, {})


def test_the_largest_clients_begin_and_every_client_is_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Scripted(monkeypatch, [5, 9, 1, 7, 3, 8, 2], fails=None)
    jobs = [Job(k, None, None) for k in range(7)]
    assert [result.client for result in slots.train(0, jobs)] == list(range(7))
    assert sorted(client for client, _ in slots.begun) == list(range(7))
    first = {name: client for client, name in reversed(slots.begun)}
    assert [first[f"slot {i}_0"] for i in range(3)] == [1, 5, 3]


def test_after_a_failure_no_other_client_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Scripted(monkeypatch, [9] + [1] * 60, fails=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        slots.train(0, [Job(k, None, None) for k in range(61)])
    assert len(slots.begun) < 20  # three at once, and few in the moment until it was noticed


def test_a_failure_meanwhile_is_told_after_the_round_and_not_blamed_on_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Scripted(monkeypatch, [1] * 9, fails=None)
    slots.sliced = True

    def fail() -> None:
        raise RuntimeError(CANNOT_LAUNCH)

    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_EXECUTION_FAILED"):
        slots.train(0, [Job(k, None, None) for k in range(9)], fail)
    assert len(slots.begun) == 9
    assert slots.sliced


@pytest.mark.parametrize(("failure", "expected"), [(None, 7), ("CUDA error: out of memory", None)])
def test_what_cannot_be_tested_in_a_slice_is_tested_on_the_whole_gpu(
    monkeypatch: pytest.MonkeyPatch, failure: str | None, expected: int | None
) -> None:
    slots = Refusing("auto", failure or CANNOT_LAUNCH)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Done())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(runners, "count_correct", lambda *_: 7)
    slots.bench = SimpleNamespace(stream=None)  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as slots._examiner:
        correct = slots.examine({})
        if expected is None:
            with pytest.raises(RuntimeError, match=failure):
                correct()
        else:
            assert correct() == expected


def test_something_else_is_done_once_while_clients_train(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Scripted(monkeypatch, [1] * 9, fails=None)
    seen: list[int] = []
    slots.train(0, [Job(k, None, None) for k in range(9)], lambda: seen.append(len(slots.begun)))
    assert len(seen) == 1
    assert 3 <= seen[0] < 9  # every slot has begun, and clients still wait


class Refusing(Slots):
    """Slots whose slices no library can work in; they train nobody."""

    def __init__(self, slicing: Slicing, failure: str) -> None:
        self._recipe = Recipe(engine=EngineConfig(slices=slicing))
        self._world, self._count = world_of([1]), 1
        self.sliced, self._failure = True, failure

    def _train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None]
    ) -> list[Result]:
        meanwhile()
        if self.sliced:
            raise RuntimeError(self._failure)
        return []

    def _count_correct(self, weights: Weights) -> int:
        raise RuntimeError(self._failure)

    def _open(self, places: Places) -> None:
        assert len(places.slots) == 1
        self.sliced = any(place.context is not None for place in places.slots)

    def close(self) -> None:
        pass


CANNOT_LAUNCH = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"


def test_where_no_library_works_in_slices_the_round_is_repeated_without(
    gpu: Callable[..., None],
) -> None:
    gpu(True)
    slots, done = Refusing("auto", CANNOT_LAUNCH), list[str]()
    with pytest.warns(UserWarning, match="gets the whole GPU from now on"):
        assert slots.train(0, [], lambda: done.append("meanwhile")) == []
    assert not slots.sliced
    assert done == ["meanwhile"]


def test_slices_that_were_asked_for_are_not_given_up_in_silence() -> None:
    with pytest.raises(FedsieveError, match="use 'auto' or 'never'"):
        Refusing("always", CANNOT_LAUNCH).train(0, [])


def test_other_failures_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        Refusing("auto", "CUDA error: out of memory").train(0, [])


@dataclass
class FakeGpu:
    """Stands in for the driver: so many multiprocessors, which perhaps cannot be sliced."""

    can_slice: bool
    multiprocessors: int = 100

    def whole(self, device: torch.device) -> Slice:
        return Slice(device, self.multiprocessors)

    def carve(self, device: torch.device, count: int) -> tuple[Slice, ...]:
        if not self.can_slice:
            raise SlicingError("a GPU without slices")
        size = size_of_slices(self.multiprocessors, count)
        return tuple(Slice(device, size, ctypes.c_void_p(i)) for i in range(count))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*arguments: Any) -> None:
        fake = FakeGpu(*arguments)
        monkeypatch.setattr(runners, "carve", fake.carve)
        monkeypatch.setattr(runners, "whole", fake.whole)

    return install


EVEN, UNEVEN, MORE_UNEVEN = [10] * 5, [10, 10, 10, 10, 30], [1, 1, 1, 1, 30]


@pytest.mark.parametrize(
    ("slicing", "sizes", "can_slice", "expected"),
    [
        ("auto", EVEN, True, [24] * 4),
        ("auto", UNEVEN, True, [48] * 4),
        ("auto", MORE_UNEVEN, True, [100] * 4),
        ("auto", EVEN, False, [100] * 4),
        ("always", MORE_UNEVEN, True, [48] * 4),
        ("never", EVEN, True, [100] * 4),
    ],
)
def test_slots_get_slices_where_that_pays(
    gpu: Callable[..., None],
    slicing: Any,
    sizes: list[int],
    can_slice: bool,
    expected: list[int],
) -> None:
    gpu(can_slice)
    places = slot_places(slicing, world_of(sizes), 4, epochs=1)
    assert [place.multiprocessors for place in places.slots] == expected
    assert places.views.multiprocessors == places.examiner.multiprocessors == 100


@pytest.mark.parametrize(
    ("multiprocessors", "epochs", "examiner"),
    [
        (132, 3, 12),  # 132 = 11 · 12, and 100 test images are no more than 4 · 3 epochs of 10
        (130, 3, 130),  # eleven slices of 12 cannot be had
        (132, 2, 132),  # the test would take longer than 2 epochs
    ],
)
def test_what_is_left_over_becomes_a_slice_for_tests(
    gpu: Callable[..., None], multiprocessors: int, epochs: int, examiner: int
) -> None:
    gpu(True, multiprocessors)
    world = replace(world_of([10] * 20), test_labels=torch.zeros(100))
    places = slot_places("auto", world, 10, epochs)
    assert [place.multiprocessors for place in places.slots] == [12] * 10
    assert places.examiner.multiprocessors == examiner
    assert places.examiner not in places.slots


@pytest.mark.parametrize(
    ("multiprocessors", "count", "size"),
    [(132, 10, 12), (132, 5, 26), (132, 3, 40), (132, 2, 64), (132, 4, 32), (7, 3, 2), (7, 4, 0)],
)
def test_small_slices_come_in_pairs_and_large_ones_in_groups_of_eight(
    multiprocessors: int, count: int, size: int
) -> None:
    assert size_of_slices(multiprocessors, count) == size


@pytest.mark.parametrize(("slots", "partner"), [(4, [3, 2, 1, 0]), (5, [None, 4, 3, 2, 1])])
def test_the_largest_client_shares_a_slice_with_the_smallest(
    gpu: Callable[..., None], slots: int, partner: list[int | None]
) -> None:
    gpu(True)
    places = slot_places("auto", world_of(UNEVEN), slots, epochs=1).slots
    assert [
        next((j for j, other in enumerate(places) if i != j and other is place), None)
        for i, place in enumerate(places)
    ] == partner


def test_slices_that_must_be_but_cannot(gpu: Callable[..., None]) -> None:
    gpu(False)
    with pytest.raises(FedsieveError, match="'always', but this is a GPU without slices"):
        slot_places("always", world_of(EVEN), 4, epochs=1)


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
