"""Clients side by side on one GPU, each in a slot of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import check
from fedsieve.local.ahead import Ahead, look_ahead
from fedsieve.local.bench import Setup, draws_from_torch
from fedsieve.local.graph import GraphBench
from fedsieve.local.slices import Slice, thread_in, whole
from fedsieve.local.together import ViewsTogether
from fedsieve.recipe import Recipe
from fedsieve.simulate.places import Places, slot_places
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.simulate.world import Job, Result, World, right_by_class, run_site
from fedsieve.types import ClientId, Shard, Streams, Weights, nothing


class Slots:
    """Clients side by side on one GPU: a thread, a stream and captured steps for each slot."""

    idle_while_training = True

    def __init__(self, recipe: Recipe, world: World, setup: Setup, count: int) -> None:
        set_gpu_arithmetic(recipe.precision)
        check(
            not compiles_steps(recipe) or importlib.util.find_spec("triton") is not None,
            "Training steps are compiled with the package triton, which is not installed; install "
            "it, or set engine.compile to false.",
        )
        self._recipe = recipe
        self._world = world
        self._setup = setup
        self._count = count
        self.bench = self._new_bench(whole(world.device))
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
        self._slot.bench = self._new_bench(place, views=self._views)

    def _leave_slot(self) -> None:
        bench: GraphBench | None = self._slot.__dict__.pop("bench", None)
        if bench is not None:
            bench.forget()

    def _new_bench(self, place: Slice, views: ViewsTogether | None = None) -> GraphBench:
        return GraphBench(
            self._setup,
            self._world.device,
            compile_model=compiles_steps(self._recipe),
            fuse_norms=fuses_norms(self._recipe, place),
            views=views,
            place=place,
        )

    def train(
        self,
        round: int,
        jobs: Sequence[Job],
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int], None] = nothing,
    ) -> list[Result]:
        once = _Once(meanwhile)
        results = self._train_somehow(round, jobs, once)
        once.complain()
        trained(len(results))
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

    def examine(self, networks: Sequence[Weights]) -> Callable[[], tuple[int, ...]]:
        torch.cuda.current_stream().synchronize()
        counting = self._examiner.submit(lambda: self._examine(self._slot.bench, networks))

        def wait() -> tuple[int, ...]:
            try:
                return counting.result()
            except RuntimeError as error:
                if not (self.sliced and refuses_slices(error)):
                    raise
            return self._examine(self.bench, networks)  # with the whole GPU, in this thread

        return wait

    def _examine(self, bench: GraphBench, networks: Sequence[Weights]) -> tuple[int, ...]:
        world = self._world
        with torch.cuda.stream(bench.stream):
            return right_by_class(
                bench, networks, world.test_images, world.test_labels, world.num_classes
            )

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


def refuses_slices(error: RuntimeError) -> bool:
    """Whether cuBLAS or cuDNN could not launch a kernel, as happens where a slice's context is not
    current in the calling thread: other versions of torch may make another one so."""
    return "_STATUS_EXECUTION_FAILED" in str(error)


def failed_call(error: RuntimeError) -> str:
    """The line of a long message that names the call which failed."""
    return next((line for line in str(error).splitlines() if "_STATUS_" in line), str(error))


def compiles_steps(recipe: Recipe) -> bool:
    """Whether slots have the recipe's training steps compiled."""
    return recipe.engine.compile and recipe.precision != "fp32"


def fuses_norms(recipe: Recipe, place: Slice) -> bool:
    """Whether BatchNorm in the steps of a slot in `place` is left to fused kernels."""
    return recipe.engine.fused_norms and compiles_steps(recipe) and place.context is not None


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
