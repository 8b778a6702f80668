"""The fast workbench: a training step captured once as a CUDA graph, replayed without host work.

A slot is one such bench with a stream of its own; several slots on one GPU train several clients
side by side. What it captures is in `program.py`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.local.ahead import Ahead, wishes
from fedsieve.local.bench import EagerBench, FrozenNet, LossNet, Setup
from fedsieve.local.compiled import outputs
from fedsieve.local.flat import Replica
from fedsieve.local.plan import Fitted, Plan, draws, schedule
from fedsieve.local.program import LAUNCHES_AHEAD, ForwardGraph, Program, program_key
from fedsieve.local.slices import Slice, whole
from fedsieve.local.together import ViewsTogether, Wish
from fedsieve.local.turns import TRIALS
from fedsieve.types import Outputs, Weights, nothing


class GraphBench(EagerBench):
    """A slot on a GPU. Made and used by one thread that has entered `place`, with `stream` as the
    current stream."""

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        *,
        compile_model: bool,
        fuse_norms: bool = False,
        forward_chunk: int = 500,
        views: ViewsTogether | None = None,
        place: Slice | None = None,
    ) -> None:
        super().__init__(setup, device)
        place = place or whole(device)
        self.stream = place.stream()
        self.compiles = compile_model
        self._multiprocessors = place.multiprocessors if fuse_norms else 0
        """For which BatchNorm's kernels are fused; 0: they are the library's."""
        self._memory = torch.cuda.graph_pool_handle()
        self._replicas: list[Replica] = []
        self._held: list[Replica] = []
        self._programs: dict[Hashable, Program] = {}
        self._chunk = forward_chunk
        self._together = views or ViewsTogether(whole(device))
        self._launches = itertools.cycle(
            [torch.cuda.Event(blocking=True) for _ in range(LAUNCHES_AHEAD)]  # type: ignore[no-untyped-call]
        )
        self.when_ready: Callable[[], None] = nothing
        """Called when all views are made and only replays follow."""
        self._forward: ForwardGraph | None = None
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
            self._forward = ForwardGraph(self, model.eval(), images, self._chunk, self._memory)
        return self._forward(images)

    @functools.cached_property
    def _draws_in_evaluation(self) -> bool:
        """Whether the model's dropout is on in evaluation mode too: such a pass is not captured."""
        return any(getattr(module, "always_on", False) for module in self.model().modules())

    def fit(self, plan: Plan) -> Fitted:
        steps = schedule(len(plan.images), plan.sgd, plan.rng("batches"))
        if not len(steps):
            ema = None if plan.ema is None else plan.ema.start
            return Fitted(tuple(plan.start), ema, 0, 0.0, carried=plan.carried)
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
        with TRIALS.side_by_side(), torch.cuda.stream(self.stream):
            several = images.repeat(-(-self._chunk // len(images)), 1, 1, 1)[: self._chunk]
            held = FrozenNet(self.model().eval(), self.precision, self.device)
            outputs(held, several, self.scale, self.shift)
            replica = self.replica(0)
            net = LossNet(replica.model, self.precision, self.device, replica.parameters)
            loss = outputs(net, images, self.scale, self.shift).logits.sum()
            torch.autograd.grad(loss, replica.leaves, allow_unused=True)
            replica.after_pass()
            self.stream.synchronize()

    def replica(self, index: int) -> Replica:
        """The trained model `index`, shared by all programs of this slot."""
        while len(self._replicas) <= index:
            model = self.new_model()
            made = Replica(model, self.precision, trained=True)
            if self._multiprocessors:
                from fedsieve.local.fused import fuse, move_statistics  # not all have triton

                norms = fuse(model, self._multiprocessors)
                made.after_pass = functools.partial(move_statistics, norms)
            self._replicas.append(made)
        return self._replicas[index]
