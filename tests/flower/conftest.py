"""Tests of the federation on Flower; without flwr they are skipped, and said to be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # for the stage of every method


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flower)
            if {"fleet", "listened"} & set(getattr(item, "fixturenames", ())):
                item.add_marker(pytest.mark.processes)
    # The longest first, so that none is left alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
