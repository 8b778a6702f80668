"""How many wrong labels a model has learnt by heart, counted by hand and by a bare model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsieve.data.sources.digits import load_digits
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.recipe import EngineConfig
from fedsieve.scenes import load_scene
from fedsieve.simulate import run as run_module
from fedsieve.simulate.diagnose import Truth
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.memorise import Tally, memorisation
from fedsieve.simulate.run import run
from fedsieve.simulate.world import World, make_setup
from fedsieve.types import Outputs, Weights, rng_for
from helpers import NEEDED, final_bytes, hand_made_scene, tiny_recipe, with_engine

METRICS = ("memorised", "memorised_of_all", "noisy_accuracy", "clean_accuracy")

TRUE = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
GIVEN = np.array([0, 0, 1, 1, 2, 0, 2, 2, 0, 0])
#                       ^     ^  ^        ^  ^   five wrong: 2, 4, 5, 8, 9
PREDICTED = np.array([0, 1, 1, 1, 1, 2, 0, 2, 0, 0])
"""Right samples 0, 1, 3, 6, 7: 0, 3 and 7 predicted rightly. Wrong ones: 2, 8 and 9 predicted as
given, 4 as it truly is, 5 as neither."""


def test_a_tally_by_hand() -> None:
    tally = Tally.of(PREDICTED, GIVEN, TRUE)
    assert tally == Tally(right=5, wrong=5, right_fitted=3, wrong_fitted=3, wrong_seen_through=1)
    assert tally.metrics() == {
        "memorised": 3 / 5,
        "memorised_of_all": 3 / 10,
        "noisy_accuracy": 1 / 5,
        "clean_accuracy": 3 / 5,
    }


def test_without_samples_of_a_kind_there_is_no_share_of_them() -> None:
    clean = Tally.of(TRUE, TRUE, TRUE).metrics()
    assert math.isnan(clean["memorised"])
    assert math.isnan(clean["noisy_accuracy"])
    assert (clean["memorised_of_all"], clean["clean_accuracy"]) == (0, 1)
    noisy = Tally.of((TRUE + 1) % 3, (TRUE + 1) % 3, TRUE).metrics()
    assert math.isnan(noisy["clean_accuracy"])
    assert (noisy["memorised"], noisy["memorised_of_all"], noisy["noisy_accuracy"]) == (1, 1, 0)
    assert all(math.isnan(value) for value in Tally().metrics().values())


LABELS = st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=30)


@settings(max_examples=50, deadline=None)
@given(LABELS, st.integers(0, 30))
def test_the_tally_of_a_whole_is_the_sum_of_its_parts(
    rows: list[tuple[int, int, int]], cut: int
) -> None:
    predicted, given_labels, true = np.array(rows).T
    parts = [
        Tally.of(predicted[part], given_labels[part], true[part])
        for part in (slice(None, cut), slice(cut, None))
    ]
    whole = Tally.of(predicted, given_labels, true)
    assert parts[0] + parts[1] == whole
    assert whole.right + whole.wrong == len(rows)
    assert whole.wrong_fitted + whole.wrong_seen_through <= whole.wrong


# ---------------------------------------------------------------------- several clients


class TableBench:
    """Images hold their sample's number; a model's weights are the class it predicts for each."""

    def __init__(self) -> None:
        self.views: list[tuple[str, float]] = []

    def view(self, name: str, images: Tensor, rng: np.random.Generator) -> Tensor:
        self.views.append((name, rng.random()))
        return images

    def forward(self, weights: Weights, images: Tensor) -> Outputs:
        predicted = weights["class"][images[:, 0, 0, 0].long()]
        return Outputs(None, torch.nn.functional.one_hot(predicted, 3).float())


HELD = (np.array([9, 3, 0, 1]), np.array([], dtype=np.int64), np.array([5, 2, 8, 6, 7, 4]))


def world_and_truth() -> tuple[World, Truth]:
    scene = hand_made_scene(HELD, GIVEN, TRUE)
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1)
    labels = torch.tensor(GIVEN)
    world = World(images, labels, images, labels, [held.copy() for held in HELD], 3)
    return world, Truth(scene, TRUE, np.zeros(3))


def predicting(classes: np.ndarray) -> Weights:
    return {"class": torch.tensor(classes)}


def test_the_global_model_is_tried_on_all_clients_and_others_on_their_own() -> None:
    """Client 0 holds 9, 3, 0, 1: sample 9 is wrong. A model that says what was given has memorised
    it; one that says the truth has seen through it."""
    bench, (world, truth) = TableBench(), world_and_truth()
    overall, per_client = memorisation(
        bench,  # type: ignore[arg-type]
        world,
        truth,
        5,
        7,
        [predicting(PREDICTED)],
        {0: {"local": [predicting(GIVEN)], "global": [predicting(TRUE)]}},
    )
    assert overall == Tally.of(PREDICTED, GIVEN, TRUE).metrics()
    assert per_client == {
        0: {
            "local_memorised": 1.0,
            "local_memorised_of_all": 1 / 4,
            "local_noisy_accuracy": 0.0,
            "local_clean_accuracy": 1.0,
            "global_memorised": 0.0,
            "global_memorised_of_all": 0.0,
            "global_noisy_accuracy": 1.0,
            "global_clean_accuracy": 1.0,
        }
    }


def test_global_networks_are_tried_together() -> None:
    """Two of three say what was given, and so do the three."""
    bench, (world, truth) = TableBench(), world_and_truth()
    networks = [predicting(classes) for classes in (TRUE, GIVEN, GIVEN)]
    overall, _ = memorisation(bench, world, truth, 5, 7, networks, {})  # type: ignore[arg-type]
    assert overall == Tally.of(GIVEN, GIVEN, TRUE).metrics()
    first = [rng_for(5, 7, client, "memorisation").random() for client in (0, 2)]
    assert bench.views == [("weak", first[0]), ("weak", first[1])], "one view for all models"


# --------------------------------------------------------------------------- in a run


def test_the_last_line_is_that_of_the_final_model(tmp_path: Path) -> None:
    """By a bare model with the saved weights on weak views drawn here."""
    recipe = with_engine(tiny_recipe(rounds=2), memorisation_every=1)
    run(recipe, tmp_path)
    data, scene = load_digits(), load_scene(tmp_path / "scene.safetensors")
    model = make_setup(recipe, data).make_model().eval()
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state = {name.removeprefix("weights."): tensor for name, tensor in stored.items()}
    model.load_state_dict(state, strict=False)
    memorised = wrong = samples = 0
    for client, held in enumerate(scene.clients):
        rng = rng_for(recipe.seed, 1, client, "memorisation")
        weak = view_set("digits").weak(data.train_images[held.copy()], rng)
        with torch.no_grad():
            x = (weak.float() / 255 - data.mean[0]) / data.std[0]
            predicted = model(x).logits.argmax(dim=1).numpy()
        is_wrong = scene.given[held] != data.train_labels.numpy()[held]
        memorised += int((is_wrong & (predicted == scene.given[held])).sum())
        wrong += int(is_wrong.sum())
        samples += len(held)
    found = read_lines(tmp_path / "metrics.jsonl")[-1]["diagnostics"]
    assert found["memorised"] == memorised / wrong
    assert found["memorised_of_all"] == memorised / samples


def test_it_is_measured_when_asked_for_and_changes_nothing_else(tmp_path: Path) -> None:
    plain = with_engine(tiny_recipe(), client_lines=True)
    run(plain, tmp_path / "plain")
    run(with_engine(plain, memorisation_every=2), tmp_path / "measured")
    assert final_bytes(tmp_path / "plain") == final_bytes(tmp_path / "measured")
    for folder, rounds in (("plain", []), ("measured", [1, 3])):
        lines = read_lines(tmp_path / folder / "metrics.jsonl")
        assert [line["round"] for line in lines if "memorised" in line["diagnostics"]] == rounds
        clients = read_lines(tmp_path / folder / "clients.jsonl")
        measured = [line for line in clients if "local_memorised" in line]
        assert [line["round"] for line in measured] == [r for r in rounds for _ in range(3)]
        for line in measured:
            names = {f"{model}_{metric}" for model in ("local", "global") for metric in METRICS}
            assert names <= line.keys()


@pytest.mark.parametrize("method", ["fedavg", "fedcoteaching"])
def test_the_only_clients_model_becomes_the_global_one(method: str, tmp_path: Path) -> None:
    """Where there are two networks, both of them."""
    recipe = tiny_recipe(
        {"name": method, **NEEDED.get(method, {})},
        rounds=2,
        clients_per_round=1,
        scene={"clients": 1, "noise": {"kind": "symmetric", "low": 0.3, "high": 0.7}},
    )
    run(with_engine(recipe, client_lines=True, memorisation_every=1), tmp_path)
    overall = [line["diagnostics"] for line in read_lines(tmp_path / "metrics.jsonl")]
    clients = read_lines(tmp_path / "clients.jsonl")
    for metrics, line in zip(overall, clients, strict=True):
        assert [line[f"local_{name}"] for name in METRICS] == [metrics[name] for name in METRICS]
        assert line["global_clean_accuracy"] < line["local_clean_accuracy"], "before and after"


def test_local_models_are_left_alone_without_client_lines(tmp_path: Path) -> None:
    run(with_engine(tiny_recipe(rounds=1), memorisation_every=1), tmp_path)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert set(line["diagnostics"]) == set(METRICS)
    assert not (tmp_path / "clients.jsonl").exists()


def test_it_needs_the_true_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = replace(load_digits(), train_labels_are_noisy=True)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: data)
    with pytest.raises(FedsieveError, match="needs true labels, and digits has none; set it to 0"):
        run(with_engine(tiny_recipe(), memorisation_every=1), tmp_path)


def test_it_cannot_be_measured_a_negative_number_of_times() -> None:
    with pytest.raises(FedsieveError, match=r"engine\.memorisation_every must be at least 0"):
        EngineConfig(memorisation_every=-1)
