"""Models as vectors, for the fast workbench.

A model's trainable parameters are pieces of one flat fp32 vector, with a bf16 shadow of those that
autocast would cast anyway. So SGD, momentum, weight decay, the shadow and the moving average are
one fused pass over memory instead of several hundred small kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsieve.local.bench import Precision
from fedsieve.models.weights import copy_weights
from fedsieve.packed import Layout, Packed
from fedsieve.types import Weights, nothing


class Replica:
    """A model whose parameters are pieces of one flat vector, as are its statistics; and, where it
    is trained, its momentum and a bf16 shadow."""

    def __init__(self, model: nn.Module, precision: Precision, *, trained: bool) -> None:
        self.model = model.train()
        self._trained = trained
        self.after_pass: Callable[[], None] = nothing
        """Called after the training passes of a step."""
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
        self.momentum = torch.zeros_like(self.flat) if trained else self.flat[:0]
        self.shadow = torch.zeros(low_size if trained else 0, dtype=torch.bfloat16, device=device)
        self.groups = [slice(0, low_size), slice(low_size, len(self.flat))]
        self.leaves: list[nn.Parameter] = []
        """What autograd differentiates by: the shadow's pieces, or the fp32 parameters."""
        self.parameters: dict[str, Tensor] = {}
        """The fp32 parameters, as losses see them."""
        self.piece_layout = Layout(tuple((name, p.shape) for name, p in order))
        """Of what holds a value for each parameter, as `flat` does."""
        masters = self.piece_layout.cut(self.flat)
        shadows = Layout(self.piece_layout.pieces[: len(low)]).cut(self.shadow) if trained else {}
        for name, parameter in order:
            self.leaves.append(parameter)
            if name in shadows:
                parameter.data = shadows[name]
                self.parameters[name] = masters[name].requires_grad_()
            else:
                parameter.data = masters[name]
                self.parameters[name] = parameter
        for module in model.modules():
            if hasattr(module, "num_batches_tracked"):
                # Nothing reads this count, and counting costs a kernel per layer.
                module.num_batches_tracked = None  # type: ignore[assignment]
        floats = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        behind = Layout(tuple((name, buffer.shape) for name, buffer in floats.items()))
        self.statistics = torch.zeros(sum(behind.sizes), device=device)
        statistics = behind.cut(self.statistics)
        for name, own in statistics.items():
            prefix, _, short = name.rpartition(".")
            setattr(model.get_submodule(prefix), short, own)
        self.tensors = {**{n: p.detach() for n, p in self.parameters.items()}, **statistics}
        """The fp32 weights in place."""
        self.layout = Layout(self.piece_layout.pieces + behind.pieces)
        """Of the weights that `read` gives: parameters as they lie in `flat`, then statistics."""

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        if isinstance(weights, Packed) and weights.layout == self.layout:
            self.flat.copy_(weights.vector[: len(self.flat)])
            self.statistics.copy_(weights.vector[len(self.flat) :])
        else:
            copy_weights(self.tensors, weights)
        if self._trained:
            self.shadow.copy_(self.flat[: len(self.shadow)])
            self.momentum.zero_()

    @torch.no_grad()
    def read(self) -> Packed:
        """A copy of the weights."""
        return Packed(torch.cat([self.flat, self.statistics]), self.layout)


def flatten(gradient: Tensor) -> Tensor:
    """The inverse of `shaped`."""
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
