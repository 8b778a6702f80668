"""One recipe, simulated and over real SuperNodes: the same global weights, bit for bit.

What the first site sends is recorded, and looked through for its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet, Recorder
from flower_stage import Stage, small_recipe, three_clients

from fedsieve.data.sources.digits import load_digits
from fedsieve.methods import METHODS, fedgr
from fedsieve.recipe import Recipe
from fedsieve.serial import decode
from fedsieve.simulate.run import run
from fedsieve.simulate.world import make_world, scene_of
from fedsieve.types import Shard
from helpers import final_bytes, timeless_lines


@dataclass(frozen=True)
class RealRun:
    """A recipe that three real sites have carried out."""

    recipe: Recipe
    out: Path
    summary: dict[str, Any]
    sent: bytes
    """Every byte that client 0 sent meanwhile."""
    kept: tuple[Path, ...]
    """Client → the folder in which it keeps its state and its results."""


@pytest.fixture(scope="module")
def listened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Recorder]]:
    """A SuperLink with three SuperNodes that play clients; what the first one sends is recorded."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        recorder = Recorder(fleet.port)
        fleet.play_client(0, recorder.port)
        fleet.play_client(1)
        fleet.play_client(2)
        yield fleet, recorder
        recorder.close()


@pytest.fixture(scope="module")
def real_run(
    listened: tuple[Fleet, Recorder], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], RealRun]:
    """Method → its run; each is carried out once, when the first test asks for it."""
    fleet, recorder = listened

    @cache
    def carried_out(name: str) -> RealRun:
        # A second round shows that a site has kept its state; some methods have none.
        recipe = three_clients(name, rounds=2 if fields(METHODS[name].client) else 1)
        out = tmp_path_factory.mktemp("real") / name
        recorder.forget()
        summary = fleet.run(recipe, out)
        kept = tuple(fleet.results(client, out) for client in range(3))
        return RealRun(recipe, out, summary, recorder.sent(), kept)

    return carried_out


@pytest.mark.parametrize("name", sorted(METHODS))
def test_real_sites_give_the_weights_of_the_simulation(
    name: str, real_run: Callable[[str], RealRun], tmp_path: Path
) -> None:
    real = real_run(name)
    run(real.recipe, tmp_path)
    assert real.summary["without_results"] == []
    assert final_bytes(real.out) == final_bytes(tmp_path)
    for line, simulated in zip(timeless_lines(real.out), timeless_lines(tmp_path), strict=True):
        assert line | {"diagnostics": None} == simulated | {"diagnostics": None}
    for folder in real.kept:
        assert final_bytes(folder) == final_bytes(real.out)


def test_two_sites_at_a_time_report_are_judged_and_taught(tmp_path: Path) -> None:
    """FedNoRo's later phases, which the one round above does not come to; in one process."""
    stage, recipe = Stage(tmp_path), small_recipe("fednoro", clients_per_round=2, rounds=6)
    stage.run(recipe)
    run(recipe, tmp_path / "simulated")
    assert final_bytes(stage.out) == final_bytes(tmp_path / "simulated")
    lines = timeless_lines(stage.out)
    assert ["noisy_clients" in line["server"] for line in lines] == [False, True] + 4 * [False]
    assert lines[1]["bytes_down"] > 1.9 * lines[0]["bytes_down"], "the judge comes along"
    assert max(line["client"]["distillation"] for line in lines[2:]) > 0


def shard_of(recipe: Recipe, client: int) -> Shard:
    data = load_digits()
    return make_world(data, scene_of(recipe, data), torch.device("cpu")).shard(client)


def traces_of_samples(shard: Shard) -> list[bytes]:
    """Bytes that would betray samples: pixels of any image as bytes or floats, and the labels in
    any usual width."""
    traces = []
    for image in shard.images.flatten(1).numpy():
        traces.append(image.tobytes())
        traces.append((image / np.float32(255)).astype(np.float32).tobytes()[4:-4])
    labels = shard.labels.numpy()
    widths = (np.uint8, np.int16, np.int32, np.int64, np.float32)
    traces += [labels[:16].astype(kind).tobytes() for kind in widths]
    traces.append(b", ".join(str(label).encode() for label in labels[:16]))
    return traces


def test_on_the_wire_are_the_declared_values_and_no_sample(
    real_run: Callable[[str], RealRun],
) -> None:
    real = real_run("fedgr")
    shard = shard_of(real.recipe, 0)
    # What Up declares is there for every round, so the recording is whole and not in disguise.
    states = [
        decode(fedgr.Client, (real.kept[0] / f"state-{round}.safetensors").read_bytes())
        for round in range(real.recipe.rounds)
    ]
    assert [state.observations for state in states] == [1, 2]
    for state in states:
        assert state.mean_loss.numpy().tobytes() in real.sent
    assert real.sent.count(shard.ids.numpy().tobytes()) >= real.recipe.rounds
    for trace in traces_of_samples(shard):
        assert trace not in real.sent
    assert b"/site-0" not in real.sent
