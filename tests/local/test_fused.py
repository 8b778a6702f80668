"""Fused BatchNorm against torch's own in double precision.

Without a GPU the kernels are interpreted, block by block, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_stage import a_plan, a_setup, difference, needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fedsieve.local import compiled as compiled_module
from fedsieve.local.bench import LossNet
from fedsieve.local.compiled import batch_loss, compiled_loss
from fedsieve.local.flat import Replica
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Batch, Loss
from fedsieve.local.program import Program
from fedsieve.methods.fedavg import local_loss
from fedsieve.models import ModelConfig, build_model
from fedsieve.models.heads import HeadKind
from fedsieve.models.norms import NormRelu
from fedsieve.models.resnet import BasicBlock
from fedsieve.models.weights import read_weights
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.types import Outputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton", reason="the kernels are written for Triton")
from fedsieve.local import fused  # noqa: E402

BF16 = 2.0**-8
"""Most that rounding to bf16 changes a value by, as a share of it."""


def images(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def a_norm(kind: type[nn.BatchNorm2d], channels: int) -> nn.BatchNorm2d:
    """With weights and statistics that are not those of a fresh layer."""
    generator = torch.Generator().manual_seed(channels)
    norm = kind(channels)
    assert norm.running_mean is not None
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.normal_(generator=generator)
        norm.running_mean.normal_(generator=generator)
    return norm.to(DEVICE)


def passed(
    norm: nn.BatchNorm2d, x: Tensor, shortcut: Tensor | None, gradient: Tensor
) -> dict[str, Tensor]:
    """All that comes out of a pass forward and back, and what it does to the statistics."""
    x = x.clone().requires_grad_()
    shortcut = None if shortcut is None else shortcut.clone().requires_grad_()
    y = norm(x) if shortcut is None else norm(x, shortcut)
    y.backward(gradient)
    if isinstance(norm, fused.FusedNorm | fused.FusedNormRelu):
        fused.move_statistics([norm])
    found = {"y": y.detach(), "x": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad}
    found |= {"mean": norm.running_mean, "variance": norm.running_var}
    if shortcut is not None:
        found["shortcut"] = shortcut.grad
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def away(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())


def compare(
    shape: tuple[int, int, int, int],
    *,
    relu: bool,
    shortcut: bool,
    blocks: int,
    dtype: torch.dtype = torch.float32,
    centre: float = 3.0,
    tolerance: float = 1e-5,
) -> None:
    x, added, gradient = (images(shape, seed, dtype) for seed in (1, 2, 3))
    x = (2 * x + centre).contiguous(memory_format=torch.channels_last)
    given_shortcut = added if shortcut else None
    kind = NormRelu if relu else nn.BatchNorm2d
    # Where rounding decides on which side of the ReLU a value lies, nothing is compared.
    before = a_norm(nn.BatchNorm2d, shape[1]).double()(x.double()) + added.double() * shortcut
    gradient = gradient.where(before.abs() > 1e-3, 0)
    library = a_norm(kind, shape[1]).double()
    exact = passed(library, x.double(), added.double() if shortcut else None, gradient.double())
    own = a_norm(kind, shape[1])
    (norm,) = fused.fuse(own, 1)
    norm.blocks = blocks
    found = passed(own, x, given_shortcut, gradient)
    assert set(found) == set(exact)
    for name, tensor in found.items():
        rounded = dtype == torch.bfloat16 and name in ("y", "x", "shortcut")
        assert away(tensor, exact[name]) < (BF16 if rounded else tolerance), name
        if rounded:
            assert tensor.dtype == dtype


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 5),
    channels=st.sampled_from([1, 3, 16, 64, 65, 130]),
    side=st.integers(2, 9),
    relu=st.booleans(),
    shortcut=st.booleans(),
    blocks=st.integers(1, 12),
)
def test_equals_the_library_however_the_work_is_cut(
    n: int, channels: int, side: int, relu: bool, shortcut: bool, blocks: int
) -> None:
    shape = (n, channels, side, side + 1)
    compare(shape, relu=relu, shortcut=shortcut and relu, blocks=blocks)


@pytest.mark.parametrize("shortcut", [False, True])
def test_bf16_is_rounded_once(shortcut: bool) -> None:
    compare((4, 64, 8, 8), relu=True, shortcut=shortcut, blocks=4, dtype=torch.bfloat16)


def test_a_channel_far_from_zero_loses_no_digits() -> None:
    # Of values near 4,000 with a spread of 2, squares hold seven digits and differ in the eighth:
    # a variance from Σx² would be wrong by its own size. The input has a spacing of 2.4e-4.
    compare((4, 16, 9, 9), relu=False, shortcut=False, blocks=3, centre=4000.0, tolerance=5e-4)


def test_a_channel_without_spread_is_its_shift() -> None:
    norm = a_norm(NormRelu, 8)
    fused.fuse(norm, 1)
    x = torch.full((2, 8, 3, 3), 7.0, device=DEVICE).contiguous(memory_format=torch.channels_last)
    expected = norm.bias.detach().clamp(min=0).view(1, -1, 1, 1).expand_as(x)
    assert torch.equal(norm(x).detach(), expected)


def test_statistics_follow_every_pass_in_its_order() -> None:
    first, second = (images((4, 6, 5, 5), seed, torch.float32) + 4 * seed for seed in (1, 2))
    own, library = (nn.Sequential(a_norm(nn.BatchNorm2d, 6), a_norm(NormRelu, 6)) for _ in "ab")
    own[0].momentum = library[0].momentum = 0.3
    norms = fused.fuse(own, 1)
    for model in (own, library):
        model(first)
        model(second)
        model[0](first)  # the layers need not have as many passes
    fused.move_statistics(norms)
    for mine, theirs in zip(own.buffers(), library.buffers(), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    before = [buffer.clone() for buffer in own.buffers()]
    fused.move_statistics(norms)  # of passes that are gone, nothing moves again
    assert all(torch.equal(a, b) for a, b in zip(before, own.buffers(), strict=True))


def test_a_model_that_is_tested_uses_the_library() -> None:
    x = images((3, 5, 4, 4), 1, torch.float32)
    for kind in (NormRelu, nn.BatchNorm2d):
        plain, own = a_norm(kind, 5).eval(), a_norm(kind, 5).eval()
        fused.fuse(own, 1)
        assert torch.equal(own(x), plain(x))


def test_a_resnet_is_fused_whole_and_keeps_its_names() -> None:
    model = build_model(
        ModelConfig(name="resnet18", head="mlp"), 3, 8, 8, 10, np.random.default_rng(0)
    )
    names = list(model.state_dict())
    fitting = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    norms = fused.fuse(model, 12)
    assert norms == fitting
    assert len(norms) == 20  # a stem, 16 in the blocks, three shortcuts
    assert {norm.blocks for norm in norms} == {12 * fused.BLOCKS_PER_MULTIPROCESSOR}
    assert list(model.state_dict()) == names


def test_a_layer_without_running_statistics_stays_the_library_s() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm1d(3),
    )
    assert fused.fuse(model, 1) == []


def two_passes(batch: Batch, net: LossNet) -> Tensor:
    return local_loss(batch, net) + net(batch["x"].flip(-1).square()).logits.square().mean()


class Tiny(nn.Module):
    """Every way in which a residual network uses BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(BasicBlock(3, 4, 1), BasicBlock(4, 4, 1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(None, self.head(self.blocks(x).mean((2, 3))))


@pytest.mark.parametrize("objective", [local_loss, two_passes])
def test_a_compiled_step_serves_several_models(
    objective: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(compiled_module, "_compiled_losses", {})
    values = {
        "x": torch.randint(0, 256, (6, 3, 5, 5), generator=torch.Generator().manual_seed(0)),
        "label": torch.arange(6) % 3,
    }
    values = {name: value.to(DEVICE) for name, value in values.items()}
    values["x"] = values["x"].to(torch.uint8)
    one, zero = (torch.full((1, 3, 1, 1), v, device=DEVICE) for v in (1 / 64, -2.0))

    def step(loss: Callable[..., Tensor], *, fuse: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Tiny().to(DEVICE, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        norms = fused.fuse(model, 1) if fuse else []
        value = loss(("x",), values, None, {}, one, zero, [LossNet(model, "fp32", DEVICE)])
        fused.move_statistics(norms)
        gradients = torch.autograd.grad(value, list(model.parameters()))
        statistics = [b for b in model.buffers() if b.is_floating_point()]
        return [value.detach(), *gradients, *statistics]

    plain = step(partial(batch_loss, objective), fuse=False)
    for loss in (partial(batch_loss, objective), *[compiled_loss(objective)] * 2):
        for mine, theirs in zip(step(loss, fuse=True), plain, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_an_uncompiled_step_moves_statistics_too(head: HeadKind) -> None:
    config = ModelConfig(name="resnet18", head=head)
    model, start = (build_model(config, 3, 8, 8, 10, np.random.default_rng(0)) for _ in "ab")
    model = model.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    replica = Replica(model, "fp32", trained=True)
    replica.load({name: tensor.to(DEVICE) for name, tensor in read_weights(start).items()})
    before = replica.statistics.clone()
    replica.after_pass = partial(fused.move_statistics, fused.fuse(model, 1))
    one, zero = (torch.full((1, 3, 1, 1), v, device=DEVICE) for v in (1 / 64, -2.0))
    program: Any = SimpleNamespace(
        _bench=SimpleNamespace(scale=one, shift=zero),
        _replicas=[replica],
        _trained=[LossNet(model, "fp32", DEVICE, replica.parameters)],
        _given=[],
        _constants={},
        _carried={},
        _loss_sum=torch.zeros((), device=DEVICE),
        _descend=lambda *_: None,
    )
    program._gradients = partial(Program._gradients, program)
    rows = {
        "x": torch.arange(4 * 3 * 64, device=DEVICE).view(1, 4, 3, 8, 8).to(torch.uint8),
        "label": torch.arange(4, device=DEVICE)[None],
    }
    step: Any = SimpleNamespace(
        values=rows, weight=None, counter=torch.zeros(1, dtype=torch.int64, device=DEVICE)
    )
    plan: Any = SimpleNamespace(normalised=("x",))
    Program._train_step(program, plan, step, partial(batch_loss, local_loss))
    assert (replica.statistics != before).float().mean() > 0.9


@pytest.mark.parametrize("shape", [(4, 8, 3, 5), (3, 6, 4, 4), (2, 6, 1, 1), (4, 1, 3, 3)])
@pytest.mark.parametrize("added", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_torch_knows_what_the_kernels_return(
    shape: tuple[int, ...], added: torch.dtype | None, layout: torch.memory_format
) -> None:
    x = images(shape, 1, torch.bfloat16).contiguous(memory_format=layout).requires_grad_()
    shortcut = None if added is None else images(shape, 2, added).requires_grad_()
    weight, bias = (torch.ones(shape[1], device=DEVICE, requires_grad=True) for _ in "wb")
    forward = (x, shortcut, weight, bias, 1e-5, True, 3)
    tensors = [t.detach() for t in (x, x, x, weight, bias, torch.ones(3, shape[1], device=DEVICE))]
    backward = (*tensors, True, added is not None, 3)
    for op, passed_in in ((fused._normalise, forward), (fused._normalise_backward, backward)):
        torch.library.opcheck(op, passed_in)  # which does not compare strides
        with FakeTensorMode() as mode:
            told = op(*(mode.from_tensor(g) if isinstance(g, Tensor) else g for g in passed_in))
        for fake, real in zip(told, op(*passed_in), strict=True):
            places = [i for i, size in enumerate(real.shape) if size > 1]
            assert [fake.stride(i) for i in places] == [real.stride(i) for i in places]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "shape", [(32, 64, 32, 32), (10, 64, 32, 32), (32, 128, 16, 16), (32, 512, 4, 4)]
)
@pytest.mark.parametrize("shortcut", [False, True])
def test_equals_the_library_on_a_gpu(shape: tuple[int, int, int, int], shortcut: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compare(shape, relu=True, shortcut=shortcut, blocks=48, dtype=dtype)


@pytest.mark.gpu
@needs_gpu
def test_captured_steps_with_fused_norms_train_as_without() -> None:
    set_gpu_arithmetic("tf32")
    plan, setup = a_plan(n=40), a_setup(precision="tf32")
    fitted = []
    for fuse in (False, True):
        bench = GraphBench(setup, torch.device("cuda"), compile_model=True, fuse_norms=fuse)
        with torch.cuda.stream(bench.stream):
            fitted.append(bench.fit(plan))
    assert fitted[0].steps == fitted[1].steps
    # tf32 rounds to eleven bits, and rounding grows from step to step.
    assert difference(plan.start[0], fitted[1].weights[0], fitted[0].weights[0]) < 0.1
