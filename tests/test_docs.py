"""What the documents show works as shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedsieve.methods import METHODS
from fedsieve.recipe import read_recipe, recipe_from_table, shipped_recipes, with_setting
from fedsieve.simulate.run import run

DOCS = Path(__file__).parent.parent / "docs"


def test_the_example_of_a_new_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "add-a-method.md").read_text(), re.DOTALL)
    module = ModuleType("fedgce")
    monkeypatch.setitem(sys.modules, "fedgce", module)
    exec(compile(code, "add-a-method.md", "exec"), module.__dict__)
    monkeypatch.setitem(METHODS, "fedgce", module.METHOD)
    table = {"rounds": 1, "clients_per_round": 2, "scene": {"clients": 4}}
    recipe = recipe_from_table(with_setting(table, "method.name", "fedgce"))
    assert run(recipe, tmp_path)["method"] == "fedgce"


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
