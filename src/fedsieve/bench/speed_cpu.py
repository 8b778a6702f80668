"""How fast a CPU runs a FedAvg round: fedsieve beside a bare PyTorch loop and other simulators.

Times on a shared machine wander, so what is compared takes turns, round by round in one process,
and the result is a ratio: the median over rounds of (way / bare loop in the same turn).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from fedsieve.bench.others import LIBRARIES, Library, bare_loop, check_outcome
from fedsieve.bench.report import Bar, machine
from fedsieve.bench.workload import BareLoop, Workload, opened
from fedsieve.data.views import view_set
from fedsieve.errors import check
from fedsieve.simulate.rounds import Simulation
from fedsieve.simulate.runners import one_thread
from fedsieve.types import Weights, rng_for

WARM_UP = 5
"""Rounds before the clock counts."""
WORKERS = 2
VIEW_IMAGES = 4096
OVERHEAD = Bar(1.10, at_most=True)
VIEW_RATE = Bar(20_000, at_most=False)

BARE, IN_PROCESS, IN_WORKERS = (
    "bare PyTorch loop, one thread",
    "fedsieve, one thread",
    f"fedsieve, {WORKERS} worker processes",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of doing the work."""

    name: str
    value: float | None
    """None where it could not be measured."""
    unit: str
    ratio: float | None = None
    """To the bare loop."""
    bar: Bar | None = None
    """For the ratio where there is one, else for the value."""
    remark: str = ""

    @property
    def passes(self) -> bool | None:
        """Whether the bar is reached; None without one."""
        measured = self.value if self.ratio is None else self.ratio
        return None if self.bar is None or measured is None else self.bar.holds(measured)


@dataclass(frozen=True, kw_only=True)
class SpeedReport:
    rows: tuple[Row, ...]
    rounds: int
    machine: Mapping[str, Any]
    title: str = "Speed on a CPU: one FedAvg round"

    def header(self) -> Sequence[str]:
        return ("way", "median", "unit", "× bare loop", "bar", "")

    def cells(self) -> Sequence[Sequence[str]]:
        return [
            (
                row.name,
                "–" if row.value is None else f"{row.value:,.1f}".removesuffix(".0"),
                row.unit,
                "–" if row.ratio is None else f"{row.ratio:.3f}",
                "" if row.bar is None else str(row.bar),
                {True: "reached", False: "MISSED", None: ""}[row.passes] or row.remark,
            )
            for row in self.rows
        ]

    def notes(self) -> Sequence[str]:
        return (
            f"Medians of {self.rounds} rounds after {WARM_UP} to warm up; a ratio is the median of "
            "the ratios of neighbouring rounds. fedsieve's rounds end with the same weights as "
            "the bare loop's, bit for bit; a library's first round agrees up to rounding.",
        )

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def measure_speed_cpu(
    rounds: int = 40,
    workload: Workload | None = None,
    libraries: Sequence[Library] = LIBRARIES,
) -> SpeedReport:
    """Measure everything; some 30 seconds without the other libraries."""
    check(rounds >= 1, f"A speed needs at least 1 round to be measured, not {rounds}.")
    workload = workload or Workload()
    facts = machine()
    with one_thread():
        rows = [*_rounds(workload, rounds)]
        rows += [_library(library, workload, rounds) for library in libraries]
    rows += [_view_rate(threads) for threads in (1, 2)]
    return SpeedReport(rows=tuple(rows), rounds=rounds, machine=facts)


# ---------------------------------------------------------------------------------------- rounds


def _rounds(workload: Workload, rounds: int) -> list[Row]:
    """The bare loop and fedsieve's two ways in turns; their weights must be equal at the end."""
    data = workload.data()
    with ExitStack() as stack:
        simulations = {
            IN_PROCESS: stack.enter_context(opened(workload.recipe(), data)),
            IN_WORKERS: stack.enter_context(opened(workload.recipe(workers=WORKERS), data)),
        }
        clients = simulations[IN_PROCESS].world.clients
        loop = BareLoop(workload.recipe(), data, clients)
        ways: dict[str, Callable[[], object]] = {
            name: simulation.next_round for name, simulation in simulations.items()
        }
        seconds: dict[str, list[float]] = {BARE: [], **{name: [] for name in ways}}
        for round in range(WARM_UP + rounds):
            plan = workload.plan_of(round)
            ways[BARE] = lambda plan=plan: loop.round(plan)  # type: ignore[misc]
            # Every other turn in the opposite order, so that no way always comes after the same.
            for name in sorted(ways, reverse=round % 2 == 1):
                seconds[name].append(_seconds(ways[name]))
        for name, simulation in simulations.items():
            _check_equal(name, _weights(simulation), loop.weights)
    counted = {name: taken[WARM_UP:] for name, taken in seconds.items()}
    bars = {IN_PROCESS: OVERHEAD}
    return [
        Row(
            name=name,
            value=1000 * statistics.median(taken),
            unit="ms/round",
            ratio=statistics.median(
                mine / bare for mine, bare in zip(taken, counted[BARE], strict=True)
            ),
            bar=bars.get(name),
        )
        for name, taken in counted.items()
    ]


def _weights(simulation: Simulation) -> Weights:
    return simulation.method.weights(simulation.server)


def _check_equal(name: str, ours: Weights, bare: Weights) -> None:
    for tensor in bare:
        assert torch.equal(ours[tensor], bare[tensor]), (
            f"{name} and the bare loop ended with different {tensor}: this compares nothing"
        )


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------- other libraries


def _library(library: Library, workload: Workload, rounds: int) -> Row:
    """A library's rounds, between as many of the bare loop before and after them."""
    if not library.installed:
        remark = "not installed: pip install 'fedsieve[bench]'"
        return Row(name=library.name, value=None, unit="ms/round", remark=remark)
    before = _bare_seconds(workload, rounds)
    outcome = library.run(workload, WARM_UP + rounds)
    after = _bare_seconds(workload, rounds)
    check_outcome(outcome, workload)
    median = statistics.median(outcome.seconds[WARM_UP:])
    ratio = median / statistics.median([*before, *after])
    return Row(name=library.name, value=1000 * median, unit="ms/round", ratio=ratio)


def _bare_seconds(workload: Workload, rounds: int) -> list[float]:
    loop = bare_loop(workload)
    plans = [workload.plan_of(round) for round in range(rounds)]
    return [_seconds(lambda plan=plan: loop.round(plan)) for plan in plans]  # type: ignore[misc]


# ----------------------------------------------------------------------------------------- views


def _view_rate(threads: int) -> Row:
    """Strong views of random 32×32 colour photographs per second."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (VIEW_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    strong = view_set("cifar10").strong
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        taken = [_seconds(lambda: strong(images, rng_for(0, 0, 0, "views"))) for _ in range(12)]
    finally:
        torch.set_num_threads(before)
    return Row(
        name=f"strong views of 32×32×3, {threads} thread{'s' if threads > 1 else ''}",
        value=VIEW_IMAGES / statistics.median(taken[2:]),
        unit="images/s",
        bar=VIEW_RATE if threads == 2 else None,
    )
