"""Settings of `[data]` that change what training makes of the images."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedsieve.data.sources.digits import load_digits
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.recipe import (
    cells,
    identity,
    recipe_from_table,
    recipe_table,
    shipped_recipes,
    with_setting,
)
from fedsieve.simulate.world import make_setup
from helpers import tiny_recipe


def test_views_and_normalisation_are_the_sources_own_unless_told() -> None:
    data = load_digits()
    setup = make_setup(tiny_recipe(), data)
    assert (setup.views, setup.mean, setup.std) == (view_set("digits"), data.mean, data.std)
    told = tiny_recipe(data={"views": "rotate15", "mean": [0.5], "std": [2]})
    setup = make_setup(told, data)
    assert (setup.views, setup.mean, setup.std) == (view_set("rotate15"), (0.5,), (2.0,))


def test_they_belong_to_the_run() -> None:
    told = tiny_recipe(data={"views": "flip", "mean": [0.5], "std": [2.0]})
    assert recipe_from_table(recipe_table(told)) == told
    assert identity(told)["data"] == {
        "source": "digits",
        "views": "flip",
        "mean": [0.5],
        "std": [2.0],
    }
    assert identity(tiny_recipe())["data"] == {"source": "digits"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"views": "rotate3"}, "There is no view set called 'rotate3'; did you mean rotate"),
        ({"mean": [0.5]}, "Give data.mean and data.std together, or neither."),
        ({"std": [0.5]}, "Give data.mean and data.std together, or neither."),
        ({"mean": [0.5], "std": [0.0]}, "cannot normalise images"),
        ({"mean": [math.inf], "std": [1.0]}, "cannot normalise images"),
        ({"mean": [0.1], "std": [math.nan]}, "cannot normalise images"),
        ({"path": "x"}, "^digits is built in and takes no path; leave it out"),
        ({"source": "digits", "path": "x"}, "^digits is built in and takes no path"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        tiny_recipe(data=settings)


def test_there_must_be_one_number_per_channel() -> None:
    recipe = tiny_recipe(data={"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2]})
    with pytest.raises(FedsieveError, match="one number for each of the 1 channels"):
        make_setup(recipe, load_digits())


def test_a_sweep_may_mix_sources_with_files_and_without() -> None:
    table = {
        "data": {"path": "files"},
        "sweep": {"data.source": ["mnist", "digits", "cifar10"]},
    }
    recipes = [recipe_from_table(cell.table) for cell in cells(table)]
    assert [recipe.data.path for recipe in recipes] == [Path("files"), None, Path("files")]
    saved = [recipe_from_table(recipe_table(recipe)) for recipe in recipes]
    assert saved == recipes


def test_an_embedded_source_drops_the_path_of_the_one_before_it() -> None:
    table = {"data": {"source": "mnist", "path": "files", "views": "flip"}}
    digits = with_setting(table, "data.source", "digits")
    assert digits == {"data": {"source": "digits", "views": "flip"}}
    assert with_setting(table, "data.source", "cifar10")["data"]["path"] == "files"
    with pytest.raises(FedsieveError, match="digits is built in and takes no path"):
        recipe_from_table(with_setting(digits, "data.path", "elsewhere"))


def test_no_shipped_recipe_gives_an_embedded_source_a_path() -> None:
    recipes = [
        recipe_from_table(cell.table)
        for text in shipped_recipes().values()
        for cell in cells(tomllib.loads(text))
    ]
    embedded = [recipe for recipe in recipes if recipe.data.source == "digits"]
    assert embedded
    assert all(recipe.data.path is None for recipe in embedded)
