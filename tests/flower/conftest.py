"""Tests of the federation on Flower; without flwr they are skipped, and said to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from flower_processes import Fleet, Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # for the stage of every method


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flower)
            if {"fleet", "listened"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.processes)
    # The longest first, so that none is left alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(scope="session")
def listened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Recorder]]:
    """A SuperLink with three SuperNodes that play clients; what the first one sends is recorded."""
    from flower_processes import Fleet, Recorder

    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        recorder = Recorder(fleet.port)
        fleet.play_client(0, recorder.port)
        fleet.play_client(1)
        fleet.play_client(2)
        yield fleet, recorder
        recorder.close()
