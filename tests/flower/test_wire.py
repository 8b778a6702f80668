"""What leaves a site: its `Up` and metrics, and nothing else about its samples."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_stage import SpoiledGrid, Stage, small_recipe, untouched

from fedsieve.flower.messages import FINISH, HELLO, ROUND, Hello, Receipt
from fedsieve.flower.records import from_content, metrics_of
from fedsieve.methods import METHODS


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_reply_is_up_and_metrics_and_nothing_else(name: str, tmp_path: Path) -> None:
    """Every byte of every reply is accounted for by a declared field."""
    stage = Stage(tmp_path)
    grid = SpoiledGrid(stage.nodes(), untouched)
    recipe = small_recipe(name)
    stage.run(recipe, grid)
    method = METHODS[name]
    kinds = {
        HELLO: {"hello": Hello},
        ROUND: {"up": method.up, "receipt": Receipt},
        FINISH: {"receipt": Receipt},
    }
    asked = [message.metadata.message_type for message, _ in grid.seen]
    assert asked.count(ROUND) >= 3  # a method may choose fewer than it may have
    for message, reply in grid.seen:
        assert reply is not None
        expected = kinds[message.metadata.message_type]
        from_content(reply.content, expected)  # refuses whatever is not a field of these
        if message.metadata.message_type != ROUND:
            assert "metrics" not in reply.content
        assert all(isinstance(value, float) for value in metrics_of(reply.content).values())


def test_what_a_site_says_of_itself_is_a_handful_of_numbers() -> None:
    """A privacy review reads this list."""
    assert [field.name for field in fields(Hello)] == [
        "site", "client", "samples", "classes", "shape", "mean", "std",
    ]  # fmt: skip
