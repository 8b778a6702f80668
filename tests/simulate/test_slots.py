"""Clients side by side on a GPU: who runs when and where, and what happens when that fails."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedsieve.errors import FedsieveError
from fedsieve.local.graph import GraphBench
from fedsieve.local.slices import Slice, SlicingError, size_of_slices, thread_in
from fedsieve.recipe import EngineConfig, Recipe, Slicing
from fedsieve.simulate import places as places_module
from fedsieve.simulate import slots as slots_module
from fedsieve.simulate.places import Places, slot_places, unevenness
from fedsieve.simulate.slots import Slots, failed_call, fuses_norms, refuses_slices
from fedsieve.simulate.world import Job, Result, World
from fedsieve.types import Weights

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


def test_norms_are_fused_where_steps_are_compiled_for_a_slice() -> None:
    slice_, whole = Slice(CPU, 12, ctypes.c_void_p(1)), Slice(CPU, 132)
    compiled, plain = Recipe(precision="bf16"), Recipe(precision="fp32")
    assert fuses_norms(compiled, slice_)
    assert not fuses_norms(compiled, whole)
    assert not fuses_norms(plain, slice_)
    unfused = replace(compiled, engine=EngineConfig(fused_norms=False))
    assert not fuses_norms(unfused, slice_)


def test_steps_cannot_be_compiled_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FedsieveError, match=r"install it, or set engine\.compile to false"):
        Slots(Recipe(precision="bf16"), world_of([1]), setup=None, count=1)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("failure", "expected"), [(None, (4, 3)), ("CUDA error: out of memory", None)]
)
def test_what_cannot_be_tested_in_a_slice_is_tested_on_the_whole_gpu(
    monkeypatch: pytest.MonkeyPatch, failure: str | None, expected: tuple[int, ...] | None
) -> None:
    slots = Refusing("auto", failure or CANNOT_LAUNCH)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Done())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(slots_module, "right_by_class", lambda *_: (4, 3))
    slots.bench = SimpleNamespace(stream=None)  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as slots._examiner:
        correct = slots.examine([{}])
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


SLICED: Any = object()
"""The workbench of a slot in a slice."""


class Refusing(Slots):
    """Slots whose slices no library can work in; they train nobody."""

    def __init__(self, slicing: Slicing, failure: str) -> None:
        self._recipe = Recipe(engine=EngineConfig(slices=slicing))
        self._world, self._count = world_of([1]), 1
        self.sliced, self._failure = True, failure
        self._slot = SimpleNamespace(bench=SLICED)  # type: ignore[assignment]

    def _train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None]
    ) -> list[Result]:
        meanwhile()
        if self.sliced:
            raise RuntimeError(self._failure)
        return []

    def _examine(self, bench: GraphBench, networks: Sequence[Weights]) -> tuple[int, ...]:
        if bench is SLICED:
            raise RuntimeError(self._failure)
        return super()._examine(bench, networks)

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
        monkeypatch.setattr(places_module, "carve", fake.carve)
        for module in (places_module, slots_module):
            monkeypatch.setattr(module, "whole", fake.whole)

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
