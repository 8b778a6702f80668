"""Who runs the clients of a round: this process, worker processes, or slots on a GPU.

All give the same result. On a CPU every client is trained by one thread, wherever it runs, because
the order of a sum, and so its last bit, may depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError, check
from fedsieve.local.ahead import Ahead, look_ahead
from fedsieve.local.bench import (
    EVALUATION_CHUNK,
    Bench,
    EagerBench,
    Precision,
    Setup,
    draws_from_torch,
)
from fedsieve.local.graph import GraphBench
from fedsieve.local.slices import (
    Slice,
    SlicingError,
    carve,
    size_of_slices,
    thread_in,
    whole,
)
from fedsieve.local.together import ViewsTogether
from fedsieve.methods import method
from fedsieve.recipe import Recipe, Slicing
from fedsieve.serial import decode, encode
from fedsieve.simulate.world import (
    Job,
    Result,
    World,
    count_correct,
    run_client,
    run_site,
)
from fedsieve.types import ClientId, Metrics, Shard, Streams, Weights, nothing

PRELOAD = [__name__]
"""What every worker needs."""


class Runner(Protocol):
    """Trains the clients of a round and evaluates the global model."""

    idle_while_training: bool
    """Whether the thread that calls `train` has time for something else meanwhile."""

    def train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None] = nothing
    ) -> list[Result]:
        """Run every job, and do `meanwhile` once; results in the order of the jobs."""

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        """Begin what can be begun of a round in which these clients will probably take part."""

    def examine(self, weights: Weights) -> Callable[[], int]:
        """Begin to test the model; the result waits until it is known how many test images it
        classifies rightly."""

    @property
    def bench(self) -> Bench:
        """A workbench in this process, for diagnosis."""

    def close(self) -> None: ...


class InProcess:
    """One client after another in this process, on a CPU or (eagerly) on a GPU."""

    idle_while_training = False

    def __init__(self, recipe: Recipe, world: World, setup: Setup) -> None:
        self._recipe = recipe
        self.world = world
        if world.device.type == "cuda":
            set_gpu_arithmetic(recipe.precision)
        self.bench = EagerBench(setup, world.device)

    def train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None] = nothing
    ) -> list[Result]:
        meanwhile()
        with one_thread():
            return [run_client(self._recipe, self.world, self.bench, round, job) for job in jobs]

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        pass

    def examine(self, weights: Weights) -> Callable[[], int]:
        with one_thread():
            correct = count_correct(
                self.bench, weights, self.world.test_images, self.world.test_labels
            )
        return lambda: correct

    def close(self) -> None:
        pass


_SHARED = ".workers-"
"""Beginning of the name of a folder from which worker processes map the data."""


class Workers:
    """Clients spread over worker processes of one thread each."""

    idle_while_training = True

    def __init__(
        self, recipe: Recipe, world: World, setup: Setup, count: int, folder: Path | None = None
    ) -> None:
        self._recipe = recipe
        self._world = world
        self._count = count
        self.bench = EagerBench(setup, world.device)
        if folder is not None:
            for left in folder.glob(f"{_SHARED}*"):  # by a process that was killed
                shutil.rmtree(left)
        self._folder = tempfile.TemporaryDirectory(prefix=_SHARED, dir=folder)
        shared = SharedWorld.save(world, Path(self._folder.name))
        # Forked from a server that has imported everything once and has no threads of its own.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _start_forkserver()
        self._pool = ProcessPoolExecutor(
            count,
            mp_context=context,
            initializer=_start_worker,
            initargs=(recipe, shared, setup),
        )

    def train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None] = nothing
    ) -> list[Result]:
        chosen = method(self._recipe.method.name)
        with self._named_failure():
            futures = [
                self._pool.submit(
                    _train_in_worker,
                    round,
                    job.client,
                    None if job.state is None else encode(job.state),
                    encode(job.down),
                )
                for job in jobs
            ]
            meanwhile()
            return [
                Result(job.client, decode(chosen.client, state), decode(chosen.up, up), metrics)
                for job, (state, up, metrics) in zip(
                    jobs, (future.result() for future in futures), strict=True
                )
            ]

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        pass

    def examine(self, weights: Weights) -> Callable[[], int]:
        chunk = EVALUATION_CHUNK["cpu"]
        total = len(self._world.test_labels)
        pieces = np.array_split(np.arange(0, total, chunk), self._count)
        ranges = [(int(p[0]), min(total, int(p[-1]) + chunk)) for p in pieces if len(p)]
        blob = encode(_Parcel(weights))
        with self._named_failure():
            counts = self._pool.map(_count_in_worker, [blob] * len(ranges), ranges)

        def wait() -> int:
            with self._named_failure():
                return sum(counts)

        return wait

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            raise FedsieveError(
                "A worker process died, most likely for want of memory; use fewer with "
                "--engine.workers and run the same command again to resume."
            ) from None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


class _Once:
    """An action that is done at most once, and whose failure is told when there is time for it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._left = [action]
        self._failure: Exception | None = None

    def __call__(self) -> None:
        while self._left:
            try:
                self._left.pop()()
            except Exception as failure:
                self._failure = failure

    def complain(self) -> None:
        if self._failure is not None:
            raise self._failure


class Slots:
    """Clients side by side on one GPU: a thread, a stream and captured steps for each slot."""

    idle_while_training = True

    def __init__(self, recipe: Recipe, world: World, setup: Setup, count: int) -> None:
        set_gpu_arithmetic(recipe.precision)
        self._recipe = recipe
        self._world = world
        self._setup = setup
        self._count = count
        self.bench = self._new_bench()
        self._open(slot_places(recipe.engine.slices, world, count, recipe.sgd.epochs))

    def _open(self, places: Places) -> None:
        """Have a thread at work in the place of each slot, and one that examines."""
        self._views = ViewsTogether(places.views)
        self._ahead: dict[Streams, tuple[Shard, Ahead]] = {}
        self._wanted: Mapping[str, str] = {}
        """The views with which clients began to train last."""
        self.sliced = any(place.context is not None for place in places.slots)
        self._slot = threading.local()
        self._threads = [thread_in(place, f"slot {i}") for i, place in enumerate(places.slots)]
        self._examiner = thread_in(places.examiner, "examiner")
        entering = [
            thread.submit(self._enter_slot, place)
            for thread, place in zip(
                [*self._threads, self._examiner], [*places.slots, places.examiner], strict=True
            )
        ]
        for entered in entering:
            entered.result()
        batch = self._world.images[: self._recipe.sgd.batch_size]
        batch = self.bench.view("raw", batch, np.random.default_rng(0))  # which draws nothing
        torch.cuda.current_stream().synchronize()
        for thread in self._threads[1:]:  # while the first one compiles
            thread.submit(self._load_kernels, batch)

    def _load_kernels(self, images: Tensor) -> None:
        # Nobody waits for this: a failure will be met again by whoever trains.
        with contextlib.suppress(RuntimeError):
            self._slot.bench.load_kernels(images)

    def _enter_slot(self, place: Slice) -> None:
        self._slot.bench = self._new_bench(views=self._views, place=place)

    def _leave_slot(self) -> None:
        bench: GraphBench | None = self._slot.__dict__.pop("bench", None)
        if bench is not None:
            bench.forget()

    def _new_bench(self, **options: Any) -> GraphBench:
        compiles = compiles_steps(self._recipe)
        return GraphBench(self._setup, self._world.device, compile_model=compiles, **options)

    def train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None] = nothing
    ) -> list[Result]:
        once = _Once(meanwhile)
        results = self._train_somehow(round, jobs, once)
        once.complain()
        return results

    def _train_somehow(self, round: int, jobs: Sequence[Job], once: _Once) -> list[Result]:
        """In slices, or without where that turns out to be impossible."""
        try:
            return self._train(round, jobs, once)
        except RuntimeError as error:
            if not (self.sliced and refuses_slices(error)):
                raise
            check(
                self._recipe.engine.slices == "auto",
                "engine.slices is 'always', but a library of this GPU cannot work in its slices "
                f"({failed_call(error)}); use 'auto' or 'never'.",
            )
            warnings.warn(
                "A library of this GPU cannot work in slices of it; every slot gets the whole GPU "
                f"from now on, which is slower ({failed_call(error)}).",
                stacklevel=2,
            )
        self.close()
        self._open(Places.shared(whole(self._world.device), self._count))
        return self._train(round, jobs, once)

    def _train(
        self, round: int, jobs: Sequence[Job], meanwhile: Callable[[], None]
    ) -> list[Result]:
        # The largest clients first, so that no slot is left alone with one at the end; slot i gets
        # the i-th largest, and whoever is done the next one.
        longest_first = sorted(jobs, key=lambda job: -len(self._world.clients[job.client]))
        waiting = iter(longest_first[len(self._threads) :])
        torch.cuda.current_stream().synchronize()
        with _quick_switching():
            begun = [
                (
                    thread.submit(self._run_from, round, job, waiting, ready := threading.Event()),
                    ready,
                )
                for thread, job in zip(self._threads, longest_first, strict=False)
            ]
            running = [run for run, _ in begun]
            try:
                for _, ready in begun:  # those that prepare need the interpreter more
                    ready.wait()
                meanwhile()
                wait_for(running, return_when=FIRST_EXCEPTION)
            finally:
                for _ in waiting:  # if one failed, or somebody is in a hurry, no other begins
                    pass
                wait_for(running)
        by_client = {result.client: result for run in running for result in run.result()}
        return [by_client[job.client] for job in jobs]

    def _run_from(
        self, round: int, first: Job, waiting: Iterator[Job], ready: threading.Event
    ) -> list[Result]:
        """Run a job, and then those that wait, as all slots do in turn; say when the first of them
        needs only the GPU."""
        try:
            return [self._run(round, job, ready) for job in itertools.chain([first], waiting)]
        finally:
            ready.set()

    def _run(self, round: int, job: Job, ready: threading.Event) -> Result:
        bench: GraphBench = self._slot.bench
        preparation = contextlib.ExitStack()
        preparation.enter_context(self._views.preparing())
        preparation.callback(ready.set)
        bench.when_ready = preparation.close
        with torch.cuda.stream(bench.stream), preparation:
            key = Streams(self._recipe.seed, round, job.client)
            shard, ahead = self._ahead.pop(key, (None, None))
            shard = shard or self._world.shard(job.client)
            with bench.visit(shard.images, ahead):
                result = run_site(self._recipe, shard, bench, round, job)
            self._wanted = bench.wanted
            return result

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        self._ahead.clear()
        if not self._wanted:
            return
        sizes = {k: len(self._world.clients[k]) for k in probably()}
        first = sorted((k for k in sizes if sizes[k]), key=lambda k: -sizes[k])[: self._count]
        shards = {Streams(self._recipe.seed, round, k): self._world.shard(k) for k in first}
        torch.cuda.current_stream().synchronize()
        images = {key: shard.images for key, shard in shards.items()}
        begun = look_ahead(self._setup, self._views, self._wanted, images)
        self._ahead.update(zip(shards, zip(shards.values(), begun, strict=True), strict=True))

    def replay(self, steps: int) -> None:
        """Let every slot repeat the steps that it captured last, and nothing else: for timing."""
        replaying = [thread.submit(self._replay, steps) for thread in self._threads]
        for replayed in replaying:
            replayed.result()

    def _replay(self, steps: int) -> None:
        bench: GraphBench = self._slot.bench
        bench.replay(steps)
        bench.stream.synchronize()

    def examine(self, weights: Weights) -> Callable[[], int]:
        torch.cuda.current_stream().synchronize()
        counting = self._examiner.submit(self._count_correct, weights)

        def wait() -> int:
            try:
                return counting.result()
            except RuntimeError as error:
                if not (self.sliced and refuses_slices(error)):
                    raise
            world = self._world  # with the whole GPU, in this thread
            with torch.cuda.stream(self.bench.stream):
                return count_correct(self.bench, weights, world.test_images, world.test_labels)

        return wait

    def _count_correct(self, weights: Weights) -> int:
        bench: GraphBench = self._slot.bench
        with torch.cuda.stream(bench.stream):
            return count_correct(bench, weights, self._world.test_images, self._world.test_labels)

    def close(self) -> None:
        """Give back the GPU's memory: whoever comes next in this process may need it."""
        # Captured steps are given up by the threads that made them.
        leaving = [thread.submit(self._leave_slot) for thread in [*self._threads, self._examiner]]
        wait_for(leaving)
        wait_for(ahead.made for _, ahead in self._ahead.values())
        self._ahead.clear()
        self._views.close()
        self.bench.forget()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        for left in leaving:
            left.result()


@dataclass(frozen=True)
class Places:
    """Where on a GPU the parts of a round work."""

    slots: Sequence[Slice]
    """Largest client first."""
    examiner: Slice
    """Where the global model is tested while the next round trains."""
    views: Slice

    @staticmethod
    def shared(place: Slice, slots: int) -> Places:
        """All in one place."""
        return Places([place] * slots, place, place)


EVEN = 1.25
"""Up to this ratio of a round's largest client to the mean one, each slot has a slice of its own. A
slot with a slice cannot use what the others leave idle when they are done."""
IN_PAIRS = 2.2
"""Up to this ratio, two slots share a slice: that of the largest client and of the smallest, and so
on. Beyond it, all slots share the GPU."""


EXAMINED = 4
"""A spare slice may test so many images for each one that a slot trains on: a forward pass is a
third of a step, and the test should be done before the slots are."""


def slot_places(slicing: Slicing, world: World, slots: int, epochs: int) -> Places:
    """Slices of the GPU where that pays, else all of it for everybody."""
    everything = whole(world.device)
    uneven = unevenness(world, slots)
    if slicing == "always" or (slicing == "auto" and uneven <= IN_PAIRS):
        count = slots if uneven <= EVEN else math.ceil(slots / 2)
        total = everything.multiprocessors
        # What does not divide evenly may be enough for a slice that costs the others nothing.
        trained = epochs * sum(map(len, world.clients)) / len(world.clients)
        spare = (
            size_of_slices(total, count + 1) == size_of_slices(total, count)
            and len(world.test_labels) <= EXAMINED * trained
        )
        try:
            slices = carve(world.device, count + spare)
            shared = slices[:count][::-1][: slots - count]
            examiner = slices[count] if spare else everything
            return Places([*slices[:count], *shared], examiner, everything)
        except SlicingError as reason:
            check(
                slicing == "auto",
                f"engine.slices is 'always', but this is {reason}; use 'auto' or 'never'.",
            )
    return Places.shared(everything, slots)


def refuses_slices(error: RuntimeError) -> bool:
    """Whether cuBLAS or cuDNN could not launch a kernel, as happens where a slice's context is not
    current in the calling thread: other versions of torch may make another one so."""
    return "_STATUS_EXECUTION_FAILED" in str(error)


def failed_call(error: RuntimeError) -> str:
    """The line of a long message that names the call which failed."""
    return next((line for line in str(error).splitlines() if "_STATUS_" in line), str(error))


def unevenness(world: World, selected: int) -> float:
    """Expected size of the largest of `selected` random clients over the mean size."""
    sizes = np.sort([len(indices) for indices in world.clients]).astype(np.float64)
    # P(largest of m draws with replacement ≤ i-th smallest) = (i / K)^m
    below = (np.arange(len(sizes) + 1) / len(sizes)) ** selected
    return float((np.diff(below) * sizes).sum() / sizes.mean())


def compiles_steps(recipe: Recipe) -> bool:
    """Whether slots have the recipe's training steps compiled."""
    return recipe.engine.compile and recipe.precision != "fp32"


def fits_graphs(setup: Setup) -> bool:
    """Whether a captured step repeats: not with dropout that draws from torch's own generator,
    which all slots share."""
    return not draws_from_torch(setup.make_model())


@contextlib.contextmanager
def _quick_switching() -> Iterator[None]:
    """Let threads that only launch work take turns quickly with those that prepare."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def set_gpu_arithmetic(precision: Precision) -> None:
    """fp32 is exact and repeatable; the others use what the matrix units and cuDNN do fastest."""
    exact = precision == "fp32"
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact


@dataclass(frozen=True)
class _Parcel:
    weights: Weights


@dataclass(frozen=True)
class SharedWorld:
    """A world whose arrays lie in files that worker processes map into their memory."""

    folder: Path
    num_classes: int

    @staticmethod
    def save(world: World, folder: Path) -> SharedWorld:
        for name, tensor in _tensors(world).items():
            np.save(folder / f"{name}.npy", tensor.numpy())
        np.save(folder / "members.npy", np.concatenate(world.clients))
        np.save(folder / "sizes.npy", np.array([len(indices) for indices in world.clients]))
        return SharedWorld(folder, world.num_classes)

    def load(self) -> World:
        def array(name: str) -> Any:
            # Mode "c" gives writable pages that are never written back, as torch wants them.
            return np.load(self.folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)

        tensors = {
            field.name: torch.from_numpy(array(field.name))
            for field in fields(World)
            if field.name not in ("clients", "num_classes")
        }
        clients = np.split(array("members"), np.cumsum(array("sizes"))[:-1])
        return World(**tensors, clients=clients, num_classes=self.num_classes)


def _tensors(world: World) -> dict[str, Tensor]:
    values = {field.name: getattr(world, field.name) for field in fields(world)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


_worker: InProcess | None = None
"""The runner of this worker process."""
_worker_recipe: Recipe | None = None


def _start_worker(recipe: Recipe, shared: SharedWorld, setup: Setup) -> None:
    global _worker, _worker_recipe
    # Ctrl-C reaches every process of the terminal; the main one lets its round finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _worker_recipe = recipe
    _worker = InProcess(recipe, shared.load(), setup)


def _start_forkserver() -> None:
    """Start it with Ctrl-C blocked, which all workers inherit: even one that has just been forked
    must not die of a signal that is meant for the main process."""
    # It needs the resource tracker, whose start would unblock the signal again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_with_parent() -> None:
    """End this worker when the main process is gone, even if that was killed without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _train_in_worker(
    round: int, client: ClientId, state: bytes | None, down: bytes
) -> tuple[bytes, bytes, Metrics]:
    assert _worker is not None
    assert _worker_recipe is not None
    chosen = method(_worker_recipe.method.name)
    job = Job(
        client,
        None if state is None else decode(chosen.client, state),
        decode(chosen.down, down),
    )
    (result,) = _worker.train(round, [job])
    return encode(result.state), encode(result.up), result.metrics


def _count_in_worker(blob: bytes, bounds: tuple[int, int]) -> int:
    assert _worker is not None
    part = slice(*bounds)
    images, labels = _worker.world.test_images[part], _worker.world.test_labels[part]
    return count_correct(_worker.bench, decode(_Parcel, blob).weights, images, labels)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operators on one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
