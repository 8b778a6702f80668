"""Views that are asked for before a plan is known are those that the plan would have asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_stage import a_setup, needs_gpu

from fedsieve.local.ahead import Ahead, look_ahead, wishes
from fedsieve.local.bench import EagerBench
from fedsieve.local.plan import Plan, Sgd, draws
from fedsieve.local.together import ViewsTogether
from fedsieve.methods.fedavg import local_loss
from fedsieve.simulate.directory import MODEL
from fedsieve.simulate.run import run
from fedsieve.simulate.slots import Slots
from fedsieve.types import Streams
from helpers import tiny_recipe

VIEWS = {"x": "strong", "again": "weak"}
SGD = Sgd(epochs=3, batch_size=16)


def a_plan(images: torch.Tensor, rng: Streams) -> Plan:
    return Plan(
        start=[{}],
        images=images,
        views=VIEWS,
        columns={},
        loss=local_loss,
        sgd=SGD,
        rng=rng,
    )


def test_what_is_asked_for_ahead_is_what_the_plain_loop_makes() -> None:
    setup = replace(a_setup(), sgd=SGD)
    draw = np.random.default_rng(0)
    shards = {
        Streams(1, 5, client): torch.from_numpy(
            draw.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8)
        )
        for client, n in ((4, 400), (7, 20))  # 3 epochs of 20 images come in one lot, of 400 in two
    }
    together = ViewsTogether()
    for ahead, (rng, images) in zip(
        look_ahead(setup, together, VIEWS, shards), shards.items(), strict=True
    ):
        plan = a_plan(images, rng)
        lots = list(EagerBench(setup, torch.device("cpu")).epoch_views(plan))
        epochs, *later = draws(len(images), SGD.epochs)
        assert ahead.serves(plan, epochs)
        for name in VIEWS:
            assert torch.equal(ahead.made.result()[name], lots[0][1][name])
        for following, (_, expected) in zip(later, lots[1:], strict=True):
            asked = together.ask(wishes(setup, VIEWS, images, ahead.streams, following)).result()
            assert all(torch.equal(asked[name], expected[name]) for name in VIEWS)
    together.close()


def test_a_guess_that_is_wrong_is_not_used() -> None:
    setup, images = replace(a_setup(), sgd=SGD), torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    together, rng = ViewsTogether(), Streams(1, 5, 4)
    (ahead,) = look_ahead(setup, together, VIEWS, {rng: images})
    plan, epochs = a_plan(images, rng), range(3)
    assert ahead.serves(plan, epochs)
    assert not ahead.serves(plan, range(2))
    assert not ahead.serves(replace(plan, images=images.clone()), epochs)
    assert not ahead.serves(replace(plan, rng=Streams(1, 6, 4)), epochs)
    assert not ahead.serves(replace(plan, views={"x": "strong"}), epochs)
    together.close()


@needs_gpu
@pytest.mark.gpu
def test_a_run_that_looks_ahead_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(rounds=6, engine={"device": "cuda"}, precision="fp32")
    guesses: list[bool] = []
    serves = Ahead.serves

    def noted(ahead: Ahead, plan: Plan, epochs: range) -> bool:
        guesses.append(serves(ahead, plan, epochs))
        return guesses[-1]

    monkeypatch.setattr(Ahead, "serves", noted)
    run(recipe, tmp_path / "ahead")
    assert guesses
    assert all(guesses)
    monkeypatch.setattr(Slots, "look_ahead", lambda *_: None)
    run(recipe, tmp_path / "not")
    ahead, without = (tmp_path / name / MODEL for name in ("ahead", "not"))
    assert ahead.read_bytes() == without.read_bytes()
