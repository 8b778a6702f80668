"""FedSCE against numbers derived here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benches import CLASSES, Linear, bench_of, images_of, labels_of, weights_of
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Sgd
from fedsieve.methods import METHODS, fedavg, fedsce
from fedsieve.methods.fedsce import Config
from fedsieve.types import Outputs, Shard, Streams
from helpers import assert_same_weights

SHARD = Shard(2, images_of(6), labels_of(6), torch.arange(6), CLASSES)
RNG = Streams(11, 4, 2)


def train(cfg: Config, start: dict[str, torch.Tensor]) -> fedavg.Up:
    bench = bench_of(Linear, Sgd(epochs=2, batch_size=3, lr=0.2))
    _, up, _ = fedsce.train(cfg, fedavg.Client(), fedavg.Down(start), SHARD, bench, RNG)
    return up


def loss_of(*probabilities: float, label: int, cfg: Config) -> float:
    logits = torch.tensor([probabilities]).log()
    batch = Batch({"x": torch.zeros(1, 1), "label": torch.tensor([label])}, {}, None)
    loss = fedsce.local_loss(
        cfg.alpha, cfg.beta, cfg.log_zero, batch, lambda x: Outputs(None, logits)
    )
    return loss.item()


def test_both_terms_by_hand() -> None:
    """p = (½, ¼, ¼) and the label 1: CE = log 4, and of the reverse ¾ of the mass meets log 0."""
    cfg = Config(alpha=2.0, beta=3.0, log_zero=-4.0)
    expected = 2 * math.log(4) + 3 * 4 * 0.75
    assert loss_of(0.5, 0.25, 0.25, label=1, cfg=cfg) == pytest.approx(expected, rel=1e-5)
    # by default 0.1·CE + RCE, with log 0 = log 10⁻⁴
    expected = 0.1 * math.log(2) - math.log(1e-4) / 2
    assert loss_of(0.5, 0.25, 0.25, label=0, cfg=Config()) == pytest.approx(expected, rel=1e-5)


def test_a_sure_wrong_prediction_costs_at_most_minus_a() -> None:
    """The reverse term alone is bounded: 1 − p_y → 1."""
    cfg = Config(alpha=0.0, beta=1.0, log_zero=-4.0)
    assert loss_of(1e-9, 1 - 1e-9, label=0, cfg=cfg) == pytest.approx(4.0, rel=1e-4)


def test_a_plan_carries_the_weights_of_its_loss() -> None:
    seen: list[Any] = []

    class Watching:
        sgd = Sgd()

        def fit(self, plan: Any) -> Any:
            seen.append(plan)
            raise InterruptedError

    bench: Any = Watching()
    with pytest.raises(InterruptedError):
        fedsce.train(
            Config(alpha=6.0, beta=0.1), fedavg.Client(), fedavg.Down({}), SHARD, bench, RNG
        )
    assert seen[0].loss.args == (6.0, 0.1, math.log(1e-4))
    assert seen[0].views == {"x": "weak"}


def test_without_the_reverse_term_it_is_fedavg() -> None:
    start, bench = weights_of(Linear, 1), bench_of(Linear, Sgd(epochs=2, batch_size=3, lr=0.2))
    plain = fedavg.train(fedavg.Config(), fedavg.Client(), fedavg.Down(start), SHARD, bench, RNG)[1]
    up = train(Config(alpha=1.0, beta=0.0), start)
    assert_same_weights(up.weights, plain.weights)
    assert up.samples == plain.samples == 6


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"alpha": -0.1}, "method.alpha must be at least 0, not -0.1."),
        ({"beta": math.inf}, "method.beta must be at least 0, not inf."),
        ({"beta": math.nan}, "method.beta must be at least 0, not nan."),
        ({"alpha": 0.0, "beta": 0.0}, "method.alpha and method.beta are both 0"),
        ({"log_zero": 0.0}, "method.log_zero must be below 0, not 0.0."),
        ({"log_zero": -math.inf}, "method.log_zero must be below 0, not -inf."),
    ],
)
def test_settings_outside_their_range(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(FedsieveError) as error:
        Config(**settings)
    assert sentence in str(error.value)


def test_it_is_registered_as_a_relative_of_fedavg() -> None:
    found = METHODS["fedsce"]
    assert (found.config, found.train) == (Config, fedsce.train)
    assert (found.merge, found.suspect) == (fedavg.merge, fedavg.suspect)
