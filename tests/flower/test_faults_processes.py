"""Real processes that are killed: the round ends without the dead, the same command goes on.

One story, because Flower takes a minute to notice that a site is gone; each test looks at one part.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet
from flower_stage import three_clients

from fedsieve.methods import fedgr
from fedsieve.serial import decode
from fedsieve.simulate.control import RunInterruptedError
from fedsieve.simulate.directory import RunDirectory
from fedsieve.simulate.run import run
from helpers import timeless_lines, with_engine

UNDISTURBED = 3
"""Rounds in which no site dies: before the ServerApp's death, after it, and after the SuperLink's.
Then comes one that the killed site misses, and one for which it is back."""
ROUNDS = UNDISTURBED + 2
RECIPE = three_clients("fedgr", rounds=ROUNDS)
DEADLINE = 300.0
"""The sites that live may take as long as they need; Flower notices a death within a minute."""


@dataclass
class Story:
    out: Path
    rounds_at: dict[str, int] = field(default_factory=dict)
    """Who died → rounds that were done by then."""
    was_finished_at: dict[str, bool] = field(default_factory=dict)
    server_state: bytes = b""
    """What the server had saved after the undisturbed rounds."""
    remembered: fedgr.Client | None = None
    """What the killed site knows in the end."""

    def died(self, who: str) -> None:
        done = RunDirectory(self.out).last_checkpoint()
        self.rounds_at[who] = done.rounds_done if done else 0
        self.was_finished_at[who] = (self.out / "summary.json").exists()

    def lines(self) -> list[dict[str, Any]]:
        return timeless_lines(self.out)

    def missed(self) -> list[int]:
        """The rounds without the killed site."""
        return [line["round"] for line in self.lines() if "client-2" in line["refused"]]


def tell(story: Story, fleet: Fleet) -> None:
    out = story.out
    fleet.submit(RECIPE, out, deadline=DEADLINE)
    fleet.wait_for_round(out, 1)
    kill_server_app(fleet)
    story.died("ServerApp")

    fleet.submit(RECIPE, out, deadline=DEADLINE)
    fleet.wait_for_round(out, 2)
    fleet.kill_link()
    story.died("SuperLink")

    fleet.start_link()
    fleet.submit(RECIPE, out, deadline=DEADLINE)
    fleet.wait_for_round(out, UNDISTURBED)
    fleet.kill_node("node-2")
    story.died("SuperNode")
    # It stays until the next round ends, and that one waits for the dead.
    story.server_state = server_file(out).read_bytes()

    fleet.play_client(2)
    fleet.wait_for_summary(out)
    states = fleet.results(2, out).glob("state-*.safetensors")
    last = max(states, key=lambda file: int(file.stem.split("-")[1]))
    story.remembered = decode(fedgr.Client, last.read_bytes())


def server_file(out: Path) -> Path:
    return out / "checkpoint" / f"server-{UNDISTURBED}.safetensors"


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


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("killed")) as fleet:
        for client in range(3):
            fleet.play_client(client)
        yield fleet


@pytest.fixture(scope="module")
def story(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("story") / "out")
    tell(story, fleet)
    return story


def test_the_same_command_goes_on_after_the_server_and_the_superlink_died(story: Story) -> None:
    assert story.rounds_at == {"ServerApp": 1, "SuperLink": 2, "SuperNode": UNDISTURBED}
    assert not any(story.was_finished_at.values())
    assert [line["round"] for line in story.lines()] == list(range(ROUNDS))


def test_their_deaths_change_no_bit(story: Story, tmp_path: Path) -> None:
    """Weights and metrics are those of a simulation that nobody disturbed."""
    with pytest.raises(RunInterruptedError):
        run(with_engine(RECIPE, stop_after_rounds=UNDISTURBED), tmp_path)
    assert story.server_state == server_file(tmp_path).read_bytes()
    real = story.lines()[:UNDISTURBED]
    for line, simulated in zip(real, timeless_lines(tmp_path), strict=True):
        assert line | {"diagnostics": None} == simulated | {"diagnostics": None}


def test_a_killed_supernode_is_missed_by_name_and_comes_back(story: Story) -> None:
    assert story.missed() == [UNDISTURBED]
    assert all(set(line["refused"]) <= {"client-2"} for line in story.lines())
    assert all(line["clients"] == [0, 1, 2] for line in story.lines())


def test_it_comes_back_with_its_state(story: Story) -> None:
    """Every round that it took part in added one observation to what it remembers."""
    assert story.remembered is not None
    assert story.remembered.observations == ROUNDS - len(story.missed())
    assert "began_anew" not in story.lines()[-1]["client"]
