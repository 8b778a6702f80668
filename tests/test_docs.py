"""What the documents show works as shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedsieve.methods import METHODS
from fedsieve.recipe import (
    cells,
    parse_recipe,
    read_recipe,
    recipe_from_table,
    shipped_recipes,
    with_setting,
)
from fedsieve.simulate.run import run

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def test_the_example_of_a_new_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("add-a-method.md", "python")
    module = ModuleType("fedgce")
    monkeypatch.setitem(sys.modules, "fedgce", module)
    exec(compile(code, "add-a-method.md", "exec"), module.__dict__)
    monkeypatch.setitem(METHODS, "fedgce", module.METHOD)
    table = {"rounds": 1, "clients_per_round": 2, "scene": {"clients": 4}}
    recipe = recipe_from_table(with_setting(table, "method.name", "fedgce"))
    assert run(recipe, tmp_path)["method"] == "fedgce"


def test_the_example_of_a_grid_has_the_runs_that_its_page_tells() -> None:
    (text,) = blocks("recipes.md", "toml")
    grid = cells(parse_recipe(text, "losses.toml"))
    assert [cell.name for cell in grid] == [
        f"{loss}-{noise}" for loss in ("CE", "SCE", "w/o CE") for noise in ("symmetric", "clean")
    ]
    methods = [recipe_from_table(cell.table).method.name for cell in grid]
    assert methods == ["fedavg"] * 2 + ["fedsce"] * 4


def test_every_recipe_says_what_it_is_and_how_to_run_it() -> None:
    for name, text in shipped_recipes().items():
        assert text.startswith("# "), f"{name} has no first line for `fedsieve recipes`"
        command = "fedsieve run" if name == "demo" else f"fedsieve run {name}"
        assert f"#   {command}" in text, f"{name} does not say how to run it"
        assert read_recipe(name)["name"]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
