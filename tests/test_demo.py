"""The embedded demonstration: its grid, and that it shows what it is there to show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedsieve.recipe import Recipe, cells, identity, read_recipe, recipe_from_table
from fedsieve.simulate.run import run


def demo() -> dict[str, Recipe]:
    """Name → recipe of every run of the demonstration."""
    return {cell.name: recipe_from_table(cell.table) for cell in cells(read_recipe("demo"))}


def test_three_methods_meet_right_and_wrong_labels() -> None:
    runs = demo()
    assert list(runs) == [
        f"{method}-{labels}"
        for method in ("fedavg", "fedprox", "fedgr")
        for labels in ("noisy", "clean")
    ]
    for name, recipe in runs.items():
        assert recipe.method.name == name.partition("-")[0]
        assert recipe.data.source == "digits"
        assert recipe.scene.clients == 20


def test_only_the_method_differs_in_a_column() -> None:
    runs = demo()
    for labels in ("noisy", "clean"):
        rest = [
            {key: value for key, value in identity(recipe).items() if key != "method"}
            for name, recipe in runs.items()
            if name.endswith(labels)
        ]
        assert rest[0] == rest[1] == rest[2]


def test_only_the_noise_differs_in_a_row() -> None:
    runs = demo()
    for method in ("fedavg", "fedprox", "fedgr"):
        noisy, clean = runs[f"{method}-noisy"], runs[f"{method}-clean"]
        assert clean.scene.noise.kind == "none"
        noise = noisy.scene.noise
        assert (noise.kind, noise.share, noise.low, noise.high) == ("symmetric", 1.0, 0.5, 0.9)
        as_noisy = replace(clean, scene=replace(clean.scene, noise=noise))
        assert identity(as_noisy) == identity(noisy)


@pytest.mark.slow
def test_fedgr_is_ten_points_ahead_of_fedavg(tmp_path: Path) -> None:
    runs = demo()
    result = {}
    for method in ("fedavg", "fedgr"):
        recipe = runs[f"{method}-noisy"]
        on_one_core = replace(recipe, engine=replace(recipe.engine, device="cpu", workers=1))
        result[method] = run(on_one_core, tmp_path / method)
    assert result["fedgr"]["last10"] >= result["fedavg"]["last10"] + 10
    assert result["fedgr"]["suspect_auroc"] > result["fedavg"]["suspect_auroc"]
