"""Models as vectors, for the fast workbench.

A model's trainable parameters are pieces of one flat fp32 vector, with a bf16 shadow of those that
autocast would cast anyway. So SGD, momentum, weight decay, the shadow and the moving average are
one fused pass over memory instead of several hundred small kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsieve.local.bench import Precision
from fedsieve.types import Weights


class Replica:
    """A model whose trainable parameters are pieces of one flat vector, and its momentum."""

    def __init__(self, model: nn.Module, precision: Precision, *, shadowed: bool) -> None:
        self.model = model.train()
        low = cast_by_autocast(model) if precision == "bf16" else frozenset[str]()
        # Parameters with a shadow come first; sizes that would break the alignment of what follows
        # come last among them.
        order = sorted(
            model.named_parameters(), key=lambda p: (p[0] not in low, p[1].numel() % 64 != 0)
        )
        device = order[0][1].device
        self.names = [name for name, _ in order]
        self.low_count = len(low)
        low_size = sum(p.numel() for name, p in order if name in low)
        self.flat = torch.zeros(sum(p.numel() for _, p in order), device=device)
        self.momentum = torch.zeros_like(self.flat)
        self.shadow = torch.zeros(low_size, dtype=torch.bfloat16, device=device)
        self.groups = [slice(0, low_size), slice(low_size, len(self.flat))]
        self.leaves: list[nn.Parameter] = []
        """What autograd differentiates by: the shadow's pieces, or the fp32 parameters."""
        self.parameters: dict[str, Tensor] = {}
        """The fp32 parameters, as losses see them."""
        offset = 0
        for name, parameter in order:
            master = piece(self.flat, offset, parameter.shape)
            self.leaves.append(parameter)
            if shadowed and name in low:
                parameter.data = piece(self.shadow, offset, parameter.shape)
                self.parameters[name] = master.requires_grad_()
            else:
                parameter.data = master
                self.parameters[name] = parameter
            offset += parameter.numel()
        for module in model.modules():
            if hasattr(module, "num_batches_tracked"):
                # Nothing reads this count, and counting costs a kernel per layer.
                module.num_batches_tracked = None  # type: ignore[assignment]
        self.buffers = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self.tensors = {**{n: p.detach() for n, p in self.parameters.items()}, **self.buffers}
        """The fp32 weights in place."""
        self.shapes = {name: self.tensors[name].shape for name in (*self.names, *self.buffers)}
        """Of the parameters as they lie in `flat`, and then of the buffers."""

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        torch._foreach_copy_(list(self.tensors.values()), [weights[name] for name in self.tensors])
        self.shadow.copy_(self.flat[: len(self.shadow)])
        self.momentum.zero_()

    @torch.no_grad()
    def read(self) -> Weights:
        """A copy of the weights: pieces of one new vector."""
        flat = torch.cat([self.flat, *(b.flatten() for b in self.buffers.values())])
        return named_pieces(flat, self.shapes)


def pieces(flat: Tensor, replica: Replica) -> dict[str, Tensor]:
    """Name the pieces of a vector that holds a value for each of a replica's parameters."""
    return named_pieces(flat, {name: replica.shapes[name] for name in replica.names})


def named_pieces(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A vector cut into pieces of these shapes, one after another."""
    # One call that splits: to cut a hundred pieces one by one takes a millisecond, and ten slots
    # that are done at the same time wait for each other's.
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {
        name: shaped(part, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def piece(flat: Tensor, offset: int, shape: torch.Size) -> Tensor:
    """Part of a flat vector in `shape`."""
    return shaped(flat[offset : offset + shape.numel()], shape)


def shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """A vector in `shape`; four dimensions lie in memory channels last."""
    if len(shape) == 1:
        return part
    if len(shape) == 4:
        out, inside, height, width = shape
        return part.view(out, height, width, inside).permute(0, 3, 1, 2)
    return part.view(shape)


def flatten(gradient: Tensor) -> Tensor:
    """The inverse of `piece`."""
    return (gradient.permute(0, 2, 3, 1) if gradient.dim() == 4 else gradient).reshape(-1)


def joined(vectors: list[Tensor]) -> Tensor:
    """`torch.cat` of vectors, as one multi-tensor copy, which is several times faster."""
    whole = torch.empty(
        sum(len(v) for v in vectors), dtype=vectors[0].dtype, device=vectors[0].device
    )
    torch._foreach_copy_(list(torch.split(whole, [len(v) for v in vectors])), vectors)
    return whole


def cast_by_autocast(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that autocast would cast for every use: convolutions and linear."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
        for name, _ in module.named_parameters(recurse=False)
    )


def update(
    weights: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    scale: Tensor | None,
    shadow: Tensor | None,
    average: Tensor | None,
    lr: float,
    factor: float,
    decay: float,
    average_decay: float,
) -> None:
    """One step of SGD with momentum and weight decay, its bf16 shadow and its moving average."""
    gradient = gradient.float().add(weights, alpha=decay)
    if scale is not None:
        gradient = gradient * scale
    momentum.mul_(factor).add_(gradient)
    weights.add_(momentum, alpha=-lr)
    if shadow is not None:
        shadow.copy_(weights)
    if average is not None:
        average.lerp_(weights, 1 - average_decay)
