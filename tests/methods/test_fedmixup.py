"""FedMixup: its loss by hand, what a plan carries, and the cases in which it is FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benches import (
    CLASSES,
    Linear,
    Normalised,
    RecordingBench,
    bench_of,
    images_of,
    labels_of,
    weights_of,
)
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Sgd
from fedsieve.methods import METHODS, fedavg, fedmixup
from fedsieve.methods.fedmixup import Config
from fedsieve.types import Outputs, Shard, Streams, Weights
from helpers import assert_same_weights

SHARD = Shard(2, images_of(7), labels_of(7), torch.arange(7), CLASSES)
RNG = Streams(11, 4, 2)
SGD = Sgd(epochs=2, batch_size=3, lr=0.2, momentum=0.5, weight_decay=0.01)


def train(alpha: float, start: Weights, sgd: Sgd = SGD) -> Weights:
    bench = bench_of(Normalised, sgd)
    down = fedavg.Down(start)
    client, up, _ = fedmixup.train(Config(alpha=alpha), fedavg.Client(), down, SHARD, bench, RNG)
    assert (client, up.samples) == (fedavg.Client(), 7)
    return up.weights


def fedavgs(start: Weights, sgd: Sgd = SGD) -> Weights:
    bench, down = bench_of(Normalised, sgd), fedavg.Down(start)
    up = fedavg.train(fedavg.Config(), fedavg.Client(), down, SHARD, bench, RNG)[1]
    return up.weights


def test_the_loss_by_hand() -> None:
    """λ = ¾, and the keys pair each of two samples with the other: x̃ = (¾, ¼) and (¼, ¾) of the
    way. The model's logits for x̃ are (log x̃, log(1 − x̃)), so that p_0 = x̃; the labels are 0 and 1.
    Both samples: ¾·log(4/3) + ¼·log 4."""
    values = {
        "x": torch.tensor([[1.0], [0.0]]),
        "label": torch.tensor([0, 1]),
        "lam": torch.tensor(0.75),
        "keys": torch.tensor([0.9, 0.1]),
    }

    def model(x: torch.Tensor) -> Outputs:
        assert x.flatten().tolist() == [0.75, 0.25]
        return Outputs(None, torch.cat([x, 1 - x], dim=1).log())

    found = fedmixup.local_loss(Batch(values, {}, None), model)  # type: ignore[arg-type]
    expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_without_mixing_it_is_fedavg() -> None:
    start = weights_of(Normalised, 1)
    assert_same_weights(train(0.0, start), fedavgs(start))


def test_the_limit_of_small_alpha_is_fedavg() -> None:
    """Beta(α, α) for α → 0 is 0 or 1: a batch is trained as it is, or in another order."""
    start = weights_of(Normalised, 1)
    limit, plain = train(1e-9, start), fedavgs(start)
    for name, tensor in plain.items():
        torch.testing.assert_close(limit[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.equal(train(1.0, start)["layer.weight"], plain["layer.weight"])


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
def test_a_plan_has_one_lambda_and_one_order_for_each_step(tail: str) -> None:
    bench = RecordingBench(bench_of(Linear, replace(SGD, tail=tail)))
    down = fedavg.Down(weights_of(Linear, 1))
    _, _, metrics = fedmixup.train(Config(), fedavg.Client(), down, SHARD, bench, RNG)
    assert metrics == {"loss": bench.fitted[0].loss}
    plan = bench.plans[0]
    steps = {"keep": 4, "drop": 4, "pad": 6}[tail]  # of 7 samples, one is left over and skipped
    assert plan.per_step["lam"].shape == (steps,)
    assert len(set(plan.per_step["lam"].tolist())) == steps
    assert plan.per_step["keys"].shape == (steps, 3)
    assert (plan.views, plan.loss) == ({"x": "weak"}, fedmixup.local_loss)
    assert torch.equal(plan.columns["label"], SHARD.labels)


def test_another_client_or_round_draws_anew() -> None:
    drawn = []
    for rng in (RNG, Streams(11, 5, 2), Streams(11, 4, 3), RNG):
        bench = RecordingBench(bench_of(Linear, SGD))
        down = fedavg.Down(weights_of(Linear, 1))
        fedmixup.train(Config(), fedavg.Client(), down, SHARD, bench, rng)
        drawn.append(tuple(bench.plans[0].per_step["lam"].tolist()))
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("alpha", [-0.1, math.inf, math.nan])
def test_alpha_outside_its_range(alpha: float) -> None:
    with pytest.raises(FedsieveError, match=r"^method\.alpha must be at least 0, not "):
        Config(alpha=alpha)


def test_it_is_registered_as_a_relative_of_fedavg() -> None:
    found = METHODS["fedmixup"]
    assert (found.config, found.train) == (Config, fedmixup.train)
    assert (found.merge, found.suspect) == (fedavg.merge, fedavg.suspect)
    assert Config().alpha == 1.0
