"""`fedsieve scene`: who holds what, with which labels, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedsieve.cli.grid import Grid, read_command
from fedsieve.cli.options import POSITIONAL
from fedsieve.errors import check
from fedsieve.recipe import Recipe
from fedsieve.scenes import describe, picture, save_scene
from fedsieve.simulate.world import load_data, scene_of


@dataclass(frozen=True, kw_only=True)
class SceneOptions:
    """Describe the scene of a recipe: clients, classes, wrong labels. A grid may have several."""

    recipe: str | None = field(default=None, metadata=POSITIONAL)
    """A TOML file, or a name from `fedsieve recipes`; without it the built-in demonstration."""
    out: Path = Path("scene.png")
    """Draw the scene into this PNG file; several scenes are numbered."""
    save: Path | None = None
    """Save the scene into this safetensors file; several scenes are numbered."""
    rows: int = 10
    """Clients to list."""


def main(argv: Sequence[str]) -> int:
    options, grid = read_command(SceneOptions, "fedsieve scene", argv)
    check(
        options.out.suffix.lower() == ".png",
        f"--out must end in .png, not {options.out}.",
    )
    check(options.rows >= 0, f"--rows must be at least 0, not {options.rows}.")
    scenes = different_scenes(grid)
    for number, recipe in enumerate(scenes, start=1):
        data = load_data(recipe)
        labels = data.train_labels.numpy()
        scene = scene_of(recipe, data)
        if len(scenes) > 1:
            print(f"Scene {number} of {len(scenes)}".center(72, "-"))
        known = not data.train_labels_are_noisy
        print(describe(scene, labels, data.classes, rows=options.rows, truth_is_known=known))
        drawing = numbered(options.out, number, len(scenes))
        picture(scene, labels, data.classes, drawing, truth_is_known=known)
        print(f"Drawn in {drawing}")
        if options.save is not None:
            saved = numbered(options.save, number, len(scenes))
            save_scene(scene, saved)
            print(f"Saved in {saved}")
    return 0


def different_scenes(grid: Grid) -> list[Recipe]:
    """One recipe for each scene of the grid."""
    first: dict[object, Recipe] = {}
    for planned in grid.runs:
        recipe = planned.recipe
        first.setdefault((recipe.data, recipe.scene, recipe.seed), recipe)
    return list(first.values())


def numbered(path: Path, number: int, count: int) -> Path:
    """`path`, or one of `count` such files, in a folder that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path if count == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
