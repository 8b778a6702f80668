"""Real processes that are killed: the round ends without the dead, the same command goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet
from flower_stage import three_clients

from fedsieve.methods import fedgr
from fedsieve.serial import decode
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from helpers import final_bytes, timeless_lines


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("killed")) as fleet:
        for client in range(3):
            fleet.play_client(client)
        yield fleet


def kill_server_app(fleet: Fleet) -> None:
    """kill -9 of the process that runs the ServerApp, and of no other."""
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _runs_server_app(entry, fleet)
    ]
    assert found
    for process in found:
        os.kill(process, signal.SIGKILL)


def _runs_server_app(entry: Path, fleet: Fleet) -> bool:
    try:
        command = (entry / "cmdline").read_bytes()
        home = (entry / "environ").read_bytes()
    except OSError:
        return False
    return b"serverapp" in command and f"FLWR_HOME={fleet.folder}".encode() in home


def test_server_and_superlink_die_and_the_same_command_goes_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    """First the ServerApp, then the SuperLink with all it holds; the weights are those of a
    simulation that nobody disturbed."""
    recipe, out = three_clients("fedgr", rounds=3), tmp_path / "out"
    fleet.submit(recipe, out)
    fleet.wait_for_round(out, 1)
    kill_server_app(fleet)
    fleet.submit(recipe, out)
    fleet.wait_for_round(out, 2)
    fleet.kill_link()
    assert not (out / "summary.json").exists()
    fleet.start_link()
    fleet.submit(recipe, out)
    fleet.wait_for_summary(out)
    run(recipe, tmp_path / "simulated")
    assert final_bytes(out) == final_bytes(tmp_path / "simulated")
    for real, simulated in zip(
        timeless_lines(out), timeless_lines(tmp_path / "simulated"), strict=True
    ):
        assert real | {"diagnostics": None} == simulated | {"diagnostics": None}


def test_a_killed_supernode_is_missed_and_rejoins_with_its_state(
    fleet: Fleet, tmp_path: Path
) -> None:
    recipe, out = three_clients("fedgr", rounds=4), tmp_path / "out"
    # The others may take as long as they need; Flower notices a death within a minute.
    fleet.submit(recipe, out, deadline=300.0)
    fleet.wait_for_round(out, 1)
    fleet.kill_node("node-2")
    fleet.play_client(2)
    fleet.wait_for_summary(out)
    lines = read_lines(out / "metrics.jsonl")
    missed = [line["round"] for line in lines if "client-2" in line["refused"]]
    assert missed
    assert missed[0] == 1
    assert all(set(line["refused"]) <= {"client-2"} for line in lines)
    assert len(missed) < 3  # it came back
    # Every round that it took part in added one observation to what it remembers.
    states = fleet.results(2, out).glob("state-*.safetensors")
    last = max(states, key=lambda file: int(file.stem.split("-")[1]))
    assert decode(fedgr.Client, last.read_bytes()).observations == 4 - len(missed)
    assert "began_anew" not in lines[-1]["client"]
