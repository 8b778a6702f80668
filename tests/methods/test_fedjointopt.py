"""FedJointOpt: its loss by hand, when labels change and to what, and the case in which it is
FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benches import (
    CLASSES,
    Linear,
    Normalised,
    RecordingBench,
    bench_of,
    images_of,
    labels_of,
    small_cnn,
    weights_of,
)
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Sgd
from fedsieve.methods import METHODS, fedavg, fedjointopt, fedlsr
from fedsieve.methods.fedjointopt import Client, Config
from fedsieve.types import Outputs, Shard, Streams, Weights
from helpers import assert_same_weights

N = 9
SHARD = Shard(2, images_of(N), labels_of(N), torch.arange(N), CLASSES)
SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5)


def rounds(
    cfg: Config, count: int, sgd: Sgd = SGD, shard: Shard = SHARD
) -> tuple[list[Client], RecordingBench]:
    """The client before and after each of so many rounds, always from the same global model."""
    bench = RecordingBench(bench_of(Linear, sgd))
    down = fedavg.Down(weights_of(Linear, 1))
    states = [fedjointopt.init_client(cfg, shard)]
    for round in range(count):
        rng = Streams(11, round, 2)
        state, up, _ = fedjointopt.train(cfg, states[-1], down, shard, bench, rng)
        assert up.samples == len(shard)
        states.append(state)
    return states, bench


def soft_labels_of(bench: RecordingBench) -> list[Tensor]:
    """What was trained on, fit by fit."""
    return [plan.columns["soft_label"] for plan in bench.plans]


def predictions_of(bench: RecordingBench) -> list[Tensor]:
    """What the model predicted after each fit, from its weights."""
    images = bench.inner.view("raw", SHARD.images, np.random.default_rng(0))
    return [bench.forward(f.weights[0], images).logits.softmax(dim=1) for f in bench.fitted]


# ------------------------------------------------------------------------------------- the loss

P, Q = (0.5, 0.25, 0.25), (0.25, 0.25, 0.5)


def loss_of(alpha: float, beta: float, weight: Tensor | None = None) -> float:
    """Of two samples predicted as P and Q, with labels (¾, ¼, 0) and (0, 0, 1), and of a third one
    that is far from both, where it is padding."""
    rows = [P, Q] if weight is None else [P, Q, (0.998, 0.001, 0.001)]
    labels = [[0.75, 0.25, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]][: len(rows)]
    batch = Batch({"x": torch.zeros(len(rows), 1), "soft_label": torch.tensor(labels)}, {}, weight)
    logits = torch.tensor(rows).log() + 3  # softmax does not see the 3

    def model(x: Tensor) -> Outputs:
        return Outputs(None, logits)

    return float(fedjointopt.local_loss(alpha, beta, batch, model))  # type: ignore[arg-type]


CLASSIFICATION = (0.75 * math.log(2) + 0.25 * math.log(4) + math.log(2)) / 2
"""−Σ s̃ log s of both samples, the mean."""
PRIOR = (2 * math.log((1 / 3) / (3 / 8)) + math.log((1 / 3) / (1 / 4))) / 3
"""The mean prediction is (⅜, ¼, ⅜)."""
ENTROPY = 0.5 * math.log(2) + 0.5 * math.log(4)
"""Of both, ½ log 2 + 2·¼ log 4."""


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("alpha", "beta", "expected"),
    [
        (0.0, 0.0, CLASSIFICATION),
        (2.0, 0.0, CLASSIFICATION + 2 * PRIOR),
        (0.0, 3.0, CLASSIFICATION + 3 * ENTROPY),
        (1.2, 0.8, CLASSIFICATION + 1.2 * PRIOR + 0.8 * ENTROPY),
    ],
)
def test_the_three_terms_by_hand(alpha: float, beta: float, expected: float, padded: bool) -> None:
    weight = torch.tensor([1.0, 1.0, 0.0]) if padded else None
    assert loss_of(alpha, beta, weight) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_the_entropy_is_that_of_both_factors() -> None:
    """∂/∂z_c −Σ s log s = −s_c·(log s_c + H): s is no constant in it."""
    z = torch.tensor([[1.0, 0.0, -2.0]], requires_grad=True)
    fedlsr.entropy(z).sum().backward()  # type: ignore[no-untyped-call]
    s = z.detach().softmax(dim=1)
    h = -(s * s.log()).sum()
    torch.testing.assert_close(z.grad, -s * (s.log() + h))


# ------------------------------------------------------------------------------ when labels change


def test_before_its_begin_it_is_fedavg() -> None:
    """With α = β = 0, as long as nothing is to be remembered: rounds that end by epoch 70 − 10."""
    sgd = Sgd(epochs=3, batch_size=4, lr=0.3, momentum=0.9, weight_decay=0.01)
    start, rng = fedavg.Down(weights_of(Normalised, 1)), Streams(11, 4, 2)
    cfg, bench = Config(alpha=0.0, beta=0.0), bench_of(Normalised, sgd)
    plain = fedavg.train(fedavg.Config(), fedavg.Client(), start, SHARD, bench, rng)[1]
    for trained, same in ((0, True), (57, True), (58, False)):
        state = Client(epochs=trained)
        state, up, metrics = fedjointopt.train(cfg, state, start, SHARD, bench, rng)
        assert state.epochs == trained + 3
        assert (state.history is None) == same
        if same:
            assert_same_weights(up.weights, plain.weights)
            assert set(metrics) == {"loss"}


def test_labels_change_after_the_clients_own_epochs() -> None:
    """Five epochs on the given labels, in rounds of two: two epochs at once, as 2 ≤ 5 − 3, then
    one by one. The sixth epoch is the second of the third round."""
    cfg = Config(begin_epoch=5, history_epochs=3)
    states, bench = rounds(cfg, 4)
    given = torch.nn.functional.one_hot(SHARD.labels, CLASSES).float()
    used, predicted = soft_labels_of(bench), predictions_of(bench)
    assert [plan.sgd.epochs for plan in bench.plans] == [2, 1, 1, 1, 1, 1, 1]
    assert [state.epochs for state in states] == [0, 2, 4, 6, 8]
    for labels in used[:4]:  # epochs 1–2, 3, 4, 5
        assert torch.equal(labels, given)
    for fit, epochs in ((4, predicted[1:4]), (5, predicted[2:5]), (6, predicted[3:6])):
        torch.testing.assert_close(used[fit], torch.stack(epochs).mean(dim=0))
    assert [len(state.history) for state in states if state.history is not None] == [2, 3, 3]


def test_a_mean_is_over_as_many_epochs_as_there_are() -> None:
    """After one epoch the queue of ten holds one prediction, and the label is that one: a row sums
    to one, not to a tenth."""
    states, bench = rounds(Config(begin_epoch=1, history_epochs=10), 2)
    used, predicted = soft_labels_of(bench), predictions_of(bench)
    for fit in (1, 2, 3):
        torch.testing.assert_close(used[fit], torch.stack(predicted[:fit]).mean(dim=0))
        torch.testing.assert_close(used[fit].sum(dim=1), torch.ones(N))
    assert states[-1].history is not None
    assert states[-1].history.shape == (4, N, CLASSES)


def test_epochs_go_on_from_each_other_with_draws_of_their_own() -> None:
    _, bench = rounds(Config(begin_epoch=1), 1)
    first, second = bench.plans
    assert_same_weights(second.start[0], bench.fitted[0].weights[0])
    orders = [plan.rng("batches").permutation(50).tolist() for plan in (first, second)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("trained", "fits"), [(58, 1), (59, 2)])
def test_the_loss_of_a_round_is_the_mean_over_its_epochs(trained: int, fits: int) -> None:
    bench, rng = RecordingBench(bench_of(Linear, SGD)), Streams(11, 0, 2)
    down, state = fedavg.Down(weights_of(Linear, 1)), Client(epochs=trained)
    _, _, metrics = fedjointopt.train(Config(), state, down, SHARD, bench, rng)
    losses = [fitted.loss for fitted in bench.fitted]
    assert len(losses) == fits
    assert metrics["loss"] == pytest.approx(sum(losses) / fits)
    assert metrics["loss"] > 0.5


def test_what_is_said_of_labels_is_what_the_last_epoch_used() -> None:
    states, bench = rounds(Config(begin_epoch=3, history_epochs=2), 2)
    assert fedjointopt.refined(states[1]) is None
    assert fedjointopt.own_sieve(states[1]) is None
    last = soft_labels_of(bench)[-1]
    found, sieved = fedjointopt.refined(states[2]), fedjointopt.own_sieve(states[2])
    assert found is not None
    assert torch.equal(found, last.argmax(dim=1))
    assert sieved is not None
    assert sieved.p_clean is not None
    p = last[torch.arange(N), SHARD.labels]
    torch.testing.assert_close(sieved.p_clean, p)
    assert sieved.noise_rate == pytest.approx(1 - float(p.mean()))
    expected = float((found != SHARD.labels).float().mean())
    assert fedjointopt.replaced_share(states[2], SHARD.labels) == pytest.approx(expected)
    assert fedjointopt.replaced_share(states[1], SHARD.labels) == 0


@pytest.mark.parametrize("n", [0, 1])
def test_a_client_that_cannot_train_keeps_its_model_and_its_memory(n: int) -> None:
    small = replace(SHARD, images=SHARD.images[:n], labels=SHARD.labels[:n], ids=SHARD.ids[:n])
    states, bench = rounds(Config(begin_epoch=1, history_epochs=2), 2, shard=small)
    assert states == [Client()] * 3
    assert_same_weights(bench.fitted[-1].weights[0], weights_of(Linear, 1))


def test_predictions_of_a_model_that_has_diverged_are_not_remembered() -> None:
    cfg, before = Config(begin_epoch=1, history_epochs=2), torch.randn(1, 4, 3).softmax(dim=2)
    logits = torch.zeros(4, 3)
    logits[1, 2] = math.nan
    found = fedjointopt.remembering(cfg, Client(epochs=5, history=before), logits)
    assert found == Client(epochs=6, history=before)
    found = fedjointopt.remembering(cfg, found, torch.zeros(4, 3))
    assert found.epochs == 7
    assert found.history is not None
    assert torch.equal(found.history, torch.cat([before, torch.full((1, 4, 3), 1 / 3)]))


def test_wrong_labels_are_replaced_by_right_ones() -> None:
    """120 digits of which 40 % are called otherwise; the model learns what most of them say."""
    data = load_digits()
    true = data.train_labels[:120]
    draw = np.random.default_rng(0)
    wrong = torch.from_numpy(draw.permutation(120)[:48])
    given = true.clone()
    given[wrong] = (true[wrong] + torch.from_numpy(draw.integers(1, 10, 48))) % 10
    shard = Shard(0, data.train_images[:120], given, torch.arange(120), 10)
    cfg = Config(begin_epoch=12, history_epochs=4)
    bench = bench_of(small_cnn, Sgd(epochs=5, batch_size=20, lr=0.05, momentum=0.5))
    state, weights = fedjointopt.init_client(cfg, shard), weights_of(small_cnn, 1)
    for round in range(6):
        rng = Streams(1, round, 0)
        down = fedavg.Down(weights)
        state, up, _ = fedjointopt.train(cfg, state, down, shard, bench, rng)
        weights = dict(up.weights)
    labels = fedjointopt.refined(state)
    assert labels is not None
    assert float((labels == true).float().mean()) > 0.8  # 0.6 of the given ones are right
    assert state.p_clean is not None
    is_wrong = given != true
    assert state.p_clean[~is_wrong].mean() > state.p_clean[is_wrong].mean() + 0.3


# -------------------------------------------------------------------------------------- the rest


def test_memory_of_other_samples_is_refused() -> None:
    other = replace(SHARD, images=images_of(4), labels=labels_of(4), ids=torch.arange(4))
    states, bench = rounds(Config(begin_epoch=1), 1)
    weights: Weights = weights_of(Linear, 1)
    with pytest.raises(FedsieveError, match=r"^Client 2 remembers predictions of other samples"):
        fedjointopt.train(
            Config(begin_epoch=1), states[1], fedavg.Down(weights), other, bench, Streams(1, 1, 2)
        )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"alpha": -0.1}, "alpha must be at least 0, not -0.1."),
        ({"beta": math.inf}, "beta must be at least 0, not inf."),
        ({"beta": math.nan}, "beta must be at least 0, not nan."),
        ({"begin_epoch": 0}, "begin_epoch must be at least 1, not 0."),
        ({"history_epochs": 0}, "history_epochs must be at least 1, not 0."),
    ],
)
def test_a_bad_setting_is_refused(values: dict[str, float], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**values)  # type: ignore[arg-type]


def test_it_is_registered_as_a_relative_of_fedavg() -> None:
    found = METHODS["fedjointopt"]
    assert (found.config, found.train) == (Config, fedjointopt.train)
    assert (found.merge, found.up) == (fedavg.merge, fedavg.Up)
    cfg = Config()
    assert (cfg.alpha, cfg.beta, cfg.begin_epoch, cfg.history_epochs) == (1.0, 0.5, 70, 10)
