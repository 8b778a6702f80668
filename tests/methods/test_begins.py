"""What is said of a run that ends before its method has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsieve.cli import main
from fedsieve.methods import METHODS
from fedsieve.methods.contract import Federation
from fedsieve.recipe import cells, read_recipe, recipe_from_table, shipped_recipes
from fedsieve.simulate.control import RunPausedError, Silent
from fedsieve.simulate.run import run
from helpers import NEEDED, tiny_recipe, with_engine

FIRST = {
    "feddiv": 5 * 20,  # five walks through 20 clients
    "feddividemix": 100,
    "fedes": 10 * 5 - 1,  # the last of ten passes of five rounds, which estimates
    "fedgr": 10 * 5,
    "fednoro": 10 + 5,  # ten rounds, and one pass in which all clients tell their losses
}
"""The first round of each method that has a warm-up, from 0: 20 clients, 4 a round."""


@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_must_be_longer_than_the_warm_up(name: str) -> None:
    method, first = METHODS[name], FIRST.get(name, 0)
    cfg: Any = method.config(name=name, **NEEDED.get(name, {}))

    def said(rounds: int) -> str | None:
        return method.all_warm_up(cfg, Federation((50,) * 20, 4, rounds, 10))

    assert said(first + 1) is None
    if first:
        sentence = said(first)
        assert sentence is not None
        assert sentence.startswith(
            f"{name} begins with round {first + 1}, but this run ends after round {first}: "
        )


@pytest.mark.parametrize("name", list(shipped_recipes()))
def test_no_recipe_ends_in_its_warm_up(name: str) -> None:
    for cell in cells(read_recipe(name)):
        recipe = recipe_from_table(cell.table)
        method, sizes = METHODS[recipe.method.name], (50,) * recipe.scene.clients
        federation = Federation(sizes, recipe.clients_per_round, recipe.rounds, 10)
        assert method.all_warm_up(recipe.method, federation) is None


class Told(Silent):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def cautioned(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_whoever_watches_is_told_when_it_starts_and_when_it_goes_on(tmp_path: Path) -> None:
    """Six clients, five walks: 30 rounds."""
    for rounds, times in ((4, 2), (31, 0)):
        recipe, told, out = tiny_recipe("feddiv", rounds=rounds), Told(), tmp_path / str(rounds)
        for done in (1, 2):
            with pytest.raises(RunPausedError):
                run(with_engine(recipe, stop_after_rounds=done), out, told)
        assert len(told.sentences) == times
        assert all("begins with round 31, but" in sentence for sentence in told.sentences)


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--method.name feddiv --rounds 2 --scene.noise.kind none"
    status = main(["run", *options.split(), "--out", str(tmp_path / "run")])
    assert status == 0
    assert (
        "feddiv begins with round 101, but this run ends after round 2" in capsys.readouterr().err
    )
