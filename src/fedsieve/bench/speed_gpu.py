"""How fast a GPU trains a round's clients: the plain loop, the engine, and one big batch.

The work is a published CIFAR-10 cell's: 10 clients × 500 images × 10 epochs, batches of 32,
ResNet-18, FedGR, on random images (speed does not depend on what they show).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedsieve.bench.report import Bar, machine
from fedsieve.data.sources import Dataset
from fedsieve.errors import check
from fedsieve.local.bench import EagerBench, Precision, Setup
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Plan, Sgd
from fedsieve.methods import fedavg, fedgr
from fedsieve.models import ModelConfig
from fedsieve.recipe import EngineConfig, Recipe
from fedsieve.scenes import SceneConfig
from fedsieve.serial import to_device
from fedsieve.simulate.directory import RunDirectory
from fedsieve.simulate.rounds import Simulation
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.simulate.slots import Slots
from fedsieve.simulate.world import initial_weights, make_setup, prepare_cuda
from fedsieve.types import Streams

CLIENTS, PER_CLIENT, PER_ROUND = 100, 500, 10
EPOCHS, BATCH = 10, 32
TEST_IMAGES = 10_000
COMPILING = 3
"""Rounds before the clock counts."""

ENGINE_RATIO = Bar(8.0, at_most=False)
ENGINE_RATE = Bar(50_000.0, at_most=False)
ROUND_SECONDS = Bar(1.0, at_most=True)
PREPARATION = Bar(0.2, at_most=True)


@dataclass(frozen=True, kw_only=True)
class RoundTimes:
    """What a round of one kind takes; medians."""

    seconds: float
    phases: Mapping[str, float]

    @staticmethod
    def of(laps: Sequence[Mapping[str, float]]) -> RoundTimes:
        """From the seconds of every phase of several rounds."""
        return RoundTimes(
            seconds=statistics.median(sum(lap.values()) for lap in laps),
            phases={name: statistics.median(lap[name] for lap in laps) for name in laps[0]},
        )


@dataclass(frozen=True, kw_only=True)
class GpuSpeedReport:
    """Training images per second of each way, and a round of the engine."""

    gpu: str
    eager_images_per_s: float
    engine_images_per_s: float
    """In the training steps alone: every slot replays its steps, nothing else runs."""
    big_batch_images_per_s: float
    kinds: Mapping[str, RoundTimes]
    """FedGR's two kinds of rounds: of the warm-up, and those that refine labels, with a pass of the
    teacher more."""
    steps_seconds: float
    """What a round's training steps alone take."""
    warm_up_seconds: float
    """Compiling and capturing, once per run."""
    fused_norms: bool
    rounds: int
    machine: Mapping[str, Any]
    title: str = "Speed on a GPU: one FedGR round, ResNet-18"

    def preparation_share(self, kind: str) -> float:
        """The part of a round in which no training step could have run."""
        return 1 - self.steps_seconds / self.kinds[kind].seconds

    def header(self) -> Sequence[str]:
        return ("what", "measured", "bar", "")

    def cells(self) -> Sequence[Sequence[str]]:
        def row(name: str, value: float, form: str, bar: Bar | None = None) -> tuple[str, ...]:
            verdict = "" if bar is None else ("reached" if bar.holds(value) else "MISSED")
            return (name, form.format(value), "" if bar is None else str(bar), verdict)

        def round_rows(kind: str) -> list[tuple[str, ...]]:
            times, share = self.kinds[kind], self.preparation_share(kind)
            return [
                row(f"a round, all in: {kind}", times.seconds, "{:.3f} s", ROUND_SECONDS),
                row("  share that is not training", share, "{:.2f}", PREPARATION),
                *(row(f"  phase: {name}", s, "{:.3f} s") for name, s in times.phases.items()),
            ]

        rate = "{:,.0f} images/s"
        return [
            row("plain loop, one client at a time, tf32", self.eager_images_per_s, rate),
            row("engine, training steps alone, bf16", self.engine_images_per_s, rate, ENGINE_RATE),
            row(
                "engine over plain loop",
                self.engine_images_per_s / self.eager_images_per_s,
                "{:.1f} ×",
                ENGINE_RATIO,
            ),
            row("one model at batch 1024, bf16 (ceiling)", self.big_batch_images_per_s, rate),
            *(cells for kind in self.kinds for cells in round_rows(kind)),
            row("compiling and capturing, once", self.warm_up_seconds, "{:.0f} s"),
        ]

    def notes(self) -> Sequence[str]:
        return (
            f"{PER_ROUND} clients × {PER_CLIENT} images × {EPOCHS} epochs, batches of {BATCH}, on "
            f"{self.gpu}; medians of {self.rounds} rounds of each kind. The phase `train` holds "
            "views, proxies, pseudo labels, the teacher's pass and the steps; `merge` the mixture "
            f"and the average. engine.fused_norms = {str(self.fused_norms).lower()}.",
        )


def work(
    precision: Precision,
    *,
    slots: int = PER_ROUND,
    warm_up: int = 100,
    fused_norms: bool = True,
) -> Recipe:
    """The recipe whose rounds are measured; labels are refined after `warm_up` rounds."""
    return Recipe(
        name="speed",
        rounds=10**6,
        clients_per_round=PER_ROUND,
        precision=precision,
        scene=SceneConfig(clients=CLIENTS),
        model=ModelConfig(name="resnet18", head="linear"),
        sgd=Sgd(
            epochs=EPOCHS, batch_size=BATCH, lr=0.01, momentum=0.5, weight_decay=5e-4, tail="drop"
        ),
        method=fedgr.Config(warmup_rounds=warm_up),
        engine=EngineConfig(
            device="cuda", slots=slots, checkpoint_seconds=1e9, fused_norms=fused_norms
        ),
    )


def random_images() -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def images(n: int) -> torch.Tensor:
        return torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator)

    def labels(n: int) -> torch.Tensor:
        return torch.randint(0, 10, (n,), generator=generator)

    n = CLIENTS * PER_CLIENT
    return Dataset(
        name="random",
        classes=tuple("0123456789"),
        train_images=images(n),
        train_labels=labels(n),
        test_images=images(TEST_IMAGES),
        test_labels=labels(TEST_IMAGES),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        views="cifar10",
    )


def measure_speed_gpu(rounds: int = 20, *, fused_norms: bool = True) -> GpuSpeedReport:
    """Measure all ways in one process; takes one to two minutes, half of it compiling."""
    prepare_cuda()
    check(torch.cuda.is_available(), "This machine has no usable GPU; measure --device cpu.")
    data = random_images()
    # Every client takes part once before labels are refined, so that each has a moving average.
    warm_up_rounds = max(COMPILING + rounds, CLIENTS // PER_ROUND)
    recipe = work("bf16", warm_up=warm_up_rounds, fused_norms=fused_norms)
    steps = (PER_CLIENT // BATCH) * EPOCHS
    images = PER_ROUND * steps * BATCH
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        directory = RunDirectory(Path(folder))
        with directory.lock():
            simulation = Simulation.open(recipe, directory, data)
            _rounds(simulation, COMPILING)
            warm_up = time.perf_counter() - started
            in_warm_up = _rounds(simulation, rounds)
            _rounds(simulation, warm_up_rounds + 1 - simulation.rounds_done)  # one that refines
            refining = _rounds(simulation, rounds)
            runner = simulation.runner
            assert isinstance(runner, Slots)
            steps_seconds = _median_seconds(lambda: runner.replay(steps), 5)
            runner.close()
    eager, big = _eager(data), _big_batch(data)
    return GpuSpeedReport(
        gpu=torch.cuda.get_device_name(),
        eager_images_per_s=eager,
        engine_images_per_s=images / steps_seconds,
        big_batch_images_per_s=big,
        kinds={"warm-up": RoundTimes.of(in_warm_up), "refining": RoundTimes.of(refining)},
        steps_seconds=steps_seconds,
        warm_up_seconds=warm_up,
        fused_norms=fused_norms,
        rounds=rounds,
        machine=machine(),
    )


def _rounds(simulation: Simulation, count: int) -> list[Mapping[str, float]]:
    """The seconds of `count` rounds, which are described while the next one trains, as in runs."""
    seconds = []

    def describe() -> None:
        if simulation.unfinished is not None:
            seconds.append(simulation.finish_round(aside=True)["seconds"])

    for _ in range(count):
        simulation.train_round(meanwhile=describe)
    describe()
    return seconds


def _eager(data: Dataset) -> float:
    """Images/s of one client, step by step, as public programs do it (tf32)."""
    recipe = work("tf32", slots=0)
    set_gpu_arithmetic("tf32")
    setup = make_setup(recipe, data)
    bench = EagerBench(setup, torch.device("cuda"))
    plan = _plain_plan(recipe, setup, data, PER_CLIENT, replace(recipe.sgd, epochs=2))
    fitted = bench.fit(plan)
    return fitted.steps * BATCH / _median_seconds(lambda: bench.fit(plan), 3)


def _big_batch(data: Dataset) -> float:
    """Images/s of one model at batch 1024, as if there were no federation: the ceiling."""
    recipe = work("bf16")
    set_gpu_arithmetic("bf16")
    setup = make_setup(recipe, data)
    bench = GraphBench(setup, torch.device("cuda"), compile_model=recipe.engine.compile)
    plan = _plain_plan(recipe, setup, data, 8192, replace(recipe.sgd, epochs=1, batch_size=1024))
    with torch.cuda.stream(bench.stream):
        bench.fit(plan)
    steps = 8192 // 1024
    return steps * 1024 / _median_seconds(lambda: bench.replay(steps), 9)


def _plain_plan(recipe: Recipe, setup: Setup, data: Dataset, n: int, sgd: Sgd) -> Plan:
    """FedAvg's local training on the first n images."""
    device = torch.device("cuda")
    return Plan(
        start=[to_device(initial_weights(setup), device)],
        images=data.train_images[:n].to(device),
        views={"x": "weak"},
        columns={"label": data.train_labels[:n].to(device)},
        loss=fedavg.local_loss,
        sgd=sgd,
        rng=Streams(recipe.seed, 0, 0),
    )


def _median_seconds(action: Callable[[], object], times: int) -> float:
    """Median wall time of `action`, the device's work included, after one run to warm up."""
    taken = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        action()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
