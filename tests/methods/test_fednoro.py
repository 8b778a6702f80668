"""FedNoRo: its equations with derived numbers, who reports when, and when it is FedAvg."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax, softmax
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.nn import functional as F

from benches import CLASSES, Linear, RecordingBench, bench_of, images_of, labels_of, weights_of
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Plan, Sgd
from fedsieve.local.program import program_key
from fedsieve.methods import fedavg, fednoro
from fedsieve.methods.contract import Federation
from fedsieve.methods.fednoro import PRESETS, Config, Down, Server, Up
from fedsieve.serial import payload_bytes
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from fedsieve.types import SERVER, Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, final_bytes, tiny_recipe

Floats = NDArray[np.float64]
SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5)
RNG = Streams(11, 4, 2)
PLAIN: Mapping[str, Any] = {"adjustment": 0.0, "distillation": 0.0, "distance_aware": False}


def f32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


# ---------------------------------------------------------------------------------- the settings


def test_the_papers_numbers() -> None:
    cfg = Config()
    assert (cfg.warmup_rounds, cfg.adjustment, cfg.distance_aware) == (10, 1.0, True)
    assert (cfg.distillation, cfg.temperature, cfg.ramp_from, cfg.ramp_to) == (0.8, 0.8, 10, 49)


def test_a_preset_fills_what_is_left_out_and_nothing_else() -> None:
    assert Config().switches == PRESETS["paper"]
    assert Config(preset="authors").switches == PRESETS["authors"]
    mixed = Config(preset="authors", covariance="diagonal")
    assert mixed.switches == replace(PRESETS["authors"], covariance="diagonal")


@pytest.mark.parametrize(
    "setting",
    [
        {"preset": "mine"},
        {"distance": "cosine"},
        {"covariance": "tied"},
        {"evaluation_view": "strong"},
        {"warmup_rounds": -1},
        {"adjustment": -0.5},
        {"distillation": 1.1},
        {"temperature": 0.0},
        {"ramp_from": -1},
        {"ramp_to": 10},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_bad_setting_is_named(setting: Mapping[str, Any]) -> None:
    with pytest.raises(FedsieveError, match=f"method.{next(iter(setting))} must be"):
        Config(**setting)


# ------------------------------------------------------------------------ logits and their offsets


def shard_with(labels: Sequence[int], client: int = 2) -> Shard:
    n = len(labels)
    given = torch.tensor(labels, dtype=torch.int64)
    return Shard(client, images_of(n), given, torch.arange(n), CLASSES)


def test_class_shares_are_those_of_the_given_labels() -> None:
    assert fednoro.class_shares(shard_with([2, 0, 2, 2])).tolist() == [0.25, 0.0, 0.75]


def test_an_absent_class_is_ruled_out_whatever_multiplies_the_logarithm() -> None:
    """0 · log 0 would be NaN."""
    shares = f32([0.25, 0.0, 0.75])
    once, half = fednoro.offsets(shares, 1.0), fednoro.offsets(shares, 0.5)
    assert once.tolist() == pytest.approx([math.log(0.25), -math.inf, math.log(0.75)])
    assert half.tolist() == pytest.approx([math.log(0.5), -math.inf, math.log(0.75) / 2])
    assert fednoro.offsets(shares, 0.0).tolist() == [0.0, 0.0, 0.0]


class Echo:
    """A net that says what it was made to say, whatever it sees."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.parameters: Mapping[str, Tensor] = {}

    def __call__(self, x: Tensor) -> Outputs:
        return Outputs(None, self.logits)


def batch_with(
    labels: Sequence[int], shares: Any, share: float = 0.0, padding: int | None = None
) -> Batch:
    n = len(labels)
    values = {"x": torch.zeros(n, 1), "label": torch.tensor(labels)}
    constants = {"offsets": fednoro.offsets(f32(shares), 1.0), "distillation": f32(share)}
    weight = None if padding is None else (torch.arange(n) < n - padding).float()
    return Batch(values, constants, weight)


def test_the_adjusted_loss_by_hand() -> None:
    """z = 0, so that softmax(z + log π) = π: the mean of −log ¼ and −log ¾."""
    batch = batch_with([0, 2], [0.25, 0.0, 0.75])
    found = fednoro.adjusted_loss(batch, Echo(torch.zeros(2, 3)))
    assert float(found) == pytest.approx(-(math.log(0.25) + math.log(0.75)) / 2)


def test_equal_frequencies_change_nothing() -> None:
    z, y = f32([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]]), [2, 0]
    found = fednoro.adjusted_loss(batch_with(y, [1 / 3] * 3), Echo(z))
    assert float(found) == pytest.approx(float(F.cross_entropy(z, torch.tensor(y))), rel=1e-6)


def test_an_absent_class_learns_nothing_and_spoils_nothing() -> None:
    z = f32([[1.0, 9.0, 0.5], [0.0, -3.0, 1.0]]).requires_grad_()
    batch = batch_with([2, 0], [0.5, 0.0, 0.5], share=0.4)
    teacher = Echo(f32([[0.0, 2.0, 0.0]] * 2))
    losses = (
        fednoro.adjusted_loss(batch, Echo(z)),
        fednoro.distilled_loss(0.8, batch, Echo(z), teacher),
    )
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, z)
        assert torch.isfinite(gradient).all()
        assert gradient[:, 1].tolist() == [0.0, 0.0]
        assert (gradient[:, [0, 2]] != 0).all()


# ------------------------------------------------------------------------------- the teaching model


def test_the_divergence_by_hand() -> None:
    """p = softmax((0.8 log 3, 0)/0.8) = (¾, ¼), q = (½, ½)."""
    found = fednoro.divergence(f32([[0.8 * math.log(3), 0.0]]), torch.zeros(1, 2), 0.8)
    assert found.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])


def test_the_divergence_is_torchs_where_all_classes_are_there() -> None:
    z = np.random.default_rng(3).normal(size=(2, 5, 4))
    teacher, student = f32(z[0]), f32(z[1])
    found = fednoro.divergence(teacher, student, 0.8)
    p = torch.tensor(softmax(z[0] / 0.8, axis=1))
    theirs = F.kl_div(torch.tensor(log_softmax(z[1], axis=1)), p, reduction="batchmean")
    assert float(found.mean()) == pytest.approx(float(theirs), rel=1e-5)


def test_in_an_absent_class_zero_stands_for_the_logarithm() -> None:
    """p = (½, ¼, ¼), q = (½, 0, ½): ½·0 + ¼·log ¼ + ¼·(log ¼ − log ½)."""
    teacher = f32([[math.log(2), 0.0, 0.0]])
    found = fednoro.divergence(teacher, f32([[0.0, -math.inf, 0.0]]), 1.0)
    expected = 0.25 * math.log(0.25) + 0.25 * math.log(0.5)
    assert found.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_both_losses_by_their_shares(share: float) -> None:
    """With λ = 0 it is the loss of a clean client. The last sample is padding."""
    z, teacher = f32([[1.0, 0.0, -1.0]] * 3), f32([[0.0, 2.0, 0.0]] * 3)
    teacher[2] = 50.0 * teacher[2]
    y, shares = [2, 0, 1], [0.2, 0.3, 0.5]
    padded = batch_with(y, shares, share, padding=1)
    found = fednoro.distilled_loss(0.8, padded, Echo(z), Echo(teacher))
    log_q = log_softmax(z[0].double().numpy() + np.log(shares))
    p = softmax(np.array([0.0, 2.0, 0.0]) / 0.8)
    divergence = (p * (np.log(p) - log_q)).sum()
    given = -(log_q[2] + log_q[0]) / 2
    assert float(found) == pytest.approx(share * divergence + (1 - share) * given, rel=1e-5)
    if share == 0:
        assert float(found) == pytest.approx(float(fednoro.adjusted_loss(padded, Echo(z))))


def test_the_ramp() -> None:
    """Half way, 5·¼ remain in the exponent."""
    cfg = Config(distillation=0.8, ramp_from=10, ramp_to=30)
    found = [fednoro.ramp(cfg, t) for t in (0, 10, 20, 30, 99)]
    first = 0.8 * math.exp(-5)
    assert found == pytest.approx([first, first, 0.8 * math.exp(-1.25), 0.8, 0.8])


# ------------------------------------------------------------------------------- class-wise losses


def test_class_losses_are_means_by_the_given_label() -> None:
    losses, labels = f32([1.0, 4.0, 2.0, 3.0]), torch.tensor([2, 0, 2, 2])
    assert fednoro.class_losses(losses, labels, 4).tolist() == [4.0, -1.0, 2.0, -1.0]


def test_losses_are_scaled_class_by_class() -> None:
    """The third class is missing everywhere, and the fourth the same for all."""
    losses = np.array([[1.0, 6.0, -1.0, 0.3], [3.0, -1.0, -1.0, 0.3], [2.0, 2.0, -1.0, -1.0]])
    found = fednoro.scaled(losses)
    assert found.tolist() == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]]


def test_rounding_is_no_difference() -> None:
    losses = np.array([[0.3, 1.0], [0.3 * (1 + 5e-8), 2.0]])
    assert fednoro.scaled(losses).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def made_reports(clients: int = 12, classes: int = 5, seed: int = 0) -> dict[int, Tensor]:
    """Losses of about 0.5, and at the odd clients of 1.5 and more."""
    rng = np.random.default_rng(seed)
    losses = 0.5 + 0.1 * rng.random((clients, classes))
    losses[1::2] += rng.uniform(1, 2, size=(clients // 2, 1))
    return {k: f32(row) for k, row in enumerate(losses)}


ODD = {k: k % 2 == 1 for k in range(12)}


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_clients_of_large_losses_are_noisy(covariance: Any) -> None:
    assert fednoro.verdict(made_reports(), covariance) == ODD


def test_the_order_of_reports_does_not_matter() -> None:
    reports = made_reports()
    assert fednoro.verdict(dict(reversed(reports.items())), "diagonal") == ODD


def test_a_missing_class_does_not_make_a_client_noisy_or_clean() -> None:
    reports = made_reports()
    for k, losses in reports.items():
        losses[k % 5] = -1.0
    assert fednoro.verdict(reports, "diagonal") == ODD


def test_a_small_class_speaks_as_loud_as_one_of_large_losses() -> None:
    """Client 3 alone is worse in the other two classes, by little as numbers go."""
    rng = np.random.default_rng(1)
    losses = rng.uniform(0, 1, size=(8, 3)) * [0.001, 0.0002, 0.0002] + [9.0, 0.01, 0.01]
    losses[3, 1:] += 0.005
    reports = {k: f32(row) for k, row in enumerate(losses)}
    assert [k for k, noisy in fednoro.verdict(reports, "diagonal").items() if noisy] == [3]


def test_one_client_of_very_large_losses_hides_the_others() -> None:
    """The page says so: the others then lie within a small part of [0, 1]."""
    reports = {**made_reports(), 0: f32([100.0] * 5)}
    assert fednoro.verdict(reports, "diagonal") == {k: k == 0 for k in range(12)}


def test_the_verdict_is_that_of_most_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine votes, four for client 0, three for client 1, two for nobody; then equal numbers."""
    said = {"0": [True, False], "1": [False, True], "-": [False, False]}
    reports = {0: f32([1.0]), 1: f32([2.0])}
    for votes, noisy in (("1-0010-10", 0), ("1-01011-0", 1), ("-00-11-01", None)):
        answers = [np.array(said[vote]) for vote in votes]
        monkeypatch.setattr(
            fednoro, "upper_group", lambda values, kind, seed, answers=answers: answers[seed]
        )
        found = fednoro.verdict(reports, "diagonal")
        assert found == {k: k == noisy for k in (0, 1)}, votes


@pytest.mark.parametrize(("covariance", "theirs"), [("diagonal", "diag"), ("full", "full")])
def test_a_group_is_upper_by_the_sum_of_its_means(covariance: Any, theirs: str) -> None:
    """The second group is lower in the first class, and higher in two."""
    rng = np.random.default_rng(2)
    values = 0.02 * rng.random((30, 3))
    values[:12] += [1.0, 0.0, 0.2]
    values[12:] += [0.0, 0.9, 0.9]
    assert fednoro.upper_group(values, covariance, 0).tolist() == [False] * 12 + [True] * 18
    mixture = GaussianMixture(2, covariance_type=theirs, random_state=0).fit(values)
    assert mixture.means_.sum(axis=1).max() == pytest.approx(1.83, abs=0.02)


@pytest.mark.parametrize(
    "reports", [{}, {3: [1.0, 2.0]}, {0: [1.0, 2.0], 1: [1.0, 2.0], 5: [1.0, -1.0]}]
)
def test_without_a_difference_nobody_is_noisy(reports: Mapping[int, list[float]]) -> None:
    found = fednoro.verdict({k: f32(losses) for k, losses in reports.items()}, "diagonal")
    assert found == dict.fromkeys(reports, False)


def test_as_many_classes_as_clients_can_be_split() -> None:
    """With a full covariance, which then has no inverse but for what is added to it, too."""
    reports = made_reports(40, 40)
    for covariance in ("diagonal", "full"):
        assert fednoro.verdict(reports, covariance) == {k: k % 2 == 1 for k in range(40)}


# --------------------------------------------------------------------------------------- averaging


def up_with(*values: float, samples: int = 10, report: Tensor | None = None) -> Up:
    """Two tensors, of two entries and of one."""
    weights = {"a": f32(values[:2]), "b": f32(values[2:])}
    return Up(weights, samples, report)


def test_distances_by_hand() -> None:
    """(3, 4) and 12 apart: √(25 + 144) = 13, or 5 + 12."""
    one, other = up_with(3.0, 4.0, 12.0).weights, up_with(0.0, 0.0, 0.0).weights
    assert fednoro.distance("euclidean", one, other) == pytest.approx(13)
    assert fednoro.distance("per_tensor", one, other) == pytest.approx(17)


def test_models_that_went_astray_have_a_finite_distance() -> None:
    """Its square is none of float32's numbers."""
    far = up_with(3e30, 4e30, 0.0).weights
    found = fednoro.distance("euclidean", far, up_with(0.0, 0.0, 0.0).weights)
    assert found == pytest.approx(5e30)


NOISY = {0: False, 1: True, 2: False, 3: True}
UPS = {
    0: up_with(0.0, 0.0, 0.0, samples=10),
    1: up_with(2.0, 0.0, 0.0, samples=20),
    2: up_with(9.0, 0.0, 0.0, samples=30),
    3: up_with(9.0, 0.0, 4.0, samples=40),
}
"""Client 1 is 2 from the nearest clean one, client 3 is 4."""


def test_a_noisy_model_counts_by_its_way_to_the_nearest_clean_one() -> None:
    assert fednoro.distances("euclidean", UPS, NOISY) == pytest.approx({1: 0.5, 3: 1.0})


def settled_server(noisy: Mapping[int, bool] | None, rounds: int = 99) -> Server:
    federation = Federation((10, 20, 30, 40), 4, rounds, CLASSES)
    return Server(up_with(1.0, 1.0, 1.0).weights, federation, {}, None, noisy)


def test_models_are_averaged_by_samples_and_distances() -> None:
    after, metrics = fednoro.merge(Config(), settled_server(NOISY), 20, UPS)
    w = np.array([10, 20 * math.exp(-0.5), 30, 40 * math.exp(-1)])
    w /= w.sum()
    expected = [2 * w[1] + 9 * w[2] + 9 * w[3], 0.0, 4 * w[3]]
    found = [*after.weights["a"].tolist(), *after.weights["b"].tolist()]
    assert found == pytest.approx(expected, rel=1e-6)
    assert metrics == {"noisy_weight": pytest.approx(w[1] + w[3])}


@pytest.mark.parametrize(
    ("cfg", "noisy"),
    [
        (Config(), dict.fromkeys(NOISY, True)),
        (Config(), dict.fromkeys(NOISY, False)),
        (Config(), {}),
        (Config(distance_aware=False), NOISY),
    ],
    ids=["only noisy", "only clean", "nobody reported", "without distances"],
)
def test_other_rounds_are_averaged_as_in_fedavg(cfg: Config, noisy: Mapping[int, bool]) -> None:
    after, metrics = fednoro.merge(cfg, settled_server(noisy), 20, UPS)
    ups = {k: fedavg.Up(up.weights, up.samples) for k, up in UPS.items()}
    server = fedavg.Server({}, settled_server(None).federation)
    theirs, _ = fedavg.merge(fedavg.Config(), server, 20, ups)
    assert_same_weights(after.weights, theirs.weights)
    assert metrics == {}


def test_a_client_without_samples_is_nobodys_neighbour() -> None:
    """Client 2 sent back what it got; the way of client 3 is then the one to client 0."""
    ups = {**UPS, 2: replace(UPS[2], samples=0)}
    root = math.sqrt(81 + 16)
    found = fednoro.distances("euclidean", ups, NOISY)
    assert found == pytest.approx({1: 2 / root, 3: 1.0})
    assert fednoro.distances("euclidean", {1: UPS[1], 2: ups[2]}, NOISY) == {}


def test_a_noisy_model_that_is_like_a_clean_one_counts_like_it() -> None:
    ups = {0: UPS[0], 1: replace(UPS[0], samples=5)}
    assert fednoro.distances("euclidean", ups, NOISY) == {}


def test_models_further_apart_than_numbers_reach_do_not_end_the_run() -> None:
    """Client 1 is 6e38 from the clean model, which is none of float32's numbers; 3 is not."""
    ups = {
        0: up_with(3e38, 0.0, 0.0),
        1: up_with(-3e38, 0.0, 0.0),
        3: up_with(2e38, 0.0, 0.0),
    }
    assert fednoro.distances("euclidean", ups, NOISY) == {1: 1.0, 3: 0.0}
    _, metrics = fednoro.merge(Config(), settled_server(NOISY), 20, ups)
    assert metrics["noisy_weight"] == pytest.approx((math.exp(-1) + 1) / (math.exp(-1) + 2))


def test_models_of_different_shapes_are_refused() -> None:
    strange = Up({"a": f32([0.0, 0.0]), "b": f32([0.0, 1.0])}, 20, None)
    with pytest.raises(FedsieveError, match=r"'b' is .* in an update but .* another update"):
        fednoro.merge(Config(), settled_server(NOISY), 20, {**UPS, 1: strange})


# --------------------------------------------------------------------------------- who reports when


def server_with(cfg: Config, clients: int = 12, per_round: int = 4) -> Server:
    federation = Federation((10,) * clients, per_round, 99, 5)
    return fednoro.init_server(cfg, weights_of(Linear, 1), federation)


def select(cfg: Config, server: Server, round: int) -> tuple[int, ...]:
    return fednoro.select(cfg, server, round, Streams(1, round, SERVER))


def reported(
    cfg: Config, server: Server, reports: Mapping[int, Tensor]
) -> tuple[Server, Mapping[str, float]]:
    """The server after all rounds in which clients report; those not in `reports` were refused."""
    metrics: Mapping[str, float] = {}
    end = fednoro.first_round_of_stage_two(cfg, server.federation)
    for round in range(cfg.warmup_rounds, end):
        ups = {
            k: Up(weights_of(Linear, round), 10, reports[k])
            for k in select(cfg, server, round)
            if k in reports
        }
        if ups:
            server, metrics = fednoro.merge(cfg, server, round, ups)
    return server, metrics


def test_after_stage_one_each_client_is_asked_once() -> None:
    cfg = Config(warmup_rounds=5)
    server = server_with(cfg)
    chosen = [select(cfg, server, t) for t in range(30)]
    asked = [fednoro.send(cfg, server, t, 0).reporting for t in range(8)]
    assert asked == [False] * 5 + [True] * 3
    assert sorted(k for clients in chosen[5:8] for k in clients) == list(range(12))
    assert not fednoro.send(cfg, reported(cfg, server, made_reports())[0], 8, 0).reporting
    others = chosen[:5] + chosen[8:]
    assert all(len(set(clients)) == 4 and list(clients) == sorted(clients) for clients in others)
    assert len(set(others)) > 20, "drawn anew each time"


def test_all_reports_are_of_the_model_that_stage_one_ended_with() -> None:
    cfg = Config(warmup_rounds=2)
    server = server_with(cfg)
    end = server.weights
    reports = made_reports()
    for round in (2, 3, 4):
        down = fednoro.send(cfg, server, round, 0)
        judge = down.weights if down.judge is None else down.judge
        assert_same_weights(judge, end)
        assert (down.judge is None) == (round == 2), "no model is sent twice"
        ups = {k: Up(weights_of(Linear, 7), 10, reports[k]) for k in select(cfg, server, round)}
        server, _ = fednoro.merge(cfg, server, round, ups)
    down = fednoro.send(cfg, server, 5, 0)
    assert down.judge is None
    assert (server.judge, server.reports) == (None, {})
    assert payload_bytes(down) < 1.5 * payload_bytes(end)


def test_the_verdict_comes_with_the_last_report() -> None:
    cfg = Config(warmup_rounds=10)
    server, metrics = reported(cfg, server_with(cfg), made_reports())
    assert server.noisy == ODD
    assert metrics["noisy_clients"] == 6
    assert 0.5 <= metrics["class_loss_clean"] <= 0.6
    assert 1.5 <= metrics["class_loss_noisy"] <= 2.6
    assert {k: sieved.noise_rate for k, sieved in fednoro.sieve(server).items()} == ODD
    sent = [fednoro.send(cfg, server, 13, k).distillation for k in range(4)]
    share = 0.8 * math.exp(-5 * (36 / 39) ** 2)
    assert sent == pytest.approx([0, share, 0, share])


def test_the_numbers_of_a_verdict_leave_missing_classes_out() -> None:
    reports = {0: f32([1.0, -1.0]), 1: f32([3.0, 5.0]), 4: f32([2.0, -1.0])}
    found = fednoro.describe(reports, {0: False, 1: True, 4: False})
    assert found == {"noisy_clients": 1, "class_loss_clean": 1.5, "class_loss_noisy": 4.0}


def test_before_the_verdict_nothing_is_believed_and_nobody_taught() -> None:
    cfg = Config(warmup_rounds=0, ramp_from=0, ramp_to=1)
    server = server_with(cfg)
    ups = {k: Up(weights_of(Linear, 3), 10, made_reports()[k]) for k in select(cfg, server, 0)}
    server, metrics = fednoro.merge(cfg, server, 0, ups)
    assert (server.noisy, fednoro.sieve(server), metrics) == (None, {}, {})
    assert [fednoro.send(cfg, server, 1, k).distillation for k in range(12)] == [0.0] * 12


def test_where_all_take_part_the_verdict_counts_in_the_round_of_the_reports() -> None:
    cfg = Config(warmup_rounds=6)
    server = server_with(cfg, per_round=12)
    assert select(cfg, server, 6) == tuple(range(12))
    ups = {k: Up(weights_of(Linear, k), 10, report) for k, report in made_reports().items()}
    after, metrics = fednoro.merge(cfg, server, 6, ups)
    assert after.noisy == ODD
    assert 0.27 < metrics["noisy_weight"] < 0.5, "e⁻¹/(1 + e⁻¹) if all were the farthest"
    assert all(fednoro.send(cfg, server, 6, k).judge is None for k in range(12))


def test_who_did_not_report_counts_as_clean() -> None:
    cfg = Config(warmup_rounds=0)
    reports = {k: losses for k, losses in made_reports().items() if k not in (3, 8)}
    server, _ = reported(cfg, server_with(cfg), reports)
    assert server.noisy == {k: noisy for k, noisy in ODD.items() if k not in (3, 8)}
    assert fednoro.send(cfg, server, 20, 3).distillation == 0
    assert set(fednoro.sieve(server)) == set(reports)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_round_without_reports_does_not_stop_the_verdict(missing: int) -> None:
    """No merge says so if it was the last one; if it was the first, the model is still the same."""
    cfg = Config(warmup_rounds=4)
    server = server_with(cfg)
    gone = select(cfg, server, 4 + missing)
    reports = {k: losses for k, losses in made_reports().items() if k not in gone}
    server, _ = reported(cfg, server, reports)
    for k in range(12):
        down = fednoro.send(cfg, server, 7, k)
        assert (down.distillation > 0) == (ODD[k] and k not in gone)
        assert down.judge is None
    after, _ = fednoro.merge(cfg, server, 7, {0: Up(weights_of(Linear, 2), 10, None)})
    assert after.noisy == {k: ODD[k] for k in reports}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (f32([1.0, 2.0]), r"shape \(2,\) and torch.float32 for 5 classes"),
        (torch.tensor([1, 2, 3, 4, 5]), r"shape \(5,\) and torch.int64 for 5 classes"),
    ],
    ids=["of other classes", "in other numbers"],
)
def test_a_strange_report_is_refused_when_it_comes(report: Tensor, said: str) -> None:
    """Later it would spoil the round of the verdict for all who report then."""
    cfg = Config(warmup_rounds=0)
    ups = {2: Up(weights_of(Linear, 2), 10, report)}
    with pytest.raises(FedsieveError, match=f"Client 2 reported losses of {said}, not of"):
        fednoro.merge(cfg, server_with(cfg), 0, ups)


def test_nobody_to_merge_is_refused_and_no_samples_change_nothing() -> None:
    cfg = Config()
    server = server_with(cfg)
    with pytest.raises(FedsieveError, match="No client took part in round 3"):
        fednoro.merge(cfg, server, 3, {})
    after, _ = fednoro.merge(cfg, server, 3, {0: Up(weights_of(Linear, 9), 0, None)})
    assert_same_weights(after.weights, server.weights)


# ------------------------------------------------------------------------------ a round at a client


def down_with(**changes: Any) -> Down:
    down = Down(weights_of(Linear, 1), reporting=False, judge=None, distillation=0.0)
    return replace(down, **changes)


def shard_of(n: int) -> Shard:
    return Shard(2, images_of(n), labels_of(n), torch.arange(n), CLASSES)


def train(
    cfg: Config, down: Down, shard: Shard, sgd: Sgd = SGD
) -> tuple[Up, Mapping[str, float], RecordingBench]:
    bench = RecordingBench(bench_of(Linear, sgd))
    _, up, metrics = fednoro.train(cfg, fedavg.Client(), down, shard, bench, RNG)
    return up, metrics, bench


def logits_of(weights: Weights, shard: Shard) -> Floats:
    """The linear model by NumPy, on normalised pixels."""
    x = (shard.images.flatten(1).numpy() / 255 - 0.25) / 0.5
    z: Floats = x @ weights["layer.weight"].double().numpy().T + weights["layer.bias"].numpy()
    return z


@pytest.mark.parametrize("judge", [None, weights_of(Linear, 8)])
def test_a_report_is_of_the_judge_without_offsets(judge: Weights | None) -> None:
    """And of the received model where that is the judge; not of the trained one."""
    shard = shard_with([0, 2, 2, 0, 2, 2, 2])
    up, _, bench = train(Config(), down_with(reporting=True, judge=judge), shard)
    z = logits_of(judge or weights_of(Linear, 1), shard)
    losses = -log_softmax(z, axis=1)[np.arange(7), shard.labels.numpy()]
    assert up.class_losses is not None
    expected = [losses[[0, 3]].mean(), -1.0, losses[[1, 2, 4, 5, 6]].mean()]
    assert up.class_losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert bench.views == ["raw"]


def test_only_who_is_asked_reports_and_it_changes_no_training() -> None:
    silent, _, bench = train(Config(), down_with(), shard_of(10))
    asked, _, other = train(Config(preset="authors"), down_with(reporting=True), shard_of(10))
    assert silent.class_losses is None
    assert_same_weights(silent.weights, asked.weights)
    assert (bench.views, other.views) == ([], ["weak"])


def test_one_step_of_a_clean_client_by_hand() -> None:
    """w ← w − 0.5 ∂/∂w mean CE(Wx + b + log π, y), of five samples without class 1."""
    shard = shard_with([0, 2, 2, 0, 2])
    sgd = Sgd(epochs=1, batch_size=5, lr=0.5)
    up, metrics, _ = train(Config(), down_with(), shard, sgd)
    start = weights_of(Linear, 1)
    z = logits_of(start, shard)[:, [0, 2]] + np.log([0.4, 0.6])
    p = np.zeros((5, CLASSES))
    p[:, [0, 2]] = softmax(z, axis=1)
    by_b = (p - np.eye(CLASSES)[shard.labels]).mean(axis=0)
    bias = start["layer.bias"].numpy() - 0.5 * by_b
    assert up.weights["layer.bias"].tolist() == pytest.approx(bias.tolist(), rel=1e-5)
    assert up.weights["layer.bias"][1] == start["layer.bias"][1]
    assert torch.equal(up.weights["layer.weight"][1], start["layer.weight"][1])
    loss = -log_softmax(z, axis=1)[np.arange(5), shard.labels.numpy() // 2].mean()
    assert metrics == {"loss": pytest.approx(loss), "distillation": 0.0}


def test_one_step_of_a_noisy_client_by_hand() -> None:
    """∂/∂z (λ KL(p ‖ q) + (1 − λ) CE) = q − λp − (1 − λ)y, where all classes are there."""
    shard = shard_with([0, 1, 2, 0, 2])
    sgd = Sgd(epochs=1, batch_size=5, lr=0.5)
    up, metrics, _ = train(Config(), down_with(distillation=0.7), shard, sgd)
    start = weights_of(Linear, 1)
    z = logits_of(start, shard)
    p, q = softmax(z / 0.8, axis=1), softmax(z + np.log([0.4, 0.2, 0.4]), axis=1)
    by_b = (q - 0.7 * p - 0.3 * np.eye(CLASSES)[shard.labels]).mean(axis=0)
    bias = start["layer.bias"].numpy() - 0.5 * by_b
    assert up.weights["layer.bias"].tolist() == pytest.approx(bias.tolist(), rel=1e-4)
    assert metrics["distillation"] == 0.7


def plan_of(down: Down) -> Plan:
    _, _, bench = train(Config(), down, shard_of(10))
    (plan,) = bench.plans
    return plan


def test_the_teacher_is_the_received_model_and_sees_what_the_student_sees() -> None:
    down = down_with(distillation=0.3)
    plan = plan_of(down)
    (teacher,) = plan.frozen
    assert_same_weights(teacher, down.weights)
    assert plan.views == {"x": "weak"}


def test_rounds_and_clients_share_a_captured_step() -> None:
    clean, reporting = plan_of(down_with()), plan_of(down_with(reporting=True))
    taught, later = (plan_of(down_with(distillation=share)) for share in (0.1, 0.8))
    assert program_key(clean) == program_key(reporting)
    assert program_key(taught) == program_key(later) != program_key(clean)


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_noisy_client_with_few_samples_is_taught_or_returns_what_it_got(
    n: int, tail: Any
) -> None:
    """Batches of 4. With one sample all other classes are ruled out, and no gradient is left."""
    shard, sgd = shard_with([0, 2, 0, 2, 0][:n]), replace(SGD, tail=tail)
    up, metrics, bench = train(Config(), down_with(distillation=0.5), shard, sgd)
    assert all(tensor.isfinite().all() for tensor in up.weights.values())
    assert math.isfinite(metrics["loss"])
    assert up.samples == n
    stands = all(torch.equal(up.weights[k], w) for k, w in weights_of(Linear, 1).items())
    assert stands == (bench.fitted[0].steps == 0 or n == 1)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_client_of_one_class_learns_nothing(share: float) -> None:
    """softmax(z + log π) is 1 for the only class, whatever z is."""
    shard = shard_with([2] * 9)
    up, _, bench = train(Config(), down_with(distillation=share), shard)
    assert bench.fitted[0].steps == 4
    assert_same_weights(up.weights, weights_of(Linear, 1))
    up, _, _ = train(Config(adjustment=0.0), down_with(), shard)
    assert not torch.equal(up.weights["layer.bias"], weights_of(Linear, 1)["layer.bias"])


def test_without_samples_there_is_nothing_to_report() -> None:
    up, metrics, _ = train(Config(), down_with(reporting=True, distillation=0.5), shard_of(0))
    assert_same_weights(up.weights, weights_of(Linear, 1))
    assert (up.samples, up.class_losses, metrics) == (0, None, {"loss": 0.0})


# --------------------------------------------------------------------------------------- whole runs


def test_without_its_parts_a_run_is_fedavgs(tmp_path: Path) -> None:
    """The rounds of the reports lie behind its last one: there clients are drawn in another way."""
    run(tiny_recipe("fedavg"), tmp_path / "fedavg")
    run(tiny_recipe({"name": "fednoro", "adjustment": 0.0}), tmp_path / "warm-up")
    assert final_bytes(tmp_path / "warm-up") == final_bytes(tmp_path / "fedavg")


def test_without_its_parts_a_run_of_all_clients_is_fedavgs_with_a_verdict(tmp_path: Path) -> None:
    run(tiny_recipe("fedavg", clients_per_round=6), tmp_path / "fedavg")
    table = {"name": "fednoro", "warmup_rounds": 1, **PLAIN}
    run(tiny_recipe(table, clients_per_round=6), tmp_path / "plain")
    assert final_bytes(tmp_path / "plain") == final_bytes(tmp_path / "fedavg")
    lines = read_lines(tmp_path / "plain" / "metrics.jsonl")
    assert ["noisy_clients" in line["server"] for line in lines] == [False, True, False, False]


def test_it_finds_the_noisy_sites(tmp_path: Path) -> None:
    """Half of the ten sites have wrong labels, 60 to 90 % of theirs."""
    table = {"name": "fednoro", "warmup_rounds": 4, "ramp_from": 0, "ramp_to": 6}
    recipe = tiny_recipe(
        table,
        rounds=9,
        clients_per_round=5,
        scene={
            "clients": 10,
            "partition": {"kind": "iid"},
            "noise": {"kind": "symmetric", "share": 0.5, "low": 0.6, "high": 0.9},
        },
        sgd={"epochs": 4, "batch_size": 16, "lr": 0.05, "momentum": 0.5},
    )
    run(recipe, tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[5]["server"]["noisy_clients"] == 5
    assert lines[5]["server"]["class_loss_noisy"] > 1.5 * lines[5]["server"]["class_loss_clean"]
    assert lines[-1]["diagnostics"]["noise_pearson"] > 0.95
    down = [line["bytes_down"] for line in lines]
    assert down[5] > 1.9 * down[4], "the judge comes along"
    assert down[6] < 1.1 * down[4]
