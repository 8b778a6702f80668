"""The fast workbench: a training step captured once as a CUDA graph, replayed without host work.

Everything a step reads lies in static buffers. The batches of a segment of epochs are gathered
before it starts, so a step takes its batch by a counter that lives on the device, and a replay is
one call. A slot is one such bench with a stream of its own; several slots on one GPU train several
clients side by side.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.local.bench import (
    EagerBench,
    FrozenNet,
    LossNet,
    Setup,
    normalised,
)
from fedsieve.local.flat import Replica, flatten, joined, update
from fedsieve.local.plan import (
    Batch,
    Fitted,
    Loss,
    Plan,
    Schedule,
    draws,
    repeats,
    schedule,
    seed_dropout,
)
from fedsieve.local.slices import Slice, whole
from fedsieve.local.together import ViewsTogether, Wish
from fedsieve.types import Outputs, Streams, Weights


class _Turns:
    """Work that several threads may do side by side, and work that one must do alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._side_by_side = 0
        self._alone = False

    @contextlib.contextmanager
    def side_by_side(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._side_by_side += 1
        try:
            yield
        finally:
            with self._changed:
                self._side_by_side -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._side_by_side)
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


_CAPTURE = threading.Lock()
"""Compiling and capturing are done by one thread at a time."""
_TRIALS = _Turns()
"""Side by side cuDNN tries kernels outside of that lock; alone it must not, in any thread."""
_WARMUP_STEPS = 3
_STEPS_TOGETHER = 5
_LAUNCHES_AHEAD = 3
"""How many graphs a slot launches before the first of them must be done."""


class GraphBench(EagerBench):
    """A slot on a GPU. Made and used by one thread that has entered `place`, with `stream` as the
    current stream."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        compile_model: bool,
        forward_chunk: int = 500,
        views: ViewsTogether | None = None,
        place: Slice | None = None,
    ) -> None:
        super().__init__(setup, device)
        self.stream = (place or whole(device)).stream()
        self.compiles = compile_model
        self._memory = torch.cuda.graph_pool_handle()
        self._replicas: list[Replica] = []
        self._held: list[Replica] = []
        self._programs: dict[Hashable, Program] = {}
        self._chunk = forward_chunk
        self._together = views or ViewsTogether(whole(device))
        self._launches = itertools.cycle(
            [torch.cuda.Event(blocking=True) for _ in range(_LAUNCHES_AHEAD)]  # type: ignore[no-untyped-call]
        )
        self.when_ready: Callable[[], None] = nothing
        """Called when all views are made and only replays follow."""
        self._forward: _ForwardGraph | None = None
        self._forward_weights: Weights | None = None
        """What the model of `forward` holds."""
        self._complete: Tensor | None = None
        """Images that other streams may read without waiting for this one."""
        self._ahead: Ahead | None = None
        """What was begun before the visit."""
        self.wanted: Mapping[str, str] = {}
        """The views of the last training on all of a client's images: a guess at the next ones."""
        self._lent: list[Tensor] = []
        """Views that this stream may still have to read; their memory belongs to another one."""

    @contextlib.contextmanager
    def visit(self, images: Tensor, ahead: Ahead | None = None) -> Iterator[None]:
        """Work with a client's `images`. They are waited for once, here, so that their views can
        be made elsewhere while this stream is busy; at the end all work is waited for."""
        self._settle()
        self._complete, self._ahead = images, ahead
        try:
            yield
        finally:
            self._settle()
            self._complete = self._ahead = self._forward_weights = None

    def _settle(self) -> None:
        """Wait for all work of this stream, which then has read what it was lent."""
        self.stream.synchronize()
        self._lent.clear()

    def view(self, name: str, images: Tensor, rng: np.random.Generator) -> Tensor:
        view = self._setup.views[name]
        if view.draws == 0:
            return view(images, rng)
        self._await(images)
        made = self._together.ask({name: Wish(view, images, rng, 1)}).result()[name]
        self._lent.append(made)
        return made

    def _await(self, images: Tensor) -> None:
        """Have images there for other streams to read."""
        if images is not self._complete:
            self._settle()

    def epoch_views(self, plan: Plan) -> Iterator[tuple[range, Mapping[str, Tensor]]]:
        """As in the plain loop, but the first views are being made from this call on, and the next
        ones are asked for before these are used, so that they are made while these train."""
        self._await(plan.images)
        epochs, *later = draws(len(plan.images), plan.sgd.epochs)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.serves(plan, epochs):
            streams, first = ahead.streams, ahead.made
        else:
            streams = {name: plan.rng(f"view/{name}") for name in plan.views}
            first = self._ask(plan, epochs, streams)
        self.wanted = plan.views if plan.images is self._complete else {}

        def made(
            current: range, asked: Future[Mapping[str, Tensor]]
        ) -> Iterator[tuple[range, Mapping[str, Tensor]]]:
            for following in later:
                views = asked.result()
                asked = self._ask(plan, following, streams)
                yield current, views
                current = following
            yield current, asked.result()

        return made(epochs, first)

    def _ask(
        self, plan: Plan, epochs: range, streams: Mapping[str, np.random.Generator]
    ) -> Future[Mapping[str, Tensor]]:
        return self._together.ask(wishes(self._setup, plan.views, plan.images, streams, epochs))

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph, not too far ahead of the GPU: a launch that finds the GPU's queue full
        holds up every thread that calls the driver."""
        launched = next(self._launches)
        launched.synchronize()
        graph.replay()
        launched.record()

    def forward(self, weights: Weights, images: Tensor) -> Outputs:
        if weights is not self._forward_weights:
            self.load(0, weights)
            self._forward_weights = weights
        model = self.model()
        if self._draws_in_evaluation:
            return self._evaluate(model, images)
        if self._forward is None:
            self._forward = _ForwardGraph(self, model.eval(), images, self._chunk, self._memory)
        return self._forward(images)

    @functools.cached_property
    def _draws_in_evaluation(self) -> bool:
        """Whether the model's dropout is on in evaluation mode too: such a pass is not captured."""
        return any(getattr(module, "always_on", False) for module in self.model().modules())

    def fit(self, plan: Plan) -> Fitted:
        steps = schedule(len(plan.images), plan.sgd, plan.rng("batches"))
        if not len(steps):
            ema = None if plan.ema is None else plan.ema.start
            return Fitted(tuple(plan.start), ema, 0, 0.0)
        key = program_key(plan)
        if key not in self._programs:
            self._programs[key] = Program(self, plan, self._memory)
        return self._programs[key].run(plan, steps)

    def forget(self) -> None:
        """Give up all that was captured, with the memory that it holds."""
        self._programs.clear()
        self._replicas.clear()
        self._held.clear()
        self._forward = self._forward_weights = None

    def replay(self, steps: int) -> None:
        """Repeat the steps of the last program on whatever its buffers hold: for timing."""
        with torch.cuda.stream(self.stream):
            list(self._programs.values())[-1].replay(steps)

    def model(self, index: int = 0) -> nn.Module:
        while len(self._held) <= index:
            self._held.append(Replica(self.new_model(), self.precision, trained=False))
        return self._held[index].model

    def load(self, index: int, weights: Weights) -> nn.Module:
        model = self.model(index)
        self._held[index].load(weights)
        return model

    def load_kernels(self, images: Tensor) -> None:
        """Have cuDNN choose and load its kernels for the model, which takes seconds in each slice
        and need not wait until the step is compiled. `images` are as many as in a batch."""
        if not self.compiles:
            return
        with _TRIALS.side_by_side(), torch.cuda.stream(self.stream):
            several = images.repeat(-(-self._chunk // len(images)), 1, 1, 1)[: self._chunk]
            held = FrozenNet(self.model().eval(), self.precision, self.device)
            outputs(held, several, self.scale, self.shift)
            replica = self.replica(0)
            net = LossNet(replica.model, self.precision, self.device, replica.parameters)
            loss = outputs(net, images, self.scale, self.shift).logits.sum()
            torch.autograd.grad(loss, replica.leaves, allow_unused=True)
            self.stream.synchronize()

    def replica(self, index: int) -> Replica:
        """The trained model `index`, shared by all programs of this slot."""
        while len(self._replicas) <= index:
            self._replicas.append(Replica(self.new_model(), self.precision, trained=True))
        return self._replicas[index]


def nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class Ahead:
    """The first views of a client's training, asked for before its plan was known."""

    images: Tensor
    rng: Streams
    views: Mapping[str, str]
    epochs: range
    """The first stretch of epochs, for which the views are made."""
    streams: Mapping[str, np.random.Generator]
    """Where the views of later epochs draw from."""
    made: Future[Mapping[str, Tensor]]

    def serves(self, plan: Plan, epochs: range) -> bool:
        """Whether these are the views that `plan` begins with."""
        return plan.images is self.images and (plan.rng, plan.views, epochs) == (
            self.rng,
            self.views,
            self.epochs,
        )


def look_ahead(
    setup: Setup,
    together: ViewsTogether,
    views: Mapping[str, str],
    shards: Mapping[Streams, Tensor],
) -> list[Ahead]:
    """Ask for the `views` with which the training on each client's images will probably begin."""
    firsts = [next(draws(len(images), setup.sgd.epochs)) for images in shards.values()]
    streams = [{name: rng(f"view/{name}") for name in views} for rng in shards]
    made = together.ask_for_all(
        [
            wishes(setup, views, images, own, first)
            for images, own, first in zip(shards.values(), streams, firsts, strict=True)
        ]
    )
    return [
        Ahead(images, rng, views, first, own, future)
        for (rng, images), first, own, future in zip(
            shards.items(), firsts, streams, made, strict=True
        )
    ]


def wishes(
    setup: Setup,
    views: Mapping[str, str],
    images: Tensor,
    streams: Mapping[str, np.random.Generator],
    epochs: range,
) -> dict[str, Wish]:
    """What has to be made for a training on `images` in these epochs."""
    return {
        name: Wish(setup.views[view], images, streams[name], repeats(view, epochs))
        for name, view in views.items()
    }


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
        plan.update_scale is not None,
    )


def loss_key(loss: Loss) -> Hashable:
    """What identifies a loss; one that hides tensors in a closure would be captured with them."""
    if isinstance(loss, functools.partial):
        for argument in (*loss.args, *loss.keywords.values()):
            if isinstance(argument, Tensor):
                raise FedsieveError(
                    "A loss is bound to a tensor; give it the tensor as a column or a constant."
                )
        return (loss_key(loss.func), loss.args, tuple(sorted(loss.keywords.items())))
    if getattr(loss, "__closure__", None):
        raise FedsieveError(
            f"The loss {loss.__qualname__} is a closure; make it a module-level function that "
            "takes its tensors from the batch."
        )
    return loss


def batch_loss(
    loss: Loss,
    views: Collection[str],
    values: Mapping[str, Tensor],
    weight: Tensor | None,
    constants: Mapping[str, Tensor | Weights],
    scale: Tensor,
    shift: Tensor,
    nets: Sequence[LossNet],
) -> Tensor:
    """The loss of a batch whose views are still uint8: all of a step that is differentiated."""
    seen = {
        name: normalised(value, scale, shift) if name in views else value
        for name, value in values.items()
    }
    return loss(Batch(seen, constants, weight), *nets)


def outputs(net: LossNet, images: Tensor, scale: Tensor, shift: Tensor) -> Outputs:
    """What a net says of uint8 images."""
    return net(normalised(images, scale, shift))


_VARIANTS = 64
"""How many variants torch may compile of one function before it gives up and runs it as it is: for
each loss, kind of model and size of batch in a process."""


@functools.cache
def import_compiler() -> Future[object]:
    """Begin to import torch's compiler, which takes seconds."""
    return ThreadPoolExecutor(1).submit(importlib.import_module, "torch._inductor.compile_fx")


def allow_variants() -> None:
    """Raise torch's limit, which may be one for each thread."""
    import_compiler().result()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)


# Not made above: torch's compiler takes a second to import, and a CPU needs none of it.
@functools.cache
def compiled_outputs() -> Callable[..., Outputs]:
    return torch.compile(outputs, dynamic=False)


@functools.cache
def compiled_update() -> Callable[..., None]:
    return torch.compile(update, dynamic=False)


_compiled_losses: dict[Hashable, Callable[..., Tensor]] = {}


def compiled_loss(loss: Loss) -> Callable[..., Tensor]:
    """`batch_loss` of this loss: model and loss become one stretch of kernels. What is made depends
    on the kind of the nets among its arguments and not on which nets they are, so all slots share
    it."""

    def objective(*rest: Any) -> Tensor:
        return batch_loss(loss, *rest)

    return _compiled_losses.setdefault(loss_key(loss), torch.compile(objective, dynamic=False))


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
    with _TRIALS.alone():
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
            del in_use[:-_LAUNCHES_AHEAD]
        weights = tuple(replica.read() for replica in self._replicas)
        ema = None if self._average is None else self._average.read()
        loss = float(self._loss_sum) / len(schedule)
        return Fitted(weights, ema, len(schedule), loss, observed)

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
        n, device = len(plan.images), self._bench.device
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
                if name in plan.per_step:
                    drawn = plan.per_step[name][chosen]
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
        if size in self._steps and self._steps[size].room >= count:
            return
        # A power of two, so that clients of growing sizes do not have it captured again and again.
        room, device = 1 << (count - 1).bit_length(), self._bench.device
        rows = {name: (t.dtype, (size, *t.shape[1:])) for name, t in plan.columns.items()}
        rows |= {name: (t.dtype, (size, *t.shape[1:])) for name, t in views.items()}
        rows |= {name: (t.dtype, t.shape[1:]) for name, t in plan.per_step.items()}
        values = {
            name: torch.zeros((room, *shape), dtype=dtype, device=device)
            for name, (dtype, shape) in rows.items()
        }
        weight = torch.ones((room, size), device=device) if plan.sgd.tail == "pad" else None
        counter = torch.zeros(1, dtype=torch.int64, device=device)
        full = size == plan.sgd.batch_size
        several = torch.cuda.CUDAGraph() if full else None
        step = self._steps[size] = _Step(values, weight, counter, torch.cuda.CUDAGraph(), several)
        with _CAPTURE:
            # Clients differ in their last batch, and there are many of its sizes. It is one step of
            # an epoch: not worth compiling code for it, nor trying which kernels are the fastest.
            loss: Callable[..., Tensor] = functools.partial(batch_loss, plan.loss)
            if full and self._bench.compiles:
                allow_variants()
                loss = compiled_loss(plan.loss)
            with contextlib.nullcontext() if full else _known_kernels():
                self._capture(plan, step, loss)

    def _capture(self, plan: Plan, step: _Step, loss: Callable[..., Tensor]) -> None:
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

    def _train_step(self, plan: Plan, step: _Step, loss_of: Callable[..., Tensor]) -> None:
        # Gathered out here: code is compiled for shapes, and that of a buffer may grow.
        def current(rows: Tensor) -> Tensor:
            return rows.index_select(0, step.counter).squeeze(0)

        loss = loss_of(
            tuple(plan.views),
            {name: current(rows) for name, rows in step.values.items()},
            None if step.weight is None else current(step.weight),
            self._constants,
            self._bench.scale,
            self._bench.shift,
            [*self._trained, *self._given],
        )
        gradients = iter(self._gradients(loss))
        with torch.no_grad():
            for replica in self._replicas:
                own = [next(gradients) for _ in replica.leaves]
                self._descend(plan, replica, own)
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


class _ForwardGraph:
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

        with _CAPTURE:
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
