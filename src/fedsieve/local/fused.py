"""BatchNorm with what follows it, as four kernels made for a slice of a GPU.

What torch's compiler makes of a BatchNorm layer reads memory at a fifth of the speed at which a
slice can: it loads a channel's four numbers again for every few values, and cuts sums into pieces
for a whole GPU, whose results take kernels of their own. Here a block holds the numbers of its
channels, reads the next tiles while it works on one, sixteen bytes at a time where channels are a
multiple of 16, and finds what a layer needs in two kernels forward and two backward, with the
addition of a shortcut and the ReLU among them.

A tensor (N, C, H, W) in channels-last order is a matrix (R, C) of R = N·H·W rows. Sums over its
rows are taken in parts: each of G blocks sums every G-th tile of rows, and whoever needs a sum adds
the G parts up. Statistics, sums and what is added are fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from fedsieve.models.norms import NormRelu

TILE_ROWS = 32
TILE_CHANNELS = 64
MOST_PARTS = 128
WARPS = 4
STAGES = 3
"""Tiles that are read at a time; left to itself, the compiler lets a load wait for the last one."""
_LAUNCHING = threading.Lock()
"""Held while kernels are launched, so that slots that begin together do not all compile them."""


@triton.jit  # type: ignore[untyped-decorator]
def _channels(C, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """This block's channels, and which of them there are."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return channel, channel < C


@triton.jit  # type: ignore[untyped-decorator]
def _tile(start, rows, channel, held, C, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the tile of rows from `start` on lies, and which of it there is."""
    row = start + tl.arange(0, ROWS)
    return row[:, None] * C + channel[None, :], (row < rows)[:, None] & held[None, :]


@triton.jit
def _values(vector, channel, held):  # type: ignore[no-untyped-def]
    return tl.load(vector + channel, mask=held, other=0.0).to(tl.float32)


@triton.jit
def _keep_parts(one, two, parts, channel, held, C):  # type: ignore[no-untyped-def]
    """Store what this block has of two sums, (rows, channels) each."""
    first, blocks = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + first * C + channel, tl.sum(one, 0), mask=held)
    tl.store(parts + (blocks + first) * C + channel, tl.sum(two, 0), mask=held)


@triton.jit  # type: ignore[untyped-decorator]
def _total(parts, which, channel, held, C, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(channels,) the sum `which` of two, from the parts (2, G, C) that the blocks have of it."""
    blocks = tl.num_programs(0)
    block = tl.arange(0, ROOM)
    place = parts + (which * blocks + block[:, None]) * C + channel[None, :]
    return tl.sum(tl.load(place, mask=(block < blocks)[:, None] & held[None, :], other=0.0), 0)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _forward_sums(  # type: ignore[no-untyped-def]
    x, parts, rows, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr
):
    """Parts of Σ(x − k) and Σ(x − k)², k being the first row, so that no digits cancel."""
    channel, held = _channels(C, CHANNELS)
    unit = tl.load(x + channel, mask=held, other=0.0)
    about = unit.to(tl.float32)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        place, there = _tile(start, rows, channel, held, C, ROWS)
        value = tl.load(x + place, mask=there, other=unit[None, :])  # k adds nothing
        apart = value.to(tl.float32) - about[None, :]
        one += apart
        two += apart * apart
    _keep_parts(one, two, parts, channel, held, C)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _forward_values(  # type: ignore[no-untyped-def]
    x,
    shortcut,
    weight,
    bias,
    parts,
    y,
    statistics,
    rows,
    C,
    eps,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """y, and the (3, C) statistics: mean, 1/√(variance + ε), unbiased variance."""
    channel, held = _channels(C, CHANNELS)
    offset = _total(parts, 0, channel, held, C, ROOM) / rows
    square = _total(parts, 1, channel, held, C, ROOM) / rows
    variance = tl.maximum(square - offset * offset, 0.0)
    mean, spread = _values(x, channel, held) + offset, 1.0 / tl.sqrt(variance + eps)
    if tl.program_id(0) == 0:
        tl.store(statistics + channel, mean, mask=held)
        tl.store(statistics + C + channel, spread, mask=held)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(statistics + 2 * C + channel, unbiased, mask=held)
    scale = _values(weight, channel, held) * spread
    shift = _values(bias, channel, held)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        place, there = _tile(start, rows, channel, held, C, ROWS)
        value = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if SHORTCUT:
            value += tl.load(shortcut + place, mask=there, other=0.0).to(tl.float32)
        if RELU:
            value = tl.maximum(value, 0.0)
        tl.store(y + place, value.to(y.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _passed(  # type: ignore[no-untyped-def]
    gradient, apart, y, place, there, scale, shift, RELU: tl.constexpr, SHORTCUT: tl.constexpr
):
    """The gradient behind the ReLU: of what is not positive nothing passes. Without a shortcut
    that is computed again, which is cheaper than to read y."""
    passed = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    if RELU:
        if SHORTCUT:
            value = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
        else:
            value = apart * scale[None, :] + shift[None, :]
        passed = tl.where(value > 0, passed, 0.0)
    return passed


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _backward_sums(  # type: ignore[no-untyped-def]
    gradient,
    x,
    y,
    weight,
    bias,
    statistics,
    parts,
    rows,
    C,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Parts of Σg and Σg·(x − mean)."""
    channel, held = _channels(C, CHANNELS)
    mean = _values(statistics, channel, held)
    scale = _values(weight, channel, held) * _values(statistics + C, channel, held)
    shift = _values(bias, channel, held)
    one = tl.zeros((ROWS, CHANNELS), tl.float32)
    two = tl.zeros((ROWS, CHANNELS), tl.float32)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        place, there = _tile(start, rows, channel, held, C, ROWS)
        apart = tl.load(x + place, mask=there, other=0.0).to(tl.float32) - mean[None, :]
        passed = _passed(gradient, apart, y, place, there, scale, shift, RELU, SHORTCUT)
        one += passed
        two += passed * apart
    _keep_parts(one, two, parts, channel, held, C)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _backward_values(  # type: ignore[no-untyped-def]
    gradient,
    x,
    y,
    weight,
    bias,
    statistics,
    parts,
    to_x,
    to_shortcut,
    to_affine,
    rows,
    C,
    RELU: tl.constexpr,
    SHORTCUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The gradients of x, of the shortcut, and (2, C) of weight and bias."""
    channel, held = _channels(C, CHANNELS)
    mean, spread = _values(statistics, channel, held), _values(statistics + C, channel, held)
    scale = _values(weight, channel, held) * spread
    shift = _values(bias, channel, held)
    total = _total(parts, 0, channel, held, C, ROOM)
    against = _total(parts, 1, channel, held, C, ROOM) * spread
    if tl.program_id(0) == 0:
        tl.store(to_affine + channel, against, mask=held)
        tl.store(to_affine + C + channel, total, mask=held)
    against = -scale * against * spread / rows
    total = -scale * total / rows
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        place, there = _tile(start, rows, channel, held, C, ROWS)
        apart = tl.load(x + place, mask=there, other=0.0).to(tl.float32) - mean[None, :]
        passed = _passed(gradient, apart, y, place, there, scale, shift, RELU, SHORTCUT)
        found = scale[None, :] * passed + (against[None, :] * apart + total[None, :])
        tl.store(to_x + place, found.to(to_x.dtype.element_ty), mask=there)
        if SHORTCUT:
            tl.store(to_shortcut + place, passed.to(to_shortcut.dtype.element_ty), mask=there)


class _Work:
    """How a matrix of x's shape is cut among blocks, about `blocks` in all."""

    def __init__(self, x: Tensor, blocks: int) -> None:
        self.channels = x.shape[1]
        self.rows = x.numel() // self.channels
        wide = min(TILE_CHANNELS, triton.next_power_of_2(self.channels))
        across = triton.cdiv(self.channels, wide)
        down = max(1, min(blocks // across, MOST_PARTS, triton.cdiv(self.rows, TILE_ROWS)))
        self.grid = (down, across)
        self.tile = {"ROWS": TILE_ROWS, "CHANNELS": wide, "STAGES": STAGES, "num_warps": WARPS}
        # One for all layers: code is made for it.
        self.room = {"ROOM": triton.next_power_of_2(min(blocks, MOST_PARTS))}
        self.parts = torch.empty((2, down, self.channels), dtype=torch.float32, device=x.device)


@torch.library.custom_op("fedsieve::normalise", mutates_args=())
def _normalise(
    x: Tensor,
    shortcut: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    relu: bool,
    blocks: int,
) -> tuple[Tensor, Tensor]:
    """BatchNorm of x by its own statistics, plus the shortcut, then ReLU; the (3, C) statistics."""
    x = x.contiguous(memory_format=torch.channels_last)
    if shortcut is not None:
        shortcut = shortcut.contiguous(memory_format=torch.channels_last)
    work = _Work(x, blocks)
    y = torch.empty_like(x)
    statistics = torch.empty((3, work.channels), dtype=torch.float32, device=x.device)
    size = (work.rows, work.channels)
    added = x if shortcut is None else shortcut
    kind = {"RELU": relu, "SHORTCUT": shortcut is not None}
    with _LAUNCHING:
        _forward_sums[work.grid](x, work.parts, *size, **work.tile)
        _forward_values[work.grid](
            *(x, added, weight, bias, work.parts, y, statistics, *size, eps),
            **kind,
            **work.tile,
            **work.room,
        )
    return y, statistics


@_normalise.register_fake
def _(
    x: Tensor,
    shortcut: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    relu: bool,
    blocks: int,
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.channels_last)
    return y, x.new_empty((3, x.shape[1]), dtype=torch.float32)


@torch.library.custom_op("fedsieve::normalise_backward", mutates_args=())
def _normalise_backward(
    gradient: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    relu: bool,
    has_shortcut: bool,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the shortcut (empty without one), and (2, C) of weight and bias."""
    last = torch.channels_last
    gradient, x, y = (tensor.contiguous(memory_format=last) for tensor in (gradient, x, y))
    work = _Work(x, blocks)
    to_x = torch.empty_like(x)
    to_shortcut = torch.empty_like(x) if has_shortcut else x.new_empty(0)
    to_affine = torch.empty((2, work.channels), dtype=torch.float32, device=x.device)
    given = (gradient, x, y, weight, bias, statistics, work.parts)
    size = (work.rows, work.channels)
    kind = {"RELU": relu, "SHORTCUT": has_shortcut}
    with _LAUNCHING:
        _backward_sums[work.grid](*given, *size, **kind, **work.tile)
        _backward_values[work.grid](
            *(*given, to_x, to_shortcut, to_affine, *size), **kind, **work.tile, **work.room
        )
    return to_x, to_shortcut, to_affine


@_normalise_backward.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    relu: bool,
    has_shortcut: bool,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    to_x = torch.empty_like(x, memory_format=torch.channels_last)
    to_shortcut = torch.empty_like(to_x) if has_shortcut else x.new_empty(0)
    return to_x, to_shortcut, x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, shortcut, weight, bias, _, ctx.relu, ctx.blocks = inputs
    y, statistics = output
    ctx.has_shortcut = shortcut is not None
    ctx.mark_non_differentiable(statistics)
    # Without a shortcut the backward pass does not read y, and should not keep it alive.
    ctx.save_for_backward(x, y if ctx.has_shortcut else x, weight, bias, statistics)


def _back(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, y, weight, bias, statistics = ctx.saved_tensors
    to_x, to_shortcut, to_affine = _normalise_backward(
        gradient, x, y, weight, bias, statistics, ctx.relu, ctx.has_shortcut, ctx.blocks
    )
    to_weight, to_bias = to_affine.unbind()
    return (
        to_x,
        to_shortcut if ctx.has_shortcut else None,
        to_weight.to(weight.dtype),
        to_bias.to(bias.dtype),
        None,
        None,
        None,
    )


_normalise.register_autograd(_back, setup_context=_keep)


class FusedNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose training passes are fused kernels. They leave the running statistics
    alone: `move_statistics` moves those of a whole model at once."""

    blocks: int
    """How many blocks of threads a kernel has at most."""
    seen: tuple[Tensor, ...]
    """(3, C) each, mean first and unbiased variance last: the statistics of every training pass
    that the running ones have not followed yet."""

    def forward(self, x: Tensor) -> Tensor:
        return _pass(self, x, None, relu=False) if self.training else super().forward(x)


class FusedNormRelu(NormRelu):
    """The same, with shortcut and ReLU."""

    blocks: int
    seen: tuple[Tensor, ...]

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if not self.training:
            return super().forward(x, shortcut)
        return _pass(self, x, shortcut, relu=True)


def _pass(
    norm: FusedNorm | FusedNormRelu, x: Tensor, shortcut: Tensor | None, *, relu: bool
) -> Tensor:
    y: Tensor
    y, seen = _normalise(x, shortcut, norm.weight, norm.bias, norm.eps, relu, norm.blocks)
    norm.seen = (*norm.seen, seen)
    return y


BLOCKS_PER_MULTIPROCESSOR = 5
"""As many as there is room for of the kernel with most registers (96), so that none waits."""
_FUSED: Mapping[type[nn.Module], type[FusedNorm | FusedNormRelu]] = MappingProxyType(
    {nn.BatchNorm2d: FusedNorm, NormRelu: FusedNormRelu}
)


def fuse(model: nn.Module, multiprocessors: int) -> list[FusedNorm | FusedNormRelu]:
    """Have the model's BatchNorm layers use fused kernels on so many multiprocessors."""
    fused: list[FusedNorm | FusedNormRelu] = []
    for module in model.modules():
        kind = _FUSED.get(type(module))
        if kind is None or not _is_usual(module):
            continue
        module.__class__ = kind
        assert isinstance(module, FusedNorm | FusedNormRelu)
        module.blocks = BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        module.seen = ()
        fused.append(module)
    return fused


def _is_usual(norm: nn.Module) -> bool:
    """Whether a layer scales, shifts, and follows its statistics by a momentum."""
    assert isinstance(norm, nn.BatchNorm2d)
    return norm.affine and norm.track_running_stats and norm.momentum is not None


@torch.no_grad()
def move_statistics(norms: list[FusedNorm | FusedNormRelu]) -> None:
    """Move running means and variances towards those of each training pass, in their order."""
    while moving := [norm for norm in norms if norm.seen]:
        for momentum in {norm.momentum for norm in moving}:
            alike = [norm for norm in moving if norm.momentum == momentum]
            running = [t for norm in alike for t in (norm.running_mean, norm.running_var)]
            seen = [t for norm in alike for t in (norm.seen[0][0], norm.seen[0][2])]
            torch._foreach_lerp_(running, seen, momentum)  # type: ignore[arg-type]
        for norm in moving:
            norm.seen = norm.seen[1:]
