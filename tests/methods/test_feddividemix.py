"""FedDivideMix: its equations in numbers worked out here, who divides for whom, and the cases in
which it is FedAvg twice over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.mixture import GaussianMixture
from torch import Tensor

from benches import (
    CLASSES,
    Linear,
    Normalised,
    RecordingBench,
    bench_of,
    bright_shard,
    images_of,
    labels_of,
    seeing,
    weights_of,
)
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Plan, Sgd, schedule
from fedsieve.local.program import program_key
from fedsieve.methods import METHODS, fedavg, feddividemix
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedcoteaching import Server, Up
from fedsieve.methods.feddividemix import Client, Config, Down
from fedsieve.simulate.run import run
from fedsieve.types import Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, final_bytes, tiny_recipe

SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.01)
RNG = Streams(11, 4, 2)
FEDERATION = Federation((10, 30), 2, 50, CLASSES)


def f32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(z)
    return powers / powers.sum(axis=1, keepdims=True)


# -------------------------------------------------------------------------------- configuration


def test_the_defaults_are_fedgrs() -> None:
    cfg = Config()
    assert (cfg.warmup_rounds, cfg.clean_threshold, cfg.temperature) == (100, 0.5, 0.5)
    assert (cfg.mixup_alpha, cfg.lambda_u, cfg.ramp_rounds, cfg.lambda_r) == (4, 25, 16, 1)
    assert (cfg.evaluation_view, cfg.second_start) == ("weak", "all")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"warmup_rounds": -1}, "warmup_rounds must be at least 0, not -1."),
        ({"ramp_rounds": 0}, "ramp_rounds must be at least 1, not 0."),
        ({"clean_threshold": 1.0}, r"clean_threshold must be in \(0, 1\), not 1.0."),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0."),
        ({"mixup_alpha": -1.0}, "mixup_alpha must be at least 0, not -1.0."),
        ({"lambda_u": math.inf}, "lambda_u must be at least 0, not inf."),
        ({"lambda_r": math.nan}, "lambda_r must be at least 0, not nan."),
        ({"evaluation_view": "strong"}, "evaluation_view must be one of 'raw', 'weak'"),
        ({"second_start": "none"}, "second_start must be one of 'all', 'head'"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**values)


# --------------------------------------------------------------------------------- the schedule


def test_the_server_counts_from_the_end_of_the_warm_up() -> None:
    server = Server({}, {}, FEDERATION)
    sent = [feddividemix.send(Config(warmup_rounds=3), server, t, 0) for t in (0, 2, 3, 7)]
    assert [down.since_warm_up for down in sent] == [None, None, 0, 4]
    assert feddividemix.send(Config(warmup_rounds=0), server, 0, 0).since_warm_up == 0


@pytest.mark.parametrize(
    ("since", "steps", "expected"),
    [
        (0, 4, [0.0, 0.390625, 0.78125, 1.171875]),  # 25/16 times 0, ¼, ½, ¾
        (15, 2, [23.4375, 24.21875]),  # 25/16 times 15, 15½
        (16, 3, [25.0, 25.0, 25.0]),
        (300, 1, [25.0]),
    ],
)
def test_the_weight_of_unlabelled_samples_grows_within_16_rounds(
    since: int, steps: int, expected: list[float]
) -> None:
    assert feddividemix.ramped_up(Config(), since, steps).tolist() == pytest.approx(expected)


# --------------------------------------------------------------------------- whose label is right


def test_the_posterior_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.gamma(2.0, 0.1, 300), rng.normal(3.0, 0.8, 200)])
    values = ((losses - losses.min()) / (losses.max() - losses.min()))[:, None]
    theirs = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0).fit(values)
    expected = theirs.predict_proba(values)[:, theirs.means_.argmin()]
    found = feddividemix.clean_probability(f32(losses))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert 290 < (found > 0.5).sum() < 310


def test_the_mixture_stops_where_scikit_learns_does() -> None:
    """Losses without groups, on which EM would creep on for long."""
    losses = np.random.default_rng(0).random(300)
    values = ((losses - losses.min()) / (losses.max() - losses.min()))[:, None]
    theirs = GaussianMixture(2, max_iter=10, tol=1e-2, reg_covar=5e-4, random_state=0).fit(values)
    further = GaussianMixture(2, max_iter=999, tol=1e-4, reg_covar=5e-4, random_state=0).fit(values)
    found = feddividemix.clean_probability(f32(losses))
    at, beyond = (m.predict_proba(values)[:, m.means_.argmin()] for m in (theirs, further))
    np.testing.assert_allclose(found, at, atol=1e-3)
    assert abs(found - beyond).max() > 0.1


def test_losses_count_relative_to_the_clients_own() -> None:
    losses = f32([0.1, 0.12, 0.15, 2.0, 2.2])
    found = feddividemix.clean_probability(losses)
    assert (found > 0.5).tolist() == [True, True, True, False, False]
    np.testing.assert_allclose(feddividemix.clean_probability(7 * losses + 3), found, atol=1e-4)


def test_equal_losses_say_nothing_and_one_that_is_not_finite_the_worst() -> None:
    assert feddividemix.clean_probability(f32([1.0] * 4)).tolist() == [1.0] * 4
    found = feddividemix.clean_probability(f32([0.1, 0.11, 0.1, 3.0, math.nan, math.inf]))
    assert (found > 0.5).tolist() == [True, True, True, False, False, False]


# ------------------------------------------------------------------------- refining and guessing


class Echo:
    """A net that has the pixels of an image, times a factor, as its logits."""

    parameters: Mapping[str, Tensor] = {}

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Outputs:
        self.seen.append(x)
        return Outputs(None, self.factor * x.flatten(1))


def batch_of(weight: Tensor | None = None, **values: Any) -> Batch:
    return Batch({n: v if isinstance(v, Tensor) else f32(v) for n, v in values.items()}, {}, weight)


HALF = math.log(0.5)


def test_a_refined_label_lies_between_the_given_one_and_the_prediction() -> None:
    """Predictions (0.5, 0.5) and (0.9, 0.1) have the mean (0.7, 0.3). With w = 0.6 and the label 1
    that is (0.28, 0.72); squared and scaled, (0.0784, 0.5184)/0.5968."""
    views = {"x1": [[HALF, HALF]], "x2": [[math.log(0.9), math.log(0.1)]]}
    batch = batch_of(**views, label=torch.tensor([1]), p_clean=[0.6])
    found = feddividemix.co_refined(0.5, batch, Echo())
    assert found[0].tolist() == pytest.approx([0.0784 / 0.5968, 0.5184 / 0.5968], rel=1e-5)
    found = feddividemix.co_refined(1.0, batch, Echo())
    assert found[0].tolist() == pytest.approx([0.28, 0.72], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_a_label_that_is_certainly_right_stays(temperature: float) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    label = torch.tensor([0, 2, 1, 1, 0])
    batch = batch_of(x1=x, x2=-x, label=label, p_clean=torch.ones(5))
    found = feddividemix.co_refined(temperature, batch, Echo())
    assert torch.equal(found, torch.eye(3)[label])


def test_a_guess_is_the_sharpened_mean_of_four_predictions() -> None:
    """The net says (0.5, 0.5) and (0.9, 0.1), the other one with twice the logits (0.5, 0.5) and
    (0.81, 0.01)/0.82."""
    batch = batch_of(u1=[[HALF, HALF]], u2=[[math.log(0.9), math.log(0.1)]])
    p = (0.5 + 0.9 + 0.5 + 0.81 / 0.82) / 4
    found = feddividemix.co_guessed(0.5, batch, Echo(), Echo(2.0))
    total = p**2 + (1 - p) ** 2
    assert found[0].tolist() == pytest.approx([p**2 / total, (1 - p) ** 2 / total], rel=1e-5)


def test_the_larger_share_stays_in_place() -> None:
    found = feddividemix.at_least_half(f32([0.0, 0.2, 0.5, 0.7, 1.0]))
    assert found.tolist() == pytest.approx([1.0, 0.8, 0.5, 0.7, 1.0])


# ------------------------------------------------------------------------------------- the loss


def numbers(seed: int, rows: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(rows, 4))


@pytest.mark.parametrize(
    ("labelled", "padding"), [(3, None), (2, None), (3, 1)], ids=["full", "last", "padded"]
)
def test_the_loss_by_numpy(labelled: int, padding: int | None) -> None:
    """Three unlabelled samples; the keys of twelve mixed ones serve ten, too. A padded sample is
    mixed with others, but nothing is learnt from what takes its place."""
    x1, x2 = numbers(1, labelled), numbers(2, labelled)
    u1, u2 = numbers(3, 3), numbers(4, 3)
    y, w = np.array([2, 0, 3])[:labelled], np.array([0.9, 0.6, 0.75])[:labelled]
    keys = np.random.default_rng(5).random(12)
    real = np.ones(labelled)
    if padding:
        real[-padding:] = 0

    def sharpen(p: NDArray[np.float64]) -> NDArray[np.float64]:
        return p**2 / (p**2).sum(axis=1, keepdims=True)

    p = (softmax(x1) + softmax(x2)) / 2
    refined = sharpen(w[:, None] * np.eye(4)[y] + (1 - w[:, None]) * p)
    four = softmax(u1) + softmax(u2) + softmax(0.5 * u1) + softmax(0.5 * u2)
    guessed = sharpen(four / 4)
    x, t = np.concatenate([x1, x2, u1, u2]), np.concatenate([refined, refined, guessed, guessed])
    order = np.argsort(keys[: len(x)])
    assert (order != np.arange(len(x))).any()
    x, t = 0.7 * x + 0.3 * x[order], 0.7 * t + 0.3 * t[order]
    q, split = softmax(x), 2 * labelled
    twice = np.concatenate([real, real])
    l_x = -(twice * (t * np.log(q))[:split].sum(axis=1)).sum() / twice.sum()
    l_u = ((q - t)[split:] ** 2).mean()
    counted = np.concatenate([twice, np.ones(6)])
    mean = (counted[:, None] * q).sum(axis=0) / counted.sum()
    l_reg = (0.25 * np.log(0.25 / mean)).sum()

    def image(z: NDArray[np.float64]) -> Tensor:
        return f32(z).reshape(-1, 1, 2, 2)

    batch = batch_of(
        None if padding is None else f32(real),
        **{"x1": image(x1), "x2": image(x2), "u1": image(u1), "u2": image(u2)},
        **{"label": torch.tensor(y), "p_clean": w, "lam": 0.3, "keys": keys, "lambda_u": 10.0},
    )
    for lambda_r in (0.0, 0.5):
        found = feddividemix.local_loss(0.5, lambda_r, batch, Echo(), Echo(0.5))
        assert float(found) == pytest.approx(l_x + 10 * l_u + lambda_r * l_reg, rel=1e-5)


def test_without_mixing_guesses_and_doubt_it_is_the_cross_entropy_of_both_views() -> None:
    x1, x2, u = f32(numbers(1, 3)), f32(numbers(2, 3)), f32(numbers(3, 3))
    label = torch.tensor([3, 0, 1])
    batch = batch_of(
        **{"x1": x1, "x2": x2, "u1": u, "u2": u, "label": label, "p_clean": torch.ones(3)},
        **{"lam": 1.0, "keys": torch.rand(12), "lambda_u": 0.0},
    )
    found = feddividemix.local_loss(0.5, 0.0, batch, Echo(), Echo())
    expected = torch.nn.functional.cross_entropy(torch.cat([x1, x2]), label.repeat(2))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_targets_are_constants() -> None:
    """Where the target is the prediction itself, CE has no gradient unless one flows into the
    target."""
    x = f32(numbers(1, 3)).requires_grad_()
    label, lam = torch.tensor([3, 0, 1]), 1.0
    values = {"label": label, "p_clean": torch.zeros(3), "lam": lam, "keys": torch.rand(12)}
    batch = batch_of(x1=x, x2=x, u1=x, u2=x, lambda_u=5.0, **values)
    loss = feddividemix.local_loss(1.0, 0.0, batch, Echo(), Echo())
    (gradient,) = torch.autograd.grad(loss, x)
    assert float(gradient.abs().max()) < 1e-6


# ------------------------------------------------------------------------------------ a stage


def train(
    cfg: Config, down: Down, shard: Shard, sgd: Sgd = SGD, model: Any = Linear
) -> tuple[Client, Up, dict[str, float], RecordingBench]:
    bench = RecordingBench(bench_of(model, sgd))
    client, up, metrics = feddividemix.train(cfg, Client(), down, shard, bench, RNG)
    return client, up, dict(metrics), bench


def plain(start: Weights, shard: Shard, sgd: Sgd, rng: Streams, model: Any = Linear) -> fedavg.Up:
    cfg, client, down = fedavg.Config(), fedavg.Client(), fedavg.Down(start)
    return fedavg.train(cfg, client, down, shard, bench_of(model, sgd), rng)[1]


SURE, MISTAKEN = seeing(2.0), seeing(2.0, shift=1)
"""For the wrong labels of `bright_shard`, MISTAKEN has the small losses."""


def recorded(shard: Shard, since: int = 3, **settings: Any) -> list[Plan]:
    """The plans of a client whose networks both tell right labels from wrong ones."""
    return train(Config(**settings), Down(SURE, SURE, since), shard)[3].plans


# ---------------------------------------------------------------------------------- the warm-up


@pytest.mark.parametrize("tail", ["keep", "pad", "drop"])
def test_in_the_warm_up_both_networks_are_fedavgs(tail: Any) -> None:
    """With batches and views of their own."""
    shard = Shard(2, images_of(10), labels_of(10), torch.arange(10), CLASSES)
    sgd = replace(SGD, tail=tail)
    one, other = weights_of(Normalised, 5), weights_of(Normalised, 6)
    client, up, metrics, _ = train(Config(), Down(one, other, None), shard, sgd, Normalised)
    assert_same_weights(up.weights, plain(one, shard, sgd, RNG, Normalised).weights)
    second = plain(other, shard, sgd, RNG.within("peer"), Normalised)
    assert_same_weights(up.peer, second.weights)
    assert (up.samples, client) == (10, Client())
    assert set(metrics) == {"loss"}


def test_a_run_that_only_warms_up_ends_with_fedavgs_model(tmp_path: Path) -> None:
    run(tiny_recipe("fedavg"), tmp_path / "fedavg")
    run(tiny_recipe({"name": "feddividemix", "warmup_rounds": 4}), tmp_path / "both")
    assert final_bytes(tmp_path / "both") == final_bytes(tmp_path / "fedavg")


# ------------------------------------------------------------------------------------ co-divide


def test_each_network_learns_from_what_the_other_one_makes_of_the_labels() -> None:
    """The first network would trust the last 6 labels, the second the first 18. So in the first
    epoch the first learns from 18; by then it has given up its error, but the division was made
    before, and the second learns from 6."""
    shard = bright_shard(wrong=6)
    client, up, metrics, bench = train(Config(), Down(MISTAKEN, SURE, 3), shard)
    first, second, third, fourth = bench.plans
    assert first.images.tolist() == shard.images[:18].tolist()
    assert first.columns["label"].tolist() == shard.labels[:18].tolist()
    assert (first.columns["p_clean"] > 0.9).all()
    assert second.images.tolist() == shard.images[18:].tolist()

    assert_same_weights(first.start[0], MISTAKEN)
    assert_same_weights(first.frozen[0], SURE)
    assert_same_weights(second.start[0], SURE)
    trained = [fitted.weights[0] for fitted in bench.fitted]
    assert_same_weights(second.frozen[0], trained[0])
    assert_same_weights(third.start[0], trained[0])
    assert_same_weights(third.frozen[0], trained[1])
    assert_same_weights(fourth.start[0], trained[1])
    assert_same_weights(up.weights, trained[2])
    assert_same_weights(up.peer, trained[3])
    assert up.samples == 24
    shares = [len(plan.images) / 24 for plan in bench.plans]
    assert metrics["labelled_share"] == pytest.approx(np.mean(shares))
    steps = [fitted.steps for fitted in bench.fitted]
    losses = [fitted.loss for fitted in bench.fitted]
    assert metrics["loss"] == pytest.approx(np.average(losses, weights=steps))
    assert client.p_clean is not None


def test_a_label_is_used_only_above_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.array([0.51, 0.5, 0.49] * 8, dtype=np.float32)
    monkeypatch.setattr(feddividemix, "clean_probability", lambda losses: w)
    shard = bright_shard(wrong=6)
    for plan in recorded(shard):
        assert torch.equal(plan.images, shard.images[::3])
        assert set(plan.columns["p_clean"].tolist()) == {w[0].item()}


def test_the_images_of_doubtful_labels_come_in_full_batches_in_passes() -> None:
    """18 labelled samples in batches of 4 are 5 steps and 20 unlabelled places: three times all of
    6, and two more."""
    plan = recorded(bright_shard(wrong=6))[0]
    assert {name: u.shape for name, u in plan.step_images.items()} == {
        "u1": (5, 4, 1, 2, 2),
        "u2": (5, 4, 1, 2, 2),
    }
    rest = np.array([3, 8, 9, 20, 21, 22])
    rows = feddividemix.unlabelled_rows(rest, 20, np.random.default_rng(0))
    passes = [rows[first : first + 6] for first in (0, 6, 12)]
    assert all(sorted(each) == rest.tolist() for each in passes)
    assert passes[0].tolist() != passes[1].tolist()
    assert set(rows[18:].tolist()) < set(rest.tolist())
    assert len(feddividemix.unlabelled_rows(rest, 4, np.random.default_rng(0))) == 4


def test_a_plan_says_all_that_a_step_needs() -> None:
    shard = bright_shard(wrong=6)
    plan = recorded(shard)[0]
    assert plan.views == {"x1": "weak", "x2": "weak"}
    doubtful = {tuple(image.flatten().tolist()) for image in shard.images[18:]}
    for u in plan.step_images.values():
        assert {tuple(image.flatten().tolist()) for image in u.flatten(0, 1)} == doubtful
    assert plan.per_step["lambda_u"].tolist() == pytest.approx(
        [25 / 16 * (3 + step / 5) for step in range(5)]
    )
    assert plan.per_step["keys"].shape == (5, 16)
    assert plan.sgd == replace(SGD, epochs=1)
    assert recorded(shard, mixup_alpha=0.0)[0].per_step["lam"].tolist() == [1.0] * 5


def test_epochs_and_networks_draw_afresh() -> None:
    plans = recorded(bright_shard(wrong=6))
    assert len(plans) == 4
    orders = {tuple(np.concatenate(schedule(18, p.sgd, p.rng("batches")).rows)) for p in plans}
    keys = {tuple(p.per_step["keys"][0].tolist()) for p in plans}
    views = {p.rng(f"view/{name}").random() for p in plans for name in ("x1", "x2", "u1", "u2")}
    assert (len(orders), len(keys), len(views)) == (4, 4, 16)


def test_rounds_and_clients_share_a_captured_step() -> None:
    first, later = (
        recorded(bright_shard(wrong=6), 0)[0],
        recorded(bright_shard(wrong=9, n=30), 9)[0],
    )
    assert len(first.images) != len(later.images)
    assert program_key(first) == program_key(later)
    assert program_key(recorded(bright_shard(wrong=6), lambda_r=0.0)[0]) != program_key(first)


@pytest.mark.parametrize("view", ["raw", "weak"])
def test_what_the_losses_are_computed_on(view: Any) -> None:
    shard = bright_shard(wrong=6)
    bench = train(Config(evaluation_view=view), Down(SURE, SURE, 0), shard)[3]
    assert bench.views == [view, "weak", "weak", "weak", "weak"] * 2


def test_guesses_are_made_in_training_mode() -> None:
    """BatchNorm's r ← 0.9·r + 0.1·mean after each of five passes: of u1, u2, x1, x2 and what is
    mixed of them, whose mean is theirs. One step of a full batch."""
    sgd, shard = Sgd(epochs=1, batch_size=18, lr=0.1), bright_shard(wrong=6)
    start = {
        **SURE,
        "norm.weight": torch.ones(4),
        "norm.bias": torch.zeros(4),
        "norm.running_mean": torch.zeros(4),
        "norm.running_var": torch.ones(4),
    }
    _, up, _, bench = train(Config(), Down(start, start, 0), shard, sgd, Normalised)
    plan = bench.plans[0]
    assert (len(plan.images), bench.fitted[0].steps) == (18, 1)

    def mean(images: Tensor) -> Tensor:
        return ((images.flatten(0, -4).flatten(1) / 255 - 0.25) / 0.5).mean(dim=0)

    x, u1, u2 = (mean(t) for t in (plan.images, *plan.step_images.values()))
    expected = torch.zeros(4)
    for seen in (u1, u2, x, x, (u1 + u2 + x + x) / 4):
        expected = 0.9 * expected + 0.1 * seen
    assert up.weights["norm.running_mean"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


# ------------------------------------------------------------------------------------ fallbacks


@pytest.mark.parametrize(
    ("peer", "tail", "batch_size"),
    [
        (seeing(0.0), "keep", 4),  # all losses equal: nobody is in doubt
        (MISTAKEN, "drop", 8),  # it trusts 6 labels, too few for a batch of 8
    ],
    ids=["no unlabelled samples", "too few labelled samples"],
)
def test_with_an_empty_part_an_epoch_is_fedavgs(peer: Weights, tail: Any, batch_size: int) -> None:
    """It begins where the last one ended: what was learnt in the round stays."""
    sgd, shard = replace(SGD, tail=tail, batch_size=batch_size), bright_shard(wrong=6)
    _, _, metrics, bench = train(Config(), Down(SURE, peer, 3), shard, sgd)
    plan, own = bench.plans[0], bench.fitted[0]
    assert torch.equal(plan.images, shard.images)
    assert plan.rng == RNG.within("epoch 0").within("net 0")
    expected = plain(SURE, shard, replace(sgd, epochs=1), plan.rng)
    assert_same_weights(own.weights[0], expected.weights)
    assert len(bench.plans[1].images) == 18, "the other network learns from what the first trusts"
    assert_same_weights(bench.plans[2].start[0], own.weights[0])
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("n", [0, 3])
def test_a_client_too_small_for_a_step_returns_what_it_got(n: int) -> None:
    sgd, shard = replace(SGD, tail="drop"), bright_shard(wrong=1)
    shard = replace(shard, images=shard.images[:n], labels=shard.labels[:n], ids=shard.ids[:n])
    _, up, metrics, _ = train(Config(), Down(SURE, MISTAKEN, 0), shard, sgd)
    assert_same_weights(up.weights, SURE)
    assert_same_weights(up.peer, MISTAKEN)
    assert (up.samples, metrics["loss"]) == (n, 0.0)


# ------------------------------------------------------------------------------------ diagnosis


def test_what_a_client_remembers_by_hand() -> None:
    """The mean of w is 0.9, 0.5 and 0.3; the networks' probabilities add up to (0.9, 1.1), so they
    agree on the class 1."""
    cfg, given = Config(), torch.tensor([0, 0, 0])
    logits = [f32([[0.8, 0.2]] * 3).log(), f32([[0.1, 0.9]] * 3).log()]
    p_clean = [np.array(w, dtype=np.float32) for w in ([1.0, 0.6, 0.1], [0.8, 0.4, 0.5])]
    client = feddividemix.believed(cfg, logits, p_clean, given)
    assert client.p_clean is not None
    assert client.p_clean.tolist() == pytest.approx([0.9, 0.5, 0.3])
    assert feddividemix.refined_labels(client) is client.labels
    assert client.labels is not None
    assert client.labels.tolist() == [0, 1, 1]
    sieved = feddividemix.own_sieve(client)
    assert sieved is not None
    assert sieved.noise_rate == pytest.approx(1.3 / 3)
    assert sieved.p_clean is client.p_clean


def test_networks_that_know_better_tell_the_wrong_labels() -> None:
    shard = bright_shard(wrong=6)
    client = train(Config(), Down(SURE, seeing(1.0), 20), shard)[0]
    assert client.labels is not None
    assert client.labels.tolist() == (torch.arange(24) % CLASSES).tolist()
    sieved = feddividemix.own_sieve(client)
    assert sieved is not None
    assert sieved.noise_rate == pytest.approx(0.25, abs=0.01)


def test_before_it_divides_a_client_believes_nothing() -> None:
    client = feddividemix.init_client(Config(), bright_shard(wrong=6))
    assert feddividemix.own_sieve(client) is None
    assert feddividemix.refined_labels(client) is None


def test_it_is_registered_with_both_networks() -> None:
    found = METHODS["feddividemix"]
    server = Server({"w": torch.zeros(1)}, {"w": torch.ones(1)}, FEDERATION)
    assert found.networks(server) == (server.weights, server.peer)
    ups = {0: Up({"w": f32([1.0])}, {"w": f32([8.0])}, 10)}
    ups[1] = Up({"w": f32([5.0])}, {"w": f32([4.0])}, 30)
    after, _ = found.merge(Config(), server, 0, ups)
    assert (after.weights["w"].item(), after.peer["w"].item()) == (4, 5)
    first = weights_of(Linear, 1)
    started = found.init_server(Config(), first, FEDERATION)
    assert_same_weights(started.weights, first)
    assert not torch.equal(started.peer["layer.weight"], first["layer.weight"])
