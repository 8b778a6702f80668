"""FedLSR: its equations in numbers worked out here, its limit cases, and what a client does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from torch import Tensor
from torch.nn import functional as F

from benches import Linear, Normalised, bench_of, images_of, labels_of, weights_of
from fedsieve.config import from_table, to_table
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Fitted, Plan, Sgd
from fedsieve.methods import fedavg, fedlsr
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedlsr import Config, Down, Objective
from fedsieve.types import Outputs, Shard, Streams
from helpers import assert_same_weights

SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.01)


def objective_of(**changes: Any) -> Objective:
    values: dict[str, Any] = {
        "prediction": "mixed",
        "sharpening_temperature": 0.5,
        "distance": "js",
        "js_reduction": "sum",
        "distillation_temperature": 1 / 3,
        "entropy_of": None,
        "lambda_e": 0.0,
        "symmetric": None,
    }
    return Objective(**(values | changes))


def rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)


def predictions(n: int = 6, classes: int = 4, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(classes), n)).float()


logit_rows = st.lists(
    st.lists(st.floats(-30, 30), min_size=10, max_size=10), min_size=1, max_size=5
).map(torch.tensor)


# -------------------------------------------------------------------------------- configuration


def test_defaults_are_the_recommended_settings() -> None:
    cfg = Config()
    assert (cfg.gamma, cfg.lambda_e, cfg.warmup_rounds) == (0.4, 0.0, None)
    assert (cfg.sharpening_temperature, cfg.distillation_temperature) == (0.5, 1 / 3)
    assert (cfg.distance, cfg.prediction, cfg.view) == ("js", "mixed", "raw")
    assert cfg.switches == fedlsr.PRESETS["paper"]


@pytest.mark.parametrize("preset", get_args(fedlsr.Preset))
def test_a_preset_fills_in_the_switches_that_are_left_out(preset: fedlsr.Preset) -> None:
    assert Config(preset=preset).switches == fedlsr.PRESETS[preset]
    mixed = Config(preset=preset, js_reduction="mean")
    assert mixed.switches == replace(fedlsr.PRESETS[preset], js_reduction="mean")
    assert from_table(Config, to_table(mixed)) == mixed


def test_the_presets_differ_in_every_switch() -> None:
    for switch in fields(fedlsr.Switches):
        values = {getattr(preset, switch.name) for preset in fedlsr.PRESETS.values()}
        assert len(values) == len(fedlsr.PRESETS), switch.name


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gamma": -0.1}, "gamma must be at least 0, not -0.1"),
        ({"gamma": math.nan}, "gamma must be at least 0"),
        ({"lambda_e": -1.0}, "lambda_e must be at least 0"),
        ({"lambda_e": math.inf}, "lambda_e must be at least 0"),
        ({"warmup_rounds": -1}, "warmup_rounds must be at least 0"),
        ({"lr_drop_round": -1}, "lr_drop_round must be at least 0"),
        ({"sharpening_temperature": 0.0}, r"sharpening_temperature must be in \(0, 1\]"),
        ({"sharpening_temperature": 1.1}, r"sharpening_temperature must be in \(0, 1\]"),
        ({"distillation_temperature": 0.0}, "distillation_temperature must be above 0"),
        ({"distillation_temperature": math.inf}, "distillation_temperature must be above 0"),
        ({"preset": "papers"}, "preset must be one of 'paper', 'authors', not 'papers'"),
        ({"distance": "kl"}, "distance must be one of 'js', 'l1', 'l2', 'cosine'"),
        (
            {"prediction": "plain"},
            "prediction must be one of 'mixed', 'original', 'none', 'logits'",
        ),
        ({"alpha": -1.0}, "alpha must be at least 0"),
        ({"alpha": 0.0, "beta": 0.0}, "alpha and method.beta are both 0"),
        ({"view": "strong"}, "view must be one of 'raw', 'weak'"),
        ({"js_reduction": "batch"}, "js_reduction must be one of 'sum', 'mean'"),
        ({"entropy_of": "both"}, "entropy_of must be one of 'predictions', 'softened'"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**settings)


# ------------------------------------------------------------------- Eqs. 6 and 7: the prediction


def test_a_mixture_lies_between_the_predictions() -> None:
    p1, p2 = rows((0.8, 0.2), (0.5, 0.5)), rows((0.4, 0.6), (0.1, 0.9))
    expected = rows((0.5, 0.5), (0.2, 0.8))  # a quarter of the way from p2 to p1
    torch.testing.assert_close(fedlsr.mixed(p1, p2, torch.tensor(0.25)), expected)
    torch.testing.assert_close(fedlsr.mixed(p1, p2, torch.tensor(1.0)), p1)
    torch.testing.assert_close(fedlsr.mixed(p1, p2, torch.tensor(0.0)), p2)


def test_sharpening_with_a_half_squares() -> None:
    # .36, .09, .01 of .46
    expected = rows((0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46))
    torch.testing.assert_close(fedlsr.sharpened(rows((0.6, 0.3, 0.1)), 0.5), expected)


def test_sharpening_with_one_changes_nothing_and_with_nearly_none_decides() -> None:
    p = predictions()
    torch.testing.assert_close(fedlsr.sharpened(p, 1.0), p)
    decided = fedlsr.sharpened(rows((0.11, 0.1, 0.79)), 1e-3)
    torch.testing.assert_close(decided, rows((0.0, 0.0, 1.0)))


@settings(max_examples=25, deadline=None)
@given(logit_rows)
def test_a_sharpened_prediction_is_one_with_the_same_order(logits: Tensor) -> None:
    p = logits.softmax(dim=1)
    sharp = fedlsr.sharpened(p, 0.5)
    torch.testing.assert_close(sharp.sum(dim=1), torch.ones(len(p)))
    assert bool((sharp.amax(dim=1) >= p.amax(dim=1) - 1e-6).all())
    assert bool((sharp.gather(1, p.argmax(1, keepdim=True)).squeeze(1) == sharp.amax(1)).all())


def test_the_sharpened_prediction_is_in_the_graph() -> None:
    """d p_s,0 / d p_0 of (a², b²)/(a² + b²) is 2ab²/(a² + b²)²."""
    p = rows((0.6, 0.4)).requires_grad_()
    fedlsr.sharpened(p, 0.5)[0, 0].backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None
    assert p.grad[0, 0].item() == pytest.approx(2 * 0.6 * 0.16 / 0.52**2, rel=1e-5)


# ----------------------------------------------------------------------- the classification loss


def test_the_loss_takes_the_prediction_for_logits() -> None:
    """Sure and right: −log(e/(e + 9)); sure and wrong: −log(1/(e + 9)); not −log p."""
    sure = F.one_hot(torch.tensor([3, 3]), 10).float()
    loss = fedlsr.bounded_cross_entropy(sure, torch.tensor([3, 4]))
    expected = [math.log(math.e + 9) - 1, math.log(math.e + 9)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx([1.461, 2.461], abs=1e-3)


@settings(max_examples=25, deadline=None)
@given(logit_rows, st.integers(0, 9))
def test_the_loss_stays_within_an_interval_of_length_one(logits: Tensor, label: int) -> None:
    p = fedlsr.sharpened(logits.softmax(dim=1), 0.5)
    loss = fedlsr.bounded_cross_entropy(p, torch.full((len(p),), label))
    top = math.log(math.e + 9)
    assert bool(((loss >= top - 1 - 1e-5) & (loss <= top + 1e-5)).all())


@pytest.mark.parametrize("label", [0, 1])
def test_a_sure_model_is_left_alone_where_cross_entropy_would_pull(label: int) -> None:
    logits = rows((20.0, 0.0, 0.0)).requires_grad_()
    labels = torch.tensor([label])
    p = fedlsr.sharpened(logits.softmax(dim=1), 0.5)
    (bounded,) = torch.autograd.grad(fedlsr.bounded_cross_entropy(p, labels).sum(), logits)
    assert bounded.abs().max() < 1e-6
    (plain,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    assert (plain.abs().max() > 0.99) == (label == 1)


# ---------------------------------------------------------------- Eqs. 8 and 9: self-distillation


def test_softening_divides_by_the_temperature_and_clamps() -> None:
    q = fedlsr.softened(rows((1.0, 0.0), (50.0, 0.0)), 1 / 3)
    assert q[0].tolist() == pytest.approx([1 / (1 + math.exp(-3)), 1 / (1 + math.exp(3))])
    assert q[1].tolist() == pytest.approx([1.0, 1e-6])


def test_jensen_shannon_is_scipys() -> None:
    q1, q2 = predictions(seed=1), predictions(seed=2)
    expected = jensenshannon(q1.double(), q2.double(), axis=1) ** 2
    assert fedlsr.jensen_shannon(q1, q2).tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_jensen_shannon_ends_at_log_two() -> None:
    one, other = rows((1.0, 1e-6)), rows((1e-6, 1.0))
    assert fedlsr.jensen_shannon(one, other).item() == pytest.approx(math.log(2), abs=1e-4)


def test_the_other_distances_by_hand() -> None:
    q1, q2 = rows((0.7, 0.2, 0.1)), rows((0.3, 0.2, 0.5))
    assert fedlsr.mean_absolute(q1, q2).item() == pytest.approx(0.8 / 3)
    assert fedlsr.mean_squared(q1, q2).item() == pytest.approx(0.32 / 3)
    cosine = (0.21 + 0.04 + 0.05) / math.sqrt(0.54 * 0.38)
    assert fedlsr.cosine_distance(q1, q2).item() == pytest.approx(2 - 2 * cosine, rel=1e-5)


@pytest.mark.parametrize("distance", get_args(fedlsr.Distance))
def test_a_distance_is_symmetric_and_zero_between_equals(distance: fedlsr.Distance) -> None:
    q1, q2 = predictions(seed=3), predictions(seed=4)
    there = fedlsr.self_distillation(q1, q2, distance, "sum")
    back = fedlsr.self_distillation(q2, q1, distance, "sum")
    assert there.shape == (len(q1),)
    assert bool((there > 0).all())
    torch.testing.assert_close(there, back)
    equal = fedlsr.self_distillation(q1, q1, distance, "sum")
    torch.testing.assert_close(equal, torch.zeros(len(q1)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("distance", get_args(fedlsr.Distance))
def test_the_authors_divide_the_divergence_by_the_classes(distance: fedlsr.Distance) -> None:
    q1, q2 = predictions(seed=5), predictions(seed=6)
    whole = fedlsr.self_distillation(q1, q2, distance, "sum")
    mean = fedlsr.self_distillation(q1, q2, distance, "mean")
    torch.testing.assert_close(mean, whole / 4 if distance == "js" else whole)


def test_the_authors_divergence_is_torchs_mean() -> None:
    q1, q2 = predictions(seed=7), predictions(seed=8)
    log_u = ((q1 + q2) / 2).log()
    sums = F.kl_div(log_u, q1, reduction="sum") + F.kl_div(log_u, q2, reduction="sum")
    expected = sums / 2 / q1.numel()  # what reduction="mean" does
    torch.testing.assert_close(fedlsr.self_distillation(q1, q2, "js", "mean").mean(), expected)


# -------------------------------------------------------------------------------- Eq. 11: LSR+


def test_the_paper_takes_both_predictions_and_the_authors_the_first_twice_softened() -> None:
    o1, o2 = rows((5.0, 0.0)), rows((0.0, 0.0))
    q1 = fedlsr.softened(o1, 1 / 3)
    p = 1 / (1 + math.exp(-5))
    h1 = -p * math.log(p) - (1 - p) * math.log(1 - p)
    paper = fedlsr.prediction_entropy(o1, o2, q1, "predictions")
    assert paper.item() == pytest.approx((h1 + math.log(2)) / 2, rel=1e-4)
    r = 1 / (1 + math.exp(-1))  # q1 is (1, 0) but for 3e-7, and its softmax (r, 1 − r)
    authors = fedlsr.prediction_entropy(o1, o2, q1, "softened")
    assert authors.item() == pytest.approx(-r * math.log(r) - (1 - r) * math.log(1 - r), rel=1e-4)


# ---------------------------------------------------------------------------- the whole objective


@dataclass
class Recorder:
    """A net whose logits a test has written down, and which remembers what it was shown."""

    outputs: dict[int, Tensor]
    seen: list[int]

    def __call__(self, x: Tensor) -> Outputs:
        key = int(x.flatten()[0])
        self.seen.append(key)
        return Outputs(None, self.outputs[key])

    parameters: Any = None


def batch_of(
    n: int, *, gamma: float = 0.0, mixing: float = 0.25, weight: Tensor | None = None
) -> Batch:
    values = {
        "original": torch.full((n, 1), 1.0),
        "augmented": torch.full((n, 1), 2.0),
        "label": labels_of(n),
        "mixing": torch.tensor(mixing),
    }
    return Batch(values, {"gamma": torch.tensor(gamma)}, weight)


def outputs_of(n: int) -> dict[int, Tensor]:
    rng = np.random.default_rng(9)
    return {k: torch.from_numpy(rng.normal(0, 1.5, (n, 3))).float() for k in (1, 2)}


def by_numpy(o: dict[int, Tensor], labels: Tensor, mixing: float) -> tuple[Any, Any, Any, Any]:
    """Per sample: the bounded loss, the JS divergence, and the entropies of both presets."""

    def softmax(z: Any) -> Any:
        return np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)

    def h(p: Any) -> Any:
        return -(p * np.log(p)).sum(axis=1)

    o1, o2 = (o[k].double().numpy() for k in (1, 2))
    p = mixing * softmax(o1) + (1 - mixing) * softmax(o2)
    sharp = p**2 / (p**2).sum(axis=1, keepdims=True)
    bounded = -np.log(softmax(sharp)[np.arange(len(labels)), labels.numpy()])
    q1, q2 = softmax(3 * o1), softmax(3 * o2)
    js = jensenshannon(q1, q2, axis=1) ** 2
    return bounded, js, (h(softmax(o1)) + h(softmax(o2))) / 2, h(softmax(q1))


def test_the_objective_is_the_sum_of_its_terms() -> None:
    n, gamma, lambda_e = 5, 0.7, 0.6
    o, batch = outputs_of(n), batch_of(5, gamma=gamma)
    bounded, js, entropy, softened = by_numpy(o, batch["label"], 0.25)
    expected = {
        objective_of(distance=None): bounded,
        objective_of(): bounded + gamma * js,
        objective_of(js_reduction="mean"): bounded + gamma * js / 3,
        objective_of(entropy_of="predictions", lambda_e=lambda_e): (
            bounded + gamma * js + lambda_e * entropy
        ),
        objective_of(entropy_of="softened", lambda_e=lambda_e, distance=None): (
            bounded + lambda_e * softened
        ),
    }
    for objective, terms in expected.items():
        loss = fedlsr.local_loss(objective, batch, Recorder(o, []))
        assert loss.item() == pytest.approx(terms.mean(), rel=1e-4), objective


def test_without_mixup_both_images_are_classified_as_they_are() -> None:
    o, batch = outputs_of(5), batch_of(5)
    loss = fedlsr.local_loss(objective_of(prediction="none"), batch, Recorder(o, []))
    both = F.cross_entropy(torch.cat([o[1], o[2]]), batch["label"].repeat(2))
    torch.testing.assert_close(loss, both)


def test_mixed_logits_are_classified_by_symmetric_cross_entropy() -> None:
    """Table 7: α·CE(o, y) + β·9.21·(1 − p_y) of o = λ·o1 + (1 − λ)·o2, and the distillation."""
    o, batch = outputs_of(5), batch_of(5, gamma=0.7)
    mixed = (0.25 * o[1] + 0.75 * o[2]).double().numpy()
    p = np.exp(mixed) / np.exp(mixed).sum(axis=1, keepdims=True)
    p_y = p[np.arange(5), batch["label"].numpy()]
    terms = -2 * np.log(p_y) - 3 * np.log(1e-4) * (1 - p_y)
    terms = terms + 0.7 * by_numpy(o, batch["label"], 0.25)[1]
    objective = objective_of(prediction="logits", symmetric=(2.0, 3.0))
    loss = fedlsr.local_loss(objective, batch, Recorder(o, []))
    assert loss.item() == pytest.approx(terms.mean(), rel=1e-4)


def test_padding_does_not_count() -> None:
    o = outputs_of(5)
    full = batch_of(5, gamma=0.5, weight=torch.tensor([1.0, 1, 1, 0, 0]))
    part = Batch(
        {name: v[:3] if v.dim() else v for name, v in full.values.items()}, full.constants, None
    )
    loss = fedlsr.local_loss(objective_of(), full, Recorder(o, []))
    first = {k: v[:3] for k, v in o.items()}
    torch.testing.assert_close(loss, fedlsr.local_loss(objective_of(), part, Recorder(first, [])))


def test_the_images_go_through_the_net_one_view_after_the_other() -> None:
    net = Recorder(outputs_of(5), [])
    fedlsr.local_loss(objective_of(), batch_of(5), net)
    assert net.seen == [1, 2]


@pytest.mark.parametrize("distance", [*get_args(fedlsr.Distance), None])
def test_both_views_are_learnt_from(distance: fedlsr.Distance | None) -> None:
    o = {k: v.requires_grad_() for k, v in outputs_of(5).items()}
    objective = objective_of(distance=distance)
    fedlsr.local_loss(objective, batch_of(5, gamma=1.0), Recorder(o, [])).backward()  # type: ignore[no-untyped-call]
    for logits in o.values():
        assert logits.grad is not None
        assert bool((logits.grad != 0).any())


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_leave_loss_and_gradient_finite(size: float) -> None:
    o = {k: (size * v).requires_grad_() for k, v in outputs_of(5).items()}
    objective = objective_of(entropy_of="predictions", lambda_e=0.6)
    loss = fedlsr.local_loss(objective, batch_of(5, gamma=1.0), Recorder(o, []))
    loss.backward()  # type: ignore[no-untyped-call]
    assert bool(torch.isfinite(loss))
    for logits in o.values():
        assert logits.grad is not None
        assert bool(torch.isfinite(logits.grad).all())


# ---------------------------------------------------------------------------------------- server


def test_gamma_grows_from_nothing() -> None:
    assert [fedlsr.warmed_up(0.6, t, 4) for t in range(6)] == pytest.approx(
        [0.0, 0.15, 0.3, 0.45, 0.6, 0.6]
    )
    assert fedlsr.warmed_up(0.6, 0, 0) == 0.6


def server_of(rounds: int) -> fedavg.Server:
    return fedavg.Server({}, Federation((10, 10), 1, rounds, 3))


def test_warm_up_is_a_fifth_of_the_rounds_unless_told() -> None:
    sent = [fedlsr.send(Config(gamma=0.4), server_of(50), t, 0).gamma for t in (0, 5, 10, 49)]
    assert sent == pytest.approx([0.0, 0.2, 0.4, 0.4])
    told = Config(gamma=0.4, warmup_rounds=40)
    sent = [fedlsr.send(told, server_of(50), t, 0).gamma for t in (0, 5, 10, 49)]
    assert sent == pytest.approx([0.0, 0.05, 0.1, 0.4])


def test_the_learning_rate_drops_once() -> None:
    cfg = Config(lr_drop_round=20)
    assert [fedlsr.send(cfg, server_of(40), t, 0).lr_scale for t in (0, 19, 20, 39)] == [
        1.0,
        1.0,
        0.1,
        0.1,
    ]
    assert fedlsr.send(Config(), server_of(40), 39, 0).lr_scale == 1.0


# ---------------------------------------------------------------------------------------- client


def shard_of(n: int) -> Shard:
    return Shard(0, images_of(n), labels_of(n), torch.arange(n), 3)


class Listening:
    """A workbench that keeps the plan and trains nothing."""

    trainable = ()

    def __init__(self, sgd: Sgd) -> None:
        self.sgd = sgd
        self.plans: list[Plan] = []

    def fit(self, plan: Plan) -> Fitted:
        self.plans.append(plan)
        return Fitted((plan.start[0],), None, 0, 0.0)

    def view(self, *_: Any) -> Any:
        raise AssertionError("a FedLSR client asks for no views but those of its plan")

    forward = view


def plan_of(cfg: Config, down: Down, n: int = 10, round: int = 3) -> Plan:
    bench = Listening(SGD)
    fedlsr.train(cfg, fedavg.Client(), down, shard_of(n), bench, Streams(1, round, 0))
    return bench.plans[0]


def test_a_plan_has_both_views_and_a_draw_for_every_step() -> None:
    plan = plan_of(Config(), Down({}, 0.3, 1.0))
    assert plan.views == {"original": "raw", "augmented": "aug"}
    assert plan.constants == {"gamma": 0.3}
    mixing = plan.per_step["mixing"]
    assert mixing.shape == (2 * 3,)  # two epochs of 4 + 4 + 2 samples
    assert mixing.dtype == torch.float32
    assert len(set(mixing.tolist())) == 6
    again, later = plan_of(Config(), Down({}, 0.3, 1.0)), plan_of(Config(), Down({}, 0, 1), round=4)
    assert torch.equal(mixing, again.per_step["mixing"])
    assert not torch.equal(mixing, later.per_step["mixing"])
    assert plan_of(Config(view="weak"), Down({}, 0.3, 1.0)).views["original"] == "weak"


def test_mixing_is_uniform_or_one() -> None:
    rng = np.random.default_rng(0)
    draws = fedlsr.draw_mixing("mixed", 20_000, rng)
    # the mean of n uniform draws is normal with deviation sqrt(1/12n) = 0.002
    assert draws.mean().item() == pytest.approx(0.5, abs=0.01)
    assert draws.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert bool((fedlsr.draw_mixing("original", 7, rng) == torch.ones(7)).all())


def test_a_plan_carries_the_settings_of_its_loss() -> None:
    cfg = Config(preset="authors", gamma=0.5, lambda_e=0.6, distance="l1", prediction="none")
    loss: Any = plan_of(cfg, Down({}, 0.1, 1.0)).loss
    assert loss.args == (
        objective_of(
            prediction="none",
            distance="l1",
            js_reduction="mean",
            entropy_of="softened",
            lambda_e=0.6,
        ),
    )
    assert hash(loss.args)
    off: Any = plan_of(Config(gamma=0.0), Down({}, 0.0, 1.0)).loss
    assert off.args == (objective_of(distance=None),)
    logits: Any = plan_of(Config(prediction="logits", beta=0.5), Down({}, 0.1, 1.0)).loss
    assert logits.args == (objective_of(prediction="logits", symmetric=(0.1, 0.5)),)


def test_the_learning_rate_follows_the_server() -> None:
    assert plan_of(Config(), Down({}, 0.1, 1.0)).sgd == SGD
    assert plan_of(Config(), Down({}, 0.1, 0.1)).sgd == replace(SGD, lr=SGD.lr * 0.1)


def test_with_nothing_left_it_is_fedavg() -> None:
    """Without MixUp prediction, distillation and distortion, each step is FedAvg's."""
    start, shard = weights_of(Linear, 5), shard_of(10)
    bench = bench_of(Linear, SGD)  # its views are all raw
    rng = Streams(1, 3, 0)
    cfg = Config(prediction="none", gamma=0.0)
    _, up, metrics = fedlsr.train(cfg, fedavg.Client(), Down(start, 0.0, 1.0), shard, bench, rng)
    _, same, _ = fedavg.train(
        fedavg.Config(), fedavg.Client(), fedavg.Down(start), shard, bench, rng
    )
    assert up.samples == same.samples == 10
    for name, tensor in same.weights.items():
        torch.testing.assert_close(up.weights[name], tensor)
    assert set(metrics) == {"loss", "gamma"}


def test_each_view_leaves_its_mark_on_batch_normalisation() -> None:
    """One step: the running mean moves towards the batch's mean twice, by a tenth each time."""
    start, shard = weights_of(Normalised, 5), shard_of(4)
    bench = bench_of(Normalised, replace(SGD, epochs=1))
    down = Down(start, 0.0, 1.0)
    _, up, _ = fedlsr.train(Config(), fedavg.Client(), down, shard, bench, Streams(1, 0, 0))
    pixels = (shard.images.flatten(1).float() / 255 - 0.25) / 0.5
    expected = 0.81 * start["norm.running_mean"] + 0.19 * pixels.mean(dim=0)
    torch.testing.assert_close(up.weights["norm.running_mean"], expected)


def test_one_step_by_hand() -> None:
    """SGD without momentum or decay on the whole loss, differentiated here from Eqs. 6 to 10."""
    sgd = Sgd(epochs=1, batch_size=4, lr=0.5)
    start, shard = weights_of(Linear, 6), shard_of(4)
    bench = bench_of(Linear, sgd, views="digits")  # its "aug" rotates
    rng = Streams(1, 2, 0)
    down = Down(start, 0.8, 1.0)
    _, up, _ = fedlsr.train(Config(), fedavg.Client(), down, shard, bench, rng)

    turned = bench.view("aug", shard.images, rng("view/augmented"))
    mixing = float(rng("mixing").beta(1.0, 1.0, 1)[0])
    w, b = (start[f"layer.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    x1, x2 = ((i.flatten(1).float() / 255 - 0.25) / 0.5 for i in (shard.images, turned))
    o1, o2 = x1 @ w.T + b, x2 @ w.T + b
    p = mixing * o1.softmax(1) + (1 - mixing) * o2.softmax(1)
    sharp = p.square() / p.square().sum(1, keepdim=True)
    q1, q2 = (3 * o1).softmax(1), (3 * o2).softmax(1)
    u = (q1 + q2) / 2
    js = ((q1 * (q1 / u).log()).sum(1) + (q2 * (q2 / u).log()).sum(1)) / 2
    (F.cross_entropy(sharp, shard.labels) + 0.8 * js.mean()).backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    assert b.grad is not None
    torch.testing.assert_close(up.weights["layer.weight"], w.detach() - 0.5 * w.grad)
    torch.testing.assert_close(up.weights["layer.bias"], b.detach() - 0.5 * b.grad)


def test_a_client_too_small_for_a_step_returns_what_it_got() -> None:
    start = weights_of(Linear, 5)
    bench = bench_of(Linear, replace(SGD, tail="drop"))
    for n in (0, 3):
        down = Down(start, 0.1, 1.0)
        _, up, metrics = fedlsr.train(
            Config(), fedavg.Client(), down, shard_of(n), bench, Streams(1, 0, 0)
        )
        assert_same_weights(up.weights, start)
        assert (up.samples, metrics["loss"]) == (n, 0.0)
