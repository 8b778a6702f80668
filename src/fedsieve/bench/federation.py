"""What Flower costs: a round of the simulator, in Flower's messages, and over real SuperNodes.

The simulator and the federation take turns, round by round, in one process, so that both see the
same machine. What the federation takes more is ours: records, files at the sites, a checkpoint
every round. What real SuperNodes take more than that is Flower's: polling, new processes, copies.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsieve.bench.report import Bar, machine
from fedsieve.flower import client
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.loopback import Loopback
from fedsieve.flower.server import Engine
from fedsieve.flower.settings import Settings
from fedsieve.local.plan import Sgd
from fedsieve.methods import fedavg, fedgr
from fedsieve.models import ModelConfig
from fedsieve.recipe import EngineConfig, Recipe
from fedsieve.scenes import Noise, SceneConfig
from fedsieve.simulate.directory import SUMMARY, RunDirectory
from fedsieve.simulate.rounds import Simulation
from fedsieve.simulate.world import load_data
from fedsieve.types import Metrics

ONE_PROCESS = Bar(1.3, at_most=True)
"""A round in Flower's messages over the simulator's."""
PATIENCE_SECONDS = 1800.0

DIGITS = Recipe(
    name="digits",
    rounds=1000,
    clients_per_round=5,
    scene=SceneConfig(clients=20, noise=Noise(kind="symmetric", low=0.5, high=0.9)),
    sgd=Sgd(epochs=10, batch_size=40, lr=0.05, momentum=0.9, weight_decay=5e-4),
    method=fedgr.Config(warmup_rounds=0),
    engine=EngineConfig(device="cpu", workers=1),
)
"""The federation of the demonstration, with FedGR after its warm-up: sites have a memory."""

RESNET = Recipe(
    name="resnet18",
    rounds=1000,
    clients_per_round=3,
    scene=SceneConfig(clients=3),
    model=ModelConfig(name="resnet18"),
    sgd=Sgd(epochs=1, batch_size=64, lr=0.05),
    method=fedavg.Config(),
    engine=EngineConfig(device="cpu", workers=1),
)
"""Three sites that send a ResNet-18 each way, whatever they learn."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a round of one recipe, medians."""

    recipe: str
    rounds: int
    """Of the simulator, and as many of the federation in one process."""
    sites: int
    """Per round."""
    megabytes: float
    """To a site and back from it, per round."""
    simulator: float
    one_process: float
    ratio: float
    """Median of the ratios of neighbouring rounds."""
    supernodes: float | None
    """Over real SuperNodes; None where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class FederationReport:
    """What Flower costs."""

    costs: tuple[Costs, ...]
    real_rounds: int
    """Over SuperNodes."""
    machine: Mapping[str, Any]
    title: str = "A round on Flower: the simulator, Flower's messages in one process, SuperNodes"

    def header(self) -> Sequence[str]:
        return (
            "federation",
            "MB per site",
            "simulator",
            "in Flower's messages",
            "ratio",
            f"bar {ONE_PROCESS}",
            "over SuperNodes",
        )

    def cells(self) -> Sequence[Sequence[str]]:
        return [
            (
                f"{costs.recipe}, {costs.sites} sites",
                f"{costs.megabytes:.2f}",
                f"{costs.simulator:.3f} s",
                f"{costs.one_process:.3f} s",
                f"{costs.ratio:.2f} ×",
                "reached" if ONE_PROCESS.holds(costs.ratio) else "MISSED",
                "–" if costs.supernodes is None else f"{costs.supernodes:.1f} s",
            )
            for costs in self.costs
        ]

    def notes(self) -> Sequence[str]:
        rounds = " and ".join(f"{costs.rounds} ({costs.recipe})" for costs in self.costs)
        return (
            f"Medians of {rounds} rounds in one process, in which simulator and federation take "
            f"turns, and of {self.real_rounds} over SuperNodes.",
            "Ours is what the messages add in one process. SuperNodes add Flower's own share: both "
            "sides look for messages every few seconds, and each message starts a process that "
            "imports torch anew.",
        )


def measure_federation(rounds: int = 20, real_rounds: int = 4) -> FederationReport:
    """Measure both federations; real SuperNodes carry the large model only."""
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="fedsieve-bench-") as folder:
        place = Path(folder)
        costs = (
            measure_costs(DIGITS, place / "digits", rounds, 0),
            measure_costs(RESNET, place / "resnet", max(2, rounds // 5), real_rounds),
        )
    return FederationReport(costs=costs, real_rounds=real_rounds, machine=facts)


def measure_costs(recipe: Recipe, place: Path, rounds: int, real_rounds: int) -> Costs:
    simulated, federated = take_turns(recipe, place, rounds)
    sites = recipe.clients_per_round
    lines = RunDirectory(place / "federation").lines()
    moved = statistics.median(line["bytes_down"] + line["bytes_up"] for line in lines)
    return Costs(
        recipe=recipe.name,
        rounds=rounds,
        sites=sites,
        megabytes=moved / sites / 1e6,
        simulator=statistics.median(simulated),
        one_process=statistics.median(federated),
        ratio=statistics.median(f / s for f, s in zip(federated, simulated, strict=True)),
        supernodes=over_supernodes(recipe, place / "real", real_rounds) if real_rounds else None,
    )


def take_turns(recipe: Recipe, place: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round: by the simulator, and by a federation in this process."""
    nodes = {
        k + 1: {"client": k, "state-path": str(place / f"site-{k}")}
        for k in range(recipe.scene.clients)
    }
    settings = Settings(recipe, place / "federation", recipe.scene.clients, 600.0, 60.0)
    of_simulator, of_federation = RunDirectory(place / "simulator"), RunDirectory(settings.out)
    with of_simulator.lock(), of_federation.lock():
        simulation = Simulation.open(recipe, of_simulator, load_data(recipe))
        grid = InProcessGrid(client.app, nodes)
        engine = Engine.open(grid, settings, of_federation, lambda text: None)
        simulation.next_round()  # everything is used for the first time
        engine.next_round()
        turns = [(_seconds(simulation), _seconds(engine)) for _ in range(rounds)]
        simulation.runner.close()
    return [one for one, _ in turns], [other for _, other in turns]


def _seconds(of: Simulation | Engine) -> float:
    began = time.perf_counter()
    of.next_round()
    return time.perf_counter() - began


def over_supernodes(recipe: Recipe, place: Path, rounds: int) -> float:
    """Median seconds of a round with a process per site, after the first."""
    recipe = replace(recipe, rounds=rounds + 1)
    with Loopback(place) as fleet:
        for k in range(recipe.scene.clients):
            fleet.play_client(k)
        fleet.submit(recipe, place / "out")
        end = time.monotonic() + PATIENCE_SECONDS
        while not (place / "out" / SUMMARY).exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no end of the federation in {place}")
            time.sleep(0.5)
    lines = RunDirectory(place / "out").lines()
    seconds: list[Metrics] = [line["seconds"] for line in lines[1:]]
    return statistics.median(sum(laps.values()) for laps in seconds)
