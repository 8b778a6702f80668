"""Every registered method: what is compiled for one slot of a GPU serves all of them, and computes
what the plain loss does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from contract_stage import stage_of
from torch import Tensor, nn

from fedsieve.local import compiled as compiled_module
from fedsieve.local.bench import EagerBench, FrozenNet, LossNet
from fedsieve.local.compiled import batch_loss, compiled_loss
from fedsieve.local.flat import Replica
from fedsieve.local.plan import Fitted, Plan, seed_dropout, stepped
from fedsieve.methods import METHODS
from fedsieve.methods.contract import Method
from fedsieve.methods.fedavg import local_loss
from fedsieve.models import ModelConfig, build_model
from fedsieve.simulate.world import Job, run_client

CPU = torch.device("cpu")
SIZE = 4


class Recorder(EagerBench):
    """Trains, and remembers how it was asked to."""

    plans: list[Plan]

    def fit(self, plan: Plan) -> Fitted:
        self.plans.append(plan)
        return super().fit(plan)


def last_plan(method: Method) -> tuple[Plan, Recorder]:
    """How the method lets a client train in its last phase; where clients train in several ways,
    one with the most nets."""
    stage = stage_of(method)
    bench = Recorder(stage.runner.bench._setup, CPU)
    server, states = stage.first_server(), dict[int, Any]()
    for round in range(3):
        bench.plans = []
        for k in stage.select(server, round):
            job = Job(k, states.get(k), method.send(stage.recipe.method, server, round, k))
            states[k] = run_client(stage.recipe, stage.world, bench, round, job).state
        server, _ = stage.round(server, states, round, stage.select(server, round))
    return max(bench.plans, key=lambda plan: len(plan.start) + len(plan.frozen)), bench


def slot(plan: Plan, bench: EagerBench) -> list[LossNet]:
    """Nets of its own, with the plan's weights."""

    def replica(weights: Any, *, trained: bool) -> Replica:
        made = Replica(bench.new_model(), "fp32", trained=trained)
        made.load(weights)
        return made

    trained = [replica(weights, trained=True) for weights in plan.start]
    average = [plan.ema.start] if plan.ema is not None and plan.ema.in_loss else []
    given = [replica(weights, trained=False) for weights in (*plan.frozen, *average)]
    return [
        *(LossNet(r.model, "fp32", CPU, r.parameters) for r in trained),
        *(FrozenNet(r.model.eval(), "fp32", CPU) for r in given),
    ]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that are handed to torch's compiler, which here runs them as they are."""
    seen: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.append(module)
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(compiled_module, "_compiled_losses", {})
    return seen


@pytest.mark.parametrize("name", sorted(METHODS))
def test_slots_share_one_graph_from_the_images_to_the_loss(
    name: str, graphs: list[torch.fx.GraphModule]
) -> None:
    plan, bench = last_plan(METHODS[name])
    constants = bench.constants(plan.constants)
    for step in range(3):
        rows = torch.arange(step, step + SIZE) % len(plan.images)
        values = {n: column[rows] for n, column in plan.columns.items()}
        values |= dict.fromkeys(plan.views, plan.images[rows])
        values |= {n: drawn[step % len(drawn)] for n, drawn in plan.of_steps.items()}
        values |= plan.carried
        found: list[tuple[Tensor, ...]] = []
        for loss in (partial(batch_loss, plan.loss), compiled_loss(plan.loss)):
            nets = slot(plan, bench)
            result = loss(
                plan.normalised,
                values,
                None,
                constants,
                bench.scale,
                bench.shift,
                nets,
            )
            value, carried = stepped(result, plan.carried)
            model = nets[0]._model
            assert isinstance(model, nn.Module)
            slopes = torch.autograd.grad(value, list(model.parameters()))
            found.append((value, *slopes, *carried.values()))
        for plain, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
        assert len(graphs) == 1


def test_slots_that_share_code_drop_by_their_own_generators(
    graphs: list[torch.fx.GraphModule],
) -> None:
    config, seeds = ModelConfig(name="cnn9"), (1, 2, 1)
    images = torch.randint(0, 256, (SIZE, 1, 28, 28), dtype=torch.uint8)
    values = {"x": images, "label": torch.arange(SIZE)}
    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)

    def losses(loss: Callable[..., Any]) -> list[float]:
        found = []
        for seed in seeds:  # a slot for each
            model = build_model(config, 1, 28, 28, 10, np.random.default_rng(0)).train()
            seed_dropout([model], torch.Generator().manual_seed(seed))
            net = LossNet(model, "fp32", CPU)
            found.append(float(loss(("x",), values, None, {}, one / 255, zero, [net]).detach()))
        return found

    plain = losses(partial(batch_loss, local_loss))
    assert plain[0] == plain[2] != plain[1]
    assert losses(compiled_loss(local_loss)) == pytest.approx(plain, rel=1e-5)
    assert graphs
