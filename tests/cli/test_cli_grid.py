"""Which runs a recipe and a command line ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fedsieve.cli.grid import expand, read_command, slug
from fedsieve.cli.options import POSITIONAL
from fedsieve.errors import FedsieveError

BASE = {
    "name": "grid",
    "clients_per_round": 2,
    "scene": {"clients": 4, "noise": {"kind": "symmetric", "low": 0.5, "high": 0.9}},
    "method": {"name": "fedprox", "mu": 0.3},
}
SWEPT = BASE | {
    "sweep": {
        "method.name": ["fedavg", "fedprox"],
        "noise": [
            {"label": "noisy", "scene.noise.kind": "symmetric"},
            {"label": "clean", "scene.noise": {"kind": "none"}},
        ],
    }
}


def names(grid):
    return [run.name for run in grid.runs]


def test_one_run_without_a_sweep():
    grid = expand(BASE, {"sgd.lr": 0.2}, ())
    (run,) = grid.runs
    assert run.name == "fedprox-seed1"
    assert (run.recipe.sgd.lr, run.recipe.method.mu) == (0.2, 0.3)
    assert grid.is_single
    assert grid.folder_of(run, Path("x")) == Path("x")
    assert grid.folder_of(run, None).parent.parent == Path("runs")


def test_an_option_takes_effect_in_every_cell():
    grid = expand(SWEPT, {"rounds": 7, "seed": 5}, ())
    assert names(grid) == [
        "fedavg-noisy-seed5",
        "fedavg-clean-seed5",
        "fedprox-noisy-seed5",
        "fedprox-clean-seed5",
    ]
    assert {run.recipe.rounds for run in grid.runs} == {7}
    assert not grid.is_single
    assert grid.folder_of(grid.runs[0], Path("x")) == Path("x/fedavg-noisy-seed5")


def test_an_option_takes_the_place_of_the_axis_that_sweeps_it():
    grid = expand(SWEPT, {"method.name": "fedprox"}, ())
    assert names(grid) == ["noisy-seed1", "clean-seed1"]
    assert {run.recipe.method.name for run in grid.runs} == {"fedprox"}
    # "noise" sweeps a whole table, so one setting of it is enough.
    grid = expand(SWEPT, {"scene.noise.low": 0.8}, ())
    assert names(grid) == ["fedavg-seed1", "fedprox-seed1"]
    assert {run.recipe.scene.noise.low for run in grid.runs} == {0.8}


def test_an_axis_that_goes_away_with_other_settings_is_told():
    """2 noises x 3 rows; --rounds takes the place of the rows, which are methods as well."""
    rows = [{"label": "long", "rounds": 9, "method.mu": 0.1}, {"label": "a"}, {"label": "b"}]
    table = BASE | {"sweep": {"noise": SWEPT["sweep"]["noise"], "row": rows}}
    grid = expand(table, {"rounds": 5}, ())
    assert names(grid) == ["noisy-seed1", "clean-seed1"]
    assert grid.notes == (
        "--rounds takes the place of the grid's axis 'row', which also sets method.mu; "
        "the grid shrinks from 6 runs to 2.",
    )


@pytest.mark.parametrize(
    "overrides",
    [{}, {"sgd.lr": 0.2}, {"method.name": "fedavg"}, {"scene.noise.kind": "none"}],
)
def test_an_axis_over_nothing_but_what_is_given_goes_quietly(overrides):
    """Whoever sets the kind of noise speaks of noise as a whole."""
    assert expand(SWEPT, overrides, ()).notes == ()


def test_only_those_runs_that_are_called_so():
    grid = expand(SWEPT, {}, (3, 4))
    assert names(grid.only(["clean"])) == [
        "fedavg-clean-seed3",
        "fedavg-clean-seed4",
        "fedprox-clean-seed3",
        "fedprox-clean-seed4",
    ]
    assert names(grid.only(["clean", "fedprox"])) == ["fedprox-clean-seed3", "fedprox-clean-seed4"]
    assert names(grid.only(["clean", "noisy", "fedavg"])) == [
        name for name in names(grid) if name.startswith("fedavg")
    ], "of one axis any that is named"
    assert grid.only([]) == grid
    assert grid.only(["clean"]).default_folder == grid.default_folder, "the rest may come later"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (SWEPT, "called 'cleen'; --only takes 'fedavg', 'fedprox', 'noisy', 'clean'"),
        (BASE, "called 'cleen'; --only takes the labels of a recipe with a sweep."),
    ],
)
def test_a_part_of_a_grid_that_is_not_there(table, sentence):
    with pytest.raises(FedsieveError) as error:
        expand(table, {}, ()).only(["cleen"])
    assert sentence in str(error.value)


def test_the_same_method_keeps_its_settings_and_another_one_does_not():
    (same,) = expand(BASE, {"method.name": "fedprox"}, ()).runs
    assert same.recipe.method.mu == 0.3
    (other,) = expand(BASE, {"method.name": "fedavg"}, ()).runs
    assert other.recipe.method.name == "fedavg"


def test_another_kind_of_noise_drops_the_settings_of_the_old_one():
    (run,) = expand(BASE, {"scene.noise.kind": "none"}, ()).runs
    assert run.recipe.scene.noise.low is None
    overrides = {"scene.noise.kind": "asymmetric", "scene.noise.low": 0.2, "scene.noise.high": 0.4}
    (run,) = expand(BASE, overrides, ()).runs
    assert (run.recipe.scene.noise.low, run.recipe.scene.noise.high) == (0.2, 0.4)
    assert run.recipe.scene.clients == 4


def test_another_method_drops_the_axes_over_the_old_ones_settings():
    swept = BASE | {"sweep": {"method.mu": [0.1, 1.0], "rounds": [1, 2]}}
    assert names(expand(swept, {"method.name": "fedavg"}, ())) == ["rounds1-seed1", "rounds2-seed1"]
    assert len(expand(swept, {"method.name": "fedprox"}, ()).runs) == 4


def test_a_methods_setting_goes_to_the_cells_that_have_it():
    grid = expand(SWEPT, {"method.mu": 2.5}, ())
    assert [getattr(run.recipe.method, "mu", None) for run in grid.runs] == [None, None, 2.5, 2.5]
    with pytest.raises(FedsieveError, match=r"No method of this recipe has a setting method\.mu"):
        expand(BASE | {"method": {"name": "fedavg"}}, {"method.mu": 2.5}, ())


def test_a_setting_whose_method_goes_away_with_the_sweep_asks_for_the_method():
    prox = {"method.name": "fedprox", "method.mu": 0.1}
    swept = BASE | {
        "method": {"name": "fedavg"},
        "sweep": {"method": [{"label": "A", "method.name": "fedavg"}, {"label": "P"} | prox]},
    }
    with pytest.raises(FedsieveError, match=r"name the method, too: --method\.name fedprox\."):
        expand(swept, {"method.mu": 2.5}, ())
    (run,) = expand(swept, {"method.name": "fedprox", "method.mu": 2.5}, ()).runs
    assert run.recipe.method.mu == 2.5


def test_none_unsets():
    (run,) = expand(BASE | {"engine": {"stop_after_minutes": 3.0}}, {}, ()).runs
    assert run.recipe.engine.stop_after_minutes == 3.0
    table = BASE | {"engine": {"stop_after_minutes": 3.0}}
    (run,) = expand(table, {"engine.stop_after_minutes": None}, ()).runs
    assert run.recipe.engine.stop_after_minutes is None


def test_several_seeds():
    grid = expand(BASE, {}, (1, 13))
    assert names(grid) == ["fedprox-seed1", "fedprox-seed13"]
    assert [run.recipe.seed for run in grid.runs] == [1, 13]
    assert not grid.is_single
    swept = BASE | {"sweep": {"seed": [3, 4]}}
    assert names(expand(swept, {}, ())) == ["seed3", "seed4"]
    assert names(expand(swept, {}, (7,))) == ["fedprox-seed7"]
    with pytest.raises(FedsieveError, match="either --seed or --seeds"):
        expand(BASE, {"seed": 1}, (1,))
    with pytest.raises(FedsieveError, match="twice"):
        expand(BASE, {}, (1, 1))


def test_cells_that_would_share_a_folder_are_refused():
    twins = [{"label": "a/b", "rounds": 1}, {"label": "a b", "rounds": 2}]
    with pytest.raises(FedsieveError, match="called 'a_b-seed1'"):
        expand(BASE | {"sweep": {"x": twins}}, {}, ())


def test_the_folder_depends_on_what_decides_the_result():
    def folder(overrides):
        return expand(BASE, overrides, ()).default_folder

    assert folder({}) == folder({"seed": 3, "engine.device": "cpu"}) == Path("runs/grid")
    assert folder({"name": "other"}) == Path("runs/other")
    first, second = folder({"rounds": 3}), folder({"rounds": 4})
    assert first != second
    assert first == folder({"rounds": 3, "engine.workers": 2})
    prefix, _, digits = first.name.partition("-")
    assert prefix == "grid"
    assert len(bytes.fromhex(digits)) == 3


def test_file_names():
    assert slug("a/b c..") == "a_b_c"
    assert slug("φ=1.0-lr0.1") == "φ=1.0-lr0.1"
    assert slug("../..") == "_"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str | None = field(default=None, metadata=POSITIONAL)


def test_recipe_and_options_from_a_command_line():
    _, grid = read_command(Options, "test", ["tiny.toml", "--sgd.lr=0.2", "--scene.clients", "5"])
    assert names(grid) == ["fedavg-seed1"]
    assert (grid.runs[0].recipe.sgd.lr, grid.runs[0].recipe.scene.clients) == (0.2, 5)
    _, grid = read_command(Options, "test", [])
    assert grid.default_folder == Path("runs/demo")
    _, grid = read_command(Options, "test", ["tiny.toml", "--method.name=fedprox", "--method.mu=3"])
    assert grid.runs[0].recipe.method.mu == 3.0


def test_a_recipe_without_a_name_is_called_like_its_file():
    Path("mine.toml").write_text("[scene]\nclients = 20\n")
    _, grid = read_command(Options, "test", ["mine.toml"])
    assert grid.default_folder == Path("runs/mine")


@pytest.mark.parametrize(
    ("text", "argv", "sentence"),
    [
        ("[sgd]\nlrr = 1\n", [], "There is no setting 'sgd.lrr'; did you mean 'lr'?"),
        ("[sgd]\nlr = 'x'\n", [], "sgd.lr must be a number, not 'x'."),
        ("sgd = 3\n", [], "sgd must be a table"),
        ("method = 3\n", [], "method must be a table"),
        ("rounds = 0\n", [], "rounds must be at least 1"),
        ("rounds = \n", [], "x.toml is not valid TOML"),
        ("sweep = 3\n", [], "sweep must be a table"),
        ("[sweep]\nrounds = 3\n", ["--seed", "1"], "sweep.rounds must be a list"),
        ("", ["--rounds", "3", "y.toml"], "Put the recipe before the options: test y.toml"),
        ("", ["--method.name", "fedpro"], "There is no method 'fedpro'; did you mean 'fedprox'?"),
        ("", ["--method.mu", "1"], "There is no option --method.mu"),
        ("", ["--precision", "bf15"], "precision must be one of"),
    ],
)
def test_mistakes(text, argv, sentence):
    Path("x.toml").write_text("[scene]\nclients = 20\n" + text if text.startswith("[") else text)
    first = [] if "y.toml" in argv else ["x.toml"]
    with pytest.raises(FedsieveError) as error:
        read_command(Options, "test", [*first, *argv])
    assert str(error.value).startswith(sentence)
