"""FedCorr: its equations with derived numbers, its stages, its corrections, and odd clients."""

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
from scipy.special import log_softmax, softmax
from torch import Tensor

from benches import CLASSES, Linear, RecordingBench, bench_of, weights_of
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Sgd, schedule
from fedsieve.methods import fedavg, fedcorr
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedcorr import (
    PRESETS,
    Client,
    Config,
    Correction,
    Down,
    Objective,
    Server,
    Standing,
    Up,
)
from fedsieve.serial import payload_bytes, values_of
from fedsieve.sieve.lid import mean_dimension
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from fedsieve.types import SERVER, Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, final_bytes, tiny_recipe

Floats = NDArray[np.float64]
SGD = Sgd(epochs=3, batch_size=8, lr=0.1, momentum=0.5)
PLAIN = Config(beta=0.0, mixup_alpha=0.0)
"""Neither MixUp nor a proximal term."""


def f32(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


# ---------------------------------------------------------------------------------- the settings


def test_a_preset_fills_what_is_left_out_and_nothing_else() -> None:
    assert Config().switches == PRESETS["paper"]
    assert Config(preset="authors").switches == PRESETS["authors"]
    mixed = Config(preset="authors", proximal="squared")
    assert mixed.switches == replace(PRESETS["authors"], proximal="squared")


def test_the_papers_numbers() -> None:
    cfg = Config()
    assert (cfg.iterations, cfg.walk_clients, cfg.fine_tuning_rounds) == (5, 1, 500)
    assert (cfg.neighbours, cfg.beta, cfg.mixup_alpha) == (20, 5.0, 1.0)
    assert (cfg.relabel_share, cfg.confidence, cfg.trusted_up_to) == (0.5, 0.5, 0.1)
    assert cfg.correction
    assert cfg.fine_tuning


@pytest.mark.parametrize(
    "setting",
    [
        {"preset": "mine"},
        {"proximal": "cubed"},
        {"sample_loss": "mse"},
        {"evaluation_view": "strong"},
        {"iterations": -1},
        {"walk_clients": 0},
        {"fine_tuning_rounds": -1},
        {"neighbours": 1},
        {"beta": -1.0},
        {"mixup_alpha": math.nan},
        {"relabel_share": 1.1},
        {"confidence": -0.1},
        {"trusted_up_to": 2.0},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_bad_setting_is_named(setting: Mapping[str, Any]) -> None:
    with pytest.raises(FedsieveError, match=f"method.{next(iter(setting))} must be"):
        Config(**setting)


# ------------------------------------------------------------------------- losses and their split


def test_the_noise_level_is_the_share_of_the_upper_group() -> None:
    """Losses 0, 0.01, … 0.06 and 2, 2.1, 2.2: three of ten."""
    losses = f32([0.03, 2.1, 0.0, 0.01, 2.0, 0.02, 0.04, 0.05, 2.2, 0.06])
    p_clean = fedcorr.clean_probability(losses)
    assert (p_clean > 0.99).tolist() == [loss < 1 for loss in losses.tolist()]
    assert fedcorr.noise_share(p_clean) == 0.3, "in double precision, as ⌊n·δ̂·π⌋ needs"


def test_a_loss_that_is_not_finite_is_no_clean_one() -> None:
    losses = f32([0.0, math.nan, 0.01, 3.0, math.inf, 3.01])
    p_clean = fedcorr.clean_probability(losses)
    assert (p_clean > 0.5).tolist() == [True, False, True, False, False, False]
    assert fedcorr.clean_probability(f32([math.nan])).tolist() == [0.0]


@pytest.mark.parametrize("losses", [[], [1.0], [0.7, 0.7, 0.7]])
def test_losses_that_do_not_differ_are_of_right_labels(losses: list[float]) -> None:
    p_clean = fedcorr.clean_probability(f32(losses))
    assert p_clean.tolist() == [1.0] * len(losses)


def test_how_many_labels_an_iteration_may_replace() -> None:
    """100 · 0.58 · 0.5 is 28.999… in floating point."""
    assert fedcorr.relabel_count(100, 0.58, 0.5) == 29
    assert fedcorr.relabel_count(10, 0.3, 0.5) == 1
    assert fedcorr.relabel_count(10, 0.3, 1.0) == 3
    assert fedcorr.relabel_count(10, 0.0, 1.0) == 0


def test_the_largest_losses() -> None:
    losses = f32([0.5, 3.0, 0.1, 2.0, 2.0])
    assert fedcorr.largest(losses, 2).nonzero().squeeze(1).tolist() == [1, 3]
    assert fedcorr.largest(losses, 0).tolist() == [False] * 5
    assert fedcorr.largest(f32([1.0, math.nan]), 1).tolist() == [False, True]


# ------------------------------------------------------------------------------------- objective


class Echo:
    """A net of one parameter that has the pixels of an image as its logits."""

    def __init__(self, weights: Tensor) -> None:
        self.parameters = {"a": weights[:2], "b": weights[2:]}

    def __call__(self, x: Tensor) -> Outputs:
        return Outputs(None, x.flatten(1))


def a_batch(weights: Tensor, pull: float) -> tuple[Batch, Echo, float]:
    """Three samples, the net, and their mean cross entropy; w_g is (1, 1, 1, 1)."""
    z = np.random.default_rng(1).normal(size=(3, 4))
    y = np.array([0, 3, 1])
    values = {
        "x": torch.tensor(z).reshape(3, 1, 2, 2),
        "label": torch.tensor(y),
        "pull": f32(pull),
        "lam": torch.tensor(0.3),
        "keys": torch.tensor([0.9, 0.1, 0.5, 0.7]),
    }
    batch = Batch(values, {"anchor": {"b": torch.ones(2), "a": torch.ones(2)}}, None)
    return batch, Echo(weights), -log_softmax(z, axis=1)[np.arange(3), y].mean()


@pytest.mark.parametrize(("kind", "term"), [("squared", 25.0), ("norm", 5.0), (None, 0.0)])
def test_the_proximal_term_is_the_distance_or_its_square(kind: Any, term: float) -> None:
    """w − w_g = (0, 3, 0, 4), and β·δ̂ = 0.2."""
    batch, net, ce = a_batch(f32([1.0, 4.0, 1.0, 5.0]), 0.2)
    found = fedcorr.local_loss(Objective(mixes=False, proximal=kind), batch, net)
    assert float(found) == pytest.approx(ce + 0.2 * term, rel=1e-5)


@pytest.mark.parametrize(("kind", "slope"), [("squared", 6.0), ("norm", 0.6)])
def test_how_the_proximal_term_pulls(kind: Any, slope: float) -> None:
    """d/dw ‖w − w_g‖² = 2·(0, 3, 0, 4), and of the norm (0, 3, 0, 4)/5; at w_g both have none."""
    for w, expected in (([1.0, 4.0, 1.0, 5.0], slope), ([1.0] * 4, 0.0)):
        weights = f32(w).requires_grad_()
        batch, net, _ = a_batch(weights, 1.0)
        loss = fedcorr.local_loss(Objective(mixes=False, proximal=kind), batch, net)
        (gradient,) = torch.autograd.grad(loss, weights)
        assert gradient.tolist() == pytest.approx([0.0, expected, 0.0, expected * 4 / 3])


def test_mixing_and_pulling_add_up() -> None:
    """λ = 0.3 and the order 1, 2, 0 of the batch."""
    batch, net, _ = a_batch(f32([1.0, 4.0, 1.0, 5.0]), 0.2)
    z, y = batch["x"].flatten(1).numpy(), np.eye(4)[batch["label"].numpy()]
    x = 0.3 * z + 0.7 * z[[1, 2, 0]]
    soft = 0.3 * y + 0.7 * y[[1, 2, 0]]
    expected = -(soft * log_softmax(x, axis=1)).sum(axis=1).mean() + 0.2 * 25
    found = fedcorr.local_loss(Objective(mixes=True, proximal="squared"), batch, net)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_norm_does_not_pull_in_the_first_batch_of_an_epoch() -> None:
    """20 samples in batches of 8 are three steps an epoch, or two without the last small batch."""
    rows = fedcorr.pull("norm", 0.5, 20, SGD).tolist()
    assert rows == [0.0, 0.5, 0.5] * 3
    assert fedcorr.pull("norm", 0.5, 20, replace(SGD, tail="drop")).tolist() == [0.0, 0.5] * 3
    assert fedcorr.pull("squared", 0.5, 20, SGD).tolist() == [0.5] * 9
    assert fedcorr.pull("norm", 0.5, 1, SGD).tolist() == []


# --------------------------------------------------------------------------------------- a stage


def make_shard(wrong: int, n: int = 30, client: int = 0, dim: int = 60) -> Shard:
    """Sample i shows class i mod 3 as a bright pixel, others are at most so dim; the last `wrong`
    labels are of the next class."""
    true = torch.arange(n) % CLASSES
    rng = np.random.default_rng(client)
    images = torch.from_numpy(rng.integers(0, dim, (n, 1, 2, 2), dtype=np.uint8))
    images.view(n, 4)[torch.arange(n), true] = 255
    labels = torch.where(torch.arange(n) < n - wrong, true, (true + 1) % CLASSES)
    return Shard(client, images, labels, torch.arange(n), CLASSES)


def seeing(strength: float, shift: int = 0) -> Weights:
    """A model that says of a bright pixel that it is the class so many further on."""
    eye = torch.eye(CLASSES, 4).roll(shift, dims=0)
    return {"layer.weight": strength * eye, "layer.bias": torch.zeros(CLASSES)}


def down_with(**changes: Any) -> Down:
    down = Down(seeing(1.0), pre_processing=True, noisy=None, noise_level=0.0, corrections=())
    return replace(down, **changes)


def train(
    cfg: Config, shard: Shard, down: Down, client: Client | None = None, sgd: Sgd = SGD
) -> tuple[Client, Up, Mapping[str, float], RecordingBench]:
    bench = RecordingBench(bench_of(Linear, sgd))
    state = client or fedcorr.init_client(cfg, shard)
    return *fedcorr.train(cfg, state, down, shard, bench, Streams(5, 2, shard.client)), bench


def logits_of(weights: Weights, shard: Shard) -> Floats:
    """The linear model by NumPy, on normalised pixels."""
    x = (shard.images.flatten(1).numpy() / 255 - 0.25) / 0.5
    z: Floats = x @ weights["layer.weight"].double().numpy().T + weights["layer.bias"].numpy()
    return z


def server_with(cfg: Config, clients: int = 6, per_round: int = 2, rounds: int = 99) -> Server:
    federation = Federation((30,) * clients, per_round, rounds, CLASSES)
    return fedcorr.init_server(cfg, weights_of(Linear, 1), federation)


def up_with(lid: float | None, level: float = 0.4, seed: int = 2) -> Up:
    return Up(weights_of(Linear, seed), 30, lid, level)


def walked(cfg: Config, server: Server, scores: Mapping[int, float], first: int = 0) -> Server:
    """The server after an iteration in which client k had the score scores[k] and δ̂ = k/10."""
    rounds = fedcorr.rounds_per_iteration(cfg, server.federation)
    for round in range(first, first + rounds):
        chosen = fedcorr.select(cfg, server, round, Streams(1, round, SERVER))
        ups = {k: up_with(scores[k], k / 10, seed=round) for k in chosen if k in scores}
        if ups:
            server, _ = fedcorr.merge(cfg, server, round, ups)
    return server


SCORES = {0: 1.0, 1: 3.0, 2: 1.1, 3: 3.2, 4: 0.9, 5: 3.1}
"""The odd clients are noisy."""


# -------------------------------------------------------------------------------------- schedule


def test_an_iteration_is_a_walk_through_all_clients() -> None:
    cfg = Config(iterations=2, fine_tuning_rounds=3, correction=False)
    server = server_with(cfg)
    chosen = [fedcorr.select(cfg, server, t, Streams(1, t, SERVER)) for t in range(12)]
    assert all(len(clients) == 1 for clients in chosen)
    walks = [[clients[0] for clients in chosen[first : first + 6]] for first in (0, 6)]
    assert [sorted(walk) for walk in walks] == [list(range(6))] * 2
    assert walks[0] != walks[1]
    downs = [fedcorr.send(cfg, server, t, 0) for t in (0, 11, 12)]
    assert [down.pre_processing for down in downs] == [True, True, False]


@pytest.mark.parametrize(("walkers", "rounds"), [(1, 6), (2, 3), (4, 3)])
def test_more_clients_may_walk_at_once_but_no_more_than_in_other_rounds(
    walkers: int, rounds: int
) -> None:
    cfg = Config(iterations=1, walk_clients=walkers)
    server = server_with(cfg, per_round=2)
    assert fedcorr.first_fine_tuning_round(cfg, server.federation) == rounds
    chosen = [fedcorr.select(cfg, server, t, Streams(1, t, SERVER)) for t in range(rounds)]
    assert sorted(k for clients in chosen for k in clients) == list(range(6))


def test_what_a_client_of_the_walk_trained_is_what_the_next_one_gets() -> None:
    cfg = Config(iterations=1)
    server, _ = fedcorr.merge(cfg, server_with(cfg), 0, {2: up_with(1.0, seed=9)})
    assert_same_weights(fedcorr.send(cfg, server, 1, 1).weights, weights_of(Linear, 9))


def test_fine_tuning_asks_trusted_clients_and_usual_training_any() -> None:
    cfg = Config(iterations=1, fine_tuning_rounds=40, trusted_up_to=0.1)
    server = walked(cfg, server_with(cfg, per_round=3), SCORES)
    met: dict[bool, set[int]] = {True: set(), False: set()}
    for t in range(6, 86):
        chosen = fedcorr.select(cfg, server, t, Streams(1, t, SERVER))
        assert len(set(chosen)) == 3
        assert list(chosen) == sorted(chosen)
        met[t < 46] |= set(chosen)
    assert met[True] == {0, 1, 2, 4}, "client 1 is noisy with δ̂ = 0.1, and so trusted"
    assert met[False] == set(range(6))


def test_fewer_trusted_clients_than_are_asked_all_take_part() -> None:
    cfg = Config(iterations=1, fine_tuning_rounds=5)
    few = SCORES | {0: 3.0, 2: 3.1}
    server = walked(cfg, server_with(cfg, per_round=5), few)
    assert fedcorr.select(cfg, server, 6, Streams(1, 6, SERVER)) == (0, 1, 4), "δ̂_0 is 0"


def test_everybody_is_trusted_with_kappa_1() -> None:
    cfg = Config(iterations=1, fine_tuning_rounds=9, trusted_up_to=1.0)
    server = walked(cfg, server_with(cfg, per_round=6), SCORES)
    assert fedcorr.select(cfg, server, 6, Streams(1, 6, SERVER)) == tuple(range(6))


def test_without_a_trusted_client_those_of_least_noise_are_asked() -> None:
    standings = tuple(Standing(reported=level, noisy=True) for level in (0.9, 0.4, 0.6, 0.4))
    assert fedcorr.trusted_clients(standings, 0.1, 2) == (1, 3)
    assert fedcorr.trusted_clients(standings, 0.1, 3) == (1, 2, 3)
    assert fedcorr.trusted_clients(standings, 0.4, 1) == (1, 3)


# --------------------------------------------------------------------------------- who is noisy


def test_the_verdict_is_by_cumulative_scores() -> None:
    """After two iterations client 0 has 1 + 4 = 5, as much as the noisy ones' 3 + 2."""
    cfg = Config(iterations=2)
    first = walked(cfg, server_with(cfg), SCORES)
    assert [standing.noisy for standing in first.standings] == [False, True] * 3
    second = walked(cfg, first, dict.fromkeys(SCORES, 2.0) | {0: 4.0}, first=6)
    noisy = [standing.noisy for standing in second.standings]
    assert noisy == [True, True, False, True, False, True]
    assert second.standings[0].lid == 5.0
    assert second.standings[0].scores == 2


def test_a_clean_client_has_no_noise_whatever_it_sent() -> None:
    cfg = Config(iterations=1)
    server = walked(cfg, server_with(cfg), SCORES)
    levels = [standing.noise_level for standing in server.standings]
    assert levels == [0.0, 0.1, 0.0, 0.3, 0.0, 0.5]
    believed = fedcorr.sieve(server)
    assert [believed[k].noise_rate for k in range(6)] == levels
    downs = [fedcorr.send(cfg, server, 6, k) for k in (2, 3)]
    assert [(down.noisy, down.noise_level) for down in downs] == [(False, 0.0), (True, 0.3)]


def test_before_the_first_verdict_nothing_is_believed() -> None:
    cfg = Config(iterations=1)
    server = server_with(cfg)
    assert fedcorr.sieve(server) == {}
    assert fedcorr.send(cfg, server, 0, 0).noisy is None
    server, metrics = fedcorr.merge(cfg, server, 0, {3: up_with(1.0)})
    assert metrics == {}
    assert fedcorr.sieve(server) == {}


def test_the_numbers_of_a_verdict() -> None:
    cfg = Config(iterations=1, walk_clients=6)
    server = server_with(cfg, per_round=6)
    ups = {k: up_with(score, k / 10) for k, score in SCORES.items()}
    _, metrics = fedcorr.merge(cfg, server, 0, ups)
    assert metrics == pytest.approx(
        {
            "noisy_clients": 3,
            "trusted_clients": 4,
            "noise_level": 0.9 / 6,
            "lid_clean": 1.0,
            "lid_noisy": 3.1,
        }
    )


@pytest.mark.parametrize("scores", [dict.fromkeys(range(6), 2.0), {}, {3: 5.0}])
def test_scores_that_do_not_differ_leave_nobody_noisy(scores: dict[int, float]) -> None:
    """All equal, none at all, or a single one."""
    cfg = Config(iterations=1, fine_tuning_rounds=2)
    server = fedcorr.settled(cfg, walked(cfg, server_with(cfg, per_round=6), scores), 6)
    assert server.settled == 1
    assert not any(standing.noisy for standing in server.standings)
    assert fedcorr.select(cfg, server, 6, Streams(1, 6, SERVER)) == tuple(range(6))


def test_a_client_without_a_score_counts_as_clean() -> None:
    cfg = Config(iterations=1, walk_clients=6)
    server = server_with(cfg, per_round=6)
    ups = {k: up_with(None if k == 5 else score) for k, score in SCORES.items()}
    server, _ = fedcorr.merge(cfg, server, 0, ups)
    assert [standing.noisy for standing in server.standings] == [False, True] * 2 + [False] * 2
    assert set(fedcorr.sieve(server)) == {0, 1, 2, 3, 4}


def test_who_missed_an_iteration_is_judged_by_the_others() -> None:
    """Client 1 has 3 of one iteration, which counts as 6 of two; client 4 has 0.9, and so 1.8."""
    cfg = Config(iterations=2)
    once = {k: score for k, score in SCORES.items() if k not in (1, 4)}
    server = fedcorr.settled(cfg, walked(cfg, server_with(cfg), once), 6)
    server = fedcorr.settled(cfg, walked(cfg, server, SCORES, first=6), 12)
    assert [standing.noisy for standing in server.standings] == [False, True] * 3


@pytest.mark.parametrize("missing", range(6))
def test_an_iteration_ends_even_if_a_round_of_it_brought_nothing(missing: int) -> None:
    """Also the last one: no merge says then that the iteration is over."""
    cfg = Config(iterations=1, fine_tuning_rounds=4)
    some = {k: score for k, score in SCORES.items() if k != missing}
    server = walked(cfg, server_with(cfg), some)
    down = fedcorr.send(cfg, server, 6, 3)
    assert down.noisy is (missing != 3)
    for correction in down.corrections:
        assert_same_weights(correction.weights, server.weights)
    chosen = fedcorr.select(cfg, server, 6, Streams(1, 6, SERVER))
    assert set(chosen) <= {0, 1, 2, 4, missing}
    later, metrics = fedcorr.merge(cfg, server, 6, {0: Up(weights_of(Linear, 60), 30, None, None)})
    (correction,) = later.corrections
    assert_same_weights(correction.weights, server.weights)
    assert ("noisy_clients" in metrics) is (server.settled == 0), "the verdict is told once"


# ----------------------------------------------------------------- which corrections are sent


def test_a_noisy_client_gets_the_model_that_an_iteration_ended_with_once() -> None:
    """In the second iteration and in no later round; in the meantime the walk has moved on."""
    cfg = Config(iterations=2)
    server = walked(cfg, server_with(cfg), SCORES)
    end = server.weights
    server, _ = fedcorr.merge(cfg, server, 6, {0: up_with(1.0, seed=40)})
    down = fedcorr.send(cfg, server, 7, 3)
    (correction,) = down.corrections
    assert (correction.number, correction.suspects_only) == (1, True)
    assert_same_weights(correction.weights, end)
    assert_same_weights(down.weights, weights_of(Linear, 40))
    server, _ = fedcorr.merge(cfg, server, 7, {3: up_with(3.0)})
    assert fedcorr.send(cfg, server, 8, 3).corrections == ()
    assert fedcorr.send(cfg, server, 8, 0).corrections == (), "a clean client corrects nothing"


def test_a_client_whose_update_was_refused_gets_it_again() -> None:
    cfg = Config(iterations=1)
    server = walked(cfg, server_with(cfg), SCORES)
    assert len(fedcorr.send(cfg, server, 6, 3).corrections) == 1
    server, _ = fedcorr.merge(cfg, server, 6, {1: Up(server.weights, 30, None, None)})
    assert len(fedcorr.send(cfg, server, 7, 3).corrections) == 1


def test_a_model_is_forgotten_when_all_noisy_clients_had_it() -> None:
    cfg = Config(iterations=1)
    server = walked(cfg, server_with(cfg), SCORES)
    for t, client in enumerate((1, 0, 3)):
        assert len(server.corrections) == 1
        up = Up(server.weights, 30, None, None)
        server, _ = fedcorr.merge(cfg, server, 6 + t, {client: up})
    assert len(server.corrections) == 1
    server, _ = fedcorr.merge(cfg, server, 9, {5: Up(server.weights, 30, None, None)})
    assert server.corrections == ()


def test_after_the_fine_tuning_noisy_clients_get_both_models() -> None:
    """Client 1 is noisy and trusted: it corrects the iteration's labels in the fine-tuning."""
    cfg = Config(iterations=1, fine_tuning_rounds=2)
    server = walked(cfg, server_with(cfg), SCORES)
    pre_processed = server.weights
    server, _ = fedcorr.merge(cfg, server, 6, {1: Up(weights_of(Linear, 50), 30, None, None)})
    server, metrics = fedcorr.merge(cfg, server, 7, {0: Up(weights_of(Linear, 51), 30, None, None)})
    assert metrics["noisy_clients"] == 3
    first, second = fedcorr.send(cfg, server, 8, 3).corrections
    assert (first.number, first.suspects_only) == (1, True)
    assert (second.number, second.suspects_only) == (2, False)
    assert_same_weights(first.weights, pre_processed)
    assert_same_weights(second.weights, weights_of(Linear, 51))
    (only,) = fedcorr.send(cfg, server, 8, 1).corrections
    assert only.number == 2
    assert fedcorr.send(cfg, server, 8, 0).corrections == ()


def test_without_fine_tuning_nobody_judges_all_labels() -> None:
    cfg = Config(iterations=1, fine_tuning_rounds=500, fine_tuning=False)
    server = walked(cfg, server_with(cfg, per_round=6), SCORES)
    assert fedcorr.first_usual_round(cfg, server.federation) == 6
    assert fedcorr.select(cfg, server, 6, Streams(1, 6, SERVER)) == tuple(range(6))
    assert [c.number for c in fedcorr.send(cfg, server, 6, 3).corrections] == [1]


def test_without_correction_no_model_is_sent_or_kept() -> None:
    cfg = Config(iterations=1, fine_tuning_rounds=0, correction=False)
    server = walked(cfg, server_with(cfg), SCORES)
    assert server.corrections == ()
    assert fedcorr.send(cfg, server, 6, 3) == replace(
        fedcorr.send(cfg, server, 6, 3), noisy=True, noise_level=0.3, corrections=()
    )


def test_without_iterations_nobody_is_noisy_and_nothing_corrected() -> None:
    cfg = Config(iterations=0, fine_tuning_rounds=1)
    server = server_with(cfg, per_round=6)
    assert fedcorr.select(cfg, server, 0, Streams(1, 0, SERVER)) == tuple(range(6))
    server, _ = fedcorr.merge(cfg, server, 0, {0: Up(server.weights, 30, None, None)})
    down = fedcorr.send(cfg, server, 1, 0)
    assert (down.pre_processing, down.noisy, down.corrections) == (False, False, ())


@pytest.mark.parametrize(
    ("lid", "level", "sentence"),
    [
        (1e308, 0.4, r"LID score 1e\+308; it must be above 0, and 1e\+06 at the most"),
        (0.0, 0.4, "LID score 0.0; it must be above 0"),
        (3.0, 1.5, r"noise level 1.5; it must be in \[0, 1\]"),
        (3.0, -0.1, "noise level -0.1"),
    ],
)
def test_numbers_that_no_client_can_measure_are_refused(
    lid: float, level: float, sentence: str
) -> None:
    """A sum of LID scores that overflows would stop every later verdict."""
    cfg = Config(iterations=1)
    with pytest.raises(FedsieveError, match=sentence):
        fedcorr.merge(cfg, server_with(cfg), 0, {0: up_with(lid, level)})


def test_nobody_to_merge_is_refused_and_no_samples_change_nothing() -> None:
    cfg = Config(iterations=1)
    server = server_with(cfg)
    with pytest.raises(FedsieveError, match="No client took part in round 3"):
        fedcorr.merge(cfg, server, 3, {})
    after, _ = fedcorr.merge(cfg, server, 0, {0: Up(weights_of(Linear, 9), 0, None, None)})
    assert_same_weights(after.weights, server.weights)


# ------------------------------------------------------------------------- a round at a client


def test_what_a_client_measures_is_of_the_model_that_it_trained() -> None:
    shard = make_shard(wrong=9)
    client, up, metrics, bench = train(Config(neighbours=5), shard, down_with())
    z, y = logits_of(up.weights, shard), shard.labels.numpy()
    losses = -log_softmax(z, axis=1)[np.arange(30), y]
    assert up.lid == pytest.approx(mean_dimension(torch.tensor(softmax(z, axis=1)), 5), rel=1e-3)
    assert metrics["lid"] == up.lid
    assert client.losses is not None
    np.testing.assert_allclose(client.losses, losses, rtol=1e-4, atol=1e-6)
    assert up.noise_level == pytest.approx(9 / 30), "bright pixels are easy to learn"
    assert bench.views == ["raw"]
    assert client.labels is None
    assert fedcorr.own_sieve(client) is None
    assert fedcorr.refined(client) is None


def test_the_program_looks_at_augmented_images_and_applies_softmax_twice() -> None:
    shard = make_shard(wrong=9)
    correcting = down_with(noisy=True, noise_level=0.4, corrections=(ITERATION,))
    _, _, _, bench = train(Config(preset="authors"), shard, correcting, with_losses(shard))
    assert bench.views == ["weak", "weak"], "for the correction, and after the training"
    client, up, _, bench = train(Config(preset="authors"), shard, down_with())
    assert bench.views == ["weak"]
    p = softmax(logits_of(up.weights, shard), axis=1)  # the weak view of these is the raw one
    losses = -log_softmax(p, axis=1)[np.arange(30), shard.labels.numpy()]
    assert client.losses is not None
    np.testing.assert_allclose(client.losses, losses, rtol=1e-4, atol=1e-6)


def test_later_stages_measure_nothing() -> None:
    down = down_with(pre_processing=False, noisy=False)
    client, up, metrics, bench = train(Config(), make_shard(wrong=9), down)
    assert (up.lid, up.noise_level, client.losses) == (None, None, None)
    assert bench.views == []
    assert "lid" not in metrics


def test_what_leaves_a_site_is_the_model_a_count_and_at_most_two_numbers() -> None:
    shard = make_shard(wrong=9)
    _, up, _, _ = train(Config(), shard, down_with())
    tensors, numbers = values_of(up)
    assert set(tensors) == {"weights.layer.weight", "weights.layer.bias"}
    assert set(numbers) == {"samples", "lid", "noise_level"}
    assert payload_bytes(up) == 4 * 15 + 8 * 3
    _, up, _, _ = train(Config(), shard, down_with(pre_processing=False, noisy=True))
    assert payload_bytes(up) == 4 * 15 + 8


def fedavg_of(shard: Shard, down: Down) -> Weights:
    there = fedavg.Down(down.weights)
    cfg, client, bench = fedavg.Config(), fedavg.Client(), bench_of(Linear, SGD)
    return fedavg.train(cfg, client, there, shard, bench, Streams(5, 2, 0))[1].weights


@pytest.mark.parametrize(
    ("cfg", "down"),
    [
        (PLAIN, down_with(noisy=True, noise_level=0.5)),
        (Config(mixup_alpha=0.0), down_with()),
        (Config(mixup_alpha=0.0), down_with(noisy=False)),
        (
            Config(mixup_alpha=0.0),
            down_with(pre_processing=False, noisy=True, noise_level=0.5),
        ),
    ],
    ids=["beta 0", "first iteration", "clean client", "later stages"],
)
def test_without_mixup_it_is_fedavg_where_nothing_pulls(cfg: Config, down: Down) -> None:
    shard = make_shard(wrong=9)
    _, up, _, bench = train(cfg, shard, down)
    assert bench.plans[0].constants == {}
    assert_same_weights(up.weights, fedavg_of(shard, down))


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_training_with_the_proximal_term_is_sgd_by_hand(preset: Any) -> None:
    """β·δ̂ = 2·0.4 pulls with 2·0.8·(w − w_g), or with 0.8·(w − w_g)/‖w − w_g‖ where it is the norm,
    but not in the first of an epoch's four batches; momentum 0.5."""
    shard, start = make_shard(wrong=9), seeing(1.0)
    cfg = Config(preset=preset, beta=2.0, mixup_alpha=0.0)
    _, up, _, _ = train(cfg, shard, down_with(noisy=True, noise_level=0.4))
    x = (shard.images.flatten(1).numpy() / 255 - 0.25) / 0.5
    x = np.concatenate([x, np.ones((30, 1))], axis=1)
    parts = (start["layer.weight"].double(), start["layer.bias"][:, None].double())
    anchor = torch.cat(parts, dim=1).numpy()
    w, v = anchor.copy(), np.zeros_like(anchor)
    for step, rows in enumerate(schedule(30, SGD, Streams(5, 2, 0)("batches")).rows):
        error = softmax(x[rows] @ w.T, axis=1) - np.eye(CLASSES)[shard.labels.numpy()[rows]]
        away = w - anchor
        norm = np.sqrt((away**2).sum())
        pull = 2 * away if preset == "paper" else away / norm * (step % 4 > 0) if norm else 0 * w
        v = 0.5 * v + error.T @ x[rows] / len(rows) + 0.8 * pull
        w = w - 0.1 * v
    np.testing.assert_allclose(up.weights["layer.weight"], w[:, :4], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(up.weights["layer.bias"], w[:, 4], rtol=1e-4, atol=1e-5)


def test_the_noisier_a_client_was_found_the_nearer_it_stays() -> None:
    """With small steps; β·δ̂ = 5 at a learning rate of 0.1 is just where large ones overshoot."""
    shard, start = make_shard(wrong=9), seeing(1.0)
    ways = []
    for level in (0.0, 0.3, 0.9):
        down = down_with(noisy=level > 0, noise_level=level)
        _, up, _, _ = train(Config(mixup_alpha=0.0), shard, down, sgd=replace(SGD, lr=0.02))
        ways.append(sum(float((up.weights[n] - start[n]).norm() ** 2) for n in start))
    assert ways[0] > 2 * ways[1] > 2 * ways[2] > 0


def test_mixup_is_drawn_for_each_step() -> None:
    _, _, _, bench = train(Config(), make_shard(wrong=9), down_with())
    (plan,) = bench.plans
    assert set(plan.per_step) == {"lam", "keys"}
    assert len(set(plan.per_step["lam"].tolist())) == 12


# ------------------------------------------------------------------------------ correcting labels


def correct(
    client: Client, shard: Shard, corrections: tuple[Correction, ...], **changes: Any
) -> Client:
    """What the client is after hearing that it is noisy with δ̂ = 0.4, and correcting."""
    cfg = Config(mixup_alpha=0.0, **changes)
    down = down_with(noisy=True, noise_level=0.4, pre_processing=False, corrections=corrections)
    after, _, _, bench = train(cfg, shard, down, client)
    assert after.labels is not None
    assert torch.equal(bench.plans[0].columns["label"], after.labels), "it trains on them"
    return after


def with_losses(shard: Shard) -> Client:
    """Wrong labels, the last ones, have the larger losses, the more so the later."""
    return Client(losses=torch.arange(len(shard)) / 100 + 2 * (shard.labels != seen(shard)))


def seen(shard: Shard) -> Tensor:
    return torch.arange(len(shard)) % CLASSES


ITERATION = Correction(1, seeing(3.0), suspects_only=True)
FINE_TUNED = Correction(2, seeing(3.0), suspects_only=False)


def replaced(client: Client, shard: Shard) -> list[int]:
    assert client.labels is not None
    return (client.labels != shard.labels).nonzero().squeeze(1).tolist()


@pytest.mark.parametrize(
    ("share", "rows"), [(0.5, range(24, 30)), (0.25, range(27, 30)), (0.0, range(0))]
)
def test_an_iteration_corrects_the_largest_losses(share: float, rows: range) -> None:
    """30 · 0.4 · ½ = 6 of the nine wrong labels, or 30 · 0.4 · ¼ = 3."""
    shard = make_shard(wrong=9)
    after = correct(with_losses(shard), shard, (ITERATION,), relabel_share=share)
    assert replaced(after, shard) == list(rows)
    assert after.labels is not None
    assert (after.labels == seen(shard))[24:].tolist() == [i in rows for i in range(24, 30)]
    assert after.losses is None, "they have served their purpose"


def test_suspects_that_are_right_keep_their_labels() -> None:
    """The model agrees with the given labels of the twelve largest losses but for nine."""
    shard = make_shard(wrong=9)
    after = correct(with_losses(shard), shard, (ITERATION,), relabel_share=1.0)
    assert replaced(after, shard) == list(range(21, 30))


def test_a_label_is_replaced_only_where_the_model_is_sure() -> None:
    """θ just above and below the third smallest confidence of the six suspects; then p = θ."""
    shard = make_shard(wrong=9)
    p = softmax(logits_of(seeing(1.0), shard), axis=1).max(axis=1)
    order = np.argsort(p[24:]) + 24
    theta = float(np.float32(p[order[2]]))
    weak = replace(ITERATION, weights=seeing(1.0))
    after = correct(with_losses(shard), shard, (weak,), confidence=theta + 1e-6)
    assert replaced(after, shard) == sorted(order[3:].tolist())
    after = correct(with_losses(shard), shard, (weak,), confidence=theta - 1e-6)
    assert replaced(after, shard) == sorted(order[2:].tolist())
    flat = replace(ITERATION, weights=seeing(0.0))
    assert replaced(correct(with_losses(shard), shard, (flat,), confidence=1 / 3), shard) == []


def test_after_the_fine_tuning_all_labels_are_judged() -> None:
    shard = make_shard(wrong=9)
    after = correct(Client(labels=shard.labels), shard, (FINE_TUNED,))
    assert after.labels is not None
    assert torch.equal(after.labels, seen(shard))


def test_two_corrections_are_made_in_their_order() -> None:
    """The first gives six labels the class after the next one; the second is sure of none, or of
    all."""
    shard = make_shard(wrong=9)
    other = replace(ITERATION, weights=seeing(3.0, shift=2))
    unsure = replace(FINE_TUNED, weights=seeing(0.0))
    after = correct(with_losses(shard), shard, (other, unsure))
    assert replaced(after, shard) == list(range(24, 30))
    assert after.labels is not None
    assert torch.equal(after.labels[24:], (seen(shard)[24:] + 2) % CLASSES)
    after = correct(with_losses(shard), shard, (other, FINE_TUNED))
    assert after.labels is not None
    assert torch.equal(after.labels, seen(shard))


def test_corrected_labels_are_those_that_the_next_iteration_measures() -> None:
    shard = make_shard(wrong=9)
    down = down_with(noisy=True, noise_level=0.6, corrections=(ITERATION,))
    after, up, metrics, _ = train(Config(relabel_share=1.0), shard, down, with_losses(shard))
    assert metrics["replaced_share"] == pytest.approx(0.3)
    assert after.labels is not None
    assert after.losses is not None
    z = logits_of(up.weights, shard)
    losses = -log_softmax(z, axis=1)[np.arange(30), seen(shard).numpy()]
    np.testing.assert_allclose(after.losses, losses, rtol=1e-4, atol=1e-6)


def test_a_correction_that_comes_twice_changes_nothing_more() -> None:
    """As where a machine lost what the client had sent."""
    shard = make_shard(wrong=9)
    once = correct(with_losses(shard), shard, (ITERATION,))
    twice = correct(once, shard, (ITERATION,))
    assert replaced(twice, shard) == replaced(once, shard)


def test_labels_stay_corrected() -> None:
    shard = make_shard(wrong=9)
    after = correct(with_losses(shard), shard, (ITERATION,))
    later = correct(after, shard, ())
    assert replaced(later, shard) == list(range(24, 30))
    refined = fedcorr.refined(later)
    assert refined is not None
    assert (refined == seen(shard)).tolist() == [True] * 21 + [False] * 3 + [True] * 6


def test_what_a_noisy_client_believes_of_its_given_labels() -> None:
    """By its losses; by the global model where it was sure and kept the label; not at all where it
    replaced it."""
    shard = make_shard(wrong=9)
    after = correct(with_losses(shard), shard, ())
    belief = fedcorr.own_sieve(after)
    assert belief is not None
    assert belief.p_clean is not None
    assert (belief.p_clean > 0.5).tolist() == [True] * 21 + [False] * 9
    assert belief.noise_rate == pytest.approx(0.3)
    after = correct(after, shard, (FINE_TUNED,))
    belief = fedcorr.own_sieve(after)
    assert belief is not None
    assert belief.p_clean is not None
    p = softmax(logits_of(seeing(3.0), shard), axis=1).max(axis=1)
    np.testing.assert_allclose(belief.p_clean[:21], p[:21], rtol=1e-5)
    assert belief.p_clean[21:].tolist() == [0.0] * 9


def test_a_clean_client_trusts_its_labels() -> None:
    shard = make_shard(wrong=9)
    after, _, _, _ = train(Config(), shard, down_with(noisy=False), with_losses(shard))
    belief = fedcorr.own_sieve(after)
    assert belief is not None
    assert belief.p_clean is not None
    assert belief.p_clean.tolist() == [1.0] * 30
    refined = fedcorr.refined(after)
    assert refined is not None
    assert torch.equal(refined, shard.labels)


def test_a_client_that_is_found_clean_later_trusts_what_it_kept() -> None:
    """Noisy after the first iteration, with six labels replaced, and clean after the second."""
    shard = make_shard(wrong=9)
    once = correct(with_losses(shard), shard, (ITERATION,))
    measured = replace(once, losses=with_losses(shard).losses)
    after, _, _, _ = train(Config(), shard, down_with(noisy=False), measured)
    assert after.p_clean is not None
    assert after.p_clean.tolist() == [1.0] * 24 + [0.0] * 6


def test_a_client_that_was_never_measured_makes_no_correction_of_an_iteration() -> None:
    shard = make_shard(wrong=9)
    assert replaced(correct(Client(), shard, (ITERATION,)), shard) == []


# ----------------------------------------------------------- as if labels were corrected at once


FAST = replace(SGD, lr=0.5)


def corrected_at_once(cfg: Config, shards: list[Shard], rounds: int, per_round: int) -> Any:
    """The paper's order of events: at the end of an iteration, and of the fine-tuning, each noisy
    client corrects its labels there and then. The model and all labels after so many rounds."""
    bench, sizes = bench_of(Linear, FAST), tuple(map(len, shards))
    server = fedcorr.init_server(
        cfg, weights_of(Linear, 1), Federation(sizes, per_round, rounds, CLASSES)
    )
    labels = {k: shard.labels for k, shard in enumerate(shards)}
    losses: dict[int, Floats] = {}
    weights, iteration = server.weights, len(shards)
    for round in range(rounds):
        in_walk = round < cfg.iterations * iteration
        chosen = fedcorr.select(cfg, server, round, Streams(7, round, SERVER))
        ups = {}
        for k in chosen:
            level = server.standings[k].noise_level
            down = Down(weights, in_walk, None, level, ())
            given = replace(shards[k], labels=labels[k])
            state, ups[k], _ = fedcorr.train(
                cfg, Client(), down, given, bench, Streams(7, round, k)
            )
            if in_walk:
                assert state.losses is not None
                losses[k] = state.losses.double().numpy()
        server, _ = fedcorr.merge(cfg, server, round, ups)
        weights = server.weights
        done = round + 1
        after_iteration = in_walk and done % iteration == 0
        if not (after_iteration or done == cfg.iterations * iteration + cfg.fine_tuning_rounds):
            continue
        for k, shard in enumerate(shards):
            if server.standings[k].noisy:
                p = softmax(logits_of(weights, shard), axis=1)
                rows = np.arange(len(shard))
                if after_iteration:
                    count = int(len(shard) * server.standings[k].noise_level * cfg.relabel_share)
                    rows = np.argsort(-losses[k], kind="stable")[:count]
                rows = rows[p.max(axis=1)[rows] > cfg.confidence]
                labels[k] = labels[k].clone()
                labels[k][rows] = torch.tensor(p.argmax(axis=1)[rows])
    return weights, labels


@pytest.mark.parametrize("rounds", [14, 21, 23, 33])
def test_it_trains_as_if_labels_were_corrected_at_once(rounds: int) -> None:
    """Three walks through seven clients, two rounds of fine-tuning, and ten of usual training; on
    images that the model is not sure of, so that any other model would correct other labels."""
    cfg = Config(iterations=3, fine_tuning_rounds=2, neighbours=8, trusted_up_to=0.2)
    wrong = (5, 12, 10, 15, 0, 20, 8)
    shards = [make_shard(w, client=k, dim=255) for k, w in enumerate(wrong)]
    weights, labels = corrected_at_once(cfg, shards, rounds, per_round=3)

    bench = bench_of(Linear, FAST)
    federation = Federation((30,) * 7, 3, rounds, CLASSES)
    server = fedcorr.init_server(cfg, weights_of(Linear, 1), federation)
    clients = {k: fedcorr.init_client(cfg, shard) for k, shard in enumerate(shards)}
    changed = 0
    for round in range(rounds):
        ups = {}
        for k in fedcorr.select(cfg, server, round, Streams(7, round, SERVER)):
            down = fedcorr.send(cfg, server, round, k)
            rng = Streams(7, round, k)
            clients[k], ups[k], _ = fedcorr.train(cfg, clients[k], down, shards[k], bench, rng)
            if round >= 23:
                mine = clients[k].labels
                assert mine is not None
                assert torch.equal(mine, labels[k])
                changed += int((mine != shards[k].labels).sum())
        server, _ = fedcorr.merge(cfg, server, round, ups)
    assert_same_weights(server.weights, weights)
    assert rounds <= 23 or changed > 20


# ------------------------------------------------------------------------------------ odd clients


def test_equal_predictions_have_no_dimension_and_make_no_client_noisy() -> None:
    shard = make_shard(wrong=9)
    same = replace(shard, images=torch.zeros_like(shard.images))
    _, up, metrics, _ = train(Config(), same, down_with())
    assert up.lid is None
    assert "lid" not in metrics
    assert up.noise_level is not None


@pytest.mark.parametrize(
    ("n", "neighbours", "scored"),
    [(1, 20, False), (3, 20, False), (5, 20, False), (6, 20, True), (3, 2, True), (2, 2, False)],
)
def test_a_small_client_has_as_many_neighbours_as_it_can(
    n: int, neighbours: int, scored: bool
) -> None:
    _, up, _, _ = train(Config(neighbours=neighbours), make_shard(wrong=0, n=n), down_with())
    assert (up.lid is not None) is scored
    assert up.samples == n


@pytest.mark.parametrize("n", [3, 4, 5, 6, 10])
def test_one_tiny_client_does_not_decide_who_else_is_noisy(n: int) -> None:
    """Twenty clients as on CIFAR-10, by the page of FedCorr, and one with a few predictions; five
    iterations. From two neighbours its score is often ten times theirs."""
    rng = np.random.default_rng(n)
    clean, noisy = rng.normal(3.7, 0.1, (5, 10)), rng.normal(4.85, 0.2, (5, 10))
    lids = np.concatenate([clean, noisy], axis=1).sum(axis=0)
    tiny = [fedcorr.lid_score(torch.tensor(rng.dirichlet(np.ones(10), n)), 20) for _ in range(5)]
    scores = [score for score in tiny if score is not None]
    standings = [Standing(lid=float(lid), scores=5) for lid in lids]
    standings.append(Standing(lid=sum(scores), scores=len(scores)))
    verdict = fedcorr.judged(tuple(standings), 5)
    assert [standing.noisy for standing in verdict[:20]] == [False] * 10 + [True] * 10


def test_a_client_without_samples_returns_what_it_got() -> None:
    down = down_with()
    client, up, metrics, bench = train(Config(), make_shard(wrong=0, n=0), down)
    assert up == Up(down.weights, 0, None, None)
    assert client == Client()
    assert metrics == {"loss": 0.0}
    assert bench.plans == []


def test_a_diverged_model_still_ends_its_round() -> None:
    broken = {name: tensor * math.nan for name, tensor in seeing(1.0).items()}
    shard = make_shard(wrong=9)
    client, up, _, _ = train(Config(), shard, down_with(weights=broken))
    assert (up.lid, up.noise_level) == (None, 1.0)
    down = down_with(noisy=True, noise_level=1.0, corrections=(replace(ITERATION, weights=broken),))
    after, _, _, _ = train(Config(), shard, down, client)
    assert replaced(after, shard) == []
    assert after.p_clean is not None
    assert after.p_clean.tolist() == [0.0] * 30


def test_other_samples_than_remembered_are_refused() -> None:
    shard = make_shard(wrong=9)
    for client in (with_losses(shard), Client(labels=shard.labels)):
        with pytest.raises(FedsieveError, match="labels for other samples than the 12 it holds"):
            train(Config(), make_shard(wrong=0, n=12), down_with(), client)


# ------------------------------------------------------------------------------------- whole runs


def test_everything_switched_off_is_fedavg(tmp_path: Path) -> None:
    off = {"iterations": 0, "fine_tuning": False, "correction": False, "mixup_alpha": 0.0}
    run(tiny_recipe({"name": "fedcorr", **off}), tmp_path / "fedcorr")
    run(tiny_recipe(), tmp_path / "fedavg")
    assert final_bytes(tmp_path / "fedcorr") == final_bytes(tmp_path / "fedavg")


def test_a_whole_run_finds_the_noisy_clients(tmp_path: Path) -> None:
    """Three of six sites have half of their labels wrong."""
    noise = {"kind": "symmetric", "share": 0.5, "low": 0.5, "high": 0.7}
    recipe = tiny_recipe(
        {"name": "fedcorr", "iterations": 3, "fine_tuning_rounds": 6},
        rounds=36,
        scene={"clients": 6, "partition": {"kind": "iid"}, "noise": noise},
        sgd={"epochs": 5, "batch_size": 32, "lr": 0.1, "momentum": 0.5},
        engine={"device": "cpu", "workers": 1, "client_lines": True},
    )
    run(recipe, tmp_path)
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [len(line["clients"]) for line in lines] == [1] * 18 + [3] * 18
    verdicts = {line["round"]: line["server"] for line in lines if line["server"]}
    assert list(verdicts) == [5, 11, 17, 23]
    assert verdicts[17]["noisy_clients"] == 3
    assert verdicts[17]["lid_noisy"] > verdicts[17]["lid_clean"]
    assert lines[17]["diagnostics"]["noise_pearson"] > 0.9
    clean = {
        line["client"] for line in read_lines(tmp_path / "clients.jsonl") if line["true_rate"] == 0
    }
    assert all(set(line["clients"]) == clean for line in lines[18:24])
    assert lines[-1]["diagnostics"]["refined_accuracy"] > 0.95
    assert lines[-1]["diagnostics"]["sieve_accuracy"] > 0.95
    assert lines[-1]["accuracy"] > 90
    plain, walk, tuned = (lines[t]["bytes_down"] / len(lines[t]["clients"]) for t in (0, 23, 35))
    assert tuned < 1.01 * plain
    assert walk < 1.01 * plain, "trusted clients are clean here, and correct nothing"
