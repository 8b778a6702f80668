"""A finished FedES run once more, with the true qualities in place of its indicator.

    python results/fedes/oracle.py runs/fedes runs/fedes-oracle

A simulation alone knows them: they come from the first run's scene and the data's true labels, and
stand in the new run's config.toml for everyone to see.
"""

import sys
from dataclasses import replace
from pathlib import Path

from fedsieve.labels import Label, load_labels, save_labels
from fedsieve.methods import fedes
from fedsieve.scenes import load_scene
from fedsieve.simulate.diagnose import Truth
from fedsieve.simulate.directory import SCENE, RunDirectory
from fedsieve.simulate.run import run
from fedsieve.simulate.world import load_data


def main(done: str, out: str) -> None:
    directory = RunDirectory(Path(done))
    recipe = directory.recipe()
    assert isinstance(recipe.method, fedes.Config), f"{done} is no run of FedES"
    true = load_data(recipe).train_labels.numpy()
    qualities = Truth.of(load_scene(directory.path / SCENE), true).qualities
    method = replace(recipe.method, indicator="oracle", oracle_quality=qualities)
    run(replace(recipe, method=method), Path(out))
    save_labels([labelled(label) for label in load_labels(directory.path)], Path(out))


def labelled(label: Label) -> Label:
    """What a table is to call the new run, where the first one was part of a grid."""
    if not label.stands_for("method.indicator"):
        return label
    settings = (*label.settings, "method.oracle_quality")
    return replace(label, text=f"oracle, not {label.text}", settings=settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
