"""What every method does in a round: pure functions of records, at home with odd clients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from contract_stage import Stage, federate, shard_of, stage_of

from fedsieve.methods.contract import Method
from fedsieve.serial import decode, encode, values_of
from fedsieve.simulate.world import first_unusable
from fedsieve.types import SERVER, Shard, Streams
from helpers import assert_same_weights


def trained(stage: Stage, shard: Shard, rounds_before: int) -> tuple[Any, Any, Any, Any]:
    """One more training of the shard's client, after some rounds of the federation."""
    cfg, method = stage.recipe.method, stage.method
    server = federate(stage, rounds_before).server if rounds_before else stage.first_server()
    down = method.send(cfg, server, rounds_before, shard.client)
    state = method.init_client(cfg, shard)
    rng = Streams(3, rounds_before, shard.client)
    return down, *method.train(cfg, state, down, shard, stage.runner.bench, rng)


def test_clients_are_drawn_without_repetition_and_by_the_stream_alone(method: Method) -> None:
    stage = stage_of(method)
    server = stage.first_server()
    for round in range(8):
        chosen = stage.select(server, round)
        assert chosen == stage.select(server, round)
        assert 1 <= len(set(chosen)) == len(chosen) <= stage.recipe.clients_per_round
        assert set(chosen) <= set(range(6))
        assert all(type(client) is int for client in chosen)
    by_seed = {
        tuple(method.select(stage.recipe.method, server, 0, Streams(seed, 0, SERVER)))
        for seed in range(20)
    }
    assert len(by_seed) > 1


def test_records_survive_their_bytes_and_so_does_the_federation(method: Method) -> None:
    """Continuing from decoded states gives the same server and clients, bit for bit."""
    stage = stage_of(method)
    plain, decoded = federate(stage), federate(stage, through_bytes=True)
    assert encode(plain.server) == encode(decoded.server)
    assert set(plain.states) == set(decoded.states)
    for client, state in plain.states.items():
        assert encode(state) == encode(decoded.states[client])
        assert type(decode(method.client, encode(state))) is method.client


def test_the_order_of_clients_does_not_matter(method: Method) -> None:
    stage = stage_of(method)
    forwards, backwards = federate(stage), federate(stage, backwards=True)
    assert encode(forwards.server) == encode(backwards.server)
    for client, state in forwards.states.items():
        assert encode(state) == encode(backwards.states[client])


def test_what_goes_in_is_not_changed(method: Method) -> None:
    stage = stage_of(method)
    cfg = stage.recipe.method
    before = federate(stage, 2)
    client = min(before.states)
    shard, state, server = stage.world.shard(client), before.states[client], before.server
    down = method.send(cfg, server, 2, client)
    kept = [encode(record) for record in (server, state, down)]
    images, labels = shard.images.clone(), shard.labels.clone()
    _, up, _ = method.train(cfg, state, down, shard, stage.runner.bench, Streams(3, 2, client))
    sent = encode(up)
    method.suspect(cfg, state, down, shard, stage.runner.bench)
    method.merge(cfg, server, 2, {client: up})
    method.sieve(server)
    assert [encode(record) for record in (server, state, down)] == kept
    assert encode(up) == sent
    assert torch.equal(shard.images, images)
    assert torch.equal(shard.labels, labels)


def test_records_hold_plain_values_on_the_client_side(method: Method) -> None:
    stage = stage_of(method)
    progress = federate(stage)
    for client, result in progress.results.items():
        assert type(result.state) is method.client
        assert type(result.up) is method.up
        assert type(method.send(stage.recipe.method, progress.server, 3, client)) is method.down
        for name, value in result.metrics.items():
            assert isinstance(name, str)
            assert isinstance(value, float)
            assert math.isfinite(value)
    assert type(progress.server) is method.server


def test_no_image_and_no_label_leaves_a_site(method: Method) -> None:
    stage = stage_of(method)
    for client, result in federate(stage).results.items():
        labels = stage.world.shard(client).labels
        for name, tensor in values_of(result.up)[0].items():
            assert tensor.dtype != torch.uint8, f"{name} looks like images"
            is_label = tensor.shape == labels.shape and torch.equal(tensor.long(), labels)
            assert not is_label, f"{name} is the labels"


def test_the_global_model_is_a_whole_finite_model(method: Method) -> None:
    stage = stage_of(method)
    start = method.weights(stage.first_server())
    after = method.weights(federate(stage).server)
    assert {name: t.shape for name, t in after.items()} == {n: t.shape for n, t in start.items()}
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(after[name], tensor) for name, tensor in start.items())


def test_a_client_has_a_network_for_each_global_one(method: Method) -> None:
    """A method with `peers` needs `local_peers`."""
    progress = federate(stage_of(method))
    shapes = [{n: t.shape for n, t in each.items()} for each in method.networks(progress.server)]
    for result in progress.results.values():
        own = method.local_networks(result.up)
        assert [{n: t.shape for n, t in each.items()} for each in own] == shapes


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("size", [0, 1, 2, 15, 16, 17])
@pytest.mark.parametrize("rounds_before", [0, 2])
def test_a_client_with_few_samples_takes_part(
    method: Method, tail: str, size: int, rounds_before: int
) -> None:
    """Batches of 16; without a step the client sends the global model back."""
    stage = stage_of(method, tail=tail)
    shard = shard_of(stage, 2, size)
    down, state, up, metrics = trained(stage, shard, rounds_before)
    assert first_unusable(up) is None
    assert all(math.isfinite(value) for value in metrics.values())
    assert type(decode(method.client, encode(state))) is method.client
    has_steps = {"keep": size >= 2, "drop": size >= 16, "pad": size >= 1}[tail]
    if not has_steps and hasattr(up, "weights") and hasattr(down, "weights"):
        assert_same_weights(up.weights, down.weights)


@pytest.mark.parametrize("size", [0, 1, 5, None])
def test_suspicion_is_a_probability_and_a_class_for_each_sample(
    method: Method, size: int | None
) -> None:
    stage = stage_of(method)
    cfg, bench = stage.recipe.method, stage.runner.bench
    progress = federate(stage)
    for rounds, server in ((0, stage.first_server()), (3, progress.server)):
        shard = shard_of(stage, 1, size)
        down = method.send(cfg, server, rounds, 1)
        states = [method.init_client(cfg, shard)]
        if size is None and rounds and 1 in progress.states:
            states.append(progress.states[1])
        for state in states:
            found = method.suspect(cfg, state, down, shard, bench)
            assert found.p_wrong.shape == found.suggested.shape == (len(shard),)
            assert found.p_wrong.is_floating_point()
            assert found.suggested.dtype == torch.int64
            assert ((found.p_wrong >= 0) & (found.p_wrong <= 1)).all()
            assert ((found.suggested >= 0) & (found.suggested < 10)).all()
            again = method.suspect(cfg, state, down, shard, bench)
            assert torch.equal(found.p_wrong, again.p_wrong), "it repeats"


def test_what_the_server_believes_is_in_the_order_of_the_shards(method: Method) -> None:
    stage = stage_of(method)
    progress = federate(stage)
    for client, sieved in method.sieve(progress.server).items():
        assert 0 <= sieved.noise_rate <= 1
        if sieved.p_clean is not None:
            assert sieved.p_clean.shape == (len(stage.world.clients[client]),)
            assert ((sieved.p_clean >= 0) & (sieved.p_clean <= 1)).all()
    for client, state in progress.states.items():
        labels = method.refined(state)
        if labels is not None:
            assert labels.shape == (len(stage.world.clients[client]),)
            assert labels.dtype == torch.int64
            assert ((labels >= -1) & (labels < 10)).all()


def test_a_round_of_one_sample_clients_is_merged(method: Method) -> None:
    stage = stage_of(method)
    cfg = stage.recipe.method
    server = stage.first_server()
    ups = {}
    for client in (1, 4):
        shard = shard_of(stage, client, 1)
        down, state = method.send(cfg, server, 0, client), method.init_client(cfg, shard)
        rng = Streams(3, 0, client)
        _, ups[client], _ = method.train(cfg, state, down, shard, stage.runner.bench, rng)
    after, metrics = method.merge(cfg, server, 0, ups)
    assert first_unusable(after) is None
    assert all(math.isfinite(value) for value in metrics.values())
