"""FedES: its equations with numbers derived here, its phases, and its recipes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from benches import Linear, bench_of, images_of, labels_of, weights_of
from fedsieve.cli.grid import expand
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Sgd
from fedsieve.methods import contract, fedavg, fedcoteaching, fedes, fedmixup, fednoro, fedsce
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedes import (
    METHOD,
    Client,
    Config,
    Down,
    Estimation,
    Server,
    Up,
    concluded,
    critical_parameters,
    criticality,
    data_quality,
    decay,
    distances,
    flat,
    init_server,
    is_estimating,
    merge,
    profile,
    select,
    send,
    sieve,
    train,
)
from fedsieve.recipe import Recipe, cells, read_recipe, recipe_from_table, shipped_recipes
from fedsieve.simulate import run as run_module
from fedsieve.simulate.diagnose import Truth
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.world import scene_of
from fedsieve.types import SERVER, Shard, Streams
from helpers import assert_same_weights, few_digits, final_bytes, same_bits, tiny_recipe

# ----------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings_", "sentence"),
    [
        ({"pretrain_rounds": 0}, "method.pretrain_rounds must be at least 1, not 0."),
        ({"pretrain_passes": 0}, "method.pretrain_passes must be at least 1, not 0."),
        ({"quality_floor": 1.5}, "method.quality_floor must be in [0, 1], not 1.5."),
        ({"drop_below": -0.1}, "method.drop_below must be in [0, 1], not -0.1."),
        ({"direction": 2}, "method.direction must be one of 1, -1, not 2."),
        ({"indicator": "gmm"}, "method.indicator must be one of 'signed_emd', 'emd', 'mean'"),
        ({"stage_two_start": "x"}, "method.stage_two_start must be one of 'pretrained', 'initial'"),
        ({"indicator": "oracle"}, "method.oracle_quality and method.indicator = 'oracle' belong"),
        ({"oracle_quality": (0.5,)}, "method.oracle_quality and method.indicator = 'oracle'"),
        (
            {"indicator": "oracle", "oracle_quality": (0.5, 1.5)},
            "method.oracle_quality must hold numbers in [0, 1], not [0.5, 1.5].",
        ),
        (
            {"indicator": "oracle", "oracle_quality": (0.0, 0.0)},
            "method.oracle_quality leaves no client to train;",
        ),
        (
            {"indicator": "oracle", "oracle_quality": (0.4, 0.3), "drop_below": 0.5},
            "method.oracle_quality leaves no client to train;",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings_: Any, sentence: str) -> None:
    with pytest.raises(FedsieveError) as caught:
        Config(**settings_)
    assert str(caught.value).startswith(sentence)


def test_a_floor_saves_an_oracle_that_trusts_nobody() -> None:
    cfg = Config(indicator="oracle", oracle_quality=(0.0, 0.0), quality_floor=0.1)
    assert init_server(cfg, START, federation((3, 3), 2)).qualities == {0: 0.1, 1: 0.1}


# ------------------------------------------------------------------ a federation written by hand

START = {
    "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "b": torch.tensor([0.5, 0.0]),
    "norm.running_mean": torch.tensor([10.0]),
}
"""Six trainable parameters and one statistic."""
TRAINABLE = ("w", "b")


def federation(sizes: tuple[int, ...], per_round: int, rounds: int = 20) -> Federation:
    return Federation(sizes, per_round, rounds, num_classes=3)


def moved(by: list[float], samples: int, *, steps: int = 1, mean: float = 10.0) -> Up:
    """An update that adds `by` to the six parameters of START."""
    delta = torch.tensor(by)
    weights = {
        "w": START["w"] + delta[:4].view(2, 2),
        "b": START["b"] + delta[4:],
        "norm.running_mean": torch.tensor([mean]),
    }
    return Up(weights, samples, steps, TRAINABLE)


UPS = {
    0: moved([1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 10),
    1: moved([0.0, -2.0, 0.0, 0.5, 0.0, 0.0], 30, mean=12.0),
    2: moved([0.0, 0.0, 1.0, -1.0, 2.0, 0.0], 60, mean=14.0),
}


def deltas(ups: Mapping[int, Up]) -> dict[int, np.ndarray]:
    return {
        k: np.concatenate([(up.weights[n] - START[n]).flatten().numpy() for n in TRAINABLE])
        for k, up in ups.items()
    }


W = np.array([1.0, 2.0, 3.0, 4.0, 0.5, 0.0])
BY_SAMPLES = {0: 0.1, 1: 0.3, 2: 0.6}


def by_hand(indicator: str, ups: Mapping[int, Up] = UPS) -> dict[int, float]:
    """d_n with SciPy's distance, from the definition."""
    delta = {k: d.astype(np.float64) for k, d in deltas(ups).items()}
    mean_delta = sum(BY_SAMPLES[k] * d for k, d in delta.items())
    assert isinstance(mean_delta, np.ndarray)
    g_s = np.abs(mean_delta * W)
    found = {}
    for k, d in delta.items():
        g = np.abs(d * W)
        emd = stats.wasserstein_distance(g, g_s)
        found[k] = {
            "signed_emd": np.sign(g.mean() - g_s.mean()) * emd,
            "emd": emd,
            "mean": g.mean() - g_s.mean(),
            "cosine": d @ mean_delta / np.linalg.norm(d) / np.linalg.norm(mean_delta),
        }[indicator]
    return found


def estimated(cfg: Config, ups: Mapping[int, Up] = UPS) -> tuple[Server, dict[str, float]]:
    server = init_server(cfg, START, federation((10, 30, 60), 3))
    after, metrics = merge(cfg, server, 0, ups)
    return after, dict(metrics)


@pytest.mark.parametrize("indicator", ["signed_emd", "emd", "mean", "cosine"])
@pytest.mark.parametrize("direction", [1, -1])
def test_qualities_are_the_scaled_distances(indicator: Any, direction: Any) -> None:
    server, metrics = estimated(Config(indicator=indicator, direction=direction))
    d = by_hand(indicator)
    low, high = min(d.values()), max(d.values())
    for k, value in d.items():
        share = (value - low) / (high - low)
        expected = share if direction == 1 else 1 - share
        assert server.qualities[k] == pytest.approx(expected, abs=1e-6)
    assert metrics["quality"] == pytest.approx(np.mean(list(server.qualities.values())))
    assert metrics["positive_distances"] == np.mean([value > 0 for value in d.values()])


def test_equal_means_have_no_sign() -> None:
    """Eq. 10: sgn(0) = 0. g_0 = (0, 4), g_1 = (2, 2) and g_s = (1, 3) have the mean 2, and both
    clients the distance 1."""
    start = {"w": torch.ones(2)}
    ups = {
        k: Up({"w": start["w"] + torch.tensor(update)}, 1, 1, ("w",))
        for k, update in enumerate([[0.0, 4.0], [2.0, 2.0]])
    }
    for indicator, quality in (("signed_emd", [1.0, 1.0]), ("emd", [1.0, 1.0])):
        cfg = Config(indicator=indicator, pretrain_rounds=1)  # type: ignore[arg-type]
        server = init_server(cfg, start, federation((1, 1), 2))
        after, metrics = merge(cfg, server, 0, ups)
        assert [after.qualities[k] for k in (0, 1)] == quality
        assert metrics["positive_distances"] == (indicator == "emd")


def test_the_sign_comes_from_the_means() -> None:
    """g_0 = (1, 0 …) is smaller than g_s in the mean, so its distance counts as negative.

    The averaged update is (.1, −.6, .6, −.45, 1.2, .1), g_s = (.1, 1.2, 1.8, 1.8, .6, 0) of mean
    5.5/6; the means of g_n are 1/6, 6/6 and 8/6.
    """
    d = by_hand("signed_emd")
    assert d[0] < 0
    assert d[1] > 0
    assert d[2] > 0
    assert by_hand("mean") == {
        0: pytest.approx((1 - 5.5) / 6),
        1: pytest.approx((6 - 5.5) / 6),
        2: pytest.approx((8 - 5.5) / 6),
    }
    server, _ = estimated(Config(indicator="emd"))
    assert server.qualities[0] != estimated(Config())[0].qualities[0]


def test_statistics_are_no_parameters_but_are_averaged() -> None:
    server, _ = estimated(Config())
    assert server.weights["norm.running_mean"].item() == pytest.approx(1.0 + 3.6 + 8.4)
    changed = {
        k: replace(up, weights={**up.weights, "norm.running_mean": torch.tensor([99.0 * k])})
        for k, up in UPS.items()
    }
    assert estimated(Config(), changed)[0].qualities == server.qualities


def test_a_client_with_twice_the_steps_looks_better_unless_steps_are_divided_out() -> None:
    """The same update per step; the first client takes three steps, the others one."""
    each = [0.2, -0.4, 0.2, 0.1, 0.0, 0.3]
    ups = {
        0: moved([3 * x for x in each], 10, steps=3),
        1: moved(each, 30),
        2: moved([x / 2 for x in each], 60),
    }
    plain, _ = estimated(Config(), ups)
    assert plain.qualities[0] == 1.0
    assert plain.qualities[1] == pytest.approx((1 - 0.5) / (3 - 0.5), abs=1e-5)
    normalised, _ = estimated(Config(normalise_steps=True), ups)
    assert normalised.qualities == {
        0: pytest.approx(1.0, abs=1e-5),
        1: pytest.approx(1.0, abs=1e-5),
        2: 0.0,
    }


def test_equal_clients_are_all_trusted() -> None:
    """0/0 of Eq. 11, also where nobody took a step."""
    for by in ([0.5] * 6, [0.0] * 6):
        server, _ = estimated(Config(), {k: moved(by, 10) for k in range(3)})
        assert server.qualities == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_floor_keeps_the_worst_client() -> None:
    plain, floored = (estimated(Config(quality_floor=f))[0].qualities for f in (0.0, 0.25))
    assert min(plain.values()) == 0.0
    assert floored == {k: max(value, 0.25) for k, value in plain.items()}


def test_what_the_server_believes_is_the_rest() -> None:
    server, _ = estimated(Config())
    assert {k: s.noise_rate for k, s in sieve(server).items()} == {
        k: 1 - q for k, q in server.qualities.items()
    }
    assert all(s.p_clean is None for s in sieve(server).values())
    assert sieve(init_server(Config(), START, federation((1,), 1))) == {}


# --------------------------------------------------------------------------------- equations


def test_criticality_is_the_size_of_update_times_weight() -> None:
    found = criticality(torch.tensor([2.0, -1.0, 3.0]), torch.tensor([-0.5, -4.0, 0.0]))
    assert found.tolist() == [1.0, 4.0, 0.0]


def test_a_profile_of_few_values_is_their_order() -> None:
    assert profile(torch.tensor([3.0, 0.0, 1.0])).tolist() == [0.0, 1.0, 3.0]
    assert profile(torch.tensor([3.0])).dtype == torch.float64


def test_a_profile_of_many_values_sums_groups_of_the_smaller_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven values in four numbers: the largest two, and the rest in threes after one zero."""
    monkeypatch.setattr(fedes, "PROFILE", 4)
    values = torch.tensor([7.0, 2.0, 5.0, 1.0, 6.0, 3.0, 4.0])
    assert profile(values).tolist() == [0 + 1.0 + 2.0, 3.0 + 4.0 + 5.0, 6.0, 7.0]


positive = st.lists(st.floats(0, 10, width=32), min_size=6, max_size=6)


@settings(max_examples=25, deadline=None)
@given(a=positive, b=positive, order=st.permutations(range(6)))
def test_the_distance_is_scipys_and_forgets_which_parameter_is_which(
    a: list[float], b: list[float], order: list[int]
) -> None:
    """With W = 1 an update is its own criticality."""
    mine, mean, start = torch.tensor(a), torch.tensor(b), torch.ones(6)

    def of(update: Tensor) -> float:
        traces = {0: profile(criticality(update, start))}
        return distances("emd", Estimation({}, mean, 1, TRAINABLE, traces), start)[0]

    expected = stats.wasserstein_distance(mine.numpy(), mean.numpy())
    assert of(mine) == pytest.approx(expected, abs=1e-6)
    assert of(mine[torch.tensor(order)]) == of(mine)


def test_groups_change_a_distance_by_less_than_a_thousandth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 000 criticalities with a heavy tail, in 1000 numbers."""
    rng = np.random.default_rng(1)
    a, b = (np.exp(rng.normal(shift, 2.0, 100_000)) for shift in (0.0, 0.1))
    monkeypatch.setattr(fedes, "PROFILE", 1000)
    start = torch.ones(100_000)
    traces = {0: profile(torch.from_numpy(a).float())}
    estimation = Estimation({}, torch.from_numpy(b).float(), 1, TRAINABLE, traces)
    found = distances("emd", estimation, start)[0]
    assert found == pytest.approx(stats.wasserstein_distance(a, b), rel=1e-3)
    assert distances("mean", estimation, start)[0] == pytest.approx(a.mean() - b.mean(), rel=1e-5)


def test_qualities_span_zero_to_one() -> None:
    assert data_quality([-1.0, 3.0, 0.0]) == [0.0, 1.0, 0.25]
    assert data_quality([2.0]) == [1.0]


CRITICALITY = {"w": torch.tensor([[5.0, 1.0], [0.0, 3.0]]), "b": torch.tensor([4.0, 1.0])}
"""In order: 5, 4, 3, 1, 1, 0."""


@pytest.mark.parametrize(
    ("quality", "w", "b"),
    [
        (0.0, [[0, 0], [0, 0]], [0, 0]),
        (0.1, [[0, 0], [0, 0]], [0, 0]),  # ⌊0.6⌋ = 0
        (1 / 6, [[1, 0], [0, 0]], [0, 0]),
        (0.5, [[1, 0], [0, 1]], [1, 0]),
        (0.7, [[1, 1], [0, 1]], [1, 1]),  # ⌊4.2⌋ = 4, and the fifth equals the fourth (Eq. 15)
        (1.0, [[1, 1], [1, 1]], [1, 1]),
    ],
)
def test_the_most_critical_parameters_of_all_are_chosen(
    quality: float, w: list[list[int]], b: list[int]
) -> None:
    found = critical_parameters(CRITICALITY, quality, spare_vectors=False)
    assert found["w"].int().tolist() == w
    assert found["b"].int().tolist() == b
    spared = critical_parameters(CRITICALITY, quality, spare_vectors=True)
    assert torch.equal(spared["w"], found["w"])
    assert spared["b"].all()
    scale = decay(found, quality, TRAINABLE)
    torch.testing.assert_close(scale["w"], quality * torch.tensor(w).float())


def test_rounding_does_not_lose_a_parameter() -> None:
    """0.29 · 100 is 28.999… in binary."""
    mask = critical_parameters({"w": torch.arange(100.0)}, 0.29, spare_vectors=False)
    assert int(mask["w"].sum()) == 29


# ------------------------------------------------------------------------------------ phases


def test_with_every_client_in_every_round_each_round_of_stage_one_estimates() -> None:
    cfg, sites = Config(), federation((5, 5, 5), 3)
    assert [is_estimating(cfg, sites, t) for t in range(12)] == [True] * 10 + [False] * 2
    server = init_server(cfg, START, sites)
    assert [send(cfg, server, t, 1).quality for t in (0, 9, 10)] == [None, None, 1.0]
    assert send(cfg, server, 9, 1).estimating
    assert not send(cfg, server, 10, 1).estimating
    for t in range(12):
        assert select(cfg, server, t, Streams(1, t, SERVER)) == (0, 1, 2)


def test_with_fewer_clients_the_last_pass_of_stage_one_meets_each_once() -> None:
    """Seven of eight clients hold samples, three per round: passes of three rounds."""
    sites = federation((5, 5, 0, 5, 5, 5, 5, 5), 3)
    cfg = Config(pretrain_rounds=5)
    server = init_server(cfg, START, sites)
    assert [is_estimating(cfg, sites, t) for t in range(7)] == [0, 0, 1, 1, 1, 0, 0]
    met = [k for t in (2, 3, 4) for k in select(cfg, server, t, Streams(1, t, SERVER))]
    assert sorted(met) == [0, 1, 3, 4, 5, 6, 7]
    orders = {select(cfg, server, 2, Streams(seed, 2, SERVER)) for seed in range(10)}
    assert len(orders) > 1
    assert [len(select(cfg, server, t, Streams(1, t, SERVER))) for t in range(7)] == [
        3, 3, 3, 2, 2, 3, 3,
    ]  # fmt: skip
    assert fedes.pretrain_rounds(Config(), sites) == 30
    with pytest.raises(FedsieveError, match="set it to at least 3"):
        init_server(Config(pretrain_rounds=2), START, sites)


@pytest.mark.parametrize("indicator", ["signed_emd", "cosine"])
def test_a_pass_over_several_rounds_equals_one_round_of_all(indicator: Any) -> None:
    """The server keeps its weights until the pass is over; the same updates, the same end."""
    at_once, _ = estimated(Config(indicator=indicator))
    cfg = Config(indicator=indicator, pretrain_rounds=3)
    server = init_server(cfg, START, federation((10, 30, 60), 1))
    for t in range(3):
        assert_same_weights(server.weights, START)
        assert server.qualities == {}
        (client,) = select(cfg, server, t, Streams(1, t, SERVER))
        server, _ = merge(cfg, server, t, {client: UPS[client]})
    assert server.estimation is None
    for k, quality in at_once.qualities.items():
        assert server.qualities[k] == pytest.approx(quality, abs=1e-5)
    for name, tensor in at_once.weights.items():
        torch.testing.assert_close(server.weights[name], tensor)


@pytest.mark.parametrize("start", ["pretrained", "initial"])
def test_a_pass_whose_last_round_was_lost_ends_before_stage_two(start: Any) -> None:
    """Clients 0 and 2 were met, so the averaged update has shares of 1/7 and 6/7.

    g_s = (1, 0, 18, 24, 6, 0)/7 and g_2 = (0, 0, 3, 4, 1, 0) have means of 7/6 and 8/6, g_0 has
    one of 1/6: client 2 is the better one. Client 1 was never estimated.
    """
    cfg = Config(pretrain_rounds=3, stage_two_start=start)
    server = init_server(cfg, START, federation((10, 30, 60), 1))
    for t, client in enumerate((0, 2)):
        server, _ = merge(cfg, server, t, {client: UPS[client]})
    assert server.estimation is not None
    sent = {k: send(cfg, server, 3, k) for k in range(3)}
    assert {k: down.quality for k, down in sent.items()} == {0: 0.0, 1: 1.0, 2: 1.0}
    drawn = {select(cfg, server, 3, Streams(seed, 3, SERVER)) for seed in range(20)}
    assert drawn == {(1,), (2,)}, "client 0 weighs nothing"
    for name, first in START.items():
        mean = (UPS[0].weights[name] + 6 * UPS[2].weights[name]) / 7
        expected = first if start == "initial" else mean
        torch.testing.assert_close(sent[1].weights[name], expected)
    after, _ = merge(cfg, server, 3, {1: UPS[1]})
    assert after.initial is None, "stage 2 begins only once"
    assert after.estimation is None
    assert set(after.qualities) == {0, 2}, "client 1 was never estimated"
    assert_same_weights(after.weights, UPS[1].weights)


def test_updates_without_samples_change_nothing() -> None:
    cfg = Config(pretrain_rounds=1)
    server = init_server(cfg, START, federation((0, 0), 2))
    empty = {k: replace(moved([1.0] * 6, 1), samples=0) for k in (0, 1)}
    for t in (0, 1):
        after, metrics = merge(cfg, server, t, empty)
        assert_same_weights(after.weights, START)
        assert after.qualities == {}
        assert metrics == {}
    assert concluded(cfg, server) == (server, {})
    with pytest.raises(FedsieveError, match="No client took part in round 4"):
        merge(cfg, server, 4, {})


def test_a_client_that_failed_in_the_last_estimation_keeps_its_quality() -> None:
    cfg = Config()
    server = init_server(cfg, START, federation((10, 30, 60), 3))
    server, _ = merge(cfg, server, 0, UPS)
    again, _ = merge(cfg, server, 1, {k: UPS[k] for k in (0, 1)})
    assert again.qualities[2] == server.qualities[2]


def in_stage_two(qualities: Mapping[int, float], **settings_: Any) -> tuple[Config, Server]:
    cfg = Config(pretrain_rounds=3, **settings_)
    sizes = (10,) * 4
    return cfg, replace(init_server(cfg, START, federation(sizes, 2)), qualities=qualities)


@pytest.mark.parametrize(
    ("settings_", "possible"),
    [
        ({}, {0, 1, 3}),  # a client without an estimate is trusted, one of quality 0 is not asked
        ({"drop_below": 0.5}, {1, 3}),
        ({"weigh_by_quality": False}, {0, 1, 2, 3}),
        ({"weigh_by_quality": False, "drop_below": 0.4}, {0, 1, 3}),
    ],
    ids=str,
)
def test_who_can_take_part_in_stage_two(settings_: Any, possible: set[int]) -> None:
    cfg, server = in_stage_two({0: 0.4, 1: 1.0, 2: 0.0}, **settings_)
    drawn = [select(cfg, server, t, Streams(1, t, SERVER)) for t in range(3, 40)]
    assert {k for clients in drawn for k in clients} == possible
    assert all(len(clients) == 2 for clients in drawn)
    assert {select(cfg, server, 0, Streams(s, 0, SERVER)) for s in range(40)} >= {(0, 2), (1, 3)}


def test_the_average_of_stage_two_goes_by_samples_and_quality() -> None:
    """Eq. 18: (10·.5·w₀ + 30·1·w₁ + 60·0·w₂)/35; without NaAgg (10w₀ + 30w₁ + 60w₂)/100."""
    qualities = {0: 0.5, 1: 1.0, 2: 0.0}
    for settings_, shares in (({}, (5, 30, 0)), ({"weigh_by_quality": False}, (10, 30, 60))):
        cfg, server = in_stage_two(qualities, **settings_)
        after, metrics = merge(cfg, server, 3, UPS)
        assert metrics == {}
        for name in START:
            parts = [n * UPS[k].weights[name] for k, n in enumerate(shares)]
            torch.testing.assert_close(after.weights[name], sum(parts) / sum(shares))
    cfg, server = in_stage_two(qualities)
    plain, _ = merge(cfg, server, 0, UPS)  # stage 1 goes by samples
    torch.testing.assert_close(
        plain.weights["b"], sum(BY_SAMPLES[k] * UPS[k].weights["b"] for k in UPS)
    )


@pytest.mark.parametrize("trunk", ["pretrained", "initial"])
def test_stage_two_may_begin_anew(trunk: Any) -> None:
    """Also where only a fork of stage 1 asks for it."""
    cfg = Config(pretrain_rounds=2, stage_two_start=trunk)
    server = init_server(cfg, START, federation((10, 30, 60), 3))
    server, _ = merge(cfg, server, 0, UPS)
    assert not torch.equal(server.weights["w"], START["w"])
    server, _ = merge(replace(cfg, stage_two_start="initial"), server, 1, UPS)
    assert_same_weights(server.weights, START)
    assert len(server.qualities) == 3
    assert server.initial is None, "stage 2 begins only once"


def test_an_oracle_is_believed_from_the_start_and_never_overruled() -> None:
    cfg = Config(indicator="oracle", oracle_quality=(0.9, 0.2, 0.6), pretrain_rounds=1)
    with pytest.raises(FedsieveError, match="holds 3 numbers for 2 clients"):
        init_server(cfg, START, federation((5, 5), 2))
    server = init_server(cfg, START, federation((10, 30, 60), 3))
    assert server.qualities == {0: 0.9, 1: 0.2, 2: 0.6}
    after, metrics = merge(cfg, server, 0, UPS)
    assert after.qualities == server.qualities
    assert metrics == {"quality": pytest.approx(1.7 / 3)}
    torch.testing.assert_close(after.weights["b"], estimated(Config())[0].weights["b"])


def test_an_oracle_is_believed_in_a_run_that_forks_from_one_without() -> None:
    others = federation((10, 30, 60), 3)
    plain = Config(pretrain_rounds=2)
    server, _ = merge(plain, init_server(plain, START, others), 0, UPS)
    assert len(server.qualities) == 3, "each round estimates, as everybody takes part"
    oracle = Config(indicator="oracle", oracle_quality=(0.9, 0.2, 0.6), pretrain_rounds=2)
    after, _ = merge(oracle, server, 1, UPS)
    assert after.qualities == {0: 0.9, 1: 0.2, 2: 0.6}
    short = Config(indicator="oracle", oracle_quality=(0.9, 0.2), pretrain_rounds=2)
    with pytest.raises(FedsieveError, match="holds 2 numbers for 3 clients"):
        merge(short, server, 1, UPS)


# ----------------------------------------------------------------------------- at the client

SGD = Sgd(epochs=3, batch_size=6, lr=0.2, momentum=0.5, weight_decay=0.1)


def shard(n: int = 6) -> Shard:
    return Shard(0, images_of(n), labels_of(n), torch.arange(n), 3)


def trained(
    client: Client, *, estimating: bool = False, quality: float | None = None, **settings_: Any
) -> tuple[Client, Up, dict[str, float]]:
    down = Down(weights_of(Linear, 1), estimating, quality)
    bench = bench_of(Linear, SGD)
    after, up, metrics = train(Config(**settings_), client, down, shard(), bench, Streams(1, 2, 0))
    return after, up, dict(metrics)


NOTHING = Client(None, None)


def test_stage_one_is_fedavg_and_remembers_what_was_critical() -> None:
    start = weights_of(Linear, 1)
    _, expected, _ = fedavg.train(
        fedavg.Config(),
        fedavg.Client(),
        fedavg.Down(start),
        shard(),
        bench_of(Linear, SGD),
        Streams(1, 2, 0),
    )
    plain, up, metrics = trained(NOTHING)
    assert plain == NOTHING
    assert (up.samples, up.steps, up.trainable) == (6, 3, ())
    assert set(metrics) == {"loss"}
    assert_same_weights(up.weights, expected.weights)
    after, up, _ = trained(NOTHING, estimating=True)
    assert up.trainable == ("layer.weight", "layer.bias")
    assert_same_weights(up.weights, expected.weights)
    assert after.criticality is not None
    for name, w in start.items():
        g = np.abs((expected.weights[name] - w).numpy() * w.numpy())
        np.testing.assert_allclose(after.criticality[name].numpy(), g, rtol=1e-6)


def test_stage_two_by_hand() -> None:
    """u = ρM ⊙ (∇F + λw), v ← m·v + u, w ← w − η·v: gradient, decay and momentum of a parameter
    that is not critical are all zero, so it keeps its bits."""
    start = weights_of(Linear, 1)
    g = {"layer.weight": torch.arange(12.0).view(3, 4), "layer.bias": torch.tensor([20.0, 0, 21])}
    rho = 0.5  # ⌊7.5⌋ = 7 of 15: 21, 20, 11, 10, 9, 8, 7
    after, up, metrics = trained(Client(g, None), quality=rho)
    assert after.criticality is None
    assert after.critical is not None
    masks = [after.critical[n].numpy() for n in ("layer.weight", "layer.bias")]
    np.testing.assert_array_equal(masks[0], np.arange(12).reshape(3, 4) >= 7)
    np.testing.assert_array_equal(masks[1], [True, False, True])
    assert metrics["critical_share"] == pytest.approx(7 / 15)

    x = (shard().images.numpy().reshape(6, 4) / 255 - 0.25) / 0.5
    y = np.eye(3)[shard().labels.numpy()]
    w, b = (start[n].numpy().astype(np.float64) for n in ("layer.weight", "layer.bias"))
    v_w, v_b = np.zeros_like(w), np.zeros_like(b)
    for _ in range(3):
        e = np.exp(x @ w.T + b)
        dz = (e / e.sum(axis=1, keepdims=True) - y) / 6
        v_w = 0.5 * v_w + rho * masks[0] * (dz.T @ x + 0.1 * w)
        v_b = 0.5 * v_b + rho * masks[1] * (dz.sum(axis=0) + 0.1 * b)
        w, b = w - 0.2 * v_w, b - 0.2 * v_b
    np.testing.assert_allclose(up.weights["layer.weight"].numpy(), w, atol=1e-6)
    np.testing.assert_allclose(up.weights["layer.bias"].numpy(), b, atol=1e-6)
    for name, mask in after.critical.items():
        assert same_bits(up.weights[name][~mask], start[name][~mask])
        assert not torch.equal(up.weights[name], start[name])
    once_more, again, _ = trained(after, quality=rho)
    assert once_more == after, "the mask is made once"
    assert_same_weights(again.weights, up.weights)


def test_the_limits_of_quality() -> None:
    """ρ = 1 is FedAvg bit for bit, ρ = 0 moves nothing, and without SeGD ρ is not looked at."""
    remembered, plain, _ = trained(NOTHING, estimating=True)
    _, whole, metrics = trained(remembered, quality=1.0)
    assert metrics["critical_share"] == 1.0
    assert_same_weights(whole.weights, plain.weights)
    _, stopped, metrics = trained(remembered, quality=0.0)
    assert metrics["critical_share"] == 0.0
    assert_same_weights(stopped.weights, weights_of(Linear, 1))
    _, unselective, metrics = trained(remembered, quality=0.3, selective=False)
    assert set(metrics) == {"loss"}
    assert_same_weights(unselective.weights, plain.weights)


def test_a_client_that_missed_the_estimation_scales_all_its_updates() -> None:
    after, up, metrics = trained(NOTHING, quality=0.5)
    assert after == NOTHING
    assert set(metrics) == {"loss"}
    everything = {n: torch.ones_like(t) for n, t in weights_of(Linear, 1).items()}
    _, same, _ = trained(Client(None, {n: t.bool() for n, t in everything.items()}), quality=0.5)
    assert_same_weights(up.weights, same.weights)
    _, plain, _ = trained(NOTHING)
    assert_same_weights(trained(NOTHING, quality=1.0)[1].weights, plain.weights)


def test_vectors_can_be_spared() -> None:
    g = {"layer.weight": torch.ones(3, 4), "layer.bias": torch.zeros(3)}
    start = weights_of(Linear, 1)
    _, kept, _ = trained(Client(g, None), quality=0.8)
    assert same_bits(kept.weights["layer.bias"], start["layer.bias"])
    _, spared, _ = trained(Client(g, None), quality=0.8, spare_vectors=True)
    assert not torch.equal(spared.weights["layer.bias"], start["layer.bias"])


def test_suspicion_is_fedavgs() -> None:
    start, bench = weights_of(Linear, 1), bench_of(Linear, SGD)
    mine = METHOD.suspect(Config(), NOTHING, Down(start, False, 0.3), shard(), bench)
    theirs = fedavg.suspect(fedavg.Config(), fedavg.Client(), fedavg.Down(start), shard(), bench)
    assert torch.equal(mine.p_wrong, theirs.p_wrong)
    assert torch.equal(mine.suggested, theirs.suggested)
    assert METHOD.refined(NOTHING) is None


def test_weights_are_laid_out_by_name() -> None:
    assert flat(START, ("b", "w")).tolist() == [0.5, 0.0, 1.0, 2.0, 3.0, 4.0]


# ------------------------------------------------------------------------------- whole runs


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "load_data", lambda recipe: few_digits())


def everyone(**method: Any) -> Recipe:
    return tiny_recipe({"name": "fedes", **method}, rounds=2, clients_per_round=6)


@pytest.mark.usefixtures("_few")
def test_stage_one_trains_as_fedavg_does_bit_for_bit(tmp_path: Path) -> None:
    run(everyone(), tmp_path / "fedes")
    run(tiny_recipe("fedavg", rounds=2, clients_per_round=6), tmp_path / "fedavg")
    assert final_bytes(tmp_path / "fedes") == final_bytes(tmp_path / "fedavg")


@pytest.mark.usefixtures("_few")
def test_the_simulation_says_how_right_the_qualities_are_in_every_round(tmp_path: Path) -> None:
    """The mean squared error of Table 4 and the rank correlation, of ρ with the true quality."""
    recipe = everyone(pretrain_rounds=1)
    recipe = replace(recipe, engine=replace(recipe.engine, client_lines=True))
    run(recipe, tmp_path)
    truth = Truth.of(scene_of(recipe, few_digits()), few_digits().train_labels.numpy())
    first = read_lines(tmp_path / "clients.jsonl")[:6]
    second = read_lines(tmp_path / "metrics.jsonl")
    rho = np.array([1 - line["noise_rate"] for line in first])
    assert sorted(rho)[0] == 0.0
    assert sorted(rho)[-1] == 1.0
    for line in second:
        found = line["diagnostics"]
        assert found["noise_mse"] == pytest.approx(np.mean((rho - truth.qualities) ** 2))
        expected = stats.spearmanr(rho, truth.qualities).statistic
        assert found["noise_spearman"] == pytest.approx(expected)
        by_size = stats.spearmanr(1 - rho, truth.scene.sizes).statistic
        assert found["noise_size_spearman"] == pytest.approx(by_size)
    assert len(second[1]["clients"]) == 5, "the client of quality 0 is not asked to train"


@pytest.mark.usefixtures("_few")
def test_an_oracle_that_knows_the_truth_makes_no_error(tmp_path: Path) -> None:
    recipe = everyone(pretrain_rounds=1)
    truth = Truth.of(scene_of(recipe, few_digits()), few_digits().train_labels.numpy())
    oracle = replace(recipe.method, indicator="oracle", oracle_quality=truth.qualities)  # type: ignore[call-arg]
    run(replace(recipe, method=oracle), tmp_path)
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert line["diagnostics"]["noise_mse"] == pytest.approx(0.0, abs=1e-12)
        assert line["diagnostics"]["noise_spearman"] == pytest.approx(1.0)
    assert "oracle_quality" in (tmp_path / "config.toml").read_text()


# ----------------------------------------------------------------------------------- recipes

RESULTS = Path(__file__).resolve().parents[3] / "shared" / "specs" / "results.md"
PAPER_SGD = Sgd(epochs=10, batch_size=128, lr=0.01, momentum=0.9, weight_decay=5e-4)
SOURCES = {1: "cifar10", 2: "cifar100"}
COTEACHING = fedcoteaching.Config(forget_rate=0.39, ramp_rounds=25, exponent=1.0)
"""On Clothing1M; on CIFAR τ is the mean rate of the column."""
ROWS_OF_TABLES: Mapping[str, Mapping[str, contract.Config]] = {
    "": {"FedES": Config(pretrain_rounds=10)},
    "-baselines": {
        "FedAvg": fedavg.Config(),
        "FedNoRo": fednoro.Config(
            preset="paper",
            covariance="diagonal",
            warmup_rounds=10,
            ramp_from=10,
            ramp_to=49,
            distillation=0.8,
            temperature=0.8,
        ),
        "Fed-SCE": fedsce.Config(alpha=0.1, beta=1.0, log_zero=math.log(1e-4)),
        "Fed-Mixup": fedmixup.Config(alpha=1.0),
    },
    "-coteaching": {"Fed-Coteaching": COTEACHING},
}
"""The end of a recipe's name for Tables 1 and 2, and the rows that it has of them."""


@cache
def runs(name: str) -> dict[str, Recipe]:
    found = cells(read_recipe(f"fedes/{name}"))
    return {cell.name: recipe_from_table(cell.table) for cell in found}


def test_there_is_a_recipe_for_every_table() -> None:
    fedgr_tables = [f"fedgr-table{t}-{p}" for t, p in product((1, 2), ("iid", "dirichlet"))]
    own = [f"table{t}{suffix}" for t, suffix in product((1, 2), ROWS_OF_TABLES)]
    own += ["table3", "table4", "table5", "figure3", "direction"]
    shipped = [n.removeprefix("fedes/") for n in shipped_recipes() if n.startswith("fedes/")]
    assert sorted(shipped) == sorted(own + fedgr_tables)


@pytest.mark.parametrize(("table", "suffix"), list(product((1, 2), ROWS_OF_TABLES)))
def test_tables_1_and_2(table: int, suffix: str) -> None:
    columns = product(("iid", "dirichlet"), ("symmetric", "asymmetric"), (0.3, 0.5))
    wanted = {
        f"{row}-{p}-{kind}-mu{mu}".removeprefix("FedES-"): (method, p, kind, mu)
        for (row, method), (p, kind, mu) in product(ROWS_OF_TABLES[suffix].items(), columns)
    }
    found = runs(f"table{table}{suffix}")
    assert set(found) == set(wanted)
    for name, (method, partition, kind, mu) in wanted.items():
        recipe = found[name]
        assert (recipe.rounds, recipe.clients_per_round, recipe.scene.clients) == (200, 20, 20)
        assert recipe.data.source == SOURCES[table]
        assert (recipe.model.name, recipe.model.head) == ("resnet18", "linear")
        assert recipe.sgd == PAPER_SGD
        assert recipe.scene.partition.kind == partition
        assert recipe.scene.partition.alpha == (0.5 if partition == "dirichlet" else None)
        noise = recipe.scene.noise
        assert (noise.kind, noise.clients, noise.mean, noise.std) == (kind, "normal", mu, 0.2)
        if kind == "asymmetric":
            assert noise.flip_to == ("next" if table == 1 else "next-in-block")
        if isinstance(method, fedcoteaching.Config):
            method = replace(method, forget_rate=mu)
        assert recipe.method == method


@pytest.mark.parametrize(("table", "suffix"), list(product((1, 2), ROWS_OF_TABLES)))
def test_headers_give_the_published_numbers(table: int, suffix: str) -> None:
    by_method = {
        line.split("|")[1].strip(): accuracies(line)
        for line in published(table).splitlines()
        if accuracies(line)
    }
    rows = [by_method[row] for row in ROWS_OF_TABLES[suffix]]
    assert {len(row) for row in rows} == {8}
    text = shipped_recipes()[f"fedes/table{table}{suffix}"]
    assert accuracies(text) == [number for row in rows for number in row]
    if len(rows) > 1:
        named = re.findall(r"^#   (\S+) +IID:", text, flags=re.MULTILINE)
        assert named == list(ROWS_OF_TABLES[suffix])


def test_the_header_says_what_clipping_does_to_the_share_that_coteaching_forgets() -> None:
    """E min(max(τ, 0), 1) for τ ~ N(μ, 0.2), by quadrature."""
    wrong = {
        mu: float(stats.norm(mu, 0.2).expect(lambda tau: np.clip(tau, 0, 1), lb=-1, ub=2))
        for mu in (0.3, 0.5)
    }
    assert wrong[0.5] == pytest.approx(0.5)
    for table in (1, 2):
        assert f"({wrong[0.3]:.3f} for 0.3," in header(f"table{table}-coteaching")


def test_the_headers_of_the_other_tables_give_the_published_numbers() -> None:
    by_method = dict(re.findall(r"([\w-]+) (\d\d\.\d\d±\d\.\d\d)", published(3)))
    for method in runs("table3"):
        assert f"{method} {by_method[method].replace('±', ' ± ')}" in header("table3")
    errors = re.findall(r"ρ_n, .*\| (\d\.\d\d) \| (\d\.\d\d) \|", published(4))
    assert re.findall(r"(\d\.\d\d) and (\d\.\d\d)", header("table4")) == errors
    assert len(errors) == 3
    assert accuracies(header("table5")) == accuracies(published(5))
    assert len(accuracies(published(5))) == 2 * 5


def published(table: int) -> str:
    """The section of a table in the collected results."""
    if not RESULTS.is_file():
        pytest.skip(f"the published numbers are not on this machine ({RESULTS})")
    after = RESULTS.read_text(encoding="utf-8").split(f"### FedES Table {table} ")[1]
    return re.split(r"^##", after, flags=re.MULTILINE)[0]


def header(name: str) -> str:
    """The comment at the head of a recipe as one line."""
    text = shipped_recipes()[f"fedes/{name}"].partition("\nname = ")[0]
    return " ".join(line.removeprefix("#").strip() for line in text.splitlines())


def accuracies(text: str) -> list[tuple[str, str]]:
    """Each mean with its deviation, in order."""
    return re.findall(r"(\d\d\.\d\d) ?± ?(\d\.\d\d)", text)


def test_one_column_of_a_table_can_be_asked_for() -> None:
    for name in ("table1", "table2-baselines"):
        options = {
            "scene.partition.kind": "iid",
            "scene.noise.kind": "symmetric",
            "scene.noise.mean": 0.3,
        }
        found = expand(read_recipe(f"fedes/{name}"), options, ()).runs
        expected = [r for cell, r in runs(name).items() if cell.endswith("iid-symmetric-mu0.3")]
        assert [replace(run.recipe, name="") for run in found] == [
            replace(recipe, name="") for recipe in expected
        ]


@pytest.mark.parametrize("suffix", ["-baselines", "-coteaching"])
def test_only_takes_a_row_or_a_column_of_the_baselines(suffix: str) -> None:
    """The forget rate goes with the column: an option for the noise alone would leave it behind."""
    whole = expand(read_recipe(f"fedes/table1{suffix}"), {}, ())
    column = whole.only(["iid", "symmetric-mu0.5"]).runs
    assert [run.recipe for run in column] == [
        recipe
        for cell, recipe in runs(f"table1{suffix}").items()
        if cell.endswith("-iid-symmetric-mu0.5")
    ]
    for row in ROWS_OF_TABLES[suffix]:
        assert len(whole.only([row]).runs) == 8


def test_table_3() -> None:
    found = runs("table3")
    methods = {name: method for rows in ROWS_OF_TABLES.values() for name, method in rows.items()}
    methods["Fed-Coteaching"] = replace(COTEACHING, second_start="head")
    assert {name: recipe.method for name, recipe in found.items()} == methods
    sgd = replace(PAPER_SGD, epochs=5, batch_size=32, lr=0.001)
    for recipe in found.values():
        assert (recipe.data.source, recipe.sgd, recipe.rounds) == ("clothing1m", sgd, 200)
        assert (recipe.scene.clients, recipe.clients_per_round) == (20, 20)


def test_table_4_and_figure_3_are_stage_one_only() -> None:
    found = runs("table4")
    indicators = {"mean": "mean", "EMD": "emd", "signed EMD": "signed_emd"}
    assert set(found) == {f"{i}-{s}" for i, s in product(indicators, SOURCES.values())}
    for (label, indicator), source in product(indicators.items(), SOURCES.values()):
        recipe = found[f"{label}-{source}"]
        assert recipe.method == Config(pretrain_rounds=10, indicator=indicator)  # type: ignore[arg-type]
        assert recipe.rounds == 10
        same_scene = runs(f"table{1 if source == 'cifar10' else 2}")["dirichlet-asymmetric-mu0.5"]
        assert (recipe.scene, recipe.data) == (same_scene.scene, same_scene.data)
    scenes = {
        "cifar10": runs("table1")["dirichlet-asymmetric-mu0.5"],
        "cifar100": runs("table2")["dirichlet-asymmetric-mu0.3"],
    }
    found = runs("figure3")
    assert set(found) == set(scenes)
    for source, whole in scenes.items():
        expected = replace(whole, rounds=50, method=Config(pretrain_rounds=50), name="")
        assert replace(found[source], name="") == expected


def test_table_5() -> None:
    rows: dict[str, dict[str, Any]] = {
        "none": {"selective": False, "weigh_by_quality": False},
        "CS": {"selective": False, "weigh_by_quality": False, "drop_below": 0.5},
        "SeGD": {"weigh_by_quality": False},
        "NaAgg": {"selective": False},
    }
    scenes = {
        "cifar10": runs("table1")["dirichlet-symmetric-mu0.3"],
        "cifar100": runs("table2")["iid-asymmetric-mu0.3"],
    }
    found = runs("table5")
    assert set(found) == {f"{row}-{source}" for row, source in product(rows, scenes)}
    for (row, settings_), (source, whole) in product(rows.items(), scenes.items()):
        expected = replace(whole, method=Config(pretrain_rounds=10, **settings_), name="")
        assert replace(found[f"{row}-{source}"], name="") == expected


@pytest.mark.parametrize(("table", "partition"), list(product((1, 2), ("iid", "dirichlet"))))
def test_fedgrs_tables_share_their_baselines_scenes(table: int, partition: str) -> None:
    baselines = cells(read_recipe(f"fedgr/table{table}-{partition}-baselines"))
    expected = {
        cell.name.removeprefix("FedAvg-"): recipe_from_table(cell.table)
        for cell in baselines
        if cell.name.startswith("FedAvg-")
    }
    found = runs(f"fedgr-table{table}-{partition}")
    assert set(found) == set(expected)
    for name, recipe in found.items():
        same = replace(expected[name], method=Config(pretrain_rounds=100), name="")
        assert replace(recipe, name="") == same
