"""Clients spread over worker processes: how these start, what they are sent, how they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.local.bench import EVALUATION_CHUNK, EagerBench, Setup
from fedsieve.methods import method
from fedsieve.recipe import Recipe
from fedsieve.serial import decode, encode
from fedsieve.simulate.runners import InProcess, counted
from fedsieve.simulate.world import Job, Result, World, right_by_class
from fedsieve.types import ClientId, Metrics, Weights, nothing

PRELOAD = [__name__]
"""What every worker needs."""
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
        self,
        round: int,
        jobs: Sequence[Job],
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int], None] = nothing,
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
            results = (
                Result(job.client, decode(chosen.client, state), decode(chosen.up, up), metrics)
                for job, (state, up, metrics) in zip(
                    jobs, (future.result() for future in futures), strict=True
                )
            )
            return counted(results, trained)

    def look_ahead(self, round: int, probably: Callable[[], Sequence[ClientId]]) -> None:
        pass

    def examine(self, networks: Sequence[Weights]) -> Callable[[], tuple[int, ...]]:
        chunk = EVALUATION_CHUNK["cpu"]
        total = len(self._world.test_labels)
        pieces = np.array_split(np.arange(0, total, chunk), self._count)
        ranges = [(int(p[0]), min(total, int(p[-1]) + chunk)) for p in pieces if len(p)]
        blob = encode(_Parcel(tuple(networks)))
        with self._named_failure():
            counts = self._pool.map(_count_in_worker, [blob] * len(ranges), ranges)

        def wait() -> tuple[int, ...]:
            with self._named_failure():
                return tuple(map(sum, zip(*counts, strict=True)))

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


@dataclass(frozen=True)
class _Parcel:
    networks: tuple[Weights, ...]


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


def _count_in_worker(blob: bytes, bounds: tuple[int, int]) -> tuple[int, ...]:
    assert _worker is not None
    world, part = _worker.world, slice(*bounds)
    images, labels = world.test_images[part], world.test_labels[part]
    networks = decode(_Parcel, blob).networks
    return right_by_class(_worker.bench, networks, images, labels, world.num_classes)
