"""Local training described as data, so that one fast loop serves every method.

A method fills in a `Plan`; the workbench carries it out, eagerly or as a CUDA graph, with the same
result. Within a step there is no Python control flow on tensor values, and every tensor that the
loss reads comes through the `Batch`: nothing is captured by a closure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.errors import check
from fedsieve.types import Outputs, Streams, Weights


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """The local solver: plain SGD, its momentum starting at zero in every round."""

    epochs: int = 1
    """E, passes over the client's data in a round (at least 1)."""
    batch_size: int = 32
    """B, samples per step (at least 2)."""
    lr: float = 0.01
    """η, constant learning rate (above 0)."""
    momentum: float = 0.0
    """Momentum without Nesterov's correction, in [0, 1)."""
    weight_decay: float = 0.0
    """L2 penalty on every trainable parameter (at least 0)."""
    tail: Literal["keep", "drop", "pad"] = "keep"
    """The last, smaller batch of an epoch: keep it as it is, drop it, or pad it with samples of
    weight zero, which count in BatchNorm all the same. A kept batch of one sample is skipped,
    because BatchNorm cannot normalise it."""

    def __post_init__(self) -> None:
        check(self.epochs >= 1, f"sgd.epochs must be at least 1, not {self.epochs}.")
        check(self.batch_size >= 2, f"sgd.batch_size must be at least 2, not {self.batch_size}.")
        check(0 < self.lr < math.inf, f"sgd.lr must be above 0, not {self.lr}.")
        check(0 <= self.momentum < 1, f"sgd.momentum must be in [0, 1), not {self.momentum}.")
        check(
            self.weight_decay >= 0, f"sgd.weight_decay must be at least 0, not {self.weight_decay}."
        )


class Net(Protocol):
    """A model in training mode, as a loss sees it."""

    def __call__(self, x: Tensor) -> Outputs: ...

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name."""


Constant: TypeAlias = Tensor | float | Weights


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step sees of B samples."""

    values: Mapping[str, Tensor]
    """Views by name, normalised, (B, C, H, W); per-sample columns by name, (B, ...); what the plan
    holds per step, one row without its leading dimension, normalised if it is images; and what the
    last step carried over."""
    constants: Mapping[str, Tensor | Weights]
    """Numbers (as 0-d tensors), tensors and weights that stay the same for the whole plan."""
    weight: Tensor | None
    """(B,) one for a sample, zero for padding; None where nothing is padded."""

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def scalar(self, name: str) -> Tensor:
        """The constant number `name` as a 0-d tensor; a constant tensor is left as it is."""
        value = self.constants[name]
        assert isinstance(value, Tensor)
        return value

    def weights(self, name: str) -> Weights:
        """The constant weights `name`."""
        value = self.constants[name]
        assert isinstance(value, Mapping)
        return value

    def mean(self, values: Tensor) -> Tensor:
        """Mean of per-sample `values`, shape (B,), over the samples that are not padding."""
        assert values.dim() == 1, f"per-sample values have shape {tuple(values.shape)}, not (B,)"
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum()


class Stepped(NamedTuple):
    """What the loss of a plan returns that carries tensors from step to step."""

    loss: Tensor
    """A scalar."""
    carried: Mapping[str, Tensor]
    """What the next step reads, by the names of `Plan.carried`; no gradient flows through it."""


Loss: TypeAlias = Callable[..., Tensor | Stepped]
"""`loss(batch, *nets)` to a scalar, or to `Stepped` where the plan carries something: the trained
nets, then the frozen ones, then the moving average where it is asked for. A module-level function,
or a `functools.partial` of one over hashable arguments, so that a captured step can be
recognised."""


def stepped(found: Tensor | Stepped, carried: Mapping[str, Tensor]) -> Stepped:
    """What a loss returned, of which the step before had `carried` these tensors over."""
    result = found if isinstance(found, Stepped) else Stepped(found, {})
    before, after = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        for tensors in (carried, result.carried)
    )
    assert before == after, f"a plan carries {before} over, its loss {after}"
    return result


@dataclass(frozen=True)
class Ema:
    """A moving average of the first model: e ← decay·e + (1 − decay)·w after each step."""

    start: Weights
    decay: float
    in_loss: bool = False
    """Hand the loss the current average as one more net: evaluation mode, no gradient."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One client's local training in one round."""

    start: Sequence[Weights]
    """Where each model starts: one entry, or two for two-network methods."""
    images: Tensor
    """(n, C, H, W) uint8"""
    views: Mapping[str, str]
    """Name in the batch → name of the view, drawn afresh in every epoch, e.g. {"x": "strong"}."""
    columns: Mapping[str, Tensor]
    """Per-sample tensors (n, ...), gathered with the batch."""
    loss: Loss
    sgd: Sgd
    rng: Streams
    constants: Mapping[str, Constant] = field(default_factory=dict)
    ema: Ema | None = None
    frozen: Sequence[Weights] = ()
    """Models that a loss may call besides the trained ones: evaluation mode, no gradient."""
    observe_after: int | None = None
    """After this many epochs record the trained model's outputs on the raw view, in evaluation
    mode."""
    per_step: Mapping[str, Tensor] = field(default_factory=dict)
    """Values that change with the step, (`count_steps`, ...): step t reads row t. A row has the
    same shape in every step, also in one with a smaller batch."""
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that each step reads from the batch by name and replaces, as the first step finds
    them. The loss returns their successors, of the same shape and type, in `Stepped`."""
    step_images: Mapping[str, Tensor] = field(default_factory=dict)
    """Images besides those of the batch, (`count_steps`, rows, C, H, W) uint8: step t reads row t,
    normalised like a view. They are views already: nothing more is drawn for them."""
    update_scale: Weights | None = None
    """s, by name of a trainable parameter of every trained model: u = s ⊙ (g + λw), v ← m·v + u,
    w ← w − η·v. An entry broadcasts to its parameter and s = 0 keeps it as it is; a parameter
    without an entry has s = 1."""

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            assert len(column) == len(self.images), f"column {name}: {len(column)} rows"
        steps = count_steps(len(self.images), self.sgd)
        for name, values in self.of_steps.items():
            assert len(values) == steps, f"{name}: {len(values)} rows for {steps} steps"
        for name, images in self.step_images.items():
            assert images.dtype == torch.uint8, f"step_images {name}: {images.dtype} is no view's"
        names = [*self.columns, *self.views, *self.per_step, *self.step_images, *self.carried]
        assert len(names) == len(set(names)), "two of what a batch holds share a name"
        assert 1 <= len(self.start) <= 2
        strange = set(self.update_scale or ()) - set(self.start[0])
        assert not strange, f"update_scale for unknown parameters {sorted(strange)}"

    @property
    def of_steps(self) -> Mapping[str, Tensor]:
        """All that has a row for each step."""
        return {**self.per_step, **self.step_images}

    @property
    def normalised(self) -> tuple[str, ...]:
        """Names of what a loss sees normalised."""
        return (*self.views, *self.step_images)


@dataclass(frozen=True)
class Fitted:
    """What local training leaves behind."""

    weights: tuple[Weights, ...]
    ema: Weights | None
    steps: int
    loss: float
    """Mean of the step losses; 0 where no step was taken."""
    observed: Outputs | None = None
    """What `Plan.observe_after` asked for; None where no step was taken."""
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    """`Plan.carried` after the last step."""


@dataclass(frozen=True)
class Schedule:
    """Which rows each step reads: all batches of all epochs, drawn once."""

    rows: tuple[np.ndarray, ...]
    """Per step the row numbers of its samples (padding included)."""
    epoch_of: tuple[int, ...]
    padding: tuple[int, ...]
    """Per step how many of the last rows are padding."""

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def size_of(self) -> np.ndarray:
        """(steps,) how many rows each step reads."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    def sizes(self) -> list[int]:
        """The different batch sizes, largest first."""
        return [int(size) for size in np.unique(self.size_of)[::-1]]

    def steps_in(self, epochs: range, size: int | None = None) -> np.ndarray:
        """The numbers of the steps of consecutive epochs, all or those that read `size` rows."""
        first, stop = np.searchsorted(self.epoch_of, [epochs.start, epochs.stop])
        steps = np.arange(first, stop)
        return steps if size is None else steps[self.size_of[steps] == size]


def count_steps(n: int, sgd: Sgd) -> int:
    """How many steps the `schedule` of n samples has."""
    full, left = divmod(n, sgd.batch_size)
    needed = {"keep": 2, "drop": sgd.batch_size, "pad": 1}[sgd.tail]
    return sgd.epochs * (full + (left >= needed))


def schedule(n: int, sgd: Sgd, rng: np.random.Generator) -> Schedule:
    """Every epoch a fresh permutation of n samples, cut into pieces of `sgd.batch_size`."""
    rows: list[np.ndarray] = []
    epochs: list[int] = []
    padding: list[int] = []
    size = sgd.batch_size
    for epoch in range(sgd.epochs):
        order = rng.permutation(n)
        for first in range(0, n, size):
            batch, missing = order[first : first + size], max(0, first + size - n)
            if missing and sgd.tail == "drop":
                continue
            if missing and sgd.tail == "pad":
                batch = (
                    np.resize(order, size) if n < size else np.concatenate([batch, order[:missing]])
                )
            if len(batch) < 2:
                continue
            rows.append(batch)
            epochs.append(epoch)
            padding.append(missing if sgd.tail == "pad" else 0)
    return Schedule(tuple(rows), tuple(epochs), tuple(padding))


IMAGES_PER_DRAW = 1024
"""Views are made for this many images at a time: whole epochs, at least one."""


def draws(n: int, epochs: int) -> Iterator[range]:
    """Consecutive epochs whose views are made in one call."""
    stride = max(1, IMAGES_PER_DRAW // max(1, n))
    for first in range(0, epochs, stride):
        yield range(first, min(epochs, first + stride))


def repeats(view: str, epochs: range) -> int:
    """How often a view of the images is made for these epochs: the raw one never changes."""
    return 1 if view == "raw" else len(epochs)


def seed_dropout(models: Sequence[nn.Module], generator: torch.Generator) -> None:
    """Let every dropout layer that can draw from a generator of its own draw from this one."""
    for model in models:
        for module in model.modules():
            if hasattr(module, "generator"):
                module.generator = generator  # type: ignore[assignment]
