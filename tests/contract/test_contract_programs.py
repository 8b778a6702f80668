"""Every method, whole rounds: what a slot of a GPU would replay gives what the plain loop does, on
a CPU, where rounding does not come in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_stage import stage_of

from fedsieve.methods.contract import Method
from fedsieve.serial import values_of
from fedsieve.simulate.world import Job, Result, run_client
from uncaptured import Slot, recorded


def test_programs_are_the_plain_loop(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of three rounds take turns on one slot, whose programs serve all of them."""
    stage = stage_of(method)
    slot, sizes = Slot(stage.runner.bench._setup), recorded(monkeypatch)
    server, states = stage.first_server(), dict[int, Any]()
    for round in range(3):
        selected = stage.select(server, round)
        for k in selected:
            job = Job(k, states.get(k), method.send(stage.recipe.method, server, round, k))
            plain, replayed = (
                run_client(stage.recipe, stage.world, bench, round, job)
                for bench in (stage.runner.bench, slot)
            )
            assert_alike(replayed, plain)
        server, results = stage.round(server, states, round, selected)
        states |= {k: result.state for k, result in results.items()}
    assert slot.programs
    assert sizes


def assert_alike(mine: Result, theirs: Result) -> None:
    for one, other in ((mine.up, theirs.up), (mine.state, theirs.state)):
        (tensors, numbers), (others, other_numbers) = values_of(one), values_of(other)
        assert set(tensors) == set(others)
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                tensor, others[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
        assert numbers == pytest.approx(other_numbers, rel=1e-4, abs=1e-5)
    assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
