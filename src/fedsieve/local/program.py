"""What is captured as CUDA graphs: the steps of a local training, and the evaluation pass.

Everything a step reads lies in static buffers. The batches of a segment of epochs are gathered
before it starts, so a step takes its batch by a counter that lives on the device, and a replay is
one call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.local.bench import FrozenNet, LossNet
from fedsieve.local.compiled import (
    allow_variants,
    batch_loss,
    compiled_loss,
    compiled_outputs,
    compiled_update,
    loss_key,
    outputs,
)
from fedsieve.local.flat import Replica, flatten, joined, update
from fedsieve.local.plan import Fitted, Plan, Schedule, Stepped, draws, seed_dropout, stepped
from fedsieve.local.turns import CAPTURE, TRIALS
from fedsieve.types import Outputs

if TYPE_CHECKING:  # it imports this file
    from fedsieve.local.graph import GraphBench

_WARMUP_STEPS = 3
_STEPS_TOGETHER = 5
LAUNCHES_AHEAD = 3
"""How many graphs a slot launches before the first of them must be done."""


def program_key(plan: Plan) -> Hashable:
    """Plans with the same key can share captured steps: only the contents of buffers differ."""
    return (
        loss_key(plan.loss),
        plan.sgd,
        len(plan.start),
        len(plan.frozen),
        None if plan.ema is None else (plan.ema.decay, plan.ema.in_loss),
        tuple(sorted(plan.views.items())),
        tuple((name, c.dtype, c.shape[1:]) for name, c in sorted(plan.columns.items())),
        tuple(
            (name, (c.dtype, c.shape) if isinstance(c, Tensor) else type(c).__name__)
            for name, c in sorted(plan.constants.items())
        ),
        tuple((name, v.dtype, v.shape[1:]) for name, v in sorted(plan.per_step.items())),
        tuple((name, t.dtype, t.shape) for name, t in sorted(plan.carried.items())),
        tuple((name, v.shape[1:]) for name, v in sorted(plan.step_images.items())),
        plan.update_scale is not None,
    )


@dataclass
class _Step:
    """A captured step for one batch size, and the batches of a segment of epochs that it reads."""

    values: dict[str, Tensor]
    """(room, B, …) per view and column; (room, …) for what the plan holds per step"""
    weight: Tensor | None
    """(room, B) zero for padding"""
    counter: Tensor
    one: torch.cuda.CUDAGraph
    several: torch.cuda.CUDAGraph | None
    """`_STEPS_TOGETHER` steps in one graph: fewer calls, fewer gaps. None for the last batch of an
    epoch, which comes alone."""

    @property
    def room(self) -> int:
        return len(next(iter(self.values.values())))

    def graphs(self, count: int) -> Iterator[torch.cuda.CUDAGraph]:
        """What to launch in order to take the next `count` batches."""
        left = count
        if self.several is not None:
            together, left = divmod(count, _STEPS_TOGETHER)
            yield from itertools.repeat(self.several, together)
        yield from itertools.repeat(self.one, left)


@contextlib.contextmanager
def _known_kernels() -> Iterator[None]:
    """Keep cuDNN from trying which kernels are the fastest, in all threads."""
    with TRIALS.alone():
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


class Program:
    """A local training with one loss and one shape of data, captured for reuse."""

    def __init__(self, bench: GraphBench, plan: Plan, memory: Any) -> None:
        self._bench = bench
        self._memory = memory
        self._steps: dict[int, _Step] = {}
        self._replicas = [bench.replica(i) for i in range(len(plan.start))]
        self._trained = [
            LossNet(r.model, bench.precision, bench.device, r.parameters) for r in self._replicas
        ]
        # Model 0 of the bench belongs to `forward`; the frozen ones stand behind it.
        self._given: list[LossNet] = [
            FrozenNet(bench.model(1 + i).eval(), bench.precision, bench.device)
            for i in range(len(plan.frozen))
        ]
        self._average: Replica | None = None
        if plan.ema is not None:
            self._average = Replica(bench.new_model(), bench.precision, trained=False)
            if plan.ema.in_loss:
                model = self._average.model.eval()
                self._given.append(FrozenNet(model, bench.precision, bench.device))
        self._constants = {
            name: {key: t.clone() for key, t in value.items()}
            if isinstance(value, Mapping)
            else value.clone()
            for name, value in bench.constants(plan.constants).items()
        }
        self._carried = {name: tensor.clone() for name, tensor in plan.carried.items()}
        self._scale = None if plan.update_scale is None else torch.ones_like(self._replicas[0].flat)
        self._loss_sum = torch.zeros((), device=bench.device)
        self._generator = torch.Generator(bench.device)
        self._update = compiled_update() if bench.compiles else update

    def run(self, plan: Plan, schedule: Schedule) -> Fitted:
        bench = self._bench
        stretches = list(draws(len(plan.images), plan.sgd.epochs))
        longest = max(
            len(schedule.steps_in(stretch, size))
            for stretch in stretches
            for size in schedule.sizes()
        )
        observed = None
        in_use = []
        being_made = bench.epoch_views(plan)
        self._load(plan)
        for stretch, (_, views) in zip(stretches, being_made, strict=True):
            if stretch.start == 0:
                for size in schedule.sizes():
                    self._ensure(plan, size, longest, views)
            self._fill(plan, schedule, stretch, views)
            in_use.append(views)  # until the GPU has read them
            if stretch.stop == plan.sgd.epochs:
                bench.when_ready()
            for epoch in stretch:
                sizes = schedule.size_of[schedule.steps_in(range(epoch, epoch + 1))]
                for size, run in itertools.groupby(sizes.tolist()):
                    for graph in self._steps[size].graphs(len(list(run))):
                        bench.launch(graph)
                if epoch + 1 == plan.observe_after:
                    raw = bench.view("raw", plan.images, plan.rng("view/raw"))
                    observed = bench.forward(self._replicas[0].read(), raw)
            del in_use[:-LAUNCHES_AHEAD]
        weights = tuple(replica.read() for replica in self._replicas)
        ema = None if self._average is None else self._average.read()
        loss = float(self._loss_sum) / len(schedule)
        carried = {name: tensor.clone() for name, tensor in self._carried.items()}
        return Fitted(weights, ema, len(schedule), loss, observed, carried)

    def replay(self, count: int) -> None:
        """Run the full-size step `count` times on the batches that the buffers hold."""
        step = self._steps[max(self._steps)]
        for first in range(0, count, step.room):
            step.counter.zero_()
            for graph in step.graphs(min(step.room, count - first)):
                self._bench.launch(graph)

    @torch.no_grad()
    def _load(self, plan: Plan) -> None:
        for replica, weights in zip(self._replicas, plan.start, strict=True):
            replica.load(weights)
        for i, weights in enumerate(plan.frozen):
            self._bench.load(1 + i, weights)
        if self._average is not None and plan.ema is not None:
            self._average.load(plan.ema.start)
        for name, value in self._bench.constants(plan.constants).items():
            held = self._constants[name]
            if isinstance(held, dict):
                assert isinstance(value, Mapping)
                torch._foreach_copy_(list(held.values()), [value[key] for key in held])
            else:
                assert isinstance(value, Tensor)
                held.copy_(value)
        for name, carried in self._carried.items():
            carried.copy_(plan.carried[name])
        if self._scale is not None and plan.update_scale is not None:
            self._scale.fill_(1)
            parts = self._replicas[0].piece_layout.cut(self._scale)
            for name, scale in plan.update_scale.items():
                parts[name].copy_(scale)
        self._loss_sum.zero_()
        self._generator.manual_seed(int(plan.rng("dropout").integers(2**63)))
        seed_dropout([replica.model for replica in self._replicas], self._generator)

    def _fill(
        self, plan: Plan, schedule: Schedule, stretch: range, views: Mapping[str, Tensor]
    ) -> None:
        """Gather the batches of a stretch of epochs into the static buffers."""
        n, device, of_steps = len(plan.images), self._bench.device, plan.of_steps
        for size, step in self._steps.items():
            step.counter.zero_()
            chosen = schedule.steps_in(stretch, size)
            if not len(chosen):
                continue
            rows = np.stack([schedule.rows[i] for i in chosen])
            epochs = np.array([schedule.epoch_of[i] - stretch.start for i in chosen])
            index = torch.from_numpy(np.stack([rows, rows + n * epochs[:, None]]))
            index = index.pin_memory().to(device, non_blocking=True).flatten(1)
            for name, buffer in step.values.items():
                if name in of_steps:
                    drawn = of_steps[name][chosen]
                    drawn = drawn if drawn.is_cuda else drawn.pin_memory()
                    buffer[: len(chosen)].copy_(drawn, non_blocking=True)
                    continue
                source = views[name] if name in views else plan.columns[name]
                into = buffer[: len(chosen)].flatten(0, 1)
                torch.index_select(source, 0, index[int(len(source) > n)], out=into)
            if step.weight is not None:
                padding = torch.tensor([schedule.padding[i] for i in chosen], device=device)
                position = torch.arange(size, device=device)
                step.weight[: len(chosen)] = (position < size - padding[:, None]).float()

    def _ensure(self, plan: Plan, size: int, count: int, views: Mapping[str, Tensor]) -> None:
        """Have a captured step for batches of `size`, with room for `count` of them."""
        full, device = size == plan.sgd.batch_size, self._bench.device
        if not full:
            count = plan.sgd.epochs  # one at the end of each: there are many of these sizes
        if size in self._steps and self._steps[size].room >= count:
            return
        # A power of two, so that clients of growing sizes do not have it captured again and again.
        room = 1 << (count - 1).bit_length()
        rows = {name: (t.dtype, (size, *t.shape[1:])) for name, t in plan.columns.items()}
        rows |= {name: (t.dtype, (size, *t.shape[1:])) for name, t in views.items()}
        rows |= {name: (t.dtype, t.shape[1:]) for name, t in plan.of_steps.items()}
        values = {
            name: torch.zeros((room, *shape), dtype=dtype, device=device)
            for name, (dtype, shape) in rows.items()
        }
        weight = torch.ones((room, size), device=device) if plan.sgd.tail == "pad" else None
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        several = torch.cuda.CUDAGraph() if full else None
        step = self._steps[size] = _Step(values, weight, counter, torch.cuda.CUDAGraph(), several)
        with CAPTURE:
            # Clients differ in their last batch, and there are many of its sizes. It is one step of
            # an epoch: not worth compiling code for it, nor trying which kernels are the fastest.
            loss: Callable[..., Tensor | Stepped] = functools.partial(batch_loss, plan.loss)
            if full and self._bench.compiles:
                allow_variants()
                loss = compiled_loss(plan.loss)
            with contextlib.nullcontext() if full else _known_kernels():
                self._capture(plan, step, loss)

    def _capture(self, plan: Plan, step: _Step, loss: Callable[..., Tensor | Stepped]) -> None:
        for _ in range(_WARMUP_STEPS):
            self._train_step(plan, step, loss)
            step.counter.zero_()
        torch.cuda.current_stream().synchronize()
        for graph, count in ((step.one, 1), (step.several, _STEPS_TOGETHER)):
            if graph is None:
                continue
            graph.register_generator_state(self._generator)
            with torch.cuda.graph(
                graph,
                pool=self._memory,
                stream=self._bench.stream,
                capture_error_mode="thread_local",
            ):
                for _ in range(count):
                    self._train_step(plan, step, loss)
        self._load(plan)  # again: the steps before capturing were taken

    def _train_step(
        self, plan: Plan, step: _Step, loss_of: Callable[..., Tensor | Stepped]
    ) -> None:
        # Gathered out here: code is compiled for shapes, and that of a buffer may grow.
        def current(rows: Tensor) -> Tensor:
            return rows.index_select(0, step.counter).squeeze(0)

        found = loss_of(
            plan.normalised,
            {name: current(rows) for name, rows in step.values.items()} | self._carried,
            None if step.weight is None else current(step.weight),
            self._constants,
            self._bench.scale,
            self._bench.shift,
            [*self._trained, *self._given],
        )
        loss, following = stepped(found, self._carried)
        gradients = iter(self._gradients(loss))
        for replica in self._replicas:  # not before: autograd refuses if statistics moved meanwhile
            replica.after_pass()
        with torch.no_grad():
            for replica in self._replicas:
                own = [next(gradients) for _ in replica.leaves]
                self._descend(plan, replica, own)
            # Not before: the gradients read them. As copies: one may be what another one was.
            successors = [following[name].clone() for name in self._carried]
            for carried, successor in zip(self._carried.values(), successors, strict=True):
                carried.copy_(successor)
            self._loss_sum += loss.detach()
            step.counter += 1

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradient of each leaf, with what the loss sent to its fp32 parameter directly."""
        leaves = [leaf for replica in self._replicas for leaf in replica.leaves]
        masters = [r.parameters[name] for r in self._replicas for name in r.names]
        found = torch.autograd.grad(loss, [*leaves, *masters], allow_unused=True)
        merged = []
        for leaf, master, by_leaf, by_master in zip(
            leaves, masters, found[: len(leaves)], found[len(leaves) :], strict=True
        ):
            parts = [by_leaf, by_master if master is not leaf else None]
            present = [g for g in parts if g is not None]
            merged.append(
                functools.reduce(lambda a, b: a.float() + b, present)
                if present
                else torch.zeros_like(leaf)
            )
        return merged

    def _descend(self, plan: Plan, replica: Replica, gradients: list[Tensor]) -> None:
        """Apply one step's gradients to a replica, and follow it with the moving average."""
        average = self._average if replica is self._replicas[0] else None
        parts = [gradients[: replica.low_count], gradients[replica.low_count :]]
        decay = 0.0 if plan.ema is None else plan.ema.decay
        for group, part, is_low in zip(replica.groups, parts, (True, False), strict=True):
            if not part:
                continue
            self._update(
                replica.flat[group],
                replica.momentum[group],
                joined([flatten(g) for g in part]),
                None if self._scale is None else self._scale[group],
                replica.shadow if is_low else None,
                None if average is None else average.flat[group],
                plan.sgd.lr,
                plan.sgd.momentum,
                plan.sgd.weight_decay,
                decay,
            )
        if average is not None:
            average.statistics.lerp_(replica.statistics, 1 - decay)


class ForwardGraph:
    """The evaluation forward pass of a bench's first model over chunks of fixed size."""

    def __init__(
        self, bench: GraphBench, model: nn.Module, images: Tensor, chunk: int, memory: Any
    ) -> None:
        self._input = torch.zeros(
            (chunk, *images.shape[1:]), dtype=torch.uint8, device=bench.device
        )
        self._graph = torch.cuda.CUDAGraph()
        net = FrozenNet(model, bench.precision, bench.device)
        outputs_of = compiled_outputs() if bench.compiles else outputs

        def look() -> Outputs:
            return outputs_of(net, self._input, bench.scale, bench.shift)

        with CAPTURE:
            if bench.compiles:
                allow_variants()
            for _ in range(_WARMUP_STEPS):
                look()
            torch.cuda.current_stream().synchronize()
            with torch.cuda.graph(
                self._graph, pool=memory, stream=bench.stream, capture_error_mode="thread_local"
            ):
                self._output = look()

    def __call__(self, images: Tensor) -> Outputs:
        chunk = len(self._input)
        features: list[Tensor] = []
        logits: list[Tensor] = []
        for first in range(0, max(1, len(images)), chunk):
            part = images[first : first + chunk]
            self._input[: len(part)].copy_(part)
            self._graph.replay()
            logits.append(self._output.logits[: len(part)].clone())
            if self._output.features is not None:
                features.append(self._output.features[: len(part)].clone())
        return Outputs(torch.cat(features) if features else None, torch.cat(logits))
