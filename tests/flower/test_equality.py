"""One recipe, simulated and over real SuperNodes: the same global weights, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_processes import Fleet, Recorder
from flower_stage import three_clients

from fedsieve.methods import METHODS
from fedsieve.simulate.run import run
from helpers import final_bytes, timeless_lines


@pytest.mark.parametrize("name", sorted(METHODS))
def test_real_sites_give_the_weights_of_the_simulation(
    name: str, listened: tuple[Fleet, Recorder], tmp_path: Path
) -> None:
    fleet, _ = listened
    # A second round shows that a site has kept its state; some methods have none.
    recipe = three_clients(name, rounds=2 if fields(METHODS[name].client) else 1)
    summary = fleet.run(recipe, tmp_path / "real")
    run(recipe, tmp_path / "simulated")
    assert summary["without_results"] == []
    assert final_bytes(tmp_path / "real") == final_bytes(tmp_path / "simulated")
    for real, simulated in zip(
        timeless_lines(tmp_path / "real"), timeless_lines(tmp_path / "simulated"), strict=True
    ):
        assert real | {"diagnostics": None} == simulated | {"diagnostics": None}
    for client in range(3):
        own = fleet.results(client, tmp_path / "real") / "model.safetensors"
        assert own.read_bytes() == final_bytes(tmp_path / "real")
