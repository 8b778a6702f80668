"""Local training as data: solver settings, batches, the schedule of steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.local import plan as plan_module
from fedsieve.local.plan import Batch, Plan, Sgd, Stepped, count_steps, draws, schedule, stepped
from fedsieve.types import Streams


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


# --------------------------------------------------------------------------------------- solver


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"epochs": 0}, "sgd.epochs must be at least 1, not 0."),
        ({"batch_size": 1}, "sgd.batch_size must be at least 2, not 1."),
        ({"lr": 0.0}, "sgd.lr must be above 0, not 0.0."),
        ({"lr": float("nan")}, "sgd.lr must be above 0, not nan."),
        ({"momentum": 1.0}, "sgd.momentum must be in [0, 1), not 1.0."),
        ({"momentum": -0.1}, "sgd.momentum must be in [0, 1), not -0.1."),
        ({"weight_decay": -1.0}, "sgd.weight_decay must be at least 0, not -1.0."),
    ],
    ids=str,
)
def test_a_solver_that_cannot_work_is_refused(settings_: dict[str, float], sentence: str) -> None:
    with pytest.raises(FedsieveError) as caught:
        Sgd(**settings_)  # type: ignore[arg-type]
    assert str(caught.value) == sentence


# ------------------------------------------------------------------------------------- schedule


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(0, 40),
    epochs=st.integers(1, 3),
    size=st.integers(2, 12),
    tail=st.sampled_from(["keep", "drop", "pad"]),
)
def test_every_epoch_is_a_permutation_cut_into_batches(
    n: int, epochs: int, size: int, tail: str
) -> None:
    sgd = Sgd(epochs=epochs, batch_size=size, tail=tail)  # type: ignore[arg-type]
    steps = schedule(n, sgd, rng())
    assert len(steps) == len(steps.rows) == len(steps.epoch_of) == len(steps.padding)
    assert len(steps) == count_steps(n, sgd)
    assert list(steps.epoch_of) == sorted(steps.epoch_of)
    orders = rng()
    for epoch in range(epochs):
        order = orders.permutation(n)
        mine = [i for i, e in enumerate(steps.epoch_of) if e == epoch]
        real = [
            row
            for i in mine
            for row in steps.rows[i][: len(steps.rows[i]) - steps.padding[i]].tolist()
        ]
        remainder = n % size
        lost = remainder if tail == "drop" or (tail == "keep" and remainder == 1) else 0
        assert real == order[: n - lost].tolist(), "in the order of the permutation, each once"


@pytest.mark.parametrize(
    ("n", "tail", "sizes", "padding"),
    [
        (10, "keep", [4, 4, 2], [0, 0, 0]),
        (10, "drop", [4, 4], [0, 0]),
        (10, "pad", [4, 4, 4], [0, 0, 2]),
        (9, "keep", [4, 4], [0, 0]),  # BatchNorm cannot normalise the one that is left
        (9, "pad", [4, 4, 4], [0, 0, 3]),
        (8, "keep", [4, 4], [0, 0]),
        (8, "drop", [4, 4], [0, 0]),
        (8, "pad", [4, 4], [0, 0]),
        (3, "keep", [3], [0]),
        (3, "drop", [], []),
        (3, "pad", [4], [1]),
        (1, "keep", [], []),
        (1, "drop", [], []),
        (1, "pad", [4], [3]),
        (0, "keep", [], []),
        (0, "drop", [], []),
        (0, "pad", [], []),
    ],
)
def test_the_tail_of_an_epoch(n: int, tail: str, sizes: list[int], padding: list[int]) -> None:
    steps = schedule(n, Sgd(epochs=2, batch_size=4, tail=tail), rng())  # type: ignore[arg-type]
    assert [len(rows) for rows in steps.rows] == sizes * 2
    assert list(steps.padding) == padding * 2
    assert list(steps.epoch_of) == [0] * len(sizes) + [1] * len(sizes)
    assert count_steps(n, Sgd(epochs=2, batch_size=4, tail=tail)) == 2 * len(sizes)  # type: ignore[arg-type]


def test_padding_repeats_the_first_samples_of_the_epoch() -> None:
    order = rng().permutation(10)
    last = schedule(10, Sgd(batch_size=4, tail="pad"), rng()).rows[-1]
    assert last.tolist() == [*order[8:], *order[:2]]
    few = rng().permutation(3)
    (only,) = schedule(3, Sgd(batch_size=8, tail="pad"), rng()).rows
    assert only.tolist() == [*few, *few, *few[:2]]


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 20_000), epochs=st.integers(1, 30))
def test_draws_cover_the_epochs_in_turn_and_stay_within_the_budget(n: int, epochs: int) -> None:
    parts = list(draws(n, epochs))
    assert [epoch for part in parts for epoch in part] == list(range(epochs))
    for part in parts:
        assert len(part) == 1 or len(part) * n <= plan_module.IMAGES_PER_DRAW
    if len(parts) > 1:
        assert (len(parts[0]) + 1) * n > plan_module.IMAGES_PER_DRAW, "as many as fit"


# ---------------------------------------------------------------------------------------- batch


def test_a_mean_leaves_padding_out() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 100.0])
    assert Batch({}, {}, None).mean(values) == 27.25
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert Batch({}, {}, weight).mean(values) == 3.0


def test_padding_gets_no_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    Batch({}, {}, torch.tensor([1.0, 1.0, 0.0])).mean(values).backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("shape", [(), (3, 1), (3, 3)])
def test_a_mean_is_taken_of_one_value_per_sample(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="per-sample values"):
        Batch({}, {}, None).mean(torch.ones(shape))


def test_a_batch_hands_out_values_numbers_and_weights_by_name() -> None:
    anchor = {"w": torch.ones(2)}
    batch = Batch({"x": torch.zeros(1)}, {"mu": torch.tensor(0.5), "anchor": anchor}, None)
    assert batch["x"].tolist() == [0.0]
    assert batch.scalar("mu") == 0.5
    assert batch.weights("anchor") is anchor
    with pytest.raises(AssertionError):
        batch.scalar("anchor")
    with pytest.raises(AssertionError):
        batch.weights("mu")


def test_a_loss_carries_what_its_plan_does() -> None:
    loss, kept = torch.tensor(2.0), {"m": torch.zeros(3)}
    assert stepped(loss, {}) == Stepped(loss, {})
    assert stepped(Stepped(loss, kept), {"m": torch.ones(3)}) == Stepped(loss, kept)
    for found, carried in (
        (loss, kept),
        (Stepped(loss, kept), {}),
        (Stepped(loss, kept), {"other": torch.zeros(3)}),
        (Stepped(loss, kept), {"m": torch.zeros(1)}),
        (Stepped(loss, kept), {"m": torch.zeros(3, dtype=torch.int64)}),
    ):
        with pytest.raises(AssertionError, match="a plan carries"):
            stepped(found, carried)


# ----------------------------------------------------------------------------------------- plan


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "start": [{}],
        "images": torch.zeros(3, 1, 2, 2, dtype=torch.uint8),
        "views": {"x": "raw"},
        "columns": {"label": torch.zeros(3)},
        "loss": lambda batch, net: torch.zeros(()),
        "sgd": Sgd(),
        "rng": Streams(0, 0, 0),
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]


def test_a_plan_checks_that_its_parts_meet() -> None:
    assert plan().observe_after is None
    with pytest.raises(AssertionError, match="column label: 2 rows"):
        plan(columns={"label": torch.zeros(2)})
    with pytest.raises(AssertionError, match="share a name"):
        plan(columns={"x": torch.zeros(3)})
    with pytest.raises(AssertionError):
        plan(start=[])
    with pytest.raises(AssertionError):
        plan(start=[{}, {}, {}])
    twice = Sgd(epochs=2, batch_size=2)  # three samples: one step of two per epoch
    assert len(plan(sgd=twice, per_step={"lam": torch.zeros(2, 5)}).per_step["lam"]) == 2
    with pytest.raises(AssertionError, match="lam: 3 rows for 2 steps"):
        plan(sgd=twice, per_step={"lam": torch.zeros(3)})
    for name in ("x", "label"):
        with pytest.raises(AssertionError, match="share a name"):
            plan(sgd=twice, per_step={name: torch.zeros(2)})
        with pytest.raises(AssertionError, match="share a name"):
            plan(carried={name: torch.zeros(2)})
    beside = torch.zeros((2, 5, 1, 2, 2), dtype=torch.uint8)
    both = plan(sgd=twice, per_step={"lam": torch.zeros(2)}, step_images={"u": beside})
    assert list(both.of_steps) == ["lam", "u"]
    assert both.normalised == ("x", "u")
    with pytest.raises(AssertionError, match=r"^u: 1 rows for 2 steps"):
        plan(sgd=twice, step_images={"u": beside[:1]})
    with pytest.raises(AssertionError, match=r"step_images u: torch\.float32 is no view's"):
        plan(sgd=twice, step_images={"u": beside.float()})
    with pytest.raises(AssertionError, match="share a name"):
        plan(sgd=twice, per_step={"u": torch.zeros(2)}, step_images={"u": beside})
    with pytest.raises(AssertionError, match=r"unknown parameters \['typo'\]"):
        plan(start=[{"w": torch.zeros(1)}], update_scale={"typo": torch.zeros(1)})
