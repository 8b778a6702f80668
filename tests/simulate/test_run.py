"""A run from its recipe to its summary: numbers derived, refusals, odd clients."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.data.sources import Dataset
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS, fedavg
from fedsieve.recipe import Recipe
from fedsieve.scenes import Scene, load_scene
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate import run as run_module
from fedsieve.simulate import summary as summary_module
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.world import Job, initial_weights, make_setup, make_world, scene_of
from helpers import NEEDED, REMEMBERING, Memory, assert_same_weights, tiny_recipe, with_engine

FLOATS = 144 + 64 + 4608 + 128 + 8256 + 650
"""The small model on 8×8 digits: conv 16·1·3·3, norm 4·16 (weight, bias, mean, variance),
conv 32·16·3·3, norm 4·32, hidden (32·2·2 + 1)·64, head (64 + 1)·10."""


def final_weights(folder: Path) -> dict[str, Tensor]:
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    return {name.removeprefix("weights."): tensor for name, tensor in stored.items()}


def test_a_run_writes_what_it_did(tmp_path: Path) -> None:
    recipe = with_engine(tiny_recipe(), client_lines=True)
    summary = run(recipe, tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    clients = read_lines(tmp_path / "clients.jsonl")
    assert json.loads((tmp_path / "summary.json").read_bytes()) == summary
    assert [line["round"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert len(line["clients"]) == 3
        assert line["bytes_down"] == 3 * 4 * FLOATS
        assert line["bytes_up"] == 3 * (4 * FLOATS + 8), "the weights and one number, the samples"
        assert line["refused"] == {}
        mine = [c for c in clients if c["round"] == line["round"]]
        assert [c["client"] for c in mine] == line["clients"] == sorted(line["clients"])
        assert line["client"]["loss"] == pytest.approx(np.mean([c["loss"] for c in mine]))
        assert set(line["seconds"]) == {"train", "merge", "evaluate", "diagnose"}
    accuracies = [line["accuracy"] for line in lines]
    assert summary["rounds"] == 4
    assert summary["last10"] == pytest.approx(np.mean(accuracies))
    assert summary["best"] == max(accuracies)
    assert summary["best_round"] == accuracies.index(max(accuracies))
    assert summary["final"] == accuracies[-1]
    assert summary["bytes_up"] == 4 * 3 * (4 * FLOATS + 8)
    assert summary["bytes_down"] == 4 * 3 * 4 * FLOATS
    assert summary["refused_updates"] == 0
    assert (summary["name"], summary["method"], summary["seed"]) == ("tiny", "fedavg", 3)
    assert summary["minutes"] == pytest.approx(
        sum(sum(line["seconds"].values()) for line in lines) / 60
    )


def test_accuracy_and_suspicion_are_those_of_the_final_model(tmp_path: Path) -> None:
    """By a bare model with the saved weights, and by counting pairs."""
    recipe, data = tiny_recipe(), load_digits()
    summary = run(recipe, tmp_path)
    model = make_setup(recipe, data).make_model().eval()
    model.load_state_dict(final_weights(tmp_path), strict=False)

    def probabilities(images: Tensor) -> Tensor:
        with torch.no_grad():
            x = (images.float() / 255 - data.mean[0]) / data.std[0]
            found: Tensor = model(x).logits.double().softmax(dim=1)
            return found

    correct = int((probabilities(data.test_images).argmax(dim=1) == data.test_labels).sum())
    assert summary["final"] == 100 * correct / 359
    given = torch.tensor(load_scene(tmp_path / "scene.safetensors").given)
    wrong = (given != data.train_labels).numpy()
    assert summary["noise"] == pytest.approx(wrong.mean())
    own = probabilities(data.train_images).gather(1, given[:, None])[:, 0].numpy()
    higher = (own[~wrong][:, None] > own[wrong][None, :]).mean()
    assert summary["suspect_auroc"] == pytest.approx(higher, abs=1e-4)


def test_the_mean_of_the_last_ten_rounds_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_module, "LAST_ROUNDS", 2)
    summary = run(tiny_recipe(), tmp_path)
    accuracies = [line["accuracy"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert summary["last10"] == pytest.approx(np.mean(accuracies[2:]))


def test_one_client_is_local_training(tmp_path: Path) -> None:
    """A federation of one client whose rounds are epochs: the server's model is the client's."""
    recipe = tiny_recipe(
        rounds=1,
        clients_per_round=1,
        scene={"clients": 1, "noise": {"kind": "symmetric", "low": 0.3}},
    )
    run(recipe, tmp_path)
    data = load_digits()
    world, setup = (
        make_world(data, scene_of(recipe, data), torch.device("cpu")),
        make_setup(recipe, data),
    )
    (result,) = InProcess(recipe, world, setup).train(
        0, [Job(0, None, fedavg.Down(initial_weights(setup)))]
    )
    found = final_weights(tmp_path)
    assert all(torch.equal(found[name], t) for name, t in result.up.weights.items())


def test_drift_is_how_far_a_client_went_from_what_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client in one round: ‖w₁ − w₀‖² without BatchNorm's statistics; none if it is refused."""
    recipe = tiny_recipe(rounds=1, clients_per_round=1)
    run(recipe, tmp_path / "healthy")
    model = make_setup(recipe, load_digits()).make_model()
    found = final_weights(tmp_path / "healthy")
    way = sum(
        float((found[n] - p.detach()).double().square().sum()) for n, p in model.named_parameters()
    )
    (line,) = read_lines(tmp_path / "healthy" / "metrics.jsonl")
    assert line["drift"] == pytest.approx(way, rel=1e-5)
    monkeypatch.setitem(METHODS, "fedavg", poisoned(set(range(6)), math.nan))
    run(recipe, tmp_path / "poisoned")
    (line,) = read_lines(tmp_path / "poisoned" / "metrics.jsonl")
    assert line["drift"] is None


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = run(tiny_recipe(), tmp_path)

    def never(_: Recipe) -> Dataset:
        raise AssertionError("there is nothing left to do")

    monkeypatch.setattr(run_module, "load_data", never)
    assert run(tiny_recipe(), tmp_path) == json.loads(json.dumps(summary))


def test_another_recipe_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(tiny_recipe(rounds=1), tmp_path)
    with pytest.raises(FedsieveError, match=r"already holds a run with rounds = 1 \(not 2\)"):
        run(tiny_recipe(rounds=2), tmp_path)


def test_data_whose_true_labels_nobody_knows_is_run_without_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(load_digits(), train_labels_are_noisy=True)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: data)
    recipe = with_engine(tiny_recipe("fedgr"), client_lines=True)
    summary = run(recipe, tmp_path)
    assert "noise" not in summary
    assert "suspect_auroc" not in summary
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert line["diagnostics"] == {}
    for line in read_lines(tmp_path / "clients.jsonl"):
        assert "true_rate" not in line


def test_a_sieve_is_written_per_client(tmp_path: Path) -> None:
    run(with_engine(tiny_recipe("fedgr"), client_lines=True), tmp_path)
    scene = load_scene(tmp_path / "scene.safetensors")
    rates = scene.true_rates(load_digits().train_labels.numpy())
    lines = read_lines(tmp_path / "clients.jsonl")
    assert len(lines) == 12
    for line in lines:
        assert line["true_rate"] == pytest.approx(rates[line["client"]])
        assert 0 <= line["noise_rate"] <= 1


# ------------------------------------------------------------------------------ broken updates


def poisoned(victims: set[int], value: float) -> Any:
    """FedAvg, but these clients send one number that is not finite."""

    def train(cfg: Any, client: Any, down: Any, shard: Any, bench: Any, rng: Any) -> Any:
        state, up, metrics = fedavg.train(cfg, client, down, shard, bench, rng)
        if shard.client in victims:
            weights = dict(up.weights)
            weights["bn2.bias"] = weights["bn2.bias"].clone()
            weights["bn2.bias"][3] = value
            return state, fedavg.Up(weights, up.samples), {"loss": math.nan}
        return state, up, metrics

    return replace(fedavg.METHOD, train=train)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_update_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    recipe, data = tiny_recipe(rounds=1), load_digits()
    world, setup = (
        make_world(data, scene_of(recipe, data), torch.device("cpu")),
        make_setup(recipe, data),
    )
    run(recipe, tmp_path / "healthy")
    chosen = read_lines(tmp_path / "healthy" / "metrics.jsonl")[0]["clients"]
    bad, *good = chosen
    monkeypatch.setitem(METHODS, "fedavg", poisoned({bad}, value))
    summary = run(recipe, tmp_path / "poisoned")
    (line,) = read_lines(tmp_path / "poisoned" / "metrics.jsonl")
    assert line["clients"] == chosen
    assert line["refused"] == {
        str(bad): "weights.bn2.bias is not finite; the update was left out of the average"
    }
    assert summary["refused_updates"] == 1
    down = fedavg.Down(initial_weights(setup))
    results = InProcess(recipe, world, setup).train(0, [Job(k, None, down) for k in good])
    sizes = [len(world.clients[k]) for k in good]
    found = final_weights(tmp_path / "poisoned")
    for name, tensor in found.items():
        one, two = (r.up.weights[name].double() for r in results)
        mean = (sizes[0] * one + sizes[1] * two) / sum(sizes)
        torch.testing.assert_close(tensor, mean.float(), atol=1e-6, rtol=1e-6)
    healthy = np.mean([r.metrics["loss"] for r in results])
    assert line["client"]["loss"] == pytest.approx(healthy), "of the clients that count"


def test_a_round_of_broken_updates_leaves_the_server_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "fedavg", poisoned(set(range(6)), math.nan))
    recipe = tiny_recipe(rounds=2)
    summary = run(recipe, tmp_path)
    assert summary["refused_updates"] == 6
    start = initial_weights(make_setup(recipe, load_digits()))
    found = final_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in start.items())
    for line in read_lines(tmp_path / "metrics.jsonl"):
        assert (len(line["refused"]), line["server"], line["client"]) == (3, {}, {})


def test_a_broken_client_keeps_the_state_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training came to nothing, so it goes on from where it was before."""
    visits: list[tuple[int, tuple[int, ...]]] = []

    def train(cfg: Any, client: Memory, down: Any, shard: Any, bench: Any, rng: Any) -> Any:
        visits.append((rng.round, client.rounds))
        state, up, metrics = REMEMBERING.train(cfg, client, down, shard, bench, rng)
        if rng.round == 1:
            up = replace(up, weights={n: t * math.nan for n, t in up.weights.items()})
        return state, up, metrics

    monkeypatch.setitem(METHODS, "remembering", replace(REMEMBERING, train=train))
    recipe = tiny_recipe(
        "remembering",
        rounds=3,
        clients_per_round=1,
        scene={"clients": 1, "noise": {"kind": "symmetric", "low": 0.3}},
    )
    run(recipe, tmp_path)
    assert visits == [(0, ()), (1, (0,)), (2, (0,))]


# ----------------------------------------------------------------------------------- odd clients


def with_sizes(recipe: Recipe, sizes: Sequence[int]) -> Scene:
    """The recipe's scene, dealt anew into these sizes (the last client gets the rest)."""
    scene = scene_of(recipe, load_digits())
    everything = np.concatenate(scene.clients)
    return replace(scene, clients=tuple(np.split(everything, np.cumsum(sizes))))


def use_scene(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Let runs have this scene, whatever their recipe says."""
    monkeypatch.setattr(rounds_module, "scene_of", lambda recipe, data: scene)


def stubborn(server: fedavg.Server) -> tuple[dict[str, Tensor], ...]:
    """A network that says class 3 of every image, louder than any other network."""
    silent = {name: torch.zeros_like(tensor) for name, tensor in server.weights.items()}
    return (silent | {"head.classify.bias": 1e6 * torch.eye(10)[3]},)


def test_a_further_network_is_heard_wherever_the_global_model_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_engine(tiny_recipe(rounds=2), memorisation_every=1, client_lines=True)
    run(recipe, tmp_path / "alone")
    monkeypatch.setitem(METHODS, "fedavg", replace(fedavg.METHOD, peers=stubborn))
    run(recipe, tmp_path / "together")
    alone, together = (read_lines(tmp_path / n / "metrics.jsonl") for n in ("alone", "together"))
    data = load_digits()
    threes = 100 * float((data.test_labels == 3).float().mean())
    scene = load_scene(tmp_path / "alone" / "scene.safetensors")
    is_wrong = scene.given != data.train_labels.numpy()

    def taken_in(samples: slice | NDArray[np.int64]) -> float:
        return float((scene.given[samples][is_wrong[samples]] == 3).mean())

    for line, other in zip(together, alone, strict=True):
        assert line["accuracy"] == pytest.approx(threes)
        assert line["diagnostics"]["memorised"] == pytest.approx(taken_in(slice(None)))
        assert line["drift"] == other["drift"]
    seen = [read_lines(tmp_path / name / "clients.jsonl") for name in ("alone", "together")]
    for own, other in zip(*seen, strict=True):
        assert other["global_memorised"] == pytest.approx(taken_in(scene.clients[own["client"]]))
        for name in own.keys() - {n for n in own if n.startswith("global_")}:
            assert own[name] == other[name], "of a client's own model"
    weights = [final_weights(tmp_path / name) for name in ("alone", "together")]
    assert_same_weights(*weights)


SETTINGS: dict[str, Mapping[str, Any]] = {
    **NEEDED,
    "feddiv": {"warmup_passes": 0},
    "fedcorr": {"iterations": 1, "walk_clients": 6, "fine_tuning_rounds": 0},
}
"""What these methods are not tried without: no rounds that ask one client each."""


@pytest.mark.parametrize("method", sorted(METHODS))
def test_clients_with_hardly_any_samples_do_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """1, 2 and 5 samples, a batch being 64, and one client with one more than a batch."""
    recipe = tiny_recipe(
        {"name": method, **SETTINGS.get(method, {})}, clients_per_round=6, rounds=2
    )
    use_scene(monkeypatch, with_sizes(recipe, [1, 2, 5, 65, 100]))
    summary = run(recipe, tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["clients"] for line in lines] == [[0, 1, 2, 3, 4, 5]] * 2
    assert [line["refused"] for line in lines] == [{}, {}]
    assert 0 < summary["noise"] < 1
    assert 0 <= summary["suspect_auroc"] <= 1


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_client_without_samples_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    data = replace(load_digits(), train_labels_are_noisy=True)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: data)
    recipe = tiny_recipe(
        {"name": method, **SETTINGS.get(method, {})}, clients_per_round=6, rounds=2
    )
    use_scene(monkeypatch, with_sizes(recipe, [0, 500, 0, 500, 1]))
    run(recipe, tmp_path)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["clients"] for line in lines] == [[1, 3, 4, 5]] * 2


def test_a_round_in_which_nobody_has_samples_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(load_digits(), train_labels_are_noisy=True)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: data)
    everyone_but_five = replace(fedavg.METHOD, select=lambda cfg, server, round, rng: (0, 1))
    monkeypatch.setitem(METHODS, "fedavg", everyone_but_five)
    recipe = tiny_recipe(rounds=1)
    use_scene(monkeypatch, with_sizes(recipe, [0, 0, 0, 0, 0]))
    run(recipe, tmp_path)
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert (line["clients"], line["client"], line["bytes_up"]) == ([], {}, 0)
    start = initial_weights(make_setup(recipe, data))
    found = final_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in start.items())
