"""FedAvg against numbers derived here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benches import (
    CLASSES,
    Linear,
    Normalised,
    bench_of,
    images_of,
    labels_of,
    plan_of,
    small_cnn,
    weights_of,
)
from fedsieve.local.plan import Sgd
from fedsieve.methods import fedavg
from fedsieve.methods.contract import Federation, choose_uniformly
from fedsieve.types import SERVER, Shard, Streams, rng_for
from helpers import assert_same_weights

CFG = fedavg.Config()
FEDERATION = Federation(sizes=(5, 1, 3, 8), per_round=2, rounds=3, num_classes=CLASSES)


def shard_of(n: int, client: int = 2) -> Shard:
    return Shard(client, images_of(n), labels_of(n), torch.arange(100, 100 + n), CLASSES)


def up(samples: int, **tensors: list[float]) -> fedavg.Up:
    return fedavg.Up({name: torch.tensor(value) for name, value in tensors.items()}, samples)


def merged(*ups: fedavg.Up) -> dict[str, list[float]]:
    server = fedavg.Server({}, FEDERATION)
    result, metrics = fedavg.merge(CFG, server, 0, dict(enumerate(ups)))
    assert metrics == {}
    assert result.federation is FEDERATION
    return {name: tensor.tolist() for name, tensor in result.weights.items()}


def test_the_server_averages_by_samples_statistics_included() -> None:
    """(1·w₁ + 3·w₂)/4 of a weight, a running mean and a running variance."""
    assert merged(
        up(1, **{"w": [4.0, 0.0], "bn.running_mean": [8.0], "bn.running_var": [1.0]}),
        up(3, **{"w": [0.0, 8.0], "bn.running_mean": [4.0], "bn.running_var": [5.0]}),
    ) == {"w": [1.0, 6.0], "bn.running_mean": [5.0], "bn.running_var": [4.0]}


def test_a_client_without_samples_has_no_say() -> None:
    assert merged(up(2, w=[1.0]), up(0, w=[100.0])) == {"w": [1.0]}


def test_one_client_is_its_own_average() -> None:
    weights = weights_of(Normalised, 1)
    server = fedavg.Server(weights_of(Normalised, 2), FEDERATION)
    result, _ = fedavg.merge(CFG, server, 0, {3: fedavg.Up(weights, 7)})
    assert_same_weights(result.weights, weights)


@pytest.mark.parametrize("n", [7, 3, 1, 0])
def test_a_client_trains_on_its_given_labels_and_sends_weights_and_size(n: int) -> None:
    sgd = Sgd(epochs=2, batch_size=4, lr=0.1, momentum=0.9)
    bench = bench_of(Normalised, sgd)
    start, shard, rng = weights_of(Normalised, 1), shard_of(n), Streams(11, 4, 2)
    client, sent, metrics = fedavg.train(
        CFG, fedavg.Client(), fedavg.Down(start), shard, bench, rng
    )
    plan = plan_of(start, shard.images, shard.labels, sgd, views={"x": "weak"}, rng=rng)
    expected = bench.fit(plan)
    assert client == fedavg.Client()
    assert sent.samples == n
    assert_same_weights(sent.weights, expected.weights[0])
    assert metrics == {"loss": expected.loss}


def test_training_sees_the_weak_view() -> None:
    """With 8×8 images and the digits' views a weak view is a shifted image, so it matters."""
    sgd = Sgd(batch_size=8)
    shard = Shard(2, images_of(8, side=8), labels_of(8, 10), torch.arange(8), 10)
    start, rng = weights_of(small_cnn, 1), Streams(11, 4, 2)
    bench = bench_of(small_cnn, sgd, "digits")
    _, sent, _ = fedavg.train(CFG, fedavg.Client(), fedavg.Down(start), shard, bench, rng)
    for view, same in (("weak", True), ("raw", False)):
        plan = plan_of(start, shard.images, shard.labels, sgd, views={"x": view}, rng=rng)
        got = bench.fit(plan).weights[0]["head.classify.weight"]
        assert torch.equal(got, sent.weights["head.classify.weight"]) == same


def test_the_server_starts_with_what_it_is_given_and_sends_it_to_everyone() -> None:
    weights = weights_of(Linear, 1)
    server = fedavg.init_server(CFG, weights, FEDERATION)
    assert fedavg.global_weights(server) is weights
    for client in range(4):
        assert fedavg.send(CFG, server, 0, client).weights is weights
    assert fedavg.init_client(CFG, shard_of(3)) == fedavg.Client()


def test_clients_are_drawn_evenly_and_without_repetition() -> None:
    """2 of 4: each client in half of the rounds; 400 rounds, within 5 standard deviations."""
    server = fedavg.init_server(CFG, {}, FEDERATION)
    counts = np.zeros(4)
    for round in range(400):
        chosen = fedavg.select(CFG, server, round, Streams(5, round, SERVER))
        assert len(set(chosen)) == 2
        assert list(chosen) == sorted(chosen)
        assert all(type(client) is int for client in chosen)
        counts[list(chosen)] += 1
    assert np.abs(counts - 200).max() < 5 * np.sqrt(400 * 0.25)


def test_more_clients_than_there_are_means_all() -> None:
    assert choose_uniformly(3, 10, rng_for(0, 0, 0, "x")) == (0, 1, 2)


def test_suspicion_is_one_minus_the_probability_of_the_given_label() -> None:
    shard = shard_of(5)
    weights = weights_of(Linear, 1)
    found = fedavg.suspect(CFG, fedavg.Client(), fedavg.Down(weights), shard, bench_of(Linear))
    x = (shard.images.numpy().reshape(5, 4) / 255 - 0.25) / 0.5
    z = x @ weights["layer.weight"].numpy().T + weights["layer.bias"].numpy()
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    given = shard.labels.numpy()
    np.testing.assert_allclose(found.p_wrong.numpy(), 1 - p[np.arange(5), given], atol=1e-5)
    assert found.suggested.tolist() == p.argmax(axis=1).tolist()


def test_fedavg_has_no_view_of_labels() -> None:
    server = fedavg.init_server(CFG, {}, FEDERATION)
    assert fedavg.sieve(server) == {}
    assert fedavg.refined(fedavg.Client()) is None
