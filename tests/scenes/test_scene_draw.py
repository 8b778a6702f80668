"""The summary and the picture of a scene."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedsieve.errors import FedsieveError
from fedsieve.scenes import Noise, Partition, SceneConfig, build_scene, describe, picture

TRUE = np.repeat([0, 1, 2], [6, 3, 3])
SITES = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
NAMES = ("cat", "dog", "a fish with a very long name")
CONFIG = SceneConfig(
    clients=3,
    partition=Partition(kind="sites"),
    noise=Noise(kind="asymmetric", clients="fixed", rate=0.5),
)


def test_the_summary_states_the_facts():
    """Client 0 holds 4 cats, client 1 2 cats and 3 dogs, client 2 3 fish; flips 2, 2, 1 of 12."""
    text = describe(build_scene(CONFIG, TRUE, 3, 1, sites=SITES), TRUE, NAMES)
    assert "samples used  12 of 12, in 3 classes" in text
    assert "noise         asymmetric, clients = fixed, rate = 0.5" in text
    assert "sizes         3 / 4 / 5 (min/median/max) samples per client" in text
    assert "true classes  1 / 1 / 2 (min/median/max) per client" in text
    assert "wrong labels  41.67% of all, 33.33% / 40.00% / 50.00% (min/median/max)" in text
    rows = [line.split() for line in text.splitlines()[-3:]]
    assert rows[0] == ["0", "4", "1", "asymmetric", "0.500", "50.0%", "cat", "(100%)"]
    assert rows[1] == ["1", "5", "2", "asymmetric", "0.500", "40.0%", "dog", "(60%)"]
    assert rows[2][:6] == ["2", "3", "1", "asymmetric", "0.500", "33.3%"]


def test_the_summary_is_short_for_many_clients():
    true = np.arange(3000) % 3
    matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    config = SceneConfig(clients=1500, noise=Noise(kind="matrix", matrix=matrix))
    text = describe(build_scene(config, true, 3, 1), true, rows=4)
    assert text.endswith("… and 1,496 more clients")
    assert "noise         matrix, 3 × 3 matrix" in text
    assert "class " in text.splitlines()[-2]
    assert len(text.splitlines()) == 10 + 4 + 1


def test_class_names_must_fit():
    scene = build_scene(CONFIG, TRUE, 3, 1, sites=SITES)
    with pytest.raises(FedsieveError, match="2 class names were given for 3 classes"):
        describe(scene, TRUE, ("cat", "dog"))


@pytest.mark.parametrize(
    ("clients", "classes", "noise"),
    [
        (3, 3, Noise()),
        (60, 10, Noise(kind="mixed", low=0.2, high=0.4, share=0.6)),
        (1000, 100, Noise(kind="symmetric", low=0.5)),
    ],
)
def test_the_picture_is_grey_and_shows_what_is_held(tmp_path, clients, classes, noise):
    true = np.arange(6000) % classes
    scene = build_scene(SceneConfig(clients=clients, noise=noise), true, classes, 1)
    picture(scene, true, None, tmp_path / "scene.png")
    with Image.open(tmp_path / "scene.png") as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape[1] == 1200
    assert np.ptp(pixels, axis=2).max() == 0
    assert pixels.min() == 0
    assert pixels.max() == 255


def test_the_picture_of_another_scene_is_another_picture(tmp_path):
    true = np.arange(600) % 3
    for name, partition in [("a", Partition()), ("b", Partition(kind="classes", classes=1))]:
        scene = build_scene(SceneConfig(clients=6, partition=partition), true, 3, 1)
        picture(scene, true, NAMES, tmp_path / f"{name}.png")
    shades = []
    for name in "ab":
        with Image.open(tmp_path / f"{name}.png") as image:
            # The upper left third lies inside the table of classes and clients.
            table = np.asarray(image.convert("L"))[40:160, 250:700]
            shades.append((table > 250).mean())
    # Three equal classes fill every cell; one class per client leaves two cells of three white.
    assert shades[0] < 0.05
    assert 0.4 < shades[1] < 0.9


def test_where_no_truth_is_known_nothing_is_said_about_wrong_labels(tmp_path):
    config = SceneConfig(clients=3, partition=Partition(kind="sites"))
    scene = build_scene(config, TRUE, 3, 1, sites=SITES)
    names = ("cat", r"$\frac{", "fish")  # to Matplotlib, half a formula
    text = describe(scene, TRUE, names, truth_is_known=False)
    assert "wrong labels  not known" in text
    assert "true" not in text
    assert "%" not in text.rpartition("most common class")[0]
    assert text.splitlines()[-3].split() == ["0", "4", "1", "cat", "(100%)"]
    heights = {}
    for known in (True, False):
        file = tmp_path / f"{known}.png"
        picture(scene, TRUE, names, file, truth_is_known=known)
        with Image.open(file) as image:
            heights[known] = image.height
    assert heights[True] - heights[False] == 240  # two inches of bars
