"""Scenes as a whole: config, helpers, and the one file that keeps them."""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fedsieve.errors import FedsieveError
from fedsieve.scenes import (
    Noise,
    Partition,
    SceneConfig,
    build_scene,
    load_scene,
    same_scene,
    save_scene,
)
from fedsieve.scenes.store import digest_of

TRUE = np.arange(60) % 3
CONFIG = SceneConfig(clients=4, noise=Noise(kind="mixed", low=0.3, high=0.9, share=0.75))


def test_helpers_agree_with_a_plain_count():
    scene = build_scene(CONFIG, TRUE, 3, 5)
    rates = [np.mean([scene.given[i] != TRUE[i] for i in held]) for held in scene.clients]
    np.testing.assert_allclose(scene.true_rates(TRUE), rates)
    assert scene.overall_noise(TRUE) == np.mean(scene.given != TRUE)
    assert scene.sizes.tolist() == [15] * 4
    for k, held in enumerate(scene.clients):
        for c in range(3):
            assert scene.class_counts(TRUE)[c, k] == sum(TRUE[i] == c for i in held)


def test_the_scene_cannot_be_written_to():
    scene = build_scene(CONFIG, TRUE, 3, 5)
    for array in (scene.given, scene.levels, *scene.clients):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_scene_needs_the_labels_it_was_built_from():
    scene = build_scene(CONFIG, TRUE, 3, 5)
    assert scene.overall_noise(TRUE.astype(np.uint8)) == scene.overall_noise(TRUE)
    other = TRUE.copy()
    other[7] = (other[7] + 1) % 3
    for question in (scene.true_rates, scene.overall_noise, scene.class_counts):
        with pytest.raises(FedsieveError, match="not the ones that the scene was built from"):
            question(other)


def test_the_fingerprint_is_the_sha256_of_the_labels():
    expected = hashlib.sha256(b"".join(int(y).to_bytes(8, "little") for y in TRUE)).hexdigest()
    assert build_scene(CONFIG, TRUE.astype(np.int16), 3, 5).fingerprint == expected


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((TRUE, 3, -1), "seed of a scene must be a whole number >= 0"),
        ((TRUE, 3, 2**32), "must not exceed 4294967295"),
        ((TRUE, 0, 1), "number of classes"),
        ((TRUE, 2, 1), "between 0 and 1"),
        ((TRUE - 1, 3, 1), "between 0 and 2"),
        ((TRUE.reshape(2, 30), 3, 1), "one whole number per sample"),
        ((TRUE.astype(float), 3, 1), "one whole number per sample"),
        ((TRUE[:0], 3, 1), "one whole number per sample"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(FedsieveError, match=match):
        build_scene(CONFIG, *arguments)


def test_sites_that_would_be_ignored_are_refused():
    with pytest.raises(FedsieveError, match=r"kind = \"sites\""):
        build_scene(CONFIG, TRUE, 3, 1, sites=TRUE)


def test_bad_configs_are_refused():
    with pytest.raises(FedsieveError, match=r"scene\.clients must be a whole number >= 1"):
        SceneConfig(clients=0)
    overlapping = Partition(kind="classes", classes=2, overlap=True)
    with pytest.raises(FedsieveError, match="cannot have noise of their own"):
        SceneConfig(partition=overlapping, noise=Noise(kind="symmetric", low=0.2))
    assert SceneConfig(partition=overlapping).noise.kind == "none"


def test_a_config_reads_from_a_recipe_and_from_the_command_line():
    recipe = tomllib.loads(
        """
        clients = 20
        [partition]
        kind = "dirichlet"
        alpha = 0.5
        [noise]
        kind = "symmetric"
        clients = "normal"
        mean = 0.3
        """
    )
    config = SceneConfig(
        clients=recipe["clients"],
        partition=Partition(**recipe["partition"]),
        noise=Noise(**recipe["noise"]),
    )
    words = (
        "--clients 20 --partition.kind dirichlet --partition.alpha 0.5"
        " --noise.kind symmetric --noise.clients normal --noise.mean 0.3"
    )
    assert tyro.cli(SceneConfig, args=words.split()) == config


def test_different_seeds_give_different_scenes():
    assert not same_scene(build_scene(CONFIG, TRUE, 3, 1), build_scene(CONFIG, TRUE, 3, 2))


CONFIGS = st.builds(
    SceneConfig,
    clients=st.integers(1, 6),
    partition=st.sampled_from(
        [
            Partition(),
            Partition(kind="balanced-dirichlet", alpha=2, min_size=1),
            Partition(kind="classes", classes=3),
        ]
    ),
    noise=st.sampled_from(
        [
            Noise(),
            Noise(kind="mixed", low=0.2, share=0.5),
            Noise(kind="symmetric", clients="bernoulli", share=0.4, low=0.5, samples="bernoulli"),
            Noise(kind="matrix", matrix=((0.1, 0.9, 0), (0, 1, 0), (0.5, 0, 0.5))),
        ]
    ),
)


@settings(max_examples=30, deadline=None)
@given(config=CONFIGS, seed=st.integers(0, 2**32 - 1))
def test_a_saved_scene_loads_back_equal(tmp_path_factory, config, seed):
    path = tmp_path_factory.mktemp("scene") / "scene.safetensors"
    scene = build_scene(config, TRUE, 3, seed)
    save_scene(scene, path)
    loaded = load_scene(path)
    assert same_scene(scene, loaded)
    assert same_scene(loaded, build_scene(loaded.config, TRUE, 3, loaded.seed))
    assert not loaded.given.flags.writeable


def test_same_scene_sees_every_difference():
    scene = build_scene(CONFIG, TRUE, 3, 5)
    assert same_scene(scene, replace(scene))
    assert not same_scene(scene, replace(scene, clients=scene.clients[:-1]))
    assert not same_scene(scene, replace(scene, clients=scene.clients[::-1]))
    assert not same_scene(scene, replace(scene, given=(scene.given + 1) % 3))
    assert not same_scene(scene, replace(scene, levels=scene.levels + 0.1))
    assert not same_scene(scene, replace(scene, kinds=("none",) * 4))
    assert not same_scene(scene, replace(scene, seed=6))
    assert not same_scene(scene, replace(scene, num_classes=4))
    assert not same_scene(scene, replace(scene, fingerprint=""))
    assert not same_scene(scene, replace(scene, config=SceneConfig(clients=4)))


def test_damaged_files_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "scene.safetensors"
    save_scene(build_scene(CONFIG, TRUE, 3, 5), path)
    whole = path.read_bytes()
    arrays = load_file(path)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]

    def refused():
        with pytest.raises(FedsieveError, match="not an intact scene file") as caught:
            load_scene(path)
        assert "\n" not in str(caught.value)

    for content in (b"", b"hello", whole[:100], whole[:-5], b"\xff" * 200):
        path.write_bytes(content)
        refused()
    facts = json.loads(header["scene"])
    later = json.dumps(
        {**facts, "config": {**facts["config"], "noise": {"option of a later version": 1}}}
    )
    for metadata in [
        None,
        {"format": header["format"]},
        {**header, "format": "something else"},
        {**header, "scene": json.dumps({**facts, "seed": 6})},
        {**header, "scene": later, "digest": digest_of(later, arrays)},
    ]:
        save_file(arrays, path, metadata=metadata)
        refused()
    save_file({k: v for k, v in arrays.items() if k != "given"}, path, metadata=header)
    refused()
    save_file(arrays, path, metadata=header)
    assert load_scene(path).seed == 5


@settings(max_examples=40, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("scene") / "scene.safetensors"
    scene = build_scene(CONFIG, TRUE, 3, 5)
    save_scene(scene, path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        assert same_scene(load_scene(path), scene)  # white space in the header carries nothing
    except FedsieveError as error:
        assert "not an intact scene file" in str(error)  # noqa: PT017


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FedsieveError, match="there is no such scene file"):
        load_scene(tmp_path / "nowhere.safetensors")


def test_the_file_tells_its_library_version(tmp_path):
    path = tmp_path / "scene.safetensors"
    save_scene(build_scene(CONFIG, TRUE, 3, 5), path)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    facts = json.loads(header["scene"])
    assert facts["version"].count(".") == 2
    assert facts["config"]["noise"]["share"] == 0.75


def test_ten_thousand_clients_are_built_saved_and_loaded_quickly(tmp_path):
    true = np.arange(200_000) % 10
    config = SceneConfig(
        clients=10_000,
        partition=Partition(kind="balanced-dirichlet", alpha=1, min_size=1),
        noise=Noise(kind="symmetric", low=0.5),
    )
    start = time.perf_counter()
    scene = build_scene(config, true, 10, 1)
    save_scene(scene, tmp_path / "scene.safetensors")
    assert same_scene(scene, load_scene(tmp_path / "scene.safetensors"))
    assert time.perf_counter() - start < 5
