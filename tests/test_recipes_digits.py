"""The comparison of all methods on digits: who takes part, the common ground, and its page."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
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
RESULTS = Path(__file__).parents[1] / "results"


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
    missing = set(METHODS) - set(runs(scene))
    assert not missing, f"recipes/digits/{scene}.toml has no entry in its sweep for {missing}"


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
    for name in by_scene["clean"]:
        seen = {by_scene[scene][name].method for scene in SCENES}
        expected = {"fedcoteaching": 3, "rofl": 3, "feddiv": 2, "fedgr": 2, "fedlsr": 2}
        assert len(seen) == expected.get(name, 1)
        assert by_scene["clean"][name].rounds == by_scene["all-noisy"][name].rounds


def test_the_page_says_what_the_runs_say() -> None:
    """Every entry of both tables is mean ± deviation of the runs beside the page."""
    by_entry: dict[tuple[str, str], list[dict[str, str]]] = {}
    with (RESULTS / "digits" / "runs.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            by_entry.setdefault((line["scene"], line["method"]), []).append(line)
    accuracy, auroc = table_of("accuracy"), table_of("AUROC of the suspects")
    shown = {(scene, method) for method, row in accuracy.items() for scene in row if row[scene]}
    assert set(by_entry) == shown
    for (scene, method), lines in by_entry.items():
        assert accuracy[method][scene] == written([float(line["last10"]) for line in lines], 1)
        if lines[0]["suspect_auroc"]:
            found = written([float(line["suspect_auroc"]) for line in lines], 3)
            assert auroc[method][scene] == found


def table_of(head: str) -> dict[str, dict[str, str]]:
    """Method → scene → entry of the page's table with this head."""
    page = (RESULTS / "digits.md").read_text(encoding="utf-8")
    lines = page.split(f"| {head} |")[1].split("\n\n")[0].splitlines()
    scenes = re.findall(r"`([\w-]+)`", lines[0])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: dict(zip(scenes, row[1:], strict=True)) for row in rows}


def written(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"
