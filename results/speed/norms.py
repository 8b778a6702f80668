"""How long BatchNorm takes in a slice of a GPU: kernels of torch's compiler, and fused ones.

    python results/speed/norms.py 10

captures, in one of so many slices, a pass forward and back of each kind of layer of a ResNet-18 at
batch 32 in bf16, and prints the time of all twenty for several ways to cut the fused kernels' work.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedsieve.local import fused
from fedsieve.local.compiled import allow_variants
from fedsieve.local.slices import Slice, carve
from fedsieve.models.norms import NormRelu
from fedsieve.simulate.world import prepare_cuda

LAYERS = {
    # (channels, side, with a shortcut): how many of the twenty
    (64, 32, False): 3,
    (64, 32, True): 2,
    (128, 16, False): 3,
    (128, 16, True): 2,
    (256, 8, False): 3,
    (256, 8, True): 2,
    (512, 4, False): 3,
    (512, 4, True): 2,
}
"""Layers without ReLU in the shortcuts of stages count as those with one."""
BATCH, TOGETHER, REPEATS = 32, 20, 20
CUTS = [
    (32, 4, 5, 3),
    (16, 4, 5, 3),
    (32, 8, 4, 3),
    (64, 8, 4, 3),
    (32, 4, 5, 1),
    (32, 4, 8, 3),
    (16, 4, 8, 2),
]
"""Rows of a tile, warps of a block, blocks of a multiprocessor, tiles that are read at a time."""


def milliseconds(place: Slice, stream: torch.cuda.Stream, pass_: Callable[[], object]) -> float:
    """Of one pass, captured many times over."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            pass_()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(TOGETHER):
                pass_()
        graph.replay()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        before.record(stream)
        for _ in range(REPEATS):
            graph.replay()
        after.record(stream)
        stream.synchronize()
    return before.elapsed_time(after) / (TOGETHER * REPEATS)


def twenty_layers(place: Slice, stream: torch.cuda.Stream, *, fuse: bool) -> float:
    torch.compiler.reset()  # there are more variants than torch would compile of one module
    allow_variants()
    total = 0.0
    for (channels, side, has_shortcut), count in LAYERS.items():
        norm = NormRelu(channels).to(place.device)
        norm.num_batches_tracked = None
        if fuse:
            fused.fuse(norm, place.multiprocessors)
        shape = (BATCH, channels, side, side)
        tensors = [
            torch.randn(shape, device=place.device, dtype=torch.bfloat16).contiguous(
                memory_format=torch.channels_last
            )
            for _ in range(3)
        ]
        gradient, x, shortcut = (t.requires_grad_(i > 0) for i, t in enumerate(tensors))
        inputs = [x, *([shortcut] if has_shortcut else [])]
        leaves = [*inputs, norm.weight, norm.bias]
        compiled = torch.compile(norm, dynamic=False)

        def pass_(
            inputs: list[Tensor] = inputs,
            leaves: list[Tensor] = leaves,
            gradient: Tensor = gradient,
            norm: Callable[..., Tensor] = compiled,
            fused_norm: NormRelu = norm,
        ) -> None:
            torch.autograd.grad(norm(*inputs), leaves, gradient)
            if fuse:
                fused_norm.seen = ()

        total += count * milliseconds(place, stream, pass_)
    return total


@contextmanager
def cut(rows: int, warps: int, blocks: int, stages: int) -> Iterator[None]:
    names = ("TILE_ROWS", "WARPS", "BLOCKS_PER_MULTIPROCESSOR", "STAGES")
    before = [getattr(fused, name) for name in names]
    try:
        for name, value in zip(names, (rows, warps, blocks, stages), strict=True):
            setattr(fused, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(fused, name, value)


def main(slices: str) -> None:
    prepare_cuda()
    place = carve(torch.device("cuda", torch.cuda.current_device()), int(slices))[0]
    place.enter()
    stream = place.stream()
    print(f"a slice of {place.multiprocessors} multiprocessors; ms for twenty layers")
    print(f"torch's compiler  {twenty_layers(place, stream, fuse=False):.3f}", flush=True)
    for rows, warps, blocks, stages in CUTS:
        with cut(rows, warps, blocks, stages):
            took = twenty_layers(place, stream, fuse=True)
        print(
            f"{rows:2} rows, {warps} warps, {blocks} blocks, {stages} stages  {took:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
