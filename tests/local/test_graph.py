"""The captured step against the plain loop, on a GPU, in exact arithmetic."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import EagerBench, Setup
from fedsieve.local.graph import GraphBench, Replica, flatten, loss_key, piece, update
from fedsieve.local.plan import Batch, Ema, Fitted, Net, Plan, Sgd
from fedsieve.losses import cross_entropy, kl
from fedsieve.methods.fedavg import local_loss
from fedsieve.models import ModelConfig, build_model
from fedsieve.models.weights import read_weights
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.types import Streams, Weights

CUDA = pytest.mark.gpu
GENTLE = Sgd(epochs=2, batch_size=16, lr=1e-3, momentum=0.5, weight_decay=5e-4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model(name: str = "resnet18", side: int = 16) -> torch.nn.Module:
    config = ModelConfig(name=name, head="linear" if name == "cnn9" else "mlp")
    return build_model(config, 3, side, side, 10, np.random.default_rng(0))


def a_setup(name: str = "resnet18", side: int = 16, precision: str = "fp32") -> Setup:
    return Setup(
        partial(make_model, name, side),
        view_set("cifar10"),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        Sgd(),
        precision,  # type: ignore[arg-type]
    )


def a_plan(n: int = 50, side: int = 16, **changes: object) -> Plan:
    rng = np.random.default_rng(1)
    device = torch.device("cuda")
    plan = Plan(
        start=[{k: v.to(device) for k, v in read_weights(make_model(side=side)).items()}],
        images=torch.from_numpy(rng.integers(0, 256, (n, 3, side, side), dtype=np.uint8)).to(
            device
        ),
        views={"x": "weak"},
        columns={"label": torch.from_numpy(rng.integers(0, 10, n)).to(device)},
        loss=local_loss,
        sgd=GENTLE,
        rng=Streams(3, 4, 5),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


@pytest.fixture
def exact() -> None:
    set_gpu_arithmetic("fp32")


def both(plan: Plan, setup: Setup) -> tuple[Fitted, Fitted]:
    device = torch.device("cuda")
    eager = EagerBench(setup, device).fit(plan)
    bench = GraphBench(setup, device, compile_model=False)
    with torch.cuda.stream(bench.stream):
        captured = bench.fit(plan)
        again = bench.fit(plan)
    torch.cuda.synchronize()
    for name, tensor in captured.weights[0].items():
        assert torch.equal(tensor, again.weights[0][name]), f"{name} differs when replayed"
    return eager, captured


def difference(start: Weights, one: Weights, other: Weights) -> float:
    """How far two trainings from `start` lie apart, as a share of the way they went."""
    assert set(start) == set(one) == set(other)
    apart = sum(((one[n] - other[n]).double() ** 2).sum() for n in start)
    way = sum(((other[n] - start[n]).double() ** 2).sum() for n in start)
    return float((apart / way).sqrt())


def assert_close(plan: Plan, eager: Fitted, captured: Fitted, tolerance: float = 5e-3) -> None:
    """The same training up to rounding.

    Rounding grows from step to step in a network with BatchNorm (two orders in a few steps at a
    large learning rate), so the tests train gently, and the tolerance is a share of the way.
    """
    assert eager.steps == captured.steps
    if eager.steps == 0:
        assert all(torch.equal(captured.weights[0][n], w) for n, w in plan.start[0].items())
        return
    assert captured.loss == pytest.approx(eager.loss, rel=tolerance)
    for start, mine, theirs in zip(plan.start, captured.weights, eager.weights, strict=True):
        assert difference(start, mine, theirs) < tolerance
    assert (eager.ema is None) == (captured.ema is None)
    if eager.ema is not None and captured.ema is not None:
        assert plan.ema is not None
        assert difference(plan.ema.start, captured.ema, eager.ema) < tolerance


@needs_gpu
@CUDA
@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
def test_tails(exact: None, tail: str) -> None:
    plan = a_plan(sgd=replace(GENTLE, tail=tail))
    assert_close(plan, *both(plan, a_setup()))


def weighted_loss(batch: Batch, net: Net) -> Tensor:
    anchor = batch.weights("anchor")
    pull = sum(((p - anchor[n]) ** 2).sum() for n, p in net.parameters.items())
    ce = cross_entropy(net(batch["x"]).logits, batch["label"])
    return batch.mean(ce) + batch.scalar("mu") * pull / 2


@needs_gpu
@CUDA
def test_constants_reach_the_step_and_may_change_between_clients(exact: None) -> None:
    setup, device = a_setup(), torch.device("cuda")
    bench = GraphBench(setup, device, compile_model=False)
    for mu in (0.0, 2.0):
        plan = a_plan(loss=weighted_loss)
        plan = replace(plan, constants={"anchor": plan.start[0], "mu": mu})
        with torch.cuda.stream(bench.stream):
            captured = bench.fit(plan)
        torch.cuda.synchronize()
        assert_close(plan, EagerBench(setup, device).fit(plan), captured)


def teacher_loss(batch: Batch, net: Net, frozen: Net, average: Net) -> Tensor:
    logits = net(batch["x"]).logits
    teachers = [teacher(batch["w"]).logits for teacher in (frozen, average)]
    return batch.mean(
        cross_entropy(logits, batch["label"]) + sum(kl(t, logits, 0.5) for t in teachers)
    )


@needs_gpu
@CUDA
def test_moving_average_and_frozen_nets(exact: None) -> None:
    plan = a_plan(views={"x": "strong", "w": "weak"}, loss=teacher_loss, observe_after=1)
    plan = replace(plan, frozen=[plan.start[0]], ema=Ema(plan.start[0], decay=0.9, in_loss=True))
    eager, captured = both(plan, a_setup())
    assert_close(plan, eager, captured)
    assert eager.observed is not None
    assert captured.observed is not None
    torch.testing.assert_close(
        captured.observed.logits, eager.observed.logits, rtol=1e-3, atol=1e-3
    )


def crossed_loss(batch: Batch, net: Net, other: Net) -> Tensor:
    a, b = net(batch["x"]).logits, other(batch["x"]).logits
    return batch.mean(cross_entropy(a, batch["label"])) + batch.mean(kl(a.detach(), b, 1.0))


@needs_gpu
@CUDA
def test_two_models(exact: None) -> None:
    plan = a_plan(loss=crossed_loss)
    other = {name: tensor * 0.9 for name, tensor in plan.start[0].items()}
    plan = replace(plan, start=[plan.start[0], other])
    assert_close(plan, *both(plan, a_setup()))


@needs_gpu
@CUDA
def test_clients_of_different_sizes_share_a_bench(exact: None) -> None:
    setup, device = a_setup(), torch.device("cuda")
    bench = GraphBench(setup, device, compile_model=False)
    for n in (20, 90, 1, 0, 33):
        plan = a_plan(n)
        with torch.cuda.stream(bench.stream):
            captured = bench.fit(plan)
        torch.cuda.synchronize()
        assert_close(plan, EagerBench(setup, device).fit(plan), captured)


@needs_gpu
@CUDA
def test_slots_in_threads_do_not_disturb_each_other(exact: None) -> None:
    setup, device = a_setup(), torch.device("cuda")
    plans = [a_plan(40 + 10 * i, rng=Streams(0, 0, i)) for i in range(4)]
    fitted: dict[int, Fitted] = {}

    def work(i: int) -> None:
        bench = GraphBench(setup, device, compile_model=False)
        with torch.cuda.stream(bench.stream):
            for _ in range(3):
                fitted[i] = bench.fit(plans[i])
        bench.stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, plan in enumerate(plans):
        assert_close(plan, EagerBench(setup, device).fit(plan), fitted[i])


@needs_gpu
@CUDA
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_stays_near_the_eager_bf16(compiled: bool) -> None:
    plan, device = a_plan(), torch.device("cuda")
    eager = EagerBench(a_setup(precision="bf16"), device).fit(plan)
    bench = GraphBench(a_setup(precision="bf16"), device, compile_model=compiled)
    with torch.cuda.stream(bench.stream):
        captured = bench.fit(plan)
    torch.cuda.synchronize()
    assert_close(plan, eager, captured, tolerance=0.2)


@needs_gpu
@CUDA
def test_dropout_repeats(exact: None) -> None:
    setup = a_setup("cnn9", 32)
    plan = a_plan(side=32)
    start = {k: v.cuda() for k, v in read_weights(make_model("cnn9", 32)).items()}
    plan = replace(plan, start=[start])
    _, captured = both(plan, setup)
    bench = GraphBench(setup, torch.device("cuda"), compile_model=False)
    with torch.cuda.stream(bench.stream):
        other = bench.fit(replace(plan, rng=Streams(3, 4, 6)))
    torch.cuda.synchronize()
    assert any(
        not torch.equal(tensor, captured.weights[0][name])
        for name, tensor in other.weights[0].items()
    )


@needs_gpu
@CUDA
def test_forward_equals_the_eager_forward(exact: None) -> None:
    setup, device = a_setup(), torch.device("cuda")
    plan = a_plan(130)
    bench = GraphBench(setup, device, compile_model=False, forward_chunk=50)
    expected = EagerBench(setup, device).forward(plan.start[0], plan.images)
    got = bench.forward(plan.start[0], plan.images)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert got.features is not None
    assert expected.features is not None
    torch.testing.assert_close(got.features, expected.features, rtol=1e-4, atol=1e-4)


def test_pieces_of_a_flat_vector_lie_channels_last_and_flatten_back() -> None:
    flat = torch.arange(24.0 + 5)
    kernel = piece(flat, 5, torch.Size((2, 3, 2, 2)))
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert kernel[1, 2, 0, 1] == 5 + 12 + (0 * 2 + 1) * 3 + 2  # out, then row, column, channel
    assert torch.equal(flatten(kernel), flat[5:])
    assert torch.equal(flatten(piece(flat, 3, torch.Size((2, 4)))), flat[3:11])


def test_a_replica_is_its_model() -> None:
    model = make_model("small")
    weights = read_weights(model)
    replica = Replica(model, "fp32", shadowed=True)
    replica.load(weights)
    read = replica.read()
    assert set(read) == set(weights)
    for name in weights:
        assert torch.equal(read[name], weights[name]), name
    assert replica.flat.numel() == sum(p.numel() for p in model.parameters())


def test_a_shadow_follows_convolutions_and_linear_layers_only() -> None:
    model = make_model("small")
    weights = read_weights(model)
    replica = Replica(model, "bf16", shadowed=True)
    replica.load(weights)
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d)
        for name, _ in module.named_parameters()
    }
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in norms else torch.bfloat16), name
        torch.testing.assert_close(parameter.float(), weights[name], rtol=2**-8, atol=1e-6)
        assert torch.equal(replica.parameters[name].detach(), weights[name])


def test_update_is_sgd_with_momentum_and_weight_decay() -> None:
    """g + λw = 3 + .1; v = .5·2 + 3.1 = 4.1; w = 1 − .01·4.1 = .959; e = .9·0 + .1·.959."""
    w, v, e = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.0])
    shadow = torch.zeros(1, dtype=torch.bfloat16)
    update(w, v, torch.tensor([3.0]), shadow, e, 0.01, 0.5, 0.1, 0.9)
    assert v.item() == pytest.approx(4.1)
    assert w.item() == pytest.approx(0.959)
    assert e.item() == pytest.approx(0.0959)
    assert shadow.item() == pytest.approx(0.959, rel=2**-8)


def test_a_loss_is_known_by_its_function_and_arguments() -> None:
    assert loss_key(partial(weighted_loss, 1)) == loss_key(partial(weighted_loss, 1))
    assert loss_key(partial(weighted_loss, 1)) != loss_key(partial(weighted_loss, 2))
    tensor = torch.zeros(1)
    with pytest.raises(FedsieveError, match="closure"):
        loss_key(lambda batch, net: tensor)
