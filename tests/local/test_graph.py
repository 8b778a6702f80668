"""The captured step against the plain loop, on a GPU, in exact arithmetic."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from graph_stage import (
    GENTLE,
    a_plan,
    a_setup,
    assert_close,
    both,
    make_model,
    needs_gpu,
)
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.local.bench import EagerBench
from fedsieve.local.compiled import batch_loss, loss_key
from fedsieve.local.flat import Replica
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Batch, Ema, Fitted, Net, Plan, Sgd, Stepped, count_steps, schedule
from fedsieve.local.program import Program, _Step, program_key
from fedsieve.losses import cross_entropy, kl
from fedsieve.methods.fedavg import local_loss
from fedsieve.models import ModelConfig, build_model
from fedsieve.models.weights import read_weights
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.types import Streams

CUDA = pytest.mark.gpu


@pytest.fixture
def exact() -> None:
    set_gpu_arithmetic("fp32")


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


def mixed_loss(batch: Batch, net: Net) -> Tensor:
    """A MixUp whose pairs and shares come with the step, a smaller last batch included."""
    x, label = batch["x"], batch["label"]
    partner, share = torch.argsort(batch["keys"][: len(x)]), batch["share"]
    logits = net(share * x + (1 - share) * x[partner]).logits
    pairs = [(share, label), (1 - share, label[partner])]
    return batch.mean(torch.stack([s * cross_entropy(logits, y) for s, y in pairs]).sum(dim=0))


def assert_zero_scale_keeps(plan: Plan, fitted: Fitted) -> None:
    for name, scale in (plan.update_scale or {}).items():
        start, end = plan.start[0][name], fitted.weights[0][name]
        kept = (scale == 0).expand(start.shape)
        assert torch.equal(end[kept], start[kept]), name


def stepped_plan(n: int, scale_seed: int | None, sgd: Sgd = GENTLE) -> Plan:
    """Its values per step lie on the host, where a method draws them."""
    rng = np.random.default_rng(n)
    steps = count_steps(n, sgd)
    plan = a_plan(
        n,
        sgd=sgd,
        loss=mixed_loss,
        per_step={
            "keys": torch.from_numpy(rng.random((steps, sgd.batch_size))),
            "share": torch.from_numpy(rng.random(steps)).float(),
        },
    )
    if scale_seed is None:
        return plan
    parameters = dict(make_model().named_parameters())
    generator = torch.Generator().manual_seed(scale_seed)
    scale: dict[str, Tensor] = {
        name: (torch.rand(p.shape, generator=generator) < 0.7).float().cuda() * 0.8
        for i, (name, p) in enumerate(parameters.items())
        if i % 4 != 3
    }
    scale[next(iter(scale))] = torch.zeros((), device="cuda")
    return replace(plan, update_scale=scale)


@needs_gpu
@CUDA
@pytest.mark.parametrize("tail", ["keep", "pad"])
@pytest.mark.parametrize("scale_seed", [None, 1])
def test_values_per_step_and_scaled_updates(
    exact: None, tail: str, scale_seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 60)  # one epoch at a time
    plan = stepped_plan(50, scale_seed, replace(GENTLE, tail=tail))
    eager, captured = both(plan, a_setup())
    assert_close(plan, eager, captured)
    assert_zero_scale_keeps(plan, eager)
    assert_zero_scale_keeps(plan, captured)


@needs_gpu
@CUDA
def test_scales_and_values_per_step_may_change_between_clients(exact: None) -> None:
    """Clients with and without a scale, and of several sizes, take turns on one bench."""
    setup, device = a_setup(), torch.device("cuda")
    bench = GraphBench(setup, device, compile_model=False)
    for n, seed in ((40, 1), (90, 2), (40, None), (33, 3), (40, 1)):
        plan = stepped_plan(n, seed)
        with torch.cuda.stream(bench.stream):
            captured = bench.fit(plan)
        torch.cuda.synchronize()
        assert_close(plan, EagerBench(setup, device).fit(plan), captured)


def steadied_loss(batch: Batch, net: Net) -> Stepped:
    """CE, and how far the mean logits have gone since the last step; a counter, and two tensors
    that change places."""
    logits = net(batch["x"]).logits
    mean = logits.mean(dim=0)
    loss = batch.mean(cross_entropy(logits, batch["label"]))
    carried = {
        "last": mean.detach(),
        "steps": batch["steps"] + 1,
        "one": batch["other"],
        "other": batch["one"],
    }
    return Stepped(loss + ((mean - batch["last"]) ** 2).sum(), carried)


def to_carry(device: str, first: float) -> dict[str, Tensor]:
    return {
        "last": torch.full((10,), first, device=device),
        "steps": torch.zeros(1, dtype=torch.int64, device=device),
        "one": torch.full((3,), first, device=device),
        "other": torch.zeros(3, device=device),
    }


def assert_carried_alike(mine: Fitted, theirs: Fitted, steps: int) -> None:
    assert mine.carried["steps"].tolist() == theirs.carried["steps"].tolist() == [steps]
    for name in ("one", "other"):
        assert torch.equal(mine.carried[name], theirs.carried[name])
    torch.testing.assert_close(mine.carried["last"], theirs.carried["last"], rtol=1e-3, atol=1e-3)


@needs_gpu
@CUDA
@pytest.mark.parametrize("compiled", [False, True])
def test_what_steps_carry_over(
    exact: None, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of several sizes take turns; the last, smaller batch of an epoch carries, too.

    On the small network, where a rounding does not grow: the compiler rounds in its own way, and a
    ResNet-18 carries that to places a tenth of the way from each other.
    """
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 60)
    setup, device = a_setup("small", 8), torch.device("cuda")
    start = [{name: t.to(device) for name, t in read_weights(make_model("small", 8)).items()}]
    bench = GraphBench(setup, device, compile_model=compiled)
    for n, first in ((50, 0.5), (90, -1.0), (1, 2.0), (50, 0.5)):
        plan = a_plan(n, 8, loss=steadied_loss, carried=to_carry("cuda", first))
        plan = replace(plan, start=start)
        with torch.cuda.stream(bench.stream):
            captured = bench.fit(plan)
        torch.cuda.synchronize()
        eager = EagerBench(setup, device).fit(plan)
        assert_close(plan, eager, captured)
        assert_carried_alike(captured, eager, eager.steps)


class Uncaptured(EagerBench):
    """A slot on a CPU: what it would capture runs as it is."""

    compiles = False

    def replica(self, index: int) -> Replica:
        return Replica(self.new_model(), self.precision, trained=True)


def test_a_step_that_would_be_captured_carries_as_the_plain_loop_does() -> None:
    setup, device = a_setup("small", 8), torch.device("cpu")
    plan = a_plan(40, 8, device="cpu", views={"x": "raw"}, loss=steadied_loss)
    plan = replace(
        plan,
        start=[read_weights(make_model("small", 8))],
        carried=to_carry("cpu", 0.5),
        sgd=replace(GENTLE, batch_size=20),
    )
    eager = EagerBench(setup, device).fit(plan)
    assert eager.steps == 4
    rows = np.stack(schedule(40, plan.sgd, plan.rng("batches")).rows)
    bench = Uncaptured(setup, device)
    program = Program(bench, plan, None)  # type: ignore[arg-type]
    values = {"x": plan.images[rows], "label": plan.columns["label"][rows]}
    for _ in "ab":  # another client in between
        program._load(plan)
        step = _Step(values, None, torch.zeros(1, dtype=torch.int64), None, None)  # type: ignore[arg-type]
        for _ in range(4):
            program._train_step(plan, step, partial(batch_loss, plan.loss))
        weights = program._replicas[0].read()
        captured = Fitted((weights,), None, 4, float(program._loss_sum) / 4, None, program._carried)
        assert_close(plan, eager, captured)
        assert_carried_alike(captured, eager, 4)


def beside_loss(batch: Batch, net: Net, frozen: Net) -> Tensor:
    """A teacher's and the model's own guess, made in training mode, of images beside the batch."""
    with torch.no_grad():
        guess = frozen(batch["u"]).logits + net(batch["u"]).logits
    logits = net(torch.cat([batch["x"], batch["u"]])).logits
    size = len(batch["x"])
    supervised = batch.mean(cross_entropy(logits[:size], batch["label"]))
    return supervised + kl(guess, logits[size:], 1.0).mean()


@needs_gpu
@CUDA
@pytest.mark.parametrize("tail", ["keep", "pad"])
def test_images_besides_those_of_the_batch(exact: None, tail: str) -> None:
    """Clients of several sizes take turns on one bench."""
    setup, device = a_setup(), torch.device("cuda")
    bench, eager = GraphBench(setup, device, compile_model=False), EagerBench(setup, device)
    for n in (50, 90, 33):
        sgd = replace(GENTLE, tail=tail)
        shape = (count_steps(n, sgd), 10, 3, 16, 16)
        images = np.random.default_rng(n).integers(0, 256, shape, dtype=np.uint8)
        plan = a_plan(
            n, sgd=sgd, loss=beside_loss, step_images={"u": torch.from_numpy(images).to(device)}
        )
        plan = replace(plan, frozen=[{n: 0.9 * t for n, t in plan.start[0].items()}])
        with torch.cuda.stream(bench.stream):
            captured = bench.fit(plan)
        torch.cuda.synchronize()
        assert_close(plan, eager.fit(plan), captured)


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
@pytest.mark.parametrize("scaled", [False, True])
def test_bf16_stays_near_the_eager_bf16(compiled: bool, scaled: bool) -> None:
    plan, device = stepped_plan(50, 1) if scaled else a_plan(), torch.device("cuda")
    eager = EagerBench(a_setup(precision="bf16"), device).fit(plan)
    bench = GraphBench(a_setup(precision="bf16"), device, compile_model=compiled)
    with torch.cuda.stream(bench.stream):
        captured = bench.fit(plan)
    torch.cuda.synchronize()
    assert_close(plan, eager, captured, tolerance=0.2)
    assert_zero_scale_keeps(plan, captured)


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


def test_what_a_step_reads_is_part_of_a_programs_key() -> None:
    plan = Plan(
        start=[{"w": torch.zeros(1)}],
        images=torch.zeros(4, 3, 2, 2, dtype=torch.uint8),
        views={"x": "raw"},
        columns={},
        loss=local_loss,
        sgd=Sgd(batch_size=2),
        rng=Streams(0, 0, 0),
    )
    keys = [
        program_key(replace(plan, **changes))  # type: ignore[arg-type]
        for changes in (
            {},
            {"update_scale": {}},
            {"per_step": {"lam": torch.zeros(2)}},
            {"per_step": {"lam": torch.zeros(2, dtype=torch.int64)}},
            {"per_step": {"lam": torch.zeros(2, 3)}},
            {"per_step": {"mu": torch.zeros(2)}},
            {"carried": {"m": torch.zeros(2)}},
            {"carried": {"m": torch.zeros(2, 3)}},
            {"carried": {"m": torch.zeros(2, dtype=torch.int64)}},
            {"step_images": {"u": torch.zeros((2, 5, 3, 2, 2), dtype=torch.uint8)}},
            {"step_images": {"u": torch.zeros((2, 6, 3, 2, 2), dtype=torch.uint8)}},
        )
    ]
    assert len(set(keys)) == len(keys)
    same = [replace(plan, update_scale={"w": torch.full((1,), s)}) for s in (0.0, 1.0)]
    assert program_key(same[0]) == program_key(same[1]) == keys[1]
    assert program_key(replace(plan, carried={"m": torch.ones(2)})) == keys[6]


def test_a_loss_is_known_by_its_function_and_arguments() -> None:
    assert loss_key(partial(weighted_loss, 1)) == loss_key(partial(weighted_loss, 1))
    assert loss_key(partial(weighted_loss, 1)) != loss_key(partial(weighted_loss, 2))
    tensor = torch.zeros(1)
    with pytest.raises(FedsieveError, match="closure"):
        loss_key(lambda batch, net: tensor)


@needs_gpu
@CUDA
def test_dropout_that_is_on_in_evaluation_too(exact: None) -> None:
    config = ModelConfig(name="cnn9", always_on_dropout=True)
    setup = replace(
        a_setup("cnn9", 32),
        make_model=partial(build_model, config, 3, 32, 32, 10, np.random.default_rng(0)),
    )
    device = torch.device("cuda")
    plan = a_plan(side=32)
    plan = replace(
        plan, start=[{n: t.to(device) for n, t in read_weights(setup.make_model()).items()}]
    )
    bench, eager = GraphBench(setup, device, compile_model=False), EagerBench(setup, device)
    with torch.cuda.stream(bench.stream):
        weights, again = (bench.fit(plan).weights[0] for _ in range(2))
        logits = bench.forward(weights, plan.images).logits
    torch.cuda.synchronize()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    torch.testing.assert_close(logits, eager.forward(weights, plan.images).logits)
