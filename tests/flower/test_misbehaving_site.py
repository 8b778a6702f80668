"""Two of three sites, over real SuperNodes, break every rule there is; one of them comes late."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet
from flower_stage import three_clients
from spoiled import DEADLINE, ROUND_BY_ROUND

from fedsieve.flower import app_folder
from fedsieve.simulate.directory import read_lines

HERE = Path(__file__).parent


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """The app in which only client 0 is honest, and two of the three sites."""
    app = tmp_path / "app"
    shutil.copytree(app_folder(), app, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "spoiled.py", app / "fedsieve_app" / "spoiled.py")
    shutil.copy(HERE / "spoiling_client_app.py", app / "fedsieve_app" / "client_app.py")
    with Fleet(tmp_path / "fleet") as fleet:
        fleet.app = app
        fleet.play_client(0)
        fleet.play_client(1)
        yield fleet


def test_they_are_waited_for_and_then_refused_in_every_round(fleet: Fleet, tmp_path: Path) -> None:
    rounds, out = len(ROUND_BY_ROUND), tmp_path / "out"
    fleet.submit(three_clients("fedavg", rounds=rounds), out, deadline=DEADLINE)
    fleet.wait_until(
        lambda: "2 of 3 sites (client-0, client-1) are connected" in fleet.said_by_server(),
        "the server to say that a site is missing",
        pause=2.0,  # each look starts a process, and the sites need the processor to start
    )
    fleet.play_client(2)
    summary = fleet.wait_for_summary(out)
    lines = read_lines(out / "metrics.jsonl")
    for line, misdeeds in zip(lines, ROUND_BY_ROUND, strict=True):
        assert list(line["refused"]) == ["client-1", "client-2"]
        for client, (_, sentence) in misdeeds.items():
            assert sentence in line["refused"][f"client-{client}"]
        # The honest site alone has moved the global model.
        assert line["drift"] > 0
    assert summary["refused_updates"] == 2 * rounds
