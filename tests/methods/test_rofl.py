"""RoFL: each equation in numbers worked out here, the traps of its public program, and the cases in
which it is FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from fedsieve.local.plan import Batch, Plan, Sgd
from fedsieve.local.program import program_key
from fedsieve.methods import METHODS, fedavg, rofl
from fedsieve.methods.contract import Federation
from fedsieve.methods.rofl import PRESETS, Client, Config, Down, Server, Up
from fedsieve.recipe import recipe_from_table
from fedsieve.simulate.run import run
from fedsieve.types import Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, final_bytes, same_bits, tiny_recipe

SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.01)
RNG = Streams(11, 4, 2)
FEDERATION = Federation((10, 30), 2, 50, CLASSES)
TWO_CLASSES = replace(FEDERATION, num_classes=2)


def shard_of(n: int) -> Shard:
    return Shard(2, images_of(n), labels_of(n), torch.arange(n), CLASSES)


# -------------------------------------------------------------------------------- configuration


def test_the_share_of_wrong_labels_must_be_given() -> None:
    with pytest.raises(FedsieveError, match=r"^Please set method\.forget_rate\.$"):
        recipe_from_table({"method": {"name": "rofl"}})


def test_the_defaults_for_cifar10() -> None:
    cfg = Config(forget_rate=0.2)
    assert (cfg.ramp_rounds, cfg.pseudo_label_round) == (10, 100)
    assert (cfg.lambda_cen, cfg.lambda_e) == (1.0, 0.8)
    assert (cfg.preset, cfg.switches) == ("paper", PRESETS["paper"])


def test_a_preset_fills_what_is_left_out_and_nothing_else() -> None:
    cfg = Config(forget_rate=0.2, preset="public", centroid_gradient=True)
    assert cfg.switches == replace(PRESETS["public"], centroid_gradient=True)
    for switch in ("centroid_gradient", "centroid_total", "evaluation_view"):
        assert getattr(PRESETS["paper"], switch) != getattr(PRESETS["public"], switch)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"forget_rate": -0.1}, r"forget_rate must be in \[0, 1\), not -0.1."),
        ({"forget_rate": 1.0}, r"forget_rate must be in \[0, 1\), not 1.0."),
        ({"forget_rate": math.nan}, "forget_rate must be in"),
        ({"ramp_rounds": 0}, "ramp_rounds must be at least 1, not 0."),
        ({"pseudo_label_round": -1}, "pseudo_label_round must be at least 0, not -1."),
        ({"lambda_cen": -1.0}, "lambda_cen must be at least 0, not -1.0."),
        ({"lambda_e": math.inf}, "lambda_e must be at least 0, not inf."),
        ({"preset": "authors"}, "preset must be one of 'paper', 'public', not 'authors'."),
        ({"centroid_total": "max"}, "centroid_total must be one of 'sum', 'mean', not 'max'."),
        ({"evaluation_view": "strong"}, "evaluation_view must be one of 'raw', 'weak'"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**({"forget_rate": 0.2} | values))


# --------------------------------------------------------------------------------- the schedules


def sent(cfg: Config, rounds: range) -> list[Down]:
    server = Server({}, FEDERATION, None)
    return [rofl.send(cfg, server, t, 0) for t in rounds]


def test_what_a_round_brings() -> None:
    """T_k = 3 and T_pl = 4; from T_pl on the public program's λ_cen has no value."""
    downs = sent(
        Config(forget_rate=0.6, ramp_rounds=3, pseudo_label_round=4, lambda_cen=2.0), range(6)
    )
    assert [d.forget_rate for d in downs] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.6, 0.6])
    assert [d.lambda_cen for d in downs] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert [d.pseudo_labels for d in downs] == [False] * 4 + [True] * 2


def test_the_global_models_labels_may_serve_from_the_start() -> None:
    downs = sent(Config(forget_rate=0.6, pseudo_label_round=0), range(2))
    assert [(d.lambda_cen, d.pseudo_labels) for d in downs] == [(1.0, True)] * 2


# --------------------------------------------------------------------------------- the centroids


def test_the_nearest_centroid_is_the_one_of_the_largest_cosine() -> None:
    """Not of the largest product, which is the first one's, nor of the smallest distance."""
    centroids = torch.tensor([[10.0, 10.0], [0.1, 0.0], [1.0, 2.0]])
    features = torch.tensor([[1.0, 0.1], [0.9, 1.0], [-1.0, 1.0]])
    assert rofl.nearest(features, centroids).tolist() == [1, 0, 2]


def test_a_class_without_a_centroid_is_nearest_to_nothing() -> None:
    """Its row of zeros would have the cosine 0, and the others' are negative."""
    centroids = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    features = torch.tensor([[-3.0, -1.0], [-1.0, -3.0]])
    assert rofl.nearest(features, centroids).tolist() == [2, 1]


def test_means_of_a_class_are_over_samples_of_weight_one() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 7.0]])
    labels, weight = torch.tensor([2, 0, 2, 0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    found = rofl.class_means(features, labels, weight, 4)
    assert found.tolist() == [[3.0, 4.0], [0.0, 0.0], [3.0, 1.0], [0.0, 0.0]]


def test_a_centroid_moves_by_the_square_of_its_similarity() -> None:
    """cos((3, 4), (4, 3)) = 24/25; what is opposite is reached, for a square has no sign."""
    centroids = torch.tensor([[3.0, 4.0], [2.0, 0.0], [1.0, 0.0], [0.3, 0.7], [0.0, 0.0]])
    means = torch.tensor([[4.0, 3.0], [-5.0, 0.0], [0.0, 4.0], [0.0, 0.0], [1.0, 1.0]])
    s2 = (24 / 25) ** 2
    expected = [
        [(1 - s2) * 3 + s2 * 4, (1 - s2) * 4 + s2 * 3],
        [-5.0, 0.0],
        [1.0, 0.0],
        [0.3, 0.7],
        [0.0, 0.0],
    ]
    found = rofl.moved(centroids, means)
    torch.testing.assert_close(found, torch.tensor(expected))
    assert same_bits(found[3], centroids[3]), "of a class that the batch does not hold"


def test_the_server_averages_by_similarities_with_their_signs() -> None:
    """Class 0: s = 1, 0, −0.6, so (1, 0) + 0.6·(3, −4) over 0.4. Class 1: all opposite, so that the
    signs cancel. Class 2: ±0.6, which sum to 0. Class 3 is new, class 4 nobody's."""
    former = torch.tensor([[1.0, 0.0], [0.0, 2.0], [5.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    zero = [0.0, 0.0]
    local = torch.tensor(
        [
            [[1.0, 0.0], [0.0, -1.0], [3.0, 4.0], [1.0, 3.0], zero],
            [[0.0, 2.0], [0.0, -3.0], [-3.0, 4.0], zero, zero],
            [[-3.0, 4.0], [0.0, -5.0], [0.0, 1.0], [5.0, -1.0], zero],
        ]
    )
    found = rofl.aligned(former, local)
    expected = [[7.0, -6.0], [0.0, -3.0], [5.0, 0.0], [3.0, 1.0], zero]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_who_is_more_similar_counts_more() -> None:
    """s = 1 and 0.6 for (2, 0) and (3, 4)."""
    found = rofl.aligned(torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]]))
    torch.testing.assert_close(found, torch.tensor([[(2 + 1.8) / 1.6, 2.4 / 1.6]]))


# ------------------------------------------------------------------------------------- the loss


class Saying(nn.Module):
    """A net whose features and two-class logits are given, these as the probabilities of 0."""

    def __init__(self, features: list[list[float]], p: list[float]) -> None:
        super().__init__()
        right = torch.tensor(p)
        self.features = nn.Parameter(torch.tensor(features))
        self.logits = nn.Parameter(torch.stack([right, 1 - right], dim=1).log())

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(self.features, self.logits)


FEATURES = [[2.0, 0.5], [1.0, 3.0], [0.0, 2.0], [9.0, 1.0]]
P = [0.9, 0.2, 0.6, 0.95]
"""Labels are 0, 1, 0, 1: of these the first three have the small losses. Nearest to the centroids
(1, 0) and (0, 1) are 0, 1, 1, 0, so that the first two are confident."""


def batch_of(
    pseudo: list[int], lambda_cen: float = 0.5, kept: float = 0.75, weight: Tensor | None = None
) -> Batch:
    values = {
        "x": torch.zeros(4, 1),
        "label": torch.tensor([0, 1, 0, 1]),
        "pseudo": torch.tensor(pseudo),
        "centroids": torch.eye(2),
    }
    numbers = {"kept_share": kept, "lambda_cen": lambda_cen, "lambda_e": 0.25}
    return Batch(values, {name: torch.tensor(v) for name, v in numbers.items()}, weight)


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


L_CEN = {"mean": 6.25 / 3, "sum": 6.25}
"""‖(2, ½) − (1, 0)‖² = 1¼ and ‖(1, 3) − (0, 1)‖² = 5; the third is not confident."""


@pytest.mark.parametrize("total", ["mean", "sum"])
@pytest.mark.parametrize("gradient", [True, False])
def test_the_loss_by_hand(total: Any, gradient: bool) -> None:
    net = Saying(FEATURES, P)
    loss, carried = rofl.local_loss(gradient, total, batch_of([1, 1, 1, 1]), net)  # type: ignore[arg-type]
    on_labels = -(math.log(0.9) + math.log(0.8) + math.log(0.4)) / 3  # the third's label is ŷ = 1
    entropy = sum(map(binary_entropy, (0.9, 0.2, 0.6))) / 3
    assert loss.item() == pytest.approx(on_labels + 0.5 * L_CEN[total] + 0.25 * entropy, rel=1e-5)

    # f̂ = (1, 1¼) of samples 0 and 2, with s² = 1/(1 + 1¼²), and (1, 3) with s² = 0.9
    s2 = 1 / (1 + 1.25**2)
    expected = torch.tensor([[1.0, s2 * 1.25], [0.9, 0.1 + 0.9 * 3]])
    torch.testing.assert_close(carried["centroids"], expected)
    assert not carried["centroids"].requires_grad

    loss.backward()  # type: ignore[no-untyped-call]
    if not gradient:
        assert net.features.grad is None
        return
    assert net.features.grad is not None
    share = 1 / 3 if total == "mean" else 1.0
    slope = share * torch.tensor([[1.0, 0.5], [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(net.features.grad, slope)  # 0.5 · 2(F(x) − f)


def test_how_the_predictions_are_pulled() -> None:
    """Of CE it is (p − target)/3, of λ_e·H it is −λ_e·p_i·(log p_i + H)/3; of the fourth, 0."""
    net = Saying(FEATURES, P)
    rofl.local_loss(True, "mean", batch_of([1, 1, 1, 1]), net)[0].backward()  # type: ignore[arg-type,no-untyped-call]
    expected = [
        (p - target - 0.25 * p * (math.log(p) + binary_entropy(p))) / 3
        for p, target in zip(P[:3], (1, 0, 0), strict=True)
    ]
    assert net.logits.grad is not None
    assert net.logits.grad[:, 0].tolist() == pytest.approx([*expected, 0.0], abs=1e-6)


def test_a_sample_that_is_not_confident_has_the_pseudo_label() -> None:
    def loss(pseudo: list[int]) -> float:
        return rofl.local_loss(True, "mean", batch_of(pseudo), Saying(FEATURES, P))[0].item()  # type: ignore[arg-type]

    given = loss([0, 1, 0, 1])
    assert loss([1, 0, 0, 0]) == given, "confident samples and those left out have no use for it"
    assert loss([0, 1, 1, 1]) - given == pytest.approx((math.log(0.6) - math.log(0.4)) / 3)


def test_padding_is_neither_learnt_from_nor_averaged() -> None:
    """⌊0.7·3⌋ = 2: samples 0 and 1, though the padding has the smallest loss."""
    net = Saying(FEATURES, [0.9, 0.2, 0.6, 0.01])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0])
    batch = batch_of([1, 1, 1, 1], kept=0.7, weight=weight)
    loss, carried = rofl.local_loss(True, "mean", batch, net)  # type: ignore[arg-type]
    on_labels = -(math.log(0.9) + math.log(0.8)) / 2
    entropy = (binary_entropy(0.9) + binary_entropy(0.2)) / 2
    assert loss.item() == pytest.approx(on_labels + 0.5 * 6.25 / 2 + 0.25 * entropy, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert net.logits.grad is not None
    assert (net.logits.grad != 0).any(dim=1).tolist() == [True, True, False, False]
    s2 = 1 / (1 + 0.25**2)  # f̂ = (2, ½) is sample 0 alone
    expected = torch.tensor([[1 - s2 + s2 * 2, s2 * 0.5], [0.9, 0.1 + 0.9 * 3]])
    torch.testing.assert_close(carried["centroids"], expected)


@pytest.mark.parametrize(("kept", "count"), [(1.0, 4), (0.74, 2), (0.5, 2), (0.2, 1), (0.0, 1)])
def test_how_many_are_picked(kept: float, count: int) -> None:
    net = Saying(FEATURES, P)
    rofl.local_loss(True, "mean", batch_of([1] * 4, kept=kept), net)[0].backward()  # type: ignore[arg-type,no-untyped-call]
    assert net.logits.grad is not None
    assert int((net.logits.grad != 0).any(dim=1).sum()) == count


# ---------------------------------------------------------------------------------- the client


def config(**settings: Any) -> Config:
    return Config(**({"forget_rate": 0.5} | settings))


def down_of(weights: Weights, **changes: Any) -> Down:
    return replace(Down(weights, None, 0.5, 0.4, pseudo_labels=False), **changes)


def train(bench: Any, down: Down, shard: Shard, **settings: Any) -> tuple[Client, Up]:
    cfg = config(**settings)
    client, up, metrics = rofl.train(cfg, Client(None), down, shard, bench, RNG)
    assert set(metrics) == {"loss", "forget_rate", "confident_share"}
    assert metrics["forget_rate"] == down.forget_rate
    assert client.p_clean is not None
    assert metrics["confident_share"] == pytest.approx(float(client.p_clean.sum()) / len(shard))
    return client, up


def asked(down: Down, shard: Shard, **settings: Any) -> Plan:
    bench = RecordingBench(bench_of(Normalised, SGD))
    train(bench, down, shard, **settings)
    return bench.plans[0]


def test_the_first_centroids_are_the_mean_features_of_the_given_labels() -> None:
    """In evaluation mode, of raw images: (pixels − mean)/σ of the model's own statistics."""
    weights, shard = weights_of(Normalised, 3), shard_of(12)
    x = (shard.images.flatten(1).float() / 255 - 0.25) / 0.5
    mean, variance = weights["norm.running_mean"], weights["norm.running_var"]
    features = (x - mean) / (variance + 1e-5).sqrt()
    features = features * weights["norm.weight"] + weights["norm.bias"]
    own = torch.stack([features[shard.labels == c].mean(dim=0) for c in range(CLASSES)])
    plan = asked(down_of(weights), shard)
    torch.testing.assert_close(plan.carried["centroids"], own)

    received = torch.arange(12.0).view(CLASSES, 4) + 1
    plan = asked(down_of(weights, centroids=received), shard)
    assert torch.equal(plan.carried["centroids"], received)
    received[1] = 0  # nobody has known this class so far
    plan = asked(down_of(weights, centroids=received), shard)
    expected = torch.stack([received[0], own[1], received[2]])
    torch.testing.assert_close(plan.carried["centroids"], expected)


def test_a_class_that_the_client_does_not_hold_has_no_number_of_its_own() -> None:
    shard = replace(shard_of(4), labels=torch.tensor([0, 2, 0, 2]))
    weights = weights_of(Normalised, 3)
    _, up = train(bench_of(Normalised, SGD), down_of(weights), shard)
    assert up.centroids[1].tolist() == [0.0] * 4
    received = torch.randn(CLASSES, 4, generator=torch.Generator().manual_seed(0))
    _, up = train(bench_of(Normalised, SGD), down_of(weights, centroids=received), shard)
    assert same_bits(up.centroids[1], received[1])
    assert not torch.equal(up.centroids[0], received[0])


def test_labels_of_the_global_model_are_given_from_their_round_on() -> None:
    weights, shard = weights_of(Normalised, 3), shard_of(12)
    before, after = (asked(down_of(weights, pseudo_labels=late), shard) for late in (False, True))
    assert torch.equal(before.columns["pseudo"], shard.labels)
    bench = bench_of(Normalised, SGD)
    raw = bench.view("raw", shard.images, RNG("any"))
    expected = bench.forward(weights, raw).logits.argmax(dim=1)
    assert not torch.equal(expected, shard.labels)
    assert torch.equal(after.columns["pseudo"], expected)
    assert torch.equal(after.columns["label"], shard.labels)


def test_the_program_looks_at_augmented_images() -> None:
    for preset, view in (("paper", "raw"), ("public", "weak")):
        bench = RecordingBench(bench_of(Normalised, SGD))
        train(bench, down_of(weights_of(Normalised, 3)), shard_of(12), preset=preset)
        assert bench.views == [view]
        assert bench.plans[0].views == {"x": "weak"}


def test_the_rounds_share_a_captured_step() -> None:
    cfg, shard = config(ramp_rounds=4, pseudo_label_round=2), shard_of(12)
    server = Server(weights_of(Normalised, 3), FEDERATION, None)
    first, later = (asked(rofl.send(cfg, server, t, 0), shard) for t in (0, 5))
    assert first.constants == {"kept_share": 1.0, "lambda_cen": 0.5, "lambda_e": 0.8}
    assert later.constants == {"kept_share": 0.5, "lambda_cen": 1.0, "lambda_e": 0.8}
    assert program_key(first) == program_key(later)
    public = asked(rofl.send(cfg, server, 0, 0), shard, preset="public")
    assert program_key(public) != program_key(first)


class Hidden(nn.Module):
    """Features = a linear map of the pixels, logits = one of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.outer = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        features = self.inner(x.flatten(1))
        return Outputs(features, self.outer(features))


@pytest.mark.parametrize("gradient", [True, False])
def test_three_steps_by_hand(gradient: bool) -> None:
    """One batch in three epochs, so that each step's centroids are what the last one left."""
    sgd, n = Sgd(epochs=3, batch_size=6, lr=0.2), 6
    weights, shard = weights_of(Hidden, 7), shard_of(n)
    first = torch.tensor([[1.0, 0.2], [-0.4, 1.0], [0.1, -1.0]])
    down = down_of(weights, centroids=first, pseudo_labels=True)
    bench = bench_of(Hidden, sgd)
    client, up = train(bench, down, shard, centroid_gradient=gradient)

    x = (shard.images.flatten(1).float() / 255 - 0.25) / 0.5
    model = Hidden()
    model.load_state_dict(dict(weights))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with torch.no_grad():
        seen = model(x)
    pseudo, y, f = seen.logits.argmax(dim=1), shard.labels, first
    cosines = F.cosine_similarity(seen.features[:, None], f[None], dim=2)
    assert client.p_clean is not None
    assert client.p_clean.tolist() == (cosines.argmax(dim=1) == y).float().tolist()
    masks = []
    for _ in range(3):
        features, logits = model(x)
        chosen = F.cross_entropy(logits, y, reduction="none").argsort()[:3].tolist()  # ⌊6/2⌋
        loss, sums = torch.zeros(()), torch.zeros(CLASSES, 3)
        for i in chosen:
            sure = int(F.cosine_similarity(features[i][None], f).argmax()) == int(y[i])
            masks.append(sure)
            target = y[i] if sure else pseudo[i]
            p = logits[i].softmax(dim=0)
            apart = ((features[i] if gradient else features[i].detach()) - f[y[i]]).square().sum()
            loss = loss - p[target].log() / 3 - 0.8 * (p * p.log()).sum() / 3
            loss = loss + 0.4 * apart * sure / 3
            sums[y[i]] += torch.cat([features[i].detach(), torch.ones(1)])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rows = []
        for c in range(CLASSES):
            if sums[c, 2] == 0:
                rows.append(f[c])
                continue
            mean = sums[c, :2] / sums[c, 2]
            s2 = float(F.cosine_similarity(f[c], mean, dim=0)) ** 2
            rows.append((1 - s2) * f[c] + s2 * mean)
        f = torch.stack(rows)
    assert set(masks) == {True, False}, "else this test shows less than it could"
    assert not torch.equal(pseudo, y)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(up.weights[name], tensor, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(up.centroids, f, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", ["keep", "pad", "drop"])
@pytest.mark.parametrize("preset", ["paper", "public"])
def test_without_forgetting_and_its_two_terms_it_is_fedavg(tail: Any, preset: Any) -> None:
    weights, shard = weights_of(Normalised, 5), shard_of(10)
    bench = bench_of(Normalised, replace(SGD, tail=tail))
    down = down_of(weights, forget_rate=0.0, lambda_cen=0.0)
    _, up = train(bench, down, shard, lambda_e=0.0, preset=preset)
    theirs = fedavg.train(
        fedavg.Config(), fedavg.Client(), fedavg.Down(weights), shard, bench, RNG
    )[1]
    assert_same_weights(up.weights, theirs.weights)
    assert up.samples == 10


def test_such_a_run_ends_with_fedavgs_model(tmp_path: Path) -> None:
    run(tiny_recipe("fedavg"), tmp_path / "fedavg")
    table = {"name": "rofl", "forget_rate": 0.0, "lambda_cen": 0.0, "lambda_e": 0.0}
    run(tiny_recipe(table), tmp_path / "rofl")
    assert final_bytes(tmp_path / "rofl") == final_bytes(tmp_path / "fedavg")


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_too_small_for_a_step_returns_what_it_got(n: int) -> None:
    weights, received = weights_of(Normalised, 5), torch.ones(CLASSES, 4)
    bench = bench_of(Normalised, replace(SGD, tail="drop"))
    _, up = train(bench, down_of(weights, centroids=received), shard_of(n))
    assert_same_weights(up.weights, weights)
    assert torch.equal(up.centroids, received)
    assert up.samples == n


def test_a_client_without_samples_returns_what_it_got() -> None:
    weights, received = weights_of(Normalised, 5), torch.ones(CLASSES, 4)
    for centroids in (None, received):
        down = down_of(weights, centroids=centroids)
        bench = bench_of(Normalised, SGD)
        client, up, metrics = rofl.train(config(), Client(None), down, shard_of(0), bench, RNG)
        assert_same_weights(up.weights, weights)
        assert torch.equal(up.centroids, received * (centroids is not None))
        assert (up.samples, metrics["confident_share"]) == (0, 0.0)
        sieved = rofl.own_sieve(client)
        assert sieved is not None
        assert sieved.noise_rate == 0.0


def test_a_model_without_features_is_refused() -> None:
    with pytest.raises(FedsieveError, match=r"needs a model that returns features: let yours"):
        train(bench_of(Linear, SGD), down_of(weights_of(Linear, 1)), shard_of(4))


def test_what_a_client_believes() -> None:
    assert rofl.own_sieve(Client(None)) is None
    found = rofl.own_sieve(Client(torch.tensor([1.0, 0.0, 1.0, 1.0])))
    assert found is not None
    assert found.noise_rate == 0.25
    assert found.p_clean is not None
    assert found.p_clean.tolist() == [1.0, 0.0, 1.0, 1.0]


# ---------------------------------------------------------------------------------- the server


def up_of(value: float, samples: int, centroids: list[list[float]]) -> Up:
    return Up({"w": torch.tensor([value])}, samples, torch.tensor(centroids))


def test_a_round_at_the_server() -> None:
    """Models by samples, centroids by similarity; at first none is known, then (2, 0), (1, 3)."""
    server = rofl.init_server(config(), {"w": torch.zeros(1)}, TWO_CLASSES)
    assert server.centroids is None
    zero = [0.0, 0.0]
    ups = {0: up_of(1.0, 10, [[1.0, 0.0], [1.0, 3.0]]), 1: up_of(5.0, 30, [[3.0, 0.0], zero])}
    server, metrics = rofl.merge(config(), server, 0, ups)
    assert server.weights["w"].item() == 4  # (10·1 + 30·5)/40
    assert server.centroids is not None
    assert server.centroids.tolist() == [[2.0, 0.0], [1.0, 3.0]]
    assert (server.federation, metrics) == (TWO_CLASSES, {})
    assert rofl.send(config(), server, 1, 0).centroids is server.centroids

    ups = {
        0: up_of(1.0, 10, [[3.0, 4.0], [1.0, 3.0]]),
        1: up_of(5.0, 30, [[4.0, 0.0], [3.0, 9.0]]),
        2: up_of(9.0, 0, [[-1.0, 9.0], [9.0, 9.0]]),  # of no samples
    }
    server, _ = rofl.merge(config(), server, 1, ups)
    assert server.weights["w"].item() == 4
    assert server.centroids is not None
    expected = torch.tensor([[(0.6 * 3 + 4) / 1.6, 0.6 * 4 / 1.6], [2.0, 6.0]])
    torch.testing.assert_close(server.centroids, expected)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (torch.ones(3, 2), r"of shape \(3, 2\) in torch.float32"),
        (torch.ones(2, 2, 1), r"of shape \(2, 2, 1\) in torch.float32"),
        (torch.ones(2, 2, dtype=torch.float64), r"of shape \(2, 2\) in torch.float64"),
        (torch.ones(2, 2, dtype=torch.int64), r"of shape \(2, 2\) in torch.int64"),
    ],
)
def test_centroids_of_another_kind_are_refused(sent: Tensor, sentence: str, known: bool) -> None:
    """One in double precision would make all of them so, which no client's features would meet."""
    server = Server({"w": torch.zeros(1)}, TWO_CLASSES, torch.ones(2, 2) if known else None)
    ups = {0: Up({"w": torch.zeros(1)}, 10, sent)}
    expected = r"\(2, 2\)" if known else r"\(2, features\)"
    with pytest.raises(FedsieveError, match=f"{sentence}, where others are {expected} in torch"):
        rofl.merge(config(), server, 0, ups)


def test_centroids_of_another_width_than_those_before_are_refused() -> None:
    server = Server({"w": torch.zeros(1)}, TWO_CLASSES, torch.ones(2, 2))
    with pytest.raises(FedsieveError, match=r"of shape \(2, 3\) in torch.float32, where others"):
        rofl.merge(config(), server, 1, {0: up_of(1.0, 10, [[1.0, 0.0, 0.0], [1.0, 3.0, 0.0]])})


def test_in_the_first_round_most_clients_tell_how_wide_centroids_are() -> None:
    """Each of them alone could be right, so none can be refused."""
    server = rofl.init_server(config(), {"w": torch.zeros(1)}, TWO_CLASSES)
    ups = {
        0: up_of(1.0, 10, [[9.0, 9.0, 9.0], [9.0, 9.0, 9.0]]),
        1: up_of(1.0, 10, [[1.0, 0.0], [1.0, 3.0]]),
        2: up_of(1.0, 10, [[3.0, 0.0], [1.0, 1.0]]),
    }
    found = rofl.merge(config(), server, 0, ups)[0].centroids
    assert found is not None
    assert found.tolist() == [[2.0, 0.0], [1.0, 2.0]]
    del ups[2]
    after, _ = rofl.merge(config(), server, 0, ups)
    assert after.centroids is None
    assert after.weights["w"].item() == 1


def test_what_leaves_a_site_is_the_model_a_count_and_the_centroids() -> None:
    assert set(Up.__dataclass_fields__) == {"weights", "samples", "centroids"}
    assert METHODS["rofl"].up is Up
    assert METHODS["rofl"].own_sieve is rofl.own_sieve
