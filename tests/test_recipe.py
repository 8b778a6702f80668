"""Recipes: reading, refusing, sweeping."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.cli.grid import expand
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Sgd
from fedsieve.methods import METHODS, fedavg, feddiv, fedprox
from fedsieve.models import ModelConfig
from fedsieve.recipe import (
    Cell,
    DataConfig,
    EngineConfig,
    Recipe,
    cells,
    identity,
    read_recipe,
    recipe_from_table,
    recipe_table,
    shipped_recipes,
    with_setting,
)
from fedsieve.scenes import Noise, Partition, SceneConfig
from helpers import NEEDED


def refusal(table: dict[str, Any]) -> str:
    with pytest.raises(FedsieveError) as caught:
        recipe_from_table(table)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------- tables


def test_an_empty_table_is_the_default_recipe() -> None:
    assert recipe_from_table({}) == Recipe()
    assert recipe_from_table({}).method == fedavg.Config()


def test_the_name_of_the_method_decides_which_settings_it_takes() -> None:
    recipe = recipe_from_table({"method": {"name": "fedprox", "mu": 0.25}})
    assert recipe.method == fedprox.Config(mu=0.25)
    assert refusal({"method": {"name": "fedavg", "mu": 0.25}}).startswith(
        "There is no setting 'method.mu'"
    )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"ruonds": 3}, "There is no setting 'ruonds'; did you mean 'rounds'?"),
        ({"sgd": {"lrr": 1.0}}, "There is no setting 'sgd.lrr'; did you mean 'lr'?"),
        ({"rounds": "3"}, "rounds must be a whole number, not '3'."),
        ({"rounds": 0}, "rounds must be at least 1, not 0."),
        ({"clients_per_round": 0}, "clients_per_round must be at least 1, not 0."),
        ({"seed": -1}, "seed must be in [0, 2^32), not -1."),
        ({"seed": 2**32}, f"seed must be in [0, 2^32), not {2**32}."),
        (
            {"clients_per_round": 7, "scene": {"clients": 6}},
            "clients_per_round is 7, but the scene has only 6 clients.",
        ),
        (
            {"precision": "fp23"},
            "precision must be one of 'fp32', 'tf32', 'bf16', not 'fp23'; did you mean 'fp32'?",
        ),
        ({"engine": {"workers": -1}}, "engine.workers must be at least 0, not -1."),
        ({"engine": {"slots": -1}}, "engine.slots must be at least 0, not -1."),
        (
            {"engine": {"memorisation_every": -1}},
            "engine.memorisation_every must be at least 0, not -1.",
        ),
        (
            {"engine": {"checkpoint_rounds": 0}},
            "engine.checkpoint_rounds must be at least 1, not 0.",
        ),
        (
            {"engine": {"client_memory_mb": -1}},
            "engine.client_memory_mb must be at least 0, not -1.",
        ),
        ({"method": {"name": "fedprox", "mu": -1.0}}, "method.mu must be at least 0, not -1.0."),
        (
            {"method": "fedavg"},
            "method must be a table with a name, such as [method] name = 'fedavg'.",
        ),
    ],
    ids=str,
)
def test_a_wrong_recipe_is_refused_in_one_sentence(table: dict[str, Any], sentence: str) -> None:
    assert refusal(table) == sentence


def test_an_unknown_method_is_refused_with_the_nearest_right_one() -> None:
    assert "did you mean 'fedprox'?" in refusal({"method": {"name": "fedprocks"}})
    assert refusal({"method": {"name": "zzz"}}).startswith("There is no method 'zzz'")


NOISES = st.sampled_from(
    [
        Noise(),
        Noise(kind="symmetric", low=0.25),
        Noise(kind="asymmetric", clients="fixed", rate=0.3, flip_to="previous"),
        Noise(kind="matrix", matrix=((0.5, 0.5), (0.25, 0.75))),
        Noise(kind="file", path="labels.csv", column="label"),
    ]
)
SCENES = st.builds(
    SceneConfig,
    clients=st.integers(10, 200),
    partition=st.sampled_from([Partition(), Partition(kind="dirichlet", alpha=0.3, min_size=5)]),
    noise=NOISES,
)
RECIPES = st.builds(
    Recipe,
    name=st.text("abc-", max_size=5),
    seed=st.integers(0, 2**32 - 1),
    rounds=st.integers(1, 1000),
    clients_per_round=st.integers(1, 10),
    precision=st.sampled_from(["fp32", "tf32", "bf16"]),
    data=st.sampled_from([DataConfig(), DataConfig(source="npz", path=Path("a/b.npz"))]),
    scene=SCENES,
    model=st.sampled_from([ModelConfig(), ModelConfig(name="cnn9", head="mlp")]),
    sgd=st.builds(
        Sgd,
        epochs=st.integers(1, 10),
        lr=st.floats(1e-6, 10.0),
        momentum=st.floats(0, 0.99),
        tail=st.sampled_from(["keep", "drop", "pad"]),
    ),
    method=st.just(fedavg.Config()) | st.builds(fedprox.Config, mu=st.floats(0, 10)),
    engine=st.builds(
        EngineConfig,
        workers=st.integers(0, 8),
        stop_after_minutes=st.none() | st.floats(0, 100),
        client_lines=st.booleans(),
    ),
)


@settings(max_examples=50, deadline=None)
@given(RECIPES)
def test_a_recipe_survives_its_table_and_its_toml(recipe: Recipe) -> None:
    table = recipe_table(recipe)
    assert recipe_from_table(table) == recipe
    assert recipe_from_table(tomllib.loads(tomli_w.dumps(table))) == recipe


@settings(max_examples=20, deadline=None)
@given(RECIPES)
def test_the_engine_is_no_part_of_what_decides_a_result(recipe: Recipe) -> None:
    other = replace(recipe, engine=EngineConfig(device="cpu", checkpoint_rounds=7))
    assert identity(other) == identity(recipe)
    assert identity(replace(recipe, seed=(recipe.seed + 1) % 2**32)) != identity(recipe)
    assert set(recipe_table(recipe)) - set(identity(recipe)) == {"engine"}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_default_settings_of_every_method_survive_their_table(name: str) -> None:
    recipe = recipe_from_table({"method": {"name": name, **NEEDED.get(name, {})}})
    assert type(recipe.method) is METHODS[name].config
    assert recipe_from_table(recipe_table(recipe)) == recipe


# -------------------------------------------------------------------------------------- reading


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seed = 5\n[sgd]\nlr = 0.5\n", encoding="utf-8")
    assert read_recipe(file) == {"seed": 5, "sgd": {"lr": 0.5}}
    assert read_recipe(str(file)) == read_recipe(file)
    file.write_text("seed = 5\n", encoding="utf-8-sig")  # as some editors of Windows do
    assert read_recipe(file) == {"seed": 5}


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("seed = = 5", encoding="utf-8")
    with pytest.raises(FedsieveError, match=r"mine\.toml is not valid TOML: .*\.$"):
        read_recipe(file)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FedsieveError, match=r"mine\.toml is not a text file in UTF-8"):
        read_recipe(file)


def test_the_demo_is_what_runs_without_a_name() -> None:
    demo = tomllib.loads(shipped_recipes()["demo"])
    assert demo == read_recipe(None) == read_recipe("demo") == read_recipe("recipes/demo.toml")


def test_a_name_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(FedsieveError, match=r"There is no recipe 'demi'; did you mean 'demo'\?"):
        read_recipe("demi")


def test_the_beginning_of_names_is_no_recipe_but_leads_to_them() -> None:
    found = [name for name in shipped_recipes() if name.startswith("fedgr/table1")]
    with pytest.raises(FedsieveError, match=rf"'fedgr/table1', but {len(found)} whose names begin"):
        read_recipe("fedgr/table1")


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_is_valid_in_all_its_cells(name: str) -> None:
    runs = cells(read_recipe(name))
    assert len({run.name for run in runs}) == len(runs), "two cells would share a folder"
    for run in runs:
        recipe = recipe_from_table(run.table)
        assert recipe_from_table(recipe_table(recipe)) == recipe


# --------------------------------------------------------------------------------------- sweeps


def test_a_recipe_without_sweep_is_one_run() -> None:
    assert cells({"seed": 4}) == [Cell("", {"seed": 4})]


def test_a_sweep_is_a_grid_whose_last_axis_turns_fastest() -> None:
    table = {"rounds": 5, "sweep": {"method.name": ["fedavg", "fedprox"], "seed": [1, 2, 3]}}
    runs = cells(table)
    assert [run.name for run in runs] == [
        "fedavg-seed1",
        "fedavg-seed2",
        "fedavg-seed3",
        "fedprox-seed1",
        "fedprox-seed2",
        "fedprox-seed3",
    ]
    assert runs[4].table == {"rounds": 5, "method": {"name": "fedprox"}, "seed": 2}
    assert table["rounds"] == 5, "the table handed in stays as it was"
    assert "sweep" in table


def test_a_value_of_a_sweep_may_set_several_things_under_a_label() -> None:
    table = {
        "scene": {"clients": 9, "noise": {"kind": "symmetric", "low": 0.5}},
        "sweep": {
            "noise": [
                {"label": "half", "scene.noise.high": 0.5},
                {"label": "none", "scene.noise": {"kind": "none"}, "seed": 8},
            ],
            "sgd.lr": [0.1],
        },
    }
    half, none = cells(table)
    assert (half.name, none.name) == ("half-lr0.1", "none-lr0.1")
    assert half.table == {
        "scene": {"clients": 9, "noise": {"kind": "symmetric", "low": 0.5, "high": 0.5}},
        "sgd": {"lr": 0.1},
    }
    assert none.table == {
        "scene": {"clients": 9, "noise": {"kind": "none"}},
        "sgd": {"lr": 0.1},
        "seed": 8,
    }


@pytest.mark.parametrize(
    ("sweep", "sentence"),
    [
        ([1], "sweep must be a table of dotted settings and lists."),
        ({"seed": 1}, "sweep.seed must be a list of values."),
        ({"seed": []}, "sweep.seed must be a list of values."),
        ({"seed": [{"seed": 1}]}, "A table in sweep.seed needs a label."),
    ],
    ids=str,
)
def test_a_wrong_sweep_is_refused(sweep: Any, sentence: str) -> None:
    with pytest.raises(FedsieveError) as caught:
        cells({"sweep": sweep})
    assert str(caught.value) == sentence


def test_cells_that_would_share_a_name_are_refused() -> None:
    with pytest.raises(FedsieveError, match="two runs called 'same'"):
        cells({"sweep": {"x": [{"label": "same", "seed": 1}, {"label": "same", "seed": 2}]}})


def test_another_method_drops_the_settings_of_the_old_one() -> None:
    table = {"method": {"name": "fedprox", "mu": 0.1}, "seed": 1}
    assert with_setting(table, "method.name", "fedavg") == {
        "method": {"name": "fedavg"},
        "seed": 1,
    }
    assert with_setting(table, "method.name", "fedprox") == table
    assert with_setting(table, "method.mu", 2.0)["method"] == {"name": "fedprox", "mu": 2.0}
    assert table == {"method": {"name": "fedprox", "mu": 0.1}, "seed": 1}


def test_a_setting_makes_the_tables_on_its_way() -> None:
    assert with_setting({}, "a.b.c", 1) == {"a": {"b": {"c": 1}}}
    assert with_setting({"a": 1}, "a", 2) == {"a": 2}


def test_a_value_has_no_settings_inside() -> None:
    with pytest.raises(FedsieveError, match=r"seed is a value, so seed\.x cannot be set"):
        with_setting({"seed": 1}, "seed.x", 2)


# -------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].config.presets])
def test_another_preset_makes_a_saved_recipe_that_presets(name: str) -> None:
    presets = list(METHODS[name].config.presets)
    for old, new in ((old, new) for old in presets for new in presets):
        given = {"name": name, **NEEDED.get(name, {})}
        saved = recipe_table(recipe_from_table({"method": {**given, "preset": old}}))
        changed = recipe_from_table(with_setting(saved, "method.preset", new))
        assert changed == recipe_from_table({"method": {**given, "preset": new}})


def test_a_switch_of_a_saved_recipe_that_was_set_by_itself_stays() -> None:
    saved = recipe_table(recipe_from_table({"method": {"name": "feddiv", "xi": 0.1}}))
    changed = recipe_from_table(with_setting(saved, "method.preset", "authors")).method
    assert changed == feddiv.Config(preset="authors", xi=0.1)
    (run,) = expand(saved, {"method.zeta": 0.75, "method.preset": "authors"}, ()).runs
    assert run.recipe.method == feddiv.Config(preset="authors", xi=0.1, zeta=0.75)
