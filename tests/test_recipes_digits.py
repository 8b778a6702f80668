"""The comparison of all methods on digits: who takes part, and that all have the same ground."""

from __future__ import annotations

import pytest

from fedsieve.methods import METHODS, fedcorr, fedcoteaching, feddiv, rofl
from fedsieve.recipe import (
    Recipe,
    cells,
    identity,
    read_recipe,
    recipe_from_table,
    shipped_recipes,
)

SCENES = ("all-noisy", "clean", "half-noisy", "half-noisy-dirichlet")
VISITS = 300
"""Sites that train in a run: 60 rounds of five, 15 passes over the 20 sites."""


def runs(scene: str) -> dict[str, Recipe]:
    """Method → its run."""
    found = [recipe_from_table(cell.table) for cell in cells(read_recipe(f"digits/{scene}"))]
    return {recipe.method.name: recipe for recipe in found}


def ground(recipe: Recipe) -> dict[str, object]:
    """All that decides a run, without its name, its method and the number of rounds."""
    left_out = ("name", "method", "rounds")
    return {k: v for k, v in identity(recipe).items() if k not in left_out}


def visits(recipe: Recipe) -> int:
    """A walk of FedCorr or FedDiv is one site in a round."""
    walked = 0
    if isinstance(recipe.method, fedcorr.Config):
        walked = recipe.method.iterations * recipe.scene.clients
    if isinstance(recipe.method, feddiv.Config):
        walked = recipe.method.warmup_passes * recipe.scene.clients
    return walked + (recipe.rounds - walked) * recipe.clients_per_round


def test_these_are_the_scenes() -> None:
    names = (name for name in shipped_recipes() if name.startswith("digits/"))
    assert sorted(names) == [f"digits/{scene}" for scene in SCENES]


@pytest.mark.parametrize("scene", SCENES)
def test_every_registered_method_takes_part_once(scene: str) -> None:
    assert len(cells(read_recipe(f"digits/{scene}"))) == len(METHODS)
    assert set(runs(scene)) == set(METHODS)


@pytest.mark.parametrize("scene", SCENES)
def test_all_methods_have_the_same_ground_and_train_as_much(scene: str) -> None:
    found = runs(scene)
    for recipe in found.values():
        assert ground(recipe) == ground(found["fedavg"])
        assert visits(recipe) == VISITS


def test_only_the_scene_differs_from_the_demonstration() -> None:
    (demo, *_) = [recipe_from_table(cell.table) for cell in cells(read_recipe("demo"))]
    for scene in SCENES:
        ours = ground(runs(scene)["fedavg"])
        assert {k for k, v in ground(demo).items() if v != ours[k]} <= {"scene"}
    assert ground(runs("all-noisy")["fedavg"]) == ground(demo)


@pytest.mark.parametrize("scene", SCENES)
def test_forget_rates_are_the_expected_share_of_wrong_labels(scene: str) -> None:
    found = runs(scene)
    noise = found["fedavg"].scene.noise
    expected = 0.0
    if noise.kind != "none":
        assert noise.low is not None
        expected = noise.share * (noise.low + noise.high) / 2
    for method in (found["fedcoteaching"].method, found["rofl"].method):
        assert isinstance(method, fedcoteaching.Config | rofl.Config)
        assert method.forget_rate == pytest.approx(expected)


def test_between_scenes_a_method_changes_only_what_its_paper_changes() -> None:
    """Forget rates by noise; FedDiv's η, FedGR's preset, FedLSR's distance by partition."""
    by_scene = {scene: runs(scene) for scene in SCENES}
    for name in METHODS:
        seen = {by_scene[scene][name].method for scene in SCENES}
        expected = {"fedcoteaching": 3, "rofl": 3, "feddiv": 2, "fedgr": 2, "fedlsr": 2}
        assert len(seen) == expected.get(name, 1)
        assert by_scene["clean"][name].rounds == by_scene["all-noisy"][name].rounds
