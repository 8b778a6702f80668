"""Programs of a GPU's slot on a CPU: all of a captured training but the capture.

A graph's replay takes its steps one by one with the plan that it was made for. So what a later
client's plan brings must come by the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fedsieve.local.bench import EagerBench, Setup
from fedsieve.local.flat import Replica
from fedsieve.local.plan import Fitted, Plan, schedule
from fedsieve.local.program import Program, program_key
from fedsieve.types import nothing


class Slot(EagerBench):
    """What a program asks of a GPU's slot. It works while steps are `recorded`."""

    compiles = False
    stream = None
    when_ready = staticmethod(nothing)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, torch.device("cpu"))
        self.programs: dict[Hashable, Program] = {}
        self._replicas: list[Replica] = []

    def replica(self, index: int) -> Replica:
        while len(self._replicas) <= index:
            self._replicas.append(Replica(self.new_model(), self.precision, trained=True))
        return self._replicas[index]

    def launch(self, graph: Recorded) -> None:
        graph.replay()

    def fit(self, plan: Plan) -> Fitted:
        steps = schedule(len(plan.images), plan.sgd, plan.rng("batches"))
        if not len(steps):
            return super().fit(plan)
        key = program_key(plan)
        if key not in self.programs:
            self.programs[key] = Program(self, plan, None)  # type: ignore[arg-type]
        return self.programs[key].run(plan, steps)


class Recorded:
    """In place of a CUDA graph: the steps that were taken while it was made, without their work."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        pass

    def replay(self) -> None:
        for step in self.steps:
            step()


def recorded(patch: Any) -> list[int]:
    """Have graphs record their steps, by pytest's monkeypatch; the result are the sizes of batches
    for which a step was captured, and grows."""
    sizes: list[int] = []
    being_made: list[Recorded] = []
    take = Program._train_step

    @contextlib.contextmanager
    def graph(made: Recorded, **_: object) -> Iterator[None]:
        being_made.append(made)
        yield
        being_made.clear()

    def take_or_record(self: Program, plan: Plan, step: Any, loss: Callable[..., Any]) -> None:
        if not being_made:
            take(self, plan, step, loss)
            return
        being_made[0].steps.append(partial(take, self, plan, step, loss))
        if being_made[0] is step.one:
            sizes.append(step.values[next(iter(plan.views))].shape[1])

    patch.setattr(Program, "_train_step", take_or_record)
    patch.setattr(torch.cuda, "CUDAGraph", Recorded)
    patch.setattr(torch.cuda, "graph", graph)
    patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=nothing))
    patch.setattr(Tensor, "pin_memory", lambda self: self)
    return sizes
