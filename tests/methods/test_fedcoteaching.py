"""FedCoteaching: who learns from what, in numbers worked out here, and the cases in which it is
FedAvg twice over."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    small_cnn,
    weights_of,
)
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch, Plan, Sgd
from fedsieve.local.program import program_key
from fedsieve.methods import METHODS, fedavg, fedcoteaching
from fedsieve.methods.contract import Federation
from fedsieve.methods.fedcoteaching import Config, Down, Server, Up
from fedsieve.models.weights import read_weights
from fedsieve.recipe import recipe_from_table
from fedsieve.simulate.directory import RunDirectory, read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.runners import InProcess
from fedsieve.simulate.world import make_setup, make_world, scene_of
from fedsieve.types import Outputs, Shard, Streams, Weights
from helpers import assert_same_weights, final_bytes, tiny_recipe, with_engine

SGD = Sgd(epochs=2, batch_size=4, lr=0.3, momentum=0.5, weight_decay=0.01)
RNG = Streams(11, 4, 2)
FEDERATION = Federation((10, 30), 2, 50, CLASSES)


def shard_of(n: int) -> Shard:
    return Shard(2, images_of(n), labels_of(n), torch.arange(n), CLASSES)


# -------------------------------------------------------------------------------- configuration


def test_the_share_of_wrong_labels_must_be_given() -> None:
    with pytest.raises(FedsieveError, match=r"^Please set method\.forget_rate\.$"):
        recipe_from_table({"method": {"name": "fedcoteaching"}})


def test_the_other_defaults_are_fedgrs() -> None:
    cfg = Config(forget_rate=0.75)
    assert (cfg.ramp_rounds, cfg.exponent) == (25, 1.0)
    assert (cfg.objective, cfg.second_start) == ("cross_entropy", "all")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"forget_rate": -0.1}, r"forget_rate must be in \[0, 1\), not -0.1."),
        ({"forget_rate": 1.0}, r"forget_rate must be in \[0, 1\), not 1.0."),
        ({"forget_rate": math.nan}, "forget_rate must be in"),
        ({"ramp_rounds": 0}, "ramp_rounds must be at least 1, not 0."),
        ({"exponent": 0.0}, "exponent must be above 0, not 0.0."),
        ({"exponent": math.inf}, "exponent must be above 0, not inf."),
        ({"objective": "lsr"}, "objective must be one of 'cross_entropy', 'sharpened'"),
        ({"second_start": "none"}, "second_start must be one of 'all', 'head'"),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FedsieveError, match=f"^method.{sentence}"):
        Config(**({"forget_rate": 0.2} | values))


# --------------------------------------------------------------------------------- the schedule


@pytest.mark.parametrize(
    ("exponent", "ramp", "expected"),
    [
        (1.0, 4, [0.0, 0.15, 0.3, 0.45, 0.6, 0.6, 0.6]),
        (2.0, 8, [0.0, 0.075, 0.3, 0.6, 0.6, 0.6, 0.6]),  # T²/8 is 0, ⅛, ½, 9/8
        (0.5, 2, [0.0, 0.3, 0.6 / math.sqrt(2), 0.3 * math.sqrt(3), 0.6, 0.6, 0.6]),
        (1.0, 1, [0.0, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6]),
    ],
)
def test_the_share_grows_with_the_rounds(exponent: float, ramp: int, expected: list[float]) -> None:
    assert [fedcoteaching.ramped_up(0.6, t, exponent, ramp) for t in range(7)] == pytest.approx(
        expected
    )


def test_the_server_sends_the_share_of_the_round() -> None:
    cfg, server = Config(forget_rate=0.75), Server({}, {}, FEDERATION)
    sent = [fedcoteaching.send(cfg, server, t, 0).forget_rate for t in (0, 10, 25, 49)]
    assert sent == pytest.approx([0.0, 0.3, 0.75, 0.75])


# -------------------------------------------------------------------------------- the selection


def batch_of(
    n: int, kept_share: float, labels: Tensor | None = None, padding: int | None = None
) -> Batch:
    """n samples, of which the last are padding; `padding` None is a batch that knows of none."""
    values = {"x": torch.zeros(n, 1), "label": torch.zeros(n).long() if labels is None else labels}
    weight = None if padding is None else (torch.arange(n) < n - padding).float()
    return Batch(values, {"kept_share": torch.tensor(kept_share)}, weight)


@pytest.mark.parametrize(
    ("share", "samples", "expected"),
    [
        (1.0, 32, 32),
        (0.25, 32, 8),
        (0.61, 32, 19),  # of 19.52
        (0.7, 10, 7),
        (1 - 0.9, 10, 1),  # 0.1 − 2⁻⁵⁵
        (0.25, 3, 1),  # not ⌊0.75⌋
        (0.25, 1, 1),
        (0.999, 2, 1),
    ],
)
def test_how_many_samples_are_kept(share: float, samples: int, expected: int) -> None:
    assert fedcoteaching.kept_count(batch_of(samples, share)).item() == expected
    padded = batch_of(samples + 5, share, padding=5)
    assert fedcoteaching.kept_count(padded).item() == expected, "padding does not count"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 512), st.data())
def test_whole_numbers_survive_their_rounding(samples: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, samples))
    assert fedcoteaching.kept_count(batch_of(samples, kept / samples)).item() == kept


def test_the_smallest_losses_are_picked() -> None:
    losses = torch.tensor([0.3, 0.1, 0.5, 0.2])
    for count, picked in enumerate(([], [1], [1, 3], [0, 1, 3], [0, 1, 2, 3])):
        found = fedcoteaching.smallest(losses, torch.tensor(float(count)), None)
        assert found.nonzero().flatten().tolist() == picked
        assert set(found.tolist()) <= {0.0, 1.0}
    ties = fedcoteaching.smallest(torch.zeros(5), torch.tensor(2.0), None)
    assert ties.tolist() == [1, 1, 0, 0, 0]


def test_padding_is_never_picked() -> None:
    losses, weight = torch.tensor([0.3, 0.4, 0.0, 0.1]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    for count, picked in ((1, [1, 0, 0, 0]), (2, [1, 1, 0, 0])):
        found = fedcoteaching.smallest(losses, torch.tensor(float(count)), weight)
        assert found.tolist() == picked


# ------------------------------------------------------------------------------------- the loss


class Saying(nn.Module):
    """A net whose two-class logits are given, as the probabilities of the label 0."""

    def __init__(self, *p: float) -> None:
        super().__init__()
        right = torch.tensor(p)
        self.logits = nn.Parameter(torch.stack([right, 1 - right], dim=1).log())

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(None, self.logits)

    @property
    def gradient(self) -> list[bool]:
        """Which samples it learns from."""
        assert self.logits.grad is not None
        return (self.logits.grad != 0).any(dim=1).tolist()


def test_each_network_learns_from_what_the_other_picks() -> None:
    """f is surest of samples 0 and 1, g of 1 and 2."""
    f, g = Saying(0.9, 0.8, 0.3, 0.2), Saying(0.2, 0.9, 0.7, 0.1)
    loss = fedcoteaching.local_loss("cross_entropy", batch_of(4, 0.5), f, g)  # type: ignore[arg-type]
    of_f = (-math.log(0.8) - math.log(0.3)) / 2
    of_g = (-math.log(0.2) - math.log(0.9)) / 2
    assert loss.item() == pytest.approx(of_f + of_g, rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert f.gradient == [False, True, True, False]
    assert g.gradient == [True, True, False, False]
    assert f.logits.grad is not None
    # the gradient of the mean over two samples of −log softmax(z)_0: (p − (1, 0))/2
    expected = torch.tensor([[-0.1, 0.1], [-0.35, 0.35]])
    torch.testing.assert_close(f.logits.grad[1:3], expected)


def test_padding_teaches_nothing() -> None:
    """Sample 3 would be everybody's first choice."""
    f, g = Saying(0.9, 0.8, 0.3, 0.99), Saying(0.2, 0.9, 0.7, 0.99)
    batch = batch_of(4, 0.4, padding=1)  # ⌊0.4·3⌋ = 1: f picks sample 0, g picks 1
    loss = fedcoteaching.local_loss("cross_entropy", batch, f, g)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(-math.log(0.8) - math.log(0.2), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert f.gradient == [False, True, False, False]
    assert g.gradient == [True, False, False, False]


def test_a_sharpened_prediction_takes_the_place_of_the_logits() -> None:
    """p = (0.6, 0.4) becomes (0.36, 0.16)/0.52, and the loss −log softmax of that."""
    net, batch = Saying(0.6, 0.6), batch_of(2, 1.0, labels=torch.tensor([0, 1]))
    found = fedcoteaching.sample_losses("sharpened", batch, net)  # type: ignore[arg-type]
    sharp = (0.36 / 0.52, 0.16 / 0.52)
    total = math.log(math.exp(sharp[0]) + math.exp(sharp[1]))
    assert found.tolist() == pytest.approx([total - sharp[0], total - sharp[1]], rel=1e-5)


# ---------------------------------------------------------------------------------- the client


def train(
    bench: Any, down: Down, shard: Shard, cfg: Config | None = None
) -> tuple[Up, dict[str, float]]:
    cfg = cfg or Config(forget_rate=0.5)
    _, up, metrics = fedcoteaching.train(cfg, fedavg.Client(), down, shard, bench, RNG)
    return up, dict(metrics)


def plain(start: Weights, shard: Shard, bench: Any) -> fedavg.Up:
    cfg, client = fedavg.Config(), fedavg.Client()
    return fedavg.train(cfg, client, fedavg.Down(start), shard, bench, RNG)[1]


@pytest.mark.parametrize("model", [Linear, Normalised])
@pytest.mark.parametrize("tail", ["keep", "pad", "drop"])
def test_where_nothing_is_left_out_each_network_is_fedavgs(
    model: type[nn.Module], tail: Any
) -> None:
    one, other = weights_of(model, 5), weights_of(model, 6)
    shard, bench = shard_of(10), bench_of(model, replace(SGD, tail=tail))
    up, metrics = train(bench, Down(one, other, 0.0), shard)
    first, second = plain(one, shard, bench), plain(other, shard, bench)
    assert_same_weights(up.weights, first.weights)
    assert_same_weights(up.peer, second.weights)
    assert up.samples == 10
    assert set(metrics) == {"loss", "forget_rate"}


def test_a_run_without_forgetting_ends_with_fedavgs_model(tmp_path: Path) -> None:
    run(tiny_recipe("fedavg"), tmp_path / "fedavg")
    recipe = tiny_recipe({"name": "fedcoteaching", "forget_rate": 0.0})
    run(recipe, tmp_path / "both")
    assert final_bytes(tmp_path / "both") == final_bytes(tmp_path / "fedavg")


def test_one_step_by_hand() -> None:
    """Five samples, of which ⌊0.4·5⌋ = 2 are kept; SGD without momentum or decay."""
    sgd, shard = Sgd(epochs=1, batch_size=5, lr=0.5), shard_of(5)
    start = [weights_of(Linear, seed) for seed in (7, 8)]
    up, metrics = train(bench_of(Linear, sgd), Down(start[0], start[1], 0.6), shard)

    x = (shard.images.flatten(1).float() / 255 - 0.25) / 0.5
    leaves = [[s[f"layer.{name}"].clone().requires_grad_() for name in ("weight", "bias")]
              for s in start]  # fmt: skip
    losses = [F.cross_entropy(x @ w.T + b, shard.labels, reduction="none") for w, b in leaves]
    picks = [ell.detach().sort().indices[:2] for ell in losses]
    assert picks[0].tolist() != picks[1].tolist(), "else this test shows nothing"
    means = [losses[0][picks[1]].mean(), losses[1][picks[0]].mean()]
    for mean, (w, b), found in zip(means, leaves, (up.weights, up.peer), strict=True):
        by_w, by_b = torch.autograd.grad(mean, (w, b))
        torch.testing.assert_close(found["layer.weight"], w.detach() - 0.5 * by_w)
        torch.testing.assert_close(found["layer.bias"], b.detach() - 0.5 * by_b)
    assert metrics["loss"] == pytest.approx(float(sum(means).detach()) / 2)  # type: ignore[union-attr]
    assert metrics["forget_rate"] == 0.6


def plan_of(cfg: Config, round: int) -> Plan:
    one, other = weights_of(Linear, 5), weights_of(Linear, 6)
    bench = RecordingBench(bench_of(Linear, SGD))
    down = fedcoteaching.send(cfg, Server(one, other, FEDERATION), round, 0)
    train(bench, down, shard_of(10), cfg)
    return bench.plans[0]


def test_the_rounds_share_a_captured_step() -> None:
    cfg = Config(forget_rate=0.8, ramp_rounds=4)
    first, later = plan_of(cfg, 0), plan_of(cfg, 3)
    assert first.constants == {"kept_share": 1.0}
    assert later.constants == {"kept_share": pytest.approx(0.4)}
    assert program_key(first) == program_key(later)
    assert first.views == {"x": "weak"}
    assert len(first.start) == 2
    sharpened = plan_of(replace(cfg, objective="sharpened"), 0)
    assert program_key(sharpened) != program_key(first)


@pytest.mark.parametrize("n", [0, 3])
def test_a_client_too_small_for_a_step_returns_what_it_got(n: int) -> None:
    one, other = weights_of(Linear, 5), weights_of(Linear, 6)
    bench = bench_of(Linear, replace(SGD, tail="drop"))
    up, metrics = train(bench, Down(one, other, 0.5), shard_of(n))
    assert_same_weights(up.weights, one)
    assert_same_weights(up.peer, other)
    assert (up.samples, metrics["loss"]) == (n, 0.0)


# ---------------------------------------------------------------------------------- the server


def test_the_networks_start_apart() -> None:
    weights = read_weights(small_cnn())
    server = fedcoteaching.init_server(Config(forget_rate=0.2), weights, FEDERATION)
    assert_same_weights(server.weights, weights)
    for name, tensor in weights.items():
        other = server.peer[name]
        assert torch.equal(other.flatten().sort().values, tensor.flatten().sort().values)
        assert torch.equal(other, tensor) == bool((tensor == tensor.flatten()[0]).all()), name


def test_pretrained_networks_differ_in_their_heads() -> None:
    weights = read_weights(small_cnn())
    cfg = Config(forget_rate=0.2, second_start="head")
    peer = fedcoteaching.init_server(cfg, weights, FEDERATION).peer
    differing = [name for name, tensor in weights.items() if not torch.equal(peer[name], tensor)]
    assert differing == ["head.classify.weight", "head.classify.bias"]
    with pytest.raises(FedsieveError, match="no part of this model is called head; use 'all'"):
        fedcoteaching.init_server(cfg, weights_of(Linear, 1), FEDERATION)


def test_each_network_is_averaged_by_samples() -> None:
    def up(first: float, second: float, samples: int) -> Up:
        return Up({"w": torch.tensor([first])}, {"w": torch.tensor([second])}, samples)

    cfg = Config(forget_rate=0.2)
    server = Server({"w": torch.zeros(1)}, {"w": torch.zeros(1)}, FEDERATION)
    after, metrics = fedcoteaching.merge(cfg, server, 0, {0: up(1.0, 8.0, 10), 1: up(5.0, 4.0, 30)})
    assert after.weights["w"].item() == 4  # (10·1 + 30·5)/40
    assert after.peer["w"].item() == 5  # (10·8 + 30·4)/40
    assert (after.federation, metrics) == (FEDERATION, {})


def test_a_second_network_of_another_shape_is_refused_by_itself() -> None:
    server = Server({"w": torch.zeros(1)}, {"w": torch.zeros(1)}, FEDERATION)
    strange = Up({"w": torch.zeros(1)}, {"w": torch.zeros(2)}, 10)
    with pytest.raises(FedsieveError, match=r"'w' is .* in the second network but .* an update's"):
        fedcoteaching.merge(Config(forget_rate=0.2), server, 0, {0: strange})


# ---------------------------------------------------------------------- both networks together


def test_accuracy_is_that_of_both_networks_together(tmp_path: Path) -> None:
    recipe = tiny_recipe({"name": "fedcoteaching", "forget_rate": 0.4, "ramp_rounds": 2}, rounds=3)
    run(with_engine(recipe, keep_states=True), tmp_path)
    directory = RunDirectory(tmp_path)
    checkpoint = directory.last_checkpoint()
    assert checkpoint is not None
    server: Server = directory.load_server(checkpoint, Server)
    data = load_digits()
    world = make_world(data, scene_of(recipe, data), torch.device("cpu"))
    bench = InProcess(recipe, world, make_setup(recipe, data)).bench
    one, other = (bench.forward(w, data.test_images).logits for w in (server.weights, server.peer))
    right = ((one + other).argmax(dim=1) == data.test_labels).float().mean().item()
    alone = [(z.argmax(dim=1) == data.test_labels).float().mean().item() for z in (one, other)]
    line = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert line["accuracy"] == pytest.approx(100 * right)
    assert right not in alone
    assert line["client"]["forget_rate"] == pytest.approx(0.4)


def test_suspicion_by_hand() -> None:
    """One network says (log 4, 0, 0), the other (0, 0, 0): together (log 2, 0, 0), so that p is
    (½, ¼, ¼)."""
    silent = {"layer.weight": torch.zeros(3, 4), "layer.bias": torch.zeros(3)}
    sure = silent | {"layer.bias": torch.tensor([math.log(4), 0.0, 0.0])}
    shard = replace(shard_of(2), labels=torch.tensor([0, 1]))
    down, bench = Down(sure, silent, 0.5), bench_of(Linear)
    found = fedcoteaching.suspect(Config(forget_rate=0.5), fedavg.Client(), down, shard, bench)
    assert found.p_wrong.tolist() == pytest.approx([0.5, 0.75])
    assert found.suggested.tolist() == [0, 0]


def test_it_is_registered_with_both_networks() -> None:
    found = METHODS["fedcoteaching"]
    server = Server({"w": torch.zeros(1)}, {"w": torch.ones(1)}, FEDERATION)
    assert found.networks(server) == (server.weights, server.peer)
    assert found.weights(server) is server.weights
    assert found.local_networks(Up(server.weights, server.peer, 3)) == (server.weights, server.peer)
    assert METHODS["fedavg"].networks(fedavg.Server(server.weights, FEDERATION)) == (
        server.weights,
    )
