"""Weights as one vector.

A model has a hundred tensors, and a copy or a sum that goes through them one by one costs a hundred
calls. Where all of them are pieces of one vector, it costs one. Only what a GPU trained comes
packed; everything here takes other weights, too, and gives the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsieve.types import Weights


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the pieces of a vector, one after another."""

    pieces: tuple[tuple[str, torch.Size], ...]

    @functools.cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for _, shape in self.pieces]

    def cut(self, vector: Tensor) -> dict[str, Tensor]:
        """The pieces of a vector by name."""
        # One call that splits: to cut a hundred pieces one by one takes a millisecond, and ten
        # slots that are done at the same time wait for each other's.
        parts = torch.split(vector, self.sizes)
        return {
            name: shaped(part, shape)
            for (name, shape), part in zip(self.pieces, parts, strict=True)
        }


def shaped(part: Tensor, shape: torch.Size) -> Tensor:
    """A vector in `shape`; four dimensions lie in memory channels last."""
    if len(shape) == 1:
        return part
    if len(shape) == 4:
        out, inside, height, width = shape
        return part.view(out, height, width, inside).permute(0, 3, 1, 2)
    return part.view(shape)


class Packed(Mapping[str, Tensor]):
    """Weights whose tensors are pieces of one vector, cut when somebody asks for one."""

    def __init__(self, vector: Tensor, layout: Layout) -> None:
        self.vector = vector
        self.layout = layout

    @functools.cached_property
    def _pieces(self) -> dict[str, Tensor]:
        return self.layout.cut(self.vector)

    def __getitem__(self, name: str) -> Tensor:
        return self._pieces[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.layout.pieces)

    def __len__(self) -> int:
        return len(self.layout.pieces)


def alike(weights: Sequence[Weights]) -> Sequence[Packed] | None:
    """The same weights, if all are packed in the same way."""
    packed = [one for one in weights if isinstance(one, Packed)]
    if len(packed) < len(weights) or any(one.layout != packed[0].layout for one in packed[1:]):
        return None
    return packed


def in_step(weights: Sequence[Weights]) -> list[list[Tensor]]:
    """For each of the weights of one model its tensors in the order of the first ones: as few as
    can be."""
    if packed := alike(weights):
        return [[one.vector] for one in packed]
    return [[one[name] for name in weights[0]] for one in weights]


def like(weights: Weights, tensors: Sequence[Tensor]) -> Weights:
    """What was computed from weights `in_step`, the first of which were `weights`, as weights."""
    if isinstance(weights, Packed) and [t.shape for t in tensors] == [weights.vector.shape]:
        return Packed(tensors[0], weights.layout)
    return dict(zip(weights, tensors, strict=True))
