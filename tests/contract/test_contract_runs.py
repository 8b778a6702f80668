"""Every method in whole runs: repeatable, resumable, blind to the truth, robust against NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from contract_stage import recipe_for

from fedsieve.methods import METHODS
from fedsieve.methods.contract import Method
from fedsieve.scenes import load_scene
from fedsieve.scenes.scene import fingerprint_of
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate import run as run_module
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from helpers import (
    Cut,
    CutAfter,
    assert_same_run,
    few_digits,
    final_bytes,
    timeless_lines,
    timeless_summary,
    with_engine,
)


@pytest.fixture(autouse=True, scope="module")
def _few() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "load_data", lambda recipe: few_digits())
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Method], Path]:
    """The folder of an undisturbed run of a method, made once."""
    made: dict[str, Path] = {}

    def of(method: Method) -> Path:
        if method.name not in made:
            made[method.name] = tmp_path_factory.mktemp("whole") / "run"
            run(recipe_for(method), made[method.name])
        return made[method.name]

    return of


def test_the_same_seed_gives_the_same_run(
    tmp_path: Path, method: Method, whole: Callable[[Method], Path]
) -> None:
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    run(recipe_for(method), tmp_path)
    assert_same_run(whole(method), tmp_path)


def test_another_seed_gives_another_run(
    tmp_path: Path, method: Method, whole: Callable[[Method], Path]
) -> None:
    run(recipe_for(method, seed=4), tmp_path)
    assert final_bytes(tmp_path) != final_bytes(whole(method))


def test_worker_processes_give_the_same_run(
    tmp_path: Path, method: Method, whole: Callable[[Method], Path]
) -> None:
    run(with_engine(recipe_for(method), workers=2), tmp_path)
    assert_same_run(whole(method), tmp_path)


def test_a_run_that_was_cut_anywhere_ends_the_same(
    tmp_path: Path, method: Method, whole: Callable[[Method], Path]
) -> None:
    recipe = with_engine(recipe_for(method), checkpoint_rounds=1)
    for last in range(3):
        with pytest.raises(Cut):
            run(recipe, tmp_path, CutAfter(last))
    run(recipe, tmp_path)
    assert_same_run(whole(method), tmp_path)


def test_the_true_labels_change_nothing_but_diagnostics(
    tmp_path: Path,
    method: Method,
    whole: Callable[[Method], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same given labels with another truth behind them: the same model, the same lines."""
    data = few_digits()
    shuffled = data.train_labels[torch.randperm(240, generator=torch.Generator().manual_seed(1))]
    scene = load_scene(whole(method) / "scene.safetensors")
    other = replace(scene, fingerprint=fingerprint_of(shuffled.numpy()))
    monkeypatch.setattr(rounds_module, "scene_of", lambda recipe, data: other)
    lie = replace(data, train_labels=shuffled)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: lie)
    run(recipe_for(method), tmp_path)

    def undiagnosed(folder: Path) -> list[dict[str, Any]]:
        return [line | {"diagnostics": None} for line in timeless_lines(folder)]

    assert undiagnosed(tmp_path) == undiagnosed(whole(method))
    assert final_bytes(tmp_path) == final_bytes(whole(method))
    known = ("noise", "suspect_auroc")
    mine, theirs = (timeless_summary(folder) for folder in (tmp_path, whole(method)))
    assert mine["noise"] != theirs["noise"]
    assert {k: v for k, v in mine.items() if k not in known} == {
        k: v for k, v in theirs.items() if k not in known
    }


def poison(record: Any, value: float) -> Any:
    """The record with one float of its first float tensor replaced."""
    for field, content in vars(record).items():
        if isinstance(content, torch.Tensor) and content.is_floating_point():
            changed = content.clone()
            changed.view(-1)[:1] = value
            return replace(record, **{field: changed})
        if isinstance(content, Mapping):
            name, tensor = next(iter(content.items()))
            changed = tensor.clone()
            changed.view(-1)[:1] = value
            return replace(record, **{field: {**content, name: changed}})
    raise AssertionError("nothing to poison")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_update_is_left_out_and_the_model_stays_finite(
    tmp_path: Path, method: Method, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    def train(cfg: Any, client: Any, down: Any, shard: Any, bench: Any, rng: Any) -> Any:
        state, up, metrics = method.train(cfg, client, down, shard, bench, rng)
        return state, poison(up, value) if shard.client % 2 else up, metrics

    monkeypatch.setitem(METHODS, method.name, replace(method, train=train))
    summary = run(recipe_for(method, clients_per_round=6), tmp_path)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert list(line["refused"]) == ["1", "3", "5"]
        assert all("is not finite" in text for text in line["refused"].values())
    assert summary["refused_updates"] == 9
    assert summary["final"] >= 0
    for tensor in safetensors.torch.load_file(tmp_path / "model.safetensors").values():
        assert torch.isfinite(tensor).all()
