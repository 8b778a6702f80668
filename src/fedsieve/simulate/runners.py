"""Who runs the clients of a round: what all runners offer, and the plainest of them, this process.

The others are worker processes (`workers.py`) and slots on a GPU (`slots.py`). All give the same
result. On a CPU every client is trained by one thread, wherever it runs, because the order of a
sum, and so its last bit, may depend on the number of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from fedsieve.local.bench import Bench, EagerBench, Precision, Setup
from fedsieve.recipe import Recipe
from fedsieve.simulate.world import Job, Result, World, right_by_class, run_client
from fedsieve.types import ClientId, Weights, nothing


class Runner(Protocol):
    """Trains the clients of a round and evaluates the global model."""

    idle_while_training: bool
    """Whether the thread that calls `train` has time for something else meanwhile."""

    def train(
        self,
        round: int,
        jobs: Sequence[Job],
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int], None] = nothing,
    ) -> list[Result]:
        """Run every job, and do `meanwhile` once; `trained` is told how many are done, as often as
        it is known. Results in the order of the jobs."""

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        """Begin what can be begun of a round in which these clients will probably take part."""

    def examine(self, networks: Sequence[Weights]) -> Callable[[], tuple[int, ...]]:
        """Begin to test the networks, which predict together; the result waits until it is known
        how many test images of each class they classify rightly."""

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
        self,
        round: int,
        jobs: Sequence[Job],
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int], None] = nothing,
    ) -> list[Result]:
        meanwhile()
        with one_thread():
            running = (run_client(self._recipe, self.world, self.bench, round, j) for j in jobs)
            return counted(running, trained)

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        pass

    def examine(self, networks: Sequence[Weights]) -> Callable[[], tuple[int, ...]]:
        world = self.world
        with one_thread():
            right = right_by_class(
                self.bench, networks, world.test_images, world.test_labels, world.num_classes
            )
        return lambda: right

    def close(self) -> None:
        pass


def counted(results: Iterable[Result], trained: Callable[[int], None]) -> list[Result]:
    """The results, while `trained` is told how many there are."""
    done: list[Result] = []
    for result in results:
        done.append(result)
        trained(len(done))
    return done


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operators on one thread for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def set_gpu_arithmetic(precision: Precision) -> None:
    """fp32 is exact and repeatable; the others use what the matrix units and cuDNN do fastest."""
    exact = precision == "fp32"
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cudnn.benchmark = not exact
