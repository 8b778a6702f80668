"""FedDiv: its equations against NumPy, its phases and switches, and what stays at a site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm
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
from fedsieve.cli.grid import expand
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Sgd, schedule
from fedsieve.methods import arfl, contract, fedavg, fedcorr, feddiv, fedjointopt, rofl
from fedsieve.methods.contract import Federation
from fedsieve.methods.feddiv import (
    FIRST_FILTER,
    CachedFilter,
    Client,
    Config,
    Down,
    Filter,
    Server,
    Up,
)
from fedsieve.recipe import Recipe, cells, read_recipe, recipe_from_table, shipped_recipes
from fedsieve.serial import payload_bytes, values_of
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from fedsieve.types import SERVER, Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, tiny_recipe

Floats = NDArray[np.float64]
SGD = Sgd(epochs=3, batch_size=4, lr=0.05, momentum=0.5)


def softmax(z: Floats) -> Floats:
    e: Floats = np.exp(z - z.max(axis=1, keepdims=True))
    p: Floats = e / e.sum(axis=1, keepdims=True)
    return p


def f32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def draw(seed: int, n: int = 6, classes: int = 4) -> tuple[Floats, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, classes)) * 2, rng.integers(classes, size=n)


# ---------------------------------------------------------------------------------- the settings


def test_a_preset_fills_what_is_left_out_and_nothing_else() -> None:
    assert Config().switches == feddiv.PRESETS["paper"]
    assert Config(preset="authors").switches == feddiv.PRESETS["authors"]
    mixed = Config(preset="authors", xi=0.0, persist_relabels=False)
    assert mixed.switches == replace(feddiv.PRESETS["authors"], xi=0.0, persist_relabels=False)


def test_the_papers_numbers() -> None:
    cfg = Config()
    assert (cfg.zeta, cfg.xi, cfg.bias_momentum) == (0.75, 0.5, 0.2)
    assert (cfg.clean_threshold, cfg.noisy_above, cfg.eta, cfg.mixup_alpha) == (0.5, 0.1, 1, 1)
    assert cfg.warmup_passes == 5


@pytest.mark.parametrize(
    "setting",
    [
        {"preset": "mine"},
        {"filter": "central"},
        {"filter_loss": "mse"},
        {"consistency": "never"},
        {"warmup_passes": -1},
        {"em_iterations": -1},
        {"clean_threshold": 1.0},
        {"noisy_above": 1.1},
        {"zeta": -0.1},
        {"bias_momentum": 2.0},
        {"eta": -1.0},
        {"mixup_alpha": math.inf},
        {"xi": math.nan},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_bad_setting_is_named(setting: Mapping[str, Any]) -> None:
    with pytest.raises(FedsieveError, match=f"method.{next(iter(setting))} must be"):
        Config(**setting)


# ------------------------------------------------------------------------- losses for the filter


def test_losses_are_scaled_to_the_clients_own_range() -> None:
    values = np.array([2.0, 4.0, 3.5, np.nan, np.inf], dtype=np.float32)
    assert feddiv.scaled(values).tolist() == [0.0, 1.0, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("values", [[], [3.0], [0.5, 0.5], [0.005, 0.0050005], [np.nan]])
def test_scaling_has_its_limits(values: list[float]) -> None:
    found = feddiv.scaled(np.array(values, dtype=np.float32))
    assert found.tolist() == [1.0 if math.isnan(v) else 0.0 for v in values]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=20))
@settings(max_examples=25, deadline=None)
def test_scaling_keeps_the_order_within_0_and_1(values: list[float]) -> None:
    losses = np.array(values, dtype=np.float32)
    found = feddiv.scaled(losses)
    assert found.min() == 0
    assert found.max() == float(losses.max() - losses.min() > 1e-6)
    assert (np.diff(found[np.argsort(losses)]) >= 0).all()


# --------------------------------------------------------------------------------- the filter


def test_the_posterior_is_bayes_rule_on_scaled_losses() -> None:
    z, y = draw(2, n=9)
    p = softmax(z)[np.arange(9), y]
    losses = -np.log(p)
    v = (losses - losses.min()) / (losses.max() - losses.min())
    joint = Filter((0.2, 0.7), (0.02, 0.1), (0.6, 0.4))
    clean, noisy = (
        s * norm.pdf(v, m, np.sqrt(c))
        for m, c, s in zip(joint.means, joint.variances, joint.shares, strict=True)
    )
    found = feddiv.clean_probability(Config(), f32(z), torch.tensor(y), joint)
    np.testing.assert_allclose(found, clean / (clean + noisy), rtol=1e-3, atol=1e-6)


def em_by_numpy(v: Floats, start: Filter, iterations: int) -> tuple[Floats, Floats, Floats]:
    """Algorithm 2 as printed, with 1e-6 added to the variances."""
    mu, var, pi = (np.array(x) for x in (start.means, start.variances, start.shares))
    for _ in range(iterations):
        joint = pi[:, None] * norm.pdf(v, mu[:, None], np.sqrt(var)[:, None])
        member = joint / joint.sum(axis=0)
        counts = member.sum(axis=1)
        mu = member @ v / counts
        var = (member * (v - mu[:, None]) ** 2).sum(axis=1) / counts + 1e-6
        pi = counts / len(v)
    return mu, var, pi


@pytest.mark.parametrize("iterations", [1, 3])
def test_a_local_filter_is_em_from_the_global_one(iterations: int) -> None:
    z, y = draw(3, n=40)
    losses = -np.log(softmax(z)[np.arange(40), y])
    v = (losses - losses.min()) / (losses.max() - losses.min())
    mu, var, pi = em_by_numpy(v, FIRST_FILTER, iterations)
    cfg = Config(em_iterations=iterations)
    found = feddiv.local_filter(cfg, f32(z), torch.tensor(y), FIRST_FILTER)
    np.testing.assert_allclose(found.means, mu, rtol=1e-4)
    np.testing.assert_allclose(found.variances, var, rtol=1e-3)
    np.testing.assert_allclose(found.shares, pi, rtol=1e-4)


def test_zero_iterations_go_on_until_the_likelihood_stands_still() -> None:
    """Two far groups, 0, 0.02, … 0.08 and 0.92, … 1: in the end members are certain."""
    losses = np.concatenate([np.arange(5) / 50, 1 - np.arange(5) / 50])
    logits = np.stack([np.log(np.exp(losses + 1) - 1), np.zeros(10)], axis=1)  # CE of class 1
    labels, start = torch.ones(10, dtype=torch.int64), Filter((0.4, 0.6), (0.2, 0.2), (0.5, 0.5))
    once, converged = (
        feddiv.local_filter(Config(em_iterations=iterations), f32(logits), labels, start)
        for iterations in (1, 0)
    )
    assert once.means[1] - once.means[0] < 0.3, "one step leaves members undecided"
    assert converged.means == pytest.approx((0.04, 0.96), abs=1e-3)
    assert converged.variances == pytest.approx([np.var(losses[:5]) + 1e-6] * 2, rel=0.01)
    assert converged.shares == pytest.approx((0.5, 0.5), abs=1e-3)


def test_a_model_that_diverged_leaves_the_filter_as_it_was() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    kept = feddiv.local_filter(Config(), logits, torch.tensor([0, 1]), FIRST_FILTER)
    assert kept == FIRST_FILTER


HALF = Filter((0.0, 0.4), (0.1, 0.2), (0.5, 0.5))
MOST = Filter((0.2, 0.8), (0.3, 0.6), (0.9, 0.1))


def test_filters_are_averaged_by_samples() -> None:
    """γ = ¼, ¾: means ¼·0 + ¾·0.2 = 0.15 and ¼·0.4 + ¾·0.8 = 0.7, and so on."""
    cache = {4: CachedFilter(HALF, 100), 1: CachedFilter(MOST, 300)}
    found = feddiv.aggregated(cache, "share")
    assert found.means == pytest.approx((0.15, 0.7))
    assert found.variances == pytest.approx((0.25, 0.5))
    assert found.shares == pytest.approx((0.8, 0.2))
    squared = feddiv.aggregated(cache, "squared_share")  # ¹⁄₁₆ and ⁹⁄₁₆
    assert squared.means == found.means
    assert squared.shares == found.shares
    assert squared.variances == pytest.approx((0.1 / 16 + 0.3 * 9 / 16, 0.2 / 16 + 0.6 * 9 / 16))


def test_squared_shares_make_the_variance_of_equal_clients_too_small() -> None:
    cache = {k: CachedFilter(HALF, 50) for k in range(20)}
    assert feddiv.aggregated(cache, "share").variances == pytest.approx(HALF.variances)
    small = feddiv.aggregated(cache, "squared_share").variances
    assert small == pytest.approx((0.1 / 20, 0.2 / 20))


def server_with(cfg: Config, sizes: tuple[int, ...] = (10, 30, 60)) -> Server:
    weights = weights_of(Linear, 1)
    return feddiv.init_server(cfg, weights, Federation(sizes, 2, 9, CLASSES))


def up_of(server: Server, samples: int, local: Filter | None) -> Up:
    return Up(server.weights, samples, local)


@pytest.mark.parametrize(
    "strange",
    [
        replace(HALF, means=(0.1, 1e30)),
        replace(HALF, means=(-1.0, 0.4)),
        replace(HALF, variances=(0.1, -1e9)),
        replace(HALF, variances=(0.0, 0.2)),
        replace(HALF, shares=(1.0, 0.0)),
        replace(HALF, shares=(-3.0, 4.0)),
    ],
    ids=repr,
)
def test_a_filter_that_no_client_can_fit_is_refused(strange: Filter) -> None:
    """All of its numbers are finite; a negative variance would make the average one for nobody."""
    cfg = Config(warmup_passes=0)
    server = feddiv.init_server(cfg, weights_of(Linear, 1), Federation((10, 30), 2, 9, CLASSES))
    ups = {0: up_of(server, 10, HALF), 1: up_of(server, 30, strange)}
    with pytest.raises(FedsieveError, match=r"^Filter\(.*is no mixture over losses in \[0, 1\]"):
        feddiv.merge(cfg, server, 0, ups)


def test_the_cache_outlives_a_round_unless_degraded() -> None:
    """Client 0 (10 samples) in one round, client 1 (30) in the next."""
    expected = {"federated": (0.15, 0.7), "degraded": MOST.means}
    for kind in ("federated", "degraded"):
        cfg = Config(warmup_passes=0, filter=kind)
        server = server_with(cfg)
        server, _ = feddiv.merge(cfg, server, 0, {0: up_of(server, 10, HALF)})
        assert server.filter.means == pytest.approx(HALF.means)
        server, metrics = feddiv.merge(cfg, server, 1, {1: up_of(server, 30, MOST)})
        assert server.filter.means == pytest.approx(expected[kind])
        assert metrics["mixture_mean_noisy"] == server.filter.means[1]
        assert set(server.cache) == {0, 1}
        known = feddiv.sieve(server)
        assert {k: known[k].noise_rate for k in known} == {0: 0.5, 1: 0.1}
        assert all(sieved.p_clean is None for sieved in known.values())


def test_a_client_that_comes_back_replaces_its_filter() -> None:
    cfg = Config(warmup_passes=0)
    server = server_with(cfg)
    for local in (HALF, MOST):
        server, _ = feddiv.merge(cfg, server, 0, {2: up_of(server, 60, local)})
    assert server.filter.means == pytest.approx(MOST.means)


def test_without_samples_there_is_nothing_to_merge() -> None:
    cfg = Config(warmup_passes=0)
    server = server_with(cfg)
    after, metrics = feddiv.merge(cfg, server, 0, {0: up_of(server, 0, None)})
    assert after == server
    assert metrics == {}
    with pytest.raises(FedsieveError, match="No client took part in round 3"):
        feddiv.merge(cfg, server, 3, {})


# ----------------------------------------------------------------------- relabelling and sampler


def test_relabelling_needs_a_noisy_label_and_confidence_of_at_least_zeta() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    clean = torch.tensor([False, False, True])
    assert feddiv.relabelled(clean, logits, 0.5).tolist() == [True, True, False]
    assert feddiv.relabelled(clean, logits, 0.75).tolist() == [False, True, False]
    assert feddiv.relabelled(clean, logits, 1.0).tolist() == [False, False, False]


def test_debiasing_by_hand() -> None:
    """z = (2, 1.5), p̂ = (0.8, 0.2), ξ = ½: F = (2 − ½ ln 0.8, 1.5 − ½ ln 0.2), the second wins."""
    z, bias = torch.tensor([[2.0, 1.5]]), torch.tensor([0.8, 0.2])
    found = feddiv.debiased(z, bias, 0.5)[0].tolist()
    assert found == pytest.approx([2 - 0.5 * math.log(0.8), 1.5 - 0.5 * math.log(0.2)])
    assert found[1] > found[0]
    assert feddiv.agreement(z, bias, 0.5, torch.tensor([1])).tolist() == [True]
    assert feddiv.agreement(z, bias, 0.0, torch.tensor([1])).tolist() == [False]


def test_a_class_that_is_never_predicted_has_a_finite_score() -> None:
    found = feddiv.debiased(torch.zeros(1, 2), torch.tensor([1.0, 0.0]), 0.5)
    assert found[0].tolist() == pytest.approx([0.0, -0.5 * math.log(1e-6)])


def test_the_bias_moves_towards_the_mean_prediction() -> None:
    z, _ = draw(4, classes=3)
    bias, counted = f32([0.5, 0.3, 0.2]), torch.tensor([True, False, True, False, False, True])
    mean = softmax(z)[[0, 2, 5]].mean(axis=0)
    expected = 0.2 * np.array([0.5, 0.3, 0.2]) + 0.8 * mean
    found = feddiv.updated_bias(bias, f32(z), counted, 0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert float(found.sum()) == pytest.approx(1)
    none = feddiv.updated_bias(bias, f32(z), torch.zeros(6, dtype=torch.bool), 0.2)
    assert torch.equal(none, bias)


# ------------------------------------------------------------------------------------- objective


def a_batch(weight: Tensor | None = None, **values: Tensor) -> Batch:
    return Batch(values, {}, weight)


def test_the_uniform_prior_is_the_divergence_from_uniform_to_the_mean_prediction() -> None:
    z, _ = draw(5)
    q = softmax(z).mean(axis=0)
    expected = (0.25 * np.log(0.25 / q)).sum()
    assert float(feddiv.uniform_prior(a_batch(), f32(z))) == pytest.approx(expected, rel=1e-5)
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0])
    q = softmax(z[:4]).mean(axis=0)
    expected = (0.25 * np.log(0.25 / q)).sum()
    found = float(feddiv.uniform_prior(a_batch(weight), f32(z)))
    assert found == pytest.approx(expected, rel=1e-5)


def test_certain_predictions_of_all_classes_alike_cost_nothing() -> None:
    assert float(feddiv.uniform_prior(a_batch(), 50 * torch.eye(4))) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 1.0, 0.0])])
def test_the_prior_of_a_class_that_nobody_predicts_has_a_gradient(weight: Tensor | None) -> None:
    """Probability e^−300 is 0 in float32; the loss is (0 + 300)/2 − ln 2."""
    z = torch.tensor([[300.0, 0.0]] * 3, requires_grad=True)
    loss = feddiv.uniform_prior(a_batch(weight), z)
    (gradient,) = torch.autograd.grad(loss, z)
    assert float(loss.detach()) == pytest.approx(150 - math.log(2))
    assert torch.isfinite(gradient).all()
    assert float(gradient[0, 1]) < 0


class Echo:
    """A net that remembers what it saw, and has the pixels of an image as its logits."""

    parameters: Mapping[str, Tensor] = {}

    def __call__(self, x: Tensor) -> Outputs:
        self.seen = x
        return Outputs(None, x.flatten(1))


@pytest.mark.parametrize("size", [5, 3])
def test_a_step_mixes_each_sample_with_one_of_its_own_batch(size: int) -> None:
    """The keys of a full batch, 5, serve a last one of 3: their order there is 2, 0, 1."""
    z, y = draw(6, n=size)
    keys = f32([0.5, 0.9, 0.1, 0.7, 0.3])
    order = {5: [2, 4, 0, 3, 1], 3: [2, 0, 1]}[size]
    net, labels = Echo(), torch.tensor(y)
    batch = a_batch(x=f32(z).reshape(size, 1, 2, 2), label=labels, lam=f32(0.3), keys=keys)
    mixed = 0.3 * z + 0.7 * z[order]
    expected = -((0.3 * np.eye(4)[y] + 0.7 * np.eye(4)[y[order]]) * np.log(softmax(mixed))).sum(
        axis=1
    )
    assert float(feddiv.local_loss(0.0, batch, net)) == pytest.approx(expected.mean(), rel=1e-5)
    np.testing.assert_allclose(net.seen.flatten(1), mixed, rtol=1e-5)
    prior = (0.25 * np.log(0.25 / softmax(mixed).mean(axis=0))).sum()
    with_prior = float(feddiv.local_loss(0.5, batch, net))
    assert with_prior == pytest.approx(expected.mean() + 0.5 * prior, rel=1e-5)


@pytest.mark.parametrize("unmixed_pass", [False, True])
def test_an_unmixed_pass_moves_the_statistics_and_nothing_else(unmixed_pass: bool) -> None:
    """One step of a batch of eight. BatchNorm's r ← 0.9·r + 0.1·s, with s of the mixed batch, and
    before that of the real one if asked. Mixing within a batch keeps its mean, but not its variance
    (unbiased, by NumPy). The step itself uses the batch's own s, so the parameters are the same."""
    images, labels, start = images_of(8), labels_of(8), weights_of(Normalised, 3)
    sgd, rng = Sgd(epochs=1, batch_size=8, lr=0.1), Streams(5, 2, 0)
    cfg = Config(eta=0.0, unmixed_pass=unmixed_pass)
    plan = replace(feddiv._plan(cfg, start, images, labels, sgd, rng), views={"x": "raw"})
    after = bench_of(Normalised, sgd).fit(plan).weights[0]

    (rows,) = schedule(8, sgd, rng("batches")).rows
    x = (images.flatten(1).numpy()[rows] / 255 - 0.25) / 0.5
    lam, order = float(plan.per_step["lam"][0]), plan.per_step["keys"][0].argsort().numpy()
    mixed = lam * x + (1 - lam) * x[order]
    mean, var = (start[f"norm.running_{name}"].double().numpy() for name in ("mean", "var"))
    for batch in (x, mixed) if unmixed_pass else (mixed,):
        mean, var = 0.9 * mean + 0.1 * x.mean(axis=0), 0.9 * var + 0.1 * batch.var(axis=0, ddof=1)
    np.testing.assert_allclose(after["norm.running_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(after["norm.running_var"], var, rtol=1e-5)

    other = replace(plan, loss=partial(feddiv.local_loss, 0.0))
    without = bench_of(Normalised, sgd).fit(other).weights[0]
    for name in ("norm.weight", "norm.bias", "layer.weight", "layer.bias"):
        assert torch.equal(after[name], without[name])


# ------------------------------------------------------------------------------------ a stage


def make_bench(sgd: Sgd = SGD) -> RecordingBench:
    return RecordingBench(bench_of(Linear, sgd))


def down_with(strength: float = 3.0, **changes: Any) -> Down:
    return replace(Down(seeing(strength), False, FIRST_FILTER), **changes)


def train(
    cfg: Config,
    shard: Shard,
    down: Down,
    client: Client | None = None,
    bench: RecordingBench | None = None,
) -> tuple[Client, Up, Mapping[str, float], RecordingBench]:
    bench = bench or make_bench()
    state = client or feddiv.init_client(cfg, shard)
    return *feddiv.train(cfg, state, down, shard, bench, Streams(5, 2, 0)), bench


def logits_of(weights: Weights, shard: Shard) -> Floats:
    """The linear model by NumPy, on normalised pixels."""
    x = (shard.images.flatten(1).numpy() / 255 - 0.25) / 0.5
    z: Floats = x @ weights["layer.weight"].double().numpy().T + weights["layer.bias"].numpy()
    return z


# ------------------------------------------------------------------------------------- warm-up


def test_a_pass_of_the_warm_up_is_a_walk_through_all_clients() -> None:
    cfg = Config(warmup_passes=2)
    server = server_with(cfg, (5,) * 7)
    chosen = [feddiv.select(cfg, server, t, Streams(1, t, SERVER)) for t in range(20)]
    assert all(len(clients) == 1 for clients in chosen[:14])
    walks = [[clients[0] for clients in chosen[first : first + 7]] for first in (0, 7)]
    assert [sorted(walk) for walk in walks] == [list(range(7))] * 2
    assert walks[0] != walks[1]
    assert all(len(clients) == 2 for clients in chosen[14:])
    downs = [feddiv.send(cfg, server, t, 0) for t in (13, 14)]
    assert [(down.warm_up, down.filter) for down in downs] == [(True, None), (False, FIRST_FILTER)]


def test_what_a_client_of_the_walk_trained_is_what_the_next_one_gets() -> None:
    cfg = Config(warmup_passes=1)
    server = server_with(cfg)
    mine = weights_of(Linear, 7)
    after, metrics = feddiv.merge(cfg, server, 0, {2: Up(mine, 60, None)})
    assert_same_weights(feddiv.send(cfg, after, 1, 1).weights, mine)
    assert after.filter == FIRST_FILTER
    assert metrics == {}
    assert feddiv.sieve(after) == {}


PLAIN = Config(eta=0.0, mixup_alpha=0.0)
"""Neither MixUp nor a prior."""


def fedavg_of(shard: Shard, down: Down) -> fedavg.Up:
    bench = make_bench()
    cfg, client = fedavg.Config(), fedavg.Client()
    there = fedavg.Down(down.weights)
    return fedavg.train(cfg, client, there, shard, bench, Streams(5, 2, 0))[1]


@pytest.mark.parametrize(
    ("down", "cfg"),
    [
        (down_with(warm_up=True, filter=None), PLAIN),
        (down_with(), replace(PLAIN, noisy_above=1.0)),
    ],
    ids=["warm-up", "every client is trusted"],
)
def test_it_is_fedavg_without_mixup_prior_and_filter(down: Down, cfg: Config) -> None:
    shard = bright_shard(wrong=9)
    _, up, _, bench = train(cfg, shard, down)
    assert len(bench.plans) == 1
    assert up.samples == 24
    expected = fedavg_of(shard, down).weights
    for name, tensor in expected.items():
        torch.testing.assert_close(up.weights[name], tensor)


def test_the_warm_up_looks_at_no_filter_and_sends_none() -> None:
    shard = bright_shard(wrong=9)
    client, up, metrics, bench = train(Config(), shard, down_with(warm_up=True, filter=None))
    assert up.filter is None
    assert bench.views == []
    assert client.participations == 0
    assert feddiv.own_sieve(client) is None
    assert feddiv.refined(client) is None
    assert set(metrics) == {"loss"}


def test_the_papers_warm_up_is_mixup_alone_and_the_programs_has_the_prior() -> None:
    shard = bright_shard(wrong=9)

    def walked(**settings: Any) -> Tensor:
        _, up, _, _ = train(Config(**settings), shard, down_with(warm_up=True, filter=None))
        return torch.cat([tensor.flatten() for tensor in up.weights.values()])

    mixup_alone, with_prior = walked(eta=0.0, preset="authors"), walked(eta=2.0, preset="authors")
    assert not torch.equal(mixup_alone, with_prior)
    assert torch.equal(walked(eta=2.0), mixup_alone)
    assert torch.equal(walked(eta=2.0, prior_in_walk=True), with_prior)
    *_, bench = train(Config(eta=2.0), shard, down_with())
    assert {plan.loss.args for plan in bench.plans} == {(2.0,)}  # type: ignore[attr-defined]


def test_every_step_has_its_own_lambda_and_pairing() -> None:
    shard = bright_shard(wrong=0)
    _, _, _, bench = train(Config(mixup_alpha=0.5), shard, down_with(warm_up=True))
    (plan,) = bench.plans
    lam, keys = plan.per_step["lam"], plan.per_step["keys"]
    assert lam.shape == (18,)
    assert keys.shape == (18, 4)
    assert len(set(lam.tolist())) == 18
    assert ((lam >= 0) & (lam <= 1)).all()
    _, _, _, unmixed = train(PLAIN, shard, down_with(warm_up=True))
    assert unmixed.plans[0].per_step["lam"].tolist() == [1.0] * 18


# ------------------------------------------------------------------------- a round with a filter


def p_clean_by_hand(loss: float) -> float:
    """Under the first filter, whose variances and shares are equal: 1/(1 + e^d) with
    d = ((v − 0.1)² − (v − 0.8)²)/(2·0.05)."""
    return 1 / (1 + math.exp(((loss - 0.1) ** 2 - (loss - 0.8) ** 2) / 0.1))


def test_filtering_and_relabelling_by_hand() -> None:
    """Right labels have the smallest loss, scaled to 0; wrong ones the largest, scaled to 1."""
    shard = bright_shard(wrong=6)
    client, up, metrics, _ = train(Config(eta=0.0), shard, down_with())
    belief = feddiv.own_sieve(client)
    assert belief is not None
    assert belief.p_clean is not None
    expected = [p_clean_by_hand(0.0)] * 18 + [p_clean_by_hand(1.0)] * 6
    assert belief.p_clean.tolist() == pytest.approx(expected, rel=1e-3)
    assert belief.noise_rate == 0.25
    assert metrics["noise_level"] == 0.25
    assert metrics["trusted"] == 0
    assert metrics["chosen_share"] == 1, "the uniform p̂ changes no prediction"
    assert metrics["relabelled_share"] == 0.25
    trained_on = feddiv.refined(client)
    assert trained_on is not None
    assert trained_on.tolist() == [i % 3 for i in range(24)], "the six got the model's class"
    assert up.filter is not None
    assert up.filter.means[0] < up.filter.means[1]
    assert up.filter.shares[1] == pytest.approx(0.25, abs=0.01)


def test_a_client_with_few_noisy_samples_trains_on_all_as_labelled() -> None:
    """2 of 24 are 8 % and not above 10 %; 3 are 12.5 %."""
    for wrong, trusted in ((2, True), (3, False)):
        shard = bright_shard(wrong)
        client, _, metrics, bench = train(Config(eta=0.0), shard, down_with())
        assert metrics["trusted"] == trusted
        assert [plan.sgd.epochs for plan in bench.plans] == ([3] if trusted else [1, 1, 1])
        if trusted:
            assert client.trained_on is not None
            assert torch.equal(client.trained_on, shard.labels)


@pytest.mark.parametrize(("wrong", "share"), [(6, 6 / 24), (5, 5 / 24), (1, 1 / 24)])
def test_exactly_the_threshold_is_still_clean(wrong: int, share: float) -> None:
    """Neither 5/24 nor 1/24 is a float32."""
    _, _, metrics, _ = train(Config(noisy_above=share), bright_shard(wrong), down_with())
    assert metrics["noise_level"] == share
    assert metrics["trusted"] == 1


def test_one_of_ten_is_not_above_a_tenth() -> None:
    """In float32 the mean is 0.10000000149."""
    judged = torch.arange(500) < 50
    assert float(judged.float().mean()) > 0.1
    assert feddiv.share_of(judged) == 0.1


def test_an_unsure_model_relabels_nothing() -> None:
    """Logits 2·0.05 apart: p = 1/(1 + 2e^−0.1) ≈ 0.36 < ζ, but losses still separate."""
    shard = bright_shard(wrong=6)
    client, _, metrics, _ = train(Config(eta=0.0), shard, down_with(0.05))
    assert client.trained_on is not None
    assert (client.trained_on[:18] >= 0).all()
    assert client.trained_on[18:].tolist() == [-1] * 6
    assert metrics["chosen_share"] == 0.75
    assert metrics["relabelled_share"] == 0


@pytest.mark.parametrize(
    ("changes", "rows", "fits"),
    [
        ({}, 24, 3),
        ({"pcs": False}, 24, 1),
        ({"relabel": False}, 18, 3),
        ({"relabel": False, "pcs": False}, 18, 1),
        ({"zeta": 1.0}, 18, 3),
        ({"relabel_above": 0.25}, 18, 3),
        ({"clean_only_rounds": 1}, 18, 1),
    ],
    ids=str,
)
def test_the_ablations_train_on_fewer_samples(
    changes: Mapping[str, Any], rows: int, fits: int
) -> None:
    _, _, _, bench = train(Config(eta=0.0, **changes), bright_shard(wrong=6), down_with())
    assert [len(plan.images) for plan in bench.plans] == [rows] * fits


def biased_client(shard: Shard) -> Client:
    """A local model that has nearly always said class 0."""
    bias = f32([0.998, 0.001, 0.001])
    return replace(feddiv.init_client(Config(), shard), bias=bias)


def test_the_sampler_asks_the_model_that_is_being_trained_in_each_epoch() -> None:
    """Each epoch's set, by NumPy: the global class must be the de-biased local one.

    A filter that is upside down trusts the twelve wrong labels alone; a model that learns those
    comes to disagree with the global one.
    """
    shard = bright_shard(wrong=12)
    down = down_with(1.2, filter=Filter((1.0, 0.0), (0.05, 0.05), (0.5, 0.5)))
    bias = f32([0.5, 0.3, 0.2])
    client = replace(feddiv.init_client(Config(), shard), bias=bias)
    cfg = Config(eta=0.0, relabel=False, mixup_alpha=0.0)
    bench = make_bench(replace(SGD, lr=0.3))
    after, _, metrics, _ = train(cfg, shard, down, client, bench)
    pseudo = logits_of(down.weights, shard).argmax(axis=1)
    starts = [down.weights, *(fitted.weights[0] for fitted in bench.fitted[:-1])]
    sets = []
    for plan, weights in zip(bench.plans, starts, strict=True):
        assert_same_weights(plan.start[0], weights)
        scores = logits_of(weights, shard) - 0.5 * np.log([0.5, 0.3, 0.2])
        chosen = (scores.argmax(axis=1) == pseudo) & (np.arange(24) >= 12)
        assert torch.equal(plan.images, shard.images[torch.from_numpy(chosen)])
        sets.append(chosen)
    assert sets[0].sum() == 12
    assert sets[-1].sum() < 12
    assert after.trained_on is not None
    assert torch.equal(after.trained_on >= 0, torch.from_numpy(sets[-1]))
    steps = [fitted.steps for fitted in bench.fitted]
    mean = np.average([fitted.loss for fitted in bench.fitted], weights=steps)
    assert metrics["loss"] == pytest.approx(mean)


def test_without_debiasing_the_first_epoch_keeps_every_sample() -> None:
    shard = bright_shard(wrong=6)
    for xi, everything in ((0.0, True), (0.5, False)):
        cfg = Config(eta=0.0, xi=xi, zeta=0.0)
        _, _, _, bench = train(cfg, shard, down_with(1.2), biased_client(shard))
        assert (len(bench.plans[0].images) == 24) is everything


def test_epochs_that_are_fitted_one_by_one_draw_afresh() -> None:
    shard = bright_shard(wrong=6)
    _, _, _, bench = train(Config(eta=0.0), shard, down_with())
    streams = Streams(5, 2, 0)
    assert [plan.rng for plan in bench.plans] == [streams.within(f"epoch {e}") for e in range(3)]
    orders = [np.concatenate(schedule(24, SGD, plan.rng("batches")).rows) for plan in bench.plans]
    assert len({tuple(order) for order in orders}) == 3
    keys = [plan.per_step["keys"] for plan in bench.plans]
    assert not torch.equal(keys[0], keys[1])


def test_an_empty_set_returns_the_global_model() -> None:
    """All labels wrong: nothing but relabelled samples would be left, and ζ = 1 admits none."""
    shard = bright_shard(wrong=24)
    down = down_with(0.05, filter=Filter((-9.0, 0.5), (0.01, 0.5), (0.5, 0.5)))
    client, up, metrics, _ = train(Config(zeta=1.0), shard, down)
    assert metrics["noise_level"] == 1
    assert metrics["loss"] == metrics["chosen_share"] == 0
    assert_same_weights(up.weights, down.weights)
    assert client.trained_on is not None
    assert client.trained_on.tolist() == [-1] * 24


def test_the_bias_after_a_round_is_equation_12_on_all_samples() -> None:
    shard = bright_shard(wrong=6)
    client, up, _, _ = train(Config(eta=0.0), shard, down_with())
    mean = softmax(logits_of(up.weights, shard)).mean(axis=0)
    np.testing.assert_allclose(client.bias, 0.2 / 3 + 0.8 * mean, rtol=1e-4)


def test_what_leaves_a_site_is_the_model_a_count_and_six_numbers() -> None:
    shard = bright_shard(wrong=6)
    _, up, _, _ = train(Config(), shard, down_with())
    tensors, numbers = values_of(up)
    assert set(tensors) == {"weights.layer.weight", "weights.layer.bias"}
    assert len(numbers) == 1 + 6
    assert payload_bytes(up) == 4 * 15 + 8 * 7
    assert payload_bytes(down_with()) == 4 * 15 + 8 * 7, "here the count is the flag"


@pytest.mark.parametrize("persist", [False, True])
def test_the_local_filter_is_fitted_to_the_trained_model(persist: bool) -> None:
    """Eq. 2 has θ_k, not the global θ, whose losses lead to another filter here; and the labels
    that the client goes on with, of which six are replaced where they persist."""
    cfg, shard = Config(eta=0.0, em_iterations=1, persist_relabels=persist), bright_shard(wrong=6)
    down = down_with()
    client, up, _, _ = train(cfg, shard, down, bench=make_bench(replace(SGD, lr=2.0)))
    assert (client.labels is not None) == persist
    labels = shard.labels if client.labels is None else client.labels

    def fitted(weights: Weights, labels: Tensor) -> list[float]:
        p = softmax(logits_of(weights, shard))
        losses = -np.log(p[np.arange(24), labels.numpy()])
        v = (losses - losses.min()) / (losses.max() - losses.min())
        return [float(x) for numbers in em_by_numpy(v, FIRST_FILTER, 1) for x in numbers]

    assert up.filter is not None
    found = [*up.filter.means, *up.filter.variances, *up.filter.shares]
    assert found == pytest.approx(fitted(up.weights, labels), rel=1e-2)
    assert found != pytest.approx(fitted(down.weights, labels), rel=1e-1)
    assert persist == (found != pytest.approx(fitted(up.weights, shard.labels), rel=1e-1))


def test_a_local_filter_is_the_clients_own_mixture_and_never_travels() -> None:
    cfg = Config(filter="local", warmup_passes=0, eta=0.0)
    server = server_with(cfg)
    down = feddiv.send(cfg, server, 0, 0)
    assert down.filter is None
    shard = bright_shard(wrong=6)
    client, up, _, _ = train(cfg, shard, replace(down, weights=seeing(3.0)))
    assert up.filter is None
    assert client.p_clean is not None
    assert ((client.p_clean < 0.5) == torch.tensor([False] * 18 + [True] * 6)).all()
    after, metrics = feddiv.merge(cfg, server, 0, {0: up})
    assert after.filter == FIRST_FILTER
    assert feddiv.sieve(after) == {}
    assert metrics == {}


def test_a_diverged_model_still_ends_its_round() -> None:
    shard = bright_shard(wrong=6)
    down = down_with()
    broken = {name: tensor * math.nan for name, tensor in down.weights.items()}
    client, up, metrics, _ = train(Config(), shard, replace(down, weights=broken))
    assert up.filter == FIRST_FILTER
    assert metrics["noise_level"] == 1
    assert client.p_clean is not None
    assert torch.isfinite(client.p_clean).all()


# ------------------------------------------------------------------------- the authors' switches


def test_first_participations_are_on_clean_samples_alone() -> None:
    cfg, shard = Config(preset="authors", persist_relabels=False, eta=0.0), bright_shard(wrong=6)
    client = feddiv.init_client(cfg, shard)
    sizes = []
    for _ in range(7):
        client, _, _, bench = train(cfg, shard, down_with(), client)
        sizes.append([len(plan.images) for plan in bench.plans])
    assert sizes == [[18]] * 5 + [[24]] * 2
    assert client.participations == 7


def test_the_sampler_uses_what_the_previous_participation_predicted() -> None:
    cfg, shard = Config(preset="authors", persist_relabels=False, eta=0.0), bright_shard(wrong=6)
    remembered = torch.arange(24) % CLASSES
    remembered[4:14] = 2
    bias = torch.tensor([1e-6, 0.4, 0.599999])  # 0.2·ln(0.4/1e-6) = 2.6 for class 0
    client = replace(
        feddiv.init_client(cfg, shard), participations=5, local_prediction=remembered, bias=bias
    )
    sgd = replace(SGD, lr=1e-6)
    after, up, _, bench = train(cfg, shard, down_with(1.0), client, bench=make_bench(sgd))
    agree = remembered == torch.arange(24) % CLASSES
    (plan,) = bench.plans
    assert plan.sgd.epochs == 3
    assert torch.equal(plan.images, shard.images[agree])
    logits = logits_of(up.weights, shard)
    scores = logits - 0.2 * np.log(bias.numpy())
    assert after.local_prediction is not None
    assert after.local_prediction.tolist() == scores.argmax(axis=1).tolist()
    by_the_new_bias = logits - 0.2 * np.log(after.bias.numpy())
    assert scores.argmax(axis=1).tolist() != by_the_new_bias.argmax(axis=1).tolist()


def test_pseudo_labels_that_persist_are_what_later_rounds_filter() -> None:
    """The six wrong labels are replaced; at the next visit all labels in use look clean, but the
    belief about the given ones is still that six are wrong."""
    cfg, shard = Config(preset="authors", eta=0.0), bright_shard(wrong=6)
    first, _, metrics, _ = train(cfg, shard, down_with())
    assert metrics["noise_level"] == 0.25
    assert first.labels is not None
    assert first.labels.tolist() == [i % 3 for i in range(24)]
    second, _, metrics, bench = train(cfg, shard, down_with(), first)
    assert metrics["noise_level"] == 0
    assert len(bench.plans[0].images) == 24
    belief = feddiv.own_sieve(second)
    assert belief is not None
    assert belief.p_clean is not None
    assert belief.p_clean[18:].tolist() == [0.0] * 6
    assert (belief.p_clean[:18] > 0.9).all()
    assert belief.noise_rate == 0.25


def test_only_labels_on_which_both_models_agree_are_replaced() -> None:
    cfg, shard = Config(preset="authors", eta=0.0), bright_shard(wrong=6)
    disagreeing = (torch.arange(24) % CLASSES).where(torch.arange(24) < 21, 0)
    client = replace(feddiv.init_client(cfg, shard), local_prediction=disagreeing)
    after, _, _, _ = train(cfg, shard, down_with(), client)
    assert after.labels is not None
    replaced = (after.labels != shard.labels).nonzero().squeeze(1).tolist()
    assert replaced == [18, 19, 20, 21], "sample 21 shows class 0, which was predicted"


def test_without_the_sampler_all_sure_labels_are_replaced() -> None:
    """PCS is what asks both models; its ablation asks the global one alone."""
    cfg, shard = Config(preset="authors", pcs=False, eta=0.0), bright_shard(wrong=6)
    disagreeing = torch.zeros(24, dtype=torch.int64)
    client = replace(feddiv.init_client(cfg, shard), local_prediction=disagreeing)
    after, _, _, _ = train(cfg, shard, down_with(), client)
    assert after.labels is not None
    assert after.labels.tolist() == [i % 3 for i in range(24)]


def test_without_relabelling_nothing_persists() -> None:
    """Else the six noisy samples would come back at the next visit as clean ones, relabelled."""
    cfg, shard = Config(preset="authors", relabel=False, eta=0.0), bright_shard(wrong=6)
    client = feddiv.init_client(cfg, shard)
    for _ in range(7):
        client, _, metrics, bench = train(cfg, shard, down_with(), client)
        assert client.labels is not None
        assert torch.equal(client.labels, shard.labels)
        assert metrics["noise_level"] == 0.25
        assert [len(plan.images) for plan in bench.plans] == [18]


def test_persistence_can_follow_the_global_models_own_agreement() -> None:
    shard = bright_shard(wrong=6)
    cfg = Config(persist_relabels=True, eta=0.0)
    client, _, _, _ = train(cfg, shard, down_with())
    assert client.labels is not None
    assert client.labels.tolist() == [i % 3 for i in range(24)]


def test_a_small_set_may_be_skipped() -> None:
    shard = bright_shard(wrong=20)  # four right labels: exactly a batch
    for rule, fits in (("skip", 0), ("train", 1)):
        cfg = Config(preset="authors", small_sets=rule)
        down = down_with()
        client, up, _, bench = train(cfg, shard, down)
        assert len(bench.plans) == fits
        assert client.participations == 1
        if rule == "skip":
            assert_same_weights(up.weights, down.weights)


def test_the_bias_may_count_confident_samples_only() -> None:
    """Nobody is 85 % sure: the bias stays. All are: it moves as in equation 12."""
    shard = bright_shard(wrong=6)
    cfg = Config(bias_from="confident", eta=0.0)
    sgd = replace(SGD, lr=1e-6)
    unsure, _, _, _ = train(cfg, shard, down_with(0.05), bench=make_bench(sgd))
    assert torch.equal(unsure.bias, torch.full((3,), 1 / 3))
    sure, up, _, _ = train(cfg, shard, down_with(9.0), biased_client(shard), make_bench(sgd))
    mean = softmax(logits_of(up.weights, shard)).mean(axis=0)
    old = biased_client(shard).bias.double().numpy()
    np.testing.assert_allclose(sure.bias, 0.2 * old + 0.8 * mean, rtol=1e-4)


def test_evaluation_may_see_augmented_images() -> None:
    for preset, view in (("paper", "raw"), ("authors", "weak")):
        _, _, _, bench = train(Config(preset=preset), bright_shard(wrong=6), down_with())
        assert bench.views == [view]


def test_other_samples_than_remembered_are_refused() -> None:
    cfg = Config(preset="authors")
    client, _, _, _ = train(cfg, bright_shard(wrong=6), down_with())
    with pytest.raises(FedsieveError, match="remembers other samples than the 12 it holds"):
        train(cfg, bright_shard(wrong=6, n=12), down_with(), client)


# --------------------------------------------------------------------------- audit and whole runs


def test_suspicion_is_the_mean_of_filter_and_model() -> None:
    shard, cfg, down = bright_shard(wrong=6), Config(), down_with(1.0)
    client = feddiv.init_client(cfg, shard)
    found = feddiv.suspect(cfg, client, down, shard, make_bench())
    p = softmax(logits_of(down.weights, shard))[np.arange(24), shard.labels.numpy()]
    clean = np.array([p_clean_by_hand(0.0)] * 18 + [p_clean_by_hand(1.0)] * 6)
    np.testing.assert_allclose(found.p_wrong, 1 - (clean + p) / 2, rtol=1e-3)
    assert found.suggested.tolist() == [i % 3 for i in range(24)]
    alone = replace(down, warm_up=True, filter=None)
    found = feddiv.suspect(cfg, client, alone, shard, make_bench())
    np.testing.assert_allclose(found.p_wrong, 1 - p, rtol=1e-4)


def test_a_whole_run_walks_first_and_filters_then(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        {"name": "feddiv", "warmup_passes": 1, "eta": 0.0},
        rounds=8,
        engine={"device": "cpu", "workers": 1, "client_lines": True},
    )
    run(recipe, tmp_path)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert sorted(line["clients"][0] for line in lines[:6]) == list(range(6))
    assert [len(line["clients"]) for line in lines] == [1] * 6 + [3, 3]
    assert all("sieve_accuracy" not in line["diagnostics"] for line in lines[:6])
    for line in lines[6:]:
        assert 0 <= line["diagnostics"]["sieve_accuracy"] <= 1
        assert line["server"]["mixture_mean_clean"] < line["server"]["mixture_mean_noisy"]
    by_client = [line for line in read_lines(tmp_path / "clients.jsonl") if line["round"] >= 6]
    assert len(by_client) == 6
    for line in by_client:
        assert line["noise_rate"] == pytest.approx(line["noise_level"])
        assert 0 <= line["sieve_accuracy"] <= 1


# -------------------------------------------------------------------------------------- recipes

RESULTS = Path(__file__).resolve().parents[3] / "shared" / "specs" / "results.md"
CELLS = {
    "table1": 8,
    "table2": 3,
    "table3": 4,
    "table4": 1,
    "table5": 1,
    "table5-baselines": 3,
    "table6-cifar10-iid": 6,
    "table6-cifar10-non-iid": 7,
    "table6-cifar100-iid": 6,
    "table6-cifar100-non-iid": 7,
    "figure3": 3,
    "figure4": 5,
    "figure5": 3,
    "figure8": 10,
    "fedgr-table1-iid": 7,
    "fedgr-table1-dirichlet": 7,
    "fedgr-table2-iid": 7,
    "fedgr-table2-dirichlet": 7,
    "fedgr-table3-iid": 1,
    "fedgr-table3-dirichlet": 1,
    "digits-dirichlet": 5,
}
BASELINES = {"table1": 16, "table2": 6, "table3": 8, "table4": 2}


def recipes_of(name: str) -> dict[str, Recipe]:
    table = read_recipe(f"feddiv/{name}")
    return {cell.name: recipe_from_table(cell.table) for cell in cells(table)}


def feddiv_runs(name: str) -> dict[str, tuple[Recipe, Config]]:
    found = recipes_of(name).items()
    return {cell: (r, r.method) for cell, r in found if isinstance(r.method, Config)}


def test_there_is_a_recipe_for_each_table() -> None:
    shipped = {n.removeprefix("feddiv/") for n in shipped_recipes() if n.startswith("feddiv/")}
    kinds = ("baselines", "fedcorr", "rofl", "arfl", "jointopt")
    others = {f"{table}-{kind}" for table in BASELINES for kind in kinds}
    assert shipped == set(CELLS) | others
    assert {name: len(recipes_of(name)) for name in CELLS} == CELLS
    for table, count in BASELINES.items():
        runs = recipes_of(f"{table}-baselines")
        assert len(runs) == count
        assert {r.method.name for r in runs.values()} == {"fedavg", "fedprox"}
        scenes = {cell: r.scene for cell, r in recipes_of(table).items()}
        for cell, recipe in runs.items():
            assert recipe.scene == scenes[cell.partition("-")[2]]
            assert recipe.rounds == 1000


@pytest.mark.parametrize("table", list(BASELINES))
def test_fedcorr_has_the_same_scenes_solver_and_rounds(table: str) -> None:
    """T_1 walks as FedDiv's T_wu, and T_2 and T_3 of its later rounds."""
    fine_tuning, usual = (500, 450) if table in ("table1", "table2") else (450, 450)
    found, ours = recipes_of(f"{table}-fedcorr"), feddiv_runs(table)
    assert list(found) == list(ours)
    for cell, recipe in found.items():
        theirs, cfg = ours[cell]
        method = fedcorr.Config(
            preset="authors", iterations=cfg.warmup_passes, fine_tuning_rounds=fine_tuning
        )
        assert recipe == replace(theirs, name=f"feddiv-{table}-fedcorr", method=method)
        assert recipe.rounds == cfg.warmup_passes * recipe.scene.clients + fine_tuning + usual


def runs_of_fedavg(table: str) -> dict[str, Recipe]:
    return {
        cell.removeprefix("FedAvg-").removeprefix("FedAvg"): recipe
        for cell, recipe in recipes_of(f"{table}-baselines").items()
        if recipe.method == fedavg.Config()
    }


@pytest.mark.parametrize("table", list(BASELINES))
def test_rofl_is_beside_fedavg_and_forgets_as_much_as_is_wrong(table: str) -> None:
    """A share ρ of the clients has levels in [τ, 1], and a label drawn anew is right with 1/C."""
    found, theirs = recipes_of(f"{table}-rofl"), runs_of_fedavg(table)
    assert list(found) == list(theirs)
    for cell, recipe in found.items():
        noise = recipe.scene.noise
        assert noise.low is not None
        assert isinstance(recipe.method, rofl.Config)
        assert recipe.method == rofl.Config(forget_rate=recipe.method.forget_rate)
        classes = 100 if recipe.data.source == "cifar100" else 10
        wrong = noise.share * (noise.low + 1) / 2 * (classes - 1) / classes
        assert recipe.method.forget_rate == pytest.approx(wrong, abs=1e-9)
        same = replace(recipe, name=f"feddiv-{table}-baselines", method=theirs[cell].method)
        assert same == theirs[cell]


@pytest.mark.parametrize("table", list(BASELINES))
@pytest.mark.parametrize(
    ("kind", "method"), [("arfl", arfl.Config()), ("jointopt", fedjointopt.Config())]
)
def test_other_baselines_have_the_runs_of_fedavg(
    table: str, kind: str, method: contract.Config
) -> None:
    """Everything but the method, whose settings are those of its authors' program."""
    assert recipes_of(f"{table}-{kind}") == {
        cell: replace(recipe, name=f"feddiv-{table}-{kind}", method=method)
        for cell, recipe in runs_of_fedavg(table).items()
    }


TABLE_8: Mapping[str, tuple[int, str, int, float, int, int, int]] = {
    "cifar10": (100, "resnet18", 10, 0.03, 5, 950, 10),
    "cifar100": (50, "resnet34", 10, 0.01, 10, 900, 5),
    "clothing1m": (500, "resnet50", 16, 0.001, 2, 100, 10),
}
"""K, network, batch, learning rate, T_wu, rounds after it, clients per round (ω·K)."""


@pytest.mark.parametrize("name", [n for n in CELLS if n.startswith(("table", "figure"))])
def test_the_papers_settings(name: str) -> None:
    for cell, (recipe, cfg) in feddiv_runs(name).items():
        clients, net, batch, lr, passes, rounds, per_round = TABLE_8[recipe.data.source]
        assert recipe.scene.clients == clients
        assert recipe.model.name == net
        assert recipe.sgd == Sgd(epochs=5, batch_size=batch, lr=lr, momentum=0.5)
        assert cfg.warmup_passes == passes
        assert recipe.rounds == passes * clients + rounds
        assert recipe.clients_per_round == per_round
        iid = recipe.scene.partition.kind == "iid"
        assert cell == "w/o L_reg" or cfg.eta == (0 if iid else 1)
        noise = recipe.scene.noise
        assert noise.kind == "none" or (noise.clients, noise.samples) == ("bernoulli",) * 2


ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "FedDiv": {},
    "Degraded": {"filter": "degraded"},
    "Local filter": {"filter": "local"},
    "w/o Relab. & w/o PCS": {"relabel": False, "pcs": False},
    "w/o PCS": {"pcs": False},
    "w/o PCS.debias": {"xi": 0.0},
    "w/o L_reg": {"eta": 0.0},
}
"""Table 6; the last row has numbers for clients that differ only."""


@pytest.mark.parametrize(
    ("column", "passes", "eta"),
    [
        ("cifar10-iid", 5, 0.0),
        ("cifar10-non-iid", 5, 1.0),
        ("cifar100-iid", 10, 0.0),
        ("cifar100-non-iid", 10, 1.0),
    ],
)
def test_the_rows_of_table_6(column: str, passes: int, eta: float) -> None:
    paper = Config(warmup_passes=passes, eta=eta)
    rows = {cell: cfg for cell, (_, cfg) in feddiv_runs(f"table6-{column}").items()}
    expected = {row: replace(paper, **changes) for row, changes in ABLATIONS.items()}
    if eta == 0:
        del expected["w/o L_reg"]
    assert rows == expected


def test_the_rows_of_the_figures() -> None:
    filters = {row: ABLATIONS[row] for row in ("FedDiv", "Degraded", "Local filter")}
    for name, eta in (("figure3", 1.0), ("figure4", 1.0), ("figure5", 0.0)):
        runs = feddiv_runs(name)
        paper = Config(warmup_passes=runs["FedDiv"][1].warmup_passes, eta=eta)
        rows = {row: cfg for row, (_, cfg) in runs.items()}
        assert rows == {row: replace(paper, **changes) for row, changes in filters.items()}
    zetas = [cfg.zeta for _, cfg in feddiv_runs("figure8").values()]
    assert zetas == [0.0, 0.25, 0.5, 0.75, 1.0] * 2


SCENES = {
    "table6-cifar10-iid": ("table1", "rho0.8-tau0.0"),
    "table6-cifar10-non-iid": ("table2", "p0.3-alpha10"),
    "table6-cifar100-iid": ("table3", "rho0.8-tau0.5"),
    "table6-cifar100-non-iid": ("table4", ""),
    "figure3": ("table4", ""),
    "figure4": ("table2", "p0.3-alpha10"),
    "figure5": ("table3", "rho0.4-tau0.5"),
    "figure8": ("table1", "rho0.8-tau0.0"),
}
"""The cell of a table on which an ablation or a figure was made; Fig. 8 has a second scene."""


@pytest.mark.parametrize("name", list(SCENES))
def test_ablations_and_figures_have_the_scene_of_a_table(name: str) -> None:
    table, cell = SCENES[name]
    expected, second = recipes_of(table)[cell], recipes_of("table2")["p0.3-alpha10"]
    for label, recipe in recipes_of(name).items():
        cell_of_table = second if name == "figure8" and label.startswith("p0.3") else expected
        assert recipe.scene == cell_of_table.scene
        assert recipe.data == cell_of_table.data


def test_the_baselines_of_table_5_have_its_scene_images_and_solver() -> None:
    (ours,) = recipes_of("table5").values()
    assert ours.data.views == "feddiv-clothing1m"
    rows = recipes_of("table5-baselines")
    for recipe in rows.values():
        method, rounds = recipe.method, recipe.rounds
        assert recipe == replace(ours, name="feddiv-table5-baselines", method=method, rounds=rounds)
    assert {row: (r.method, r.rounds) for row, r in rows.items()} == {
        "FedCorr": (
            fedcorr.Config(
                preset="authors",
                iterations=2,
                fine_tuning_rounds=50,
                relabel_share=0.8,
                confidence=0.9,
            ),
            2 * 500 + 50 + 50,
        ),
        "RoFL": (rofl.Config(forget_rate=0.39, pseudo_label_round=10), 200),
        "ARFL": (arfl.Config(), 200),
    }


def test_the_columns_of_tables_1_to_4() -> None:
    def levels(name: str) -> list[tuple[float, float | None]]:
        return [(r.scene.noise.share, r.scene.noise.low) for r in recipes_of(name).values()]

    assert levels("table1") == [(r, t) for r in (0.4, 0.6, 0.8, 1.0) for t in (0.0, 0.5)]
    assert levels("table3") == [(r, 0.5) for r in (0.4, 0.6, 0.8, 1.0)]
    assert levels("table2") == [(0.6, 0.5)] * 3
    assert levels("table4") == [(0.4, 0.0)]
    partitions = [r.scene.partition for r in recipes_of("table2").values()]
    assert [(p.presence, p.alpha) for p in partitions] == [(0.7, 10), (0.7, 1), (0.3, 10)]


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("table", [1, 2, 3])
def test_fedgrs_columns_have_fedgrs_scenes_and_solver(table: int, partition: str) -> None:
    passes = {1: 5, 2: 10, 3: 2}[table]
    for column, (recipe, cfg) in feddiv_runs(f"fedgr-table{table}-{partition}").items():
        file = f"fedgr/table{table}-{partition}-{column}".removesuffix("-")
        theirs = recipe_from_table(read_recipe(file))
        walks = passes * theirs.scene.clients
        assert cfg == Config(
            preset="paper", warmup_passes=passes, eta=0 if partition == "iid" else 1
        )
        assert recipe == replace(
            theirs,
            name=f"feddiv-fedgr-table{table}-{partition}",
            rounds=walks + theirs.rounds - walks // 10,  # a walk counts as rounds of ten clients
            sgd=replace(theirs.sgd, tail="keep"),
            method=cfg,
        )


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_on_clothing1m_fedgrs_rounds_are_feddivs_own(partition: str) -> None:
    ((recipe, cfg),) = feddiv_runs(f"fedgr-table3-{partition}").values()
    clients, net, _, _, passes, rounds, per_round = TABLE_8["clothing1m"]
    assert (recipe.scene.clients, recipe.model.name) == (clients, net)
    assert (cfg.warmup_passes, recipe.clients_per_round) == (passes, per_round)
    assert recipe.rounds == passes * clients + rounds


def published(heading: str, row: str, part: int = 0) -> list[str]:
    """The numbers of a row in the transcript of the papers' tables."""
    if not RESULTS.is_file():
        pytest.skip(f"the published numbers are not on this machine ({RESULTS})")
    section = RESULTS.read_text(encoding="utf-8").split(f"### {heading} ")[1].split("\n### ")[0]
    section = section.split("**Non-IID")[part]
    line = next(line for line in section.splitlines() if line.startswith(f"| {row} |"))
    numbers = [cell.strip() for cell in line.strip(" |").split("|")[1:]]
    return [number.replace("±", " ± ") for number in numbers if "±" in number]


@pytest.mark.parametrize("number_of_table", [1, 2, 3, 4])
def test_the_headers_of_the_tables_give_the_published_numbers(number_of_table: int) -> None:
    name, heading = f"table{number_of_table}", f"FedDiv Table {number_of_table}"
    text = shipped_recipes()[f"feddiv/{name}"]
    for cell, number in zip(recipes_of(name), published(heading, "FedDiv (Ours)"), strict=True):
        assert (f"{cell}: {number}" if cell else f"Published: {number}") in text
    text = shipped_recipes()[f"feddiv/{name}-fedcorr"]
    for cell, number in zip(recipes_of(name), published(heading, "FedCorr"), strict=True):
        plain = number.replace("§", "")
        assert (f"{cell}: {plain}" if cell else f"Published: {plain}") in text
    text = shipped_recipes()[f"feddiv/{name}-rofl"]
    numbers = published(heading, "RoFL")  # none for ρ = 1
    for cell, number in zip(recipes_of(f"{name}-rofl"), numbers, strict=False):
        assert (f"{cell}: {number}" if cell else f"Published: {number}") in text
    assert text.count(" ± ") == len(numbers)
    for kind, row in (("arfl", "ARFL"), ("jointopt", "JointOpt")):
        text = shipped_recipes()[f"feddiv/{name}-{kind}"]
        for cell, number in zip(recipes_of(name), published(heading, row), strict=False):
            assert (f"{cell}: {number}" if cell else f"Published: {number}") in text
    text = shipped_recipes()[f"feddiv/{name}-baselines"]
    for method in ("FedAvg", "FedProx"):
        for number in published(heading, method):
            assert number in text


def test_the_headers_of_table_6_give_the_published_numbers() -> None:
    printed_as = {
        "FedDiv": "FedDiv (Ours)",
        "Degraded": "FedDiv (Degraded)",
        "Local filter": "FedDiv (Local filter)",
    }
    files = [name for name in CELLS if name.startswith("table6")]
    for row in recipes_of("table6-cifar10-non-iid"):
        having = [name for name in files if row in recipes_of(name)]
        numbers = published("FedDiv Table 6", printed_as.get(row, f"FedDiv {row}"))
        for name, number in zip(having, numbers, strict=True):
            assert f"{row}: {number}" in shipped_recipes()[f"feddiv/{name}"]


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("table", [1, 2])
def test_the_headers_of_fedgrs_tables_give_the_published_numbers(
    table: int, partition: str
) -> None:
    name = f"fedgr-table{table}-{partition}"
    numbers = published(f"FedGR Table {table}", "FedDiv", part=int(partition == "dirichlet"))
    columns = [column for column in recipes_of(name) if column != "clean"]
    for column, number in zip(columns, numbers[:6], strict=True):
        assert f"{column}: {number}" in shipped_recipes()[f"feddiv/{name}"]


def test_the_headers_on_clothing1m_give_fedgrs_number() -> None:
    for partition, row in (("iid", "T3 IID"), ("dirichlet", "T3 non-IID Dir(.3)")):
        *_, ours, _, _ = published("FedGR Table 3", row)  # FedFixer and FedGR follow
        text = shipped_recipes()[f"feddiv/fedgr-table3-{partition}"]
        assert f"# Published by FedGR: {ours}, " in text


def test_one_cell_of_a_table_can_be_asked_for() -> None:
    asked = {"scene.noise.share": 0.4, "scene.noise.low": 0.0}
    (one,) = expand(read_recipe("feddiv/table1"), asked, ()).runs
    assert replace(one.recipe, name="feddiv-table1") == recipes_of("table1")["rho0.4-tau0.0"]
