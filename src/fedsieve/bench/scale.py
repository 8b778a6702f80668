"""Ten thousand clients on one machine: what memory and time depend on the number of clients.

Everything but the number of clients K stays the same: the n images per client, the clients per
round, the rounds, and the memory that images take: what a smaller federation lacks of them is held
as ballast. The method is FedGR, whose clients keep a model each between their rounds; only a few of
these states may stay in memory. Every K is measured in a process of its own, because peak memory
belongs to a process.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsieve.bench.report import Bar, machine, write_json, write_markdown
from fedsieve.errors import check
from fedsieve.local.plan import Sgd
from fedsieve.methods import fedgr
from fedsieve.recipe import DataConfig, EngineConfig, Recipe
from fedsieve.scenes import SceneConfig, load_scene
from fedsieve.scenes.noise import Noise
from fedsieve.sieve.gmm import fit_mixture
from fedsieve.simulate.control import Silent
from fedsieve.simulate.directory import SCENE, RunDirectory
from fedsieve.simulate.run import run

MEMORY = Bar(1.10, at_most=True)
"""Largest over smallest peak memory."""
MIXTURE_SECONDS = Bar(2.0, at_most=True)
PROXIES = 10_000_000
MEGABYTE = 2**20
CLASSES = 10
WRONG = 0.4
"""Share of wrong labels, so that the method has something to do."""


@dataclass(frozen=True, kw_only=True)
class ScaleWork:
    """What is the same for every number of clients."""

    per_round: int = 100
    samples: int = 20
    """n, images per client."""
    side: int = 14
    test_images: int = 1000
    last: int = 20
    """Rounds at the end that the clock counts: labels are refined there."""
    client_memory_mb: int = 8
    """What the clients' states may take of memory."""
    proxies: int = PROXIES
    seed: int = 1

    def recipe(self, clients: int, rounds: int, data: Path) -> Recipe:
        return Recipe(
            name="scale",
            seed=self.seed,
            rounds=rounds,
            clients_per_round=self.per_round,
            data=DataConfig(source="npz", path=data),
            scene=SceneConfig(
                clients=clients, noise=Noise(kind="symmetric", low=WRONG, high=WRONG)
            ),
            sgd=Sgd(lr=0.05, batch_size=32),
            method=fedgr.Config(warmup_rounds=max(0, rounds - self.last)),
            engine=EngineConfig(
                device="cpu",
                workers=1,
                client_memory_mb=self.client_memory_mb,
                keep_states=True,  # to see how large they are
            ),
        )

    @property
    def bytes_per_client(self) -> int:
        """Of images, and of labels in 64 bits."""
        return self.samples * (self.side**2 + 8)

    def save_data(self, clients: int, file: Path) -> None:
        """Blurred blots for `clients` clients: a bright square whose place tells the class."""
        rng = np.random.default_rng(self.seed)

        def split(n: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
            labels = rng.integers(CLASSES, size=n)
            images = rng.integers(0, 128, size=(n, self.side, self.side), dtype=np.uint8)
            size = self.side // 5
            for label in range(CLASSES):
                row, column = size * (label // 5) * 2, size * (label % 5)
                images[labels == label, row : row + size, column : column + size] += 100
            return images, labels

        x, y = split(clients * self.samples)
        x_test, y_test = split(self.test_images)
        np.savez(file, x=x, y=y, x_test=x_test, y_test=y_test)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One number of clients."""

    clients: int
    peak_mb: float
    """Most resident memory of the process."""
    ready_mb: float
    """The same before the first round: libraries, data and scene."""
    states_mb: float
    """All clients' states at the end, on disk."""
    round_seconds: float
    """Median of the last rounds, wall clock."""
    cpu_seconds: float
    """Median of the last rounds, processor time."""
    phases: Mapping[str, float]
    """Median seconds of each phase of the last rounds."""


@dataclass(frozen=True, kw_only=True)
class ScaleReport:
    measured: tuple[Measured, ...]
    work: ScaleWork
    rounds: int
    mixture_seconds: float
    """One fit over `work.proxies` losses."""
    machine: Mapping[str, Any]
    title: str = "Scale: many clients on one machine"

    @property
    def memory_ratio(self) -> float:
        peaks = [m.peak_mb for m in self.measured]
        return max(peaks) / min(peaks)

    def header(self) -> Sequence[str]:
        phases = [f"{phase}, ms" for phase in self.measured[0].phases]
        names = ("clients", "peak memory, MB", "states on disk, MB", "round, ms", "CPU, ms")
        return (*names, *phases)

    def cells(self) -> Sequence[Sequence[str]]:
        return [
            (
                f"{m.clients:,}",
                f"{m.peak_mb:,.0f}",
                f"{m.states_mb:,.0f}",
                *(f"{1000 * s:,.0f}" for s in (m.round_seconds, m.cpu_seconds)),
                *(f"{1000 * s:,.1f}" for s in m.phases.values()),
            )
            for m in self.measured
        ]

    def notes(self) -> Sequence[str]:
        work = self.work
        return (
            f"FedGR, {self.rounds} rounds of {work.per_round} clients with {work.samples} images "
            f"of {work.side}×{work.side} each; times are medians of the last "
            f"{min(work.last, self.rounds)} rounds; client states may take "
            f"{work.client_memory_mb} MB of memory.",
            f"Largest over smallest peak memory: {self.memory_ratio:.3f} (bar {MEMORY}: "
            f"{_verdict(MEMORY, self.memory_ratio)}).",
            f"Mixture fit over {work.proxies:,} losses: {self.mixture_seconds:.2f} s (bar "
            f"{MIXTURE_SECONDS}: {_verdict(MIXTURE_SECONDS, self.mixture_seconds)}).",
        )


def _verdict(bar: Bar, value: float) -> str:
    return "reached" if bar.holds(value) else "MISSED"


def measure_scale(
    counts: Sequence[int] = (100, 1000, 10_000),
    rounds: int | None = None,
    out: Path | None = None,
    work: ScaleWork | None = None,
) -> ScaleReport:
    """Measure each number of clients; `out` gets scale.json, scale.md and scale.png.

    Without `rounds` there are as many as let every client of the largest federation take part
    once, and `work.last` more.
    """
    work = work or ScaleWork()
    check(len(counts) > 0, "Give at least one number of clients to measure.")
    check(
        min(counts) >= work.per_round,
        f"Every number of clients must be at least {work.per_round}, the clients of a round.",
    )
    if rounds is None:
        rounds = -(-max(counts) // work.per_round) + work.last
    check(rounds >= 1, f"A scale needs at least 1 round to be measured, not {rounds}.")
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="fedsieve-scale-") as folder:
        measured = tuple(
            _in_new_process(work, clients, max(counts), rounds, Path(folder) / str(clients))
            for clients in counts
        )
    report = ScaleReport(
        measured=measured,
        work=work,
        rounds=rounds,
        mixture_seconds=_mixture_seconds(work.proxies),
        machine=facts,
    )
    if out is not None:
        write_json(report, out / "scale.json")
        write_markdown(report, out / "scale.md")
        draw(report, out / "scale.png")
    return report


# ----------------------------------------------------------------------------- one federation


def _in_new_process(
    work: ScaleWork, clients: int, most: int, rounds: int, folder: Path
) -> Measured:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_one, work, clients, most, rounds, folder).result()


def measure_one(work: ScaleWork, clients: int, most: int, rounds: int, folder: Path) -> Measured:
    """Run a federation in this process, with the images of `most` clients in memory."""
    folder.mkdir(parents=True)
    data = folder.with_suffix(".npz")
    work.save_data(clients, data)
    ballast = np.ones((most - clients) * work.bytes_per_client, dtype=np.uint8)
    recipe = work.recipe(clients, rounds, data)
    watch = _Watch()
    run(recipe, folder, watch)
    last = watch.laps[-work.last :]
    peak = peak_memory()
    del ballast
    sizes = load_scene(folder / SCENE).sizes
    assert (sizes == work.samples).all(), "clients of different federations must do equal work"
    states = RunDirectory(folder).client_folder.glob("*.safetensors")
    return Measured(
        clients=clients,
        peak_mb=peak / MEGABYTE,
        ready_mb=watch.ready / MEGABYTE,
        states_mb=sum(file.stat().st_size for file in states) / MEGABYTE,
        round_seconds=statistics.median(lap.wall for lap in last),
        cpu_seconds=statistics.median(lap.cpu for lap in last),
        phases={
            phase: statistics.median(lap.phases[phase] for lap in last) for phase in last[0].phases
        },
    )


@dataclass(frozen=True)
class _Lap:
    wall: float
    cpu: float
    phases: Mapping[str, float]


@dataclass
class _Watch(Silent):
    """A run's reporter that stops the time between rounds."""

    laps: list[_Lap] = field(default_factory=list)
    ready: int = 0
    _since: tuple[float, float] = (0.0, 0.0)

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self.ready = peak_memory()
        self._since = (time.perf_counter(), time.process_time())

    def finished_round(self, line: Mapping[str, Any]) -> None:
        now = (time.perf_counter(), time.process_time())
        self.laps.append(_Lap(now[0] - self._since[0], now[1] - self._since[1], line["seconds"]))
        self._since = now


def peak_memory() -> int:
    """Most bytes that this process has had in memory.

    Linux's VmHWM, because ru_maxrss of a new process starts with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _mixture_seconds(n: int) -> float:
    """Median of three fits to losses of which the larger ones belong to wrong labels."""
    rng = np.random.default_rng(0)
    wrong = rng.random(n) < WRONG
    losses = np.where(wrong, rng.normal(3.0, 1.0, n), rng.gamma(1.0, 0.3, n)).astype(np.float32)

    def fit() -> float:
        started = time.perf_counter()
        fit_mixture(losses)
        return time.perf_counter() - started

    return statistics.median(fit() for _ in range(3))


# -------------------------------------------------------------------------------------- picture


def draw(report: ScaleReport, file: Path) -> None:
    """Memory and time over the number of clients; told apart without colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients = [m.clients for m in report.measured]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, seconds = figure.subplots(1, 2)
    lines = {
        "peak": ([m.peak_mb for m in report.measured], "o-"),
        "before the first round": ([m.ready_mb for m in report.measured], "s:"),
        "states on disk": ([m.states_mb for m in report.measured], "^--"),
    }
    for name, (values, style) in lines.items():
        memory.plot(clients, values, style, color="black", label=name)
    memory.set_ylabel("MB")
    memory.set_title("Memory")
    phases = {name: [m.phases[name] for m in report.measured] for name in report.measured[0].phases}
    rest = [m.round_seconds - sum(m.phases.values()) for m in report.measured]
    below = np.zeros(len(clients))
    places = np.arange(len(clients))
    hatches = ("", "//", "..", "xx", "\\\\")
    for (name, values), hatch in zip({**phases, "rest": rest}.items(), hatches, strict=True):
        heights = np.maximum(0, values)
        seconds.bar(
            places, heights, 0.6, below, color="white", edgecolor="black", hatch=hatch, label=name
        )
        below += heights
    seconds.set_xticks(places, [f"{k:,}" for k in clients])
    seconds.set_ylabel("seconds per round")
    seconds.set_title("Time")
    memory.set_xscale("log")
    memory.set_xticks(clients, [f"{k:,}" for k in clients])
    memory.minorticks_off()
    memory.set_yscale("log")
    for panel in (memory, seconds):
        panel.set_xlabel("clients in the federation")
        panel.legend(frameon=False, fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
