"""Captured trainings against the plain loop, on a CPU: all of a program but the capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_stage import GENTLE, a_plan, a_setup, assert_close, make_model
from torch import Tensor

from fedsieve.local.bench import EagerBench
from fedsieve.local.plan import Batch, Ema, Net, Plan, Stepped, count_steps
from fedsieve.losses import cross_entropy, kl
from fedsieve.models.weights import read_weights
from fedsieve.types import Weights
from uncaptured import Slot, recorded

CPU = torch.device("cpu")
SIDE = 8


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of batches for which a step was captured."""
    return recorded(monkeypatch)


def a_slot() -> Slot:
    return Slot(a_setup("small", SIDE))


def everything_loss(batch: Batch, net: Net, other: Net, frozen: Net, average: Net) -> Stepped:
    """Two trained networks, a frozen one and the average; images beside the batch, numbers of the
    step, and what is carried: the mean logits, a count, and two that change places."""
    x, share = batch["x"], batch["share"]
    a, b = net(x).logits, other(batch["w"]).logits
    labels = cross_entropy(a, batch["label"]) + cross_entropy(b, batch["label"])
    teachers = kl(frozen(x).logits, a, 2.0) + kl(average(x).logits, b, 2.0)
    beside = net(batch["u"]).logits
    mean = batch.mean(a.sum(dim=1)) + beside.mean(dim=0)
    loss = batch.mean(labels + share * teachers) + batch.scalar("mu") * beside.square().mean()
    carried = {
        "last": 0.5 * batch["last"] + 0.1 * mean,  # with its graph
        "steps": batch["steps"] + 1,
        "one": batch["other"],
        "other": batch["one"],
    }
    return Stepped(loss + 0.1 * (mean - batch["last"]).square().mean(), carried)


def start(factor: float = 1.0) -> Weights:
    weights = read_weights(make_model("small", SIDE))
    return {name: factor * tensor for name, tensor in weights.items()}


def everything(n: int, seed: int, tail: Any, epochs: int = 3) -> Plan:
    """A plan that asks for all there is; two clients of the same `n` differ in every value."""
    sgd = replace(GENTLE, epochs=epochs, batch_size=8, tail=tail)
    steps, rng = count_steps(n, sgd), np.random.default_rng(seed)
    beside = rng.integers(0, 256, (steps, 5, 3, SIDE, SIDE), dtype=np.uint8)
    plan = a_plan(n, SIDE, "cpu", views={"x": "weak", "w": "raw"}, loss=everything_loss, sgd=sgd)
    first = float(rng.random())
    return replace(
        plan,
        start=[start(), start(0.8 + 0.1 * first)],
        frozen=[start(0.9 + 0.1 * first)],
        ema=Ema(start(1.1), 0.8, in_loss=True),
        images=torch.from_numpy(rng.integers(0, 256, (n, 3, SIDE, SIDE), dtype=np.uint8)),
        columns={"label": torch.from_numpy(rng.integers(0, 10, n))},
        constants={"mu": first},
        per_step={"share": torch.from_numpy(rng.random(steps)).float()},
        step_images={"u": torch.from_numpy(beside)},
        carried={
            "last": torch.full((10,), first),
            "steps": torch.zeros(1, dtype=torch.int64),
            "one": torch.full((3,), first),
            "other": torch.zeros(3),
        },
        update_scale={name: torch.tensor(first) for name in list(start())[:2]},
        observe_after=epochs - 1,
    )


@pytest.mark.parametrize(
    ("tail", "sizes"), [("keep", [8, 5, 8, 2]), ("drop", [8, 8]), ("pad", [8])]
)
def test_it_is_the_plain_loop(
    captured: list[int], monkeypatch: pytest.MonkeyPatch, tail: str, sizes: list[int]
) -> None:
    """Clients of several sizes take turns on one program, in stretches of some epochs each. The
    third has more batches in a stretch than there is room for: its step is captured anew."""
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 45)
    slot, eager = a_slot(), EagerBench(a_setup("small", SIDE), CPU)
    plans = [everything(n, seed, tail) for n, seed in ((21, 1), (21, 2), (50, 3), (21, 1))]
    fitted = [slot.fit(plan) for plan in plans]
    for plan, mine in zip(plans, fitted, strict=True):  # none of which a later one may change
        theirs = eager.fit(plan)
        assert theirs.steps > 0
        assert_close(plan, theirs, mine, 1e-3)
        close(mine.carried["last"], theirs.carried["last"])
        assert mine.carried["steps"].tolist() == theirs.carried["steps"].tolist() == [theirs.steps]
        for name in ("one", "other"):
            assert torch.equal(mine.carried[name], theirs.carried[name])
        assert mine.observed is not None
        assert theirs.observed is not None
        close(mine.observed.logits, theirs.observed.logits)
    assert len(slot.programs) == 1
    assert captured == sizes


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_smaller_last_batch_has_room_for_one_of_each_epoch(captured: list[int]) -> None:
    """There may be as many of these sizes as a batch has samples, each with all that a step reads,
    and clients of any size share them: 16 or 1 of the batches of 8 in a stretch, one of 5."""
    slot = a_slot()
    for n in (8 * 16 + 5, 8 + 5, 8 * 5 + 5):
        plan = everything(n, n, "keep", epochs=2)
        slot.fit(replace(plan, observe_after=None))
    (held,) = slot.programs.values()
    assert {size: step.room for size, step in held._steps.items()} == {8: 32, 5: 2}
    assert captured == [8, 5]
