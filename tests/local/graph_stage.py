"""Plans that the plain loop and the captured step both carry out, and how near they must come."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fedsieve.data.views import view_set
from fedsieve.local.bench import EagerBench, Setup
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Fitted, Plan, Sgd
from fedsieve.methods.fedavg import local_loss
from fedsieve.models import ModelConfig, build_model
from fedsieve.models.weights import read_weights
from fedsieve.types import Streams, Weights

GENTLE = Sgd(epochs=2, batch_size=16, lr=1e-3, momentum=0.5, weight_decay=5e-4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model(name: str = "resnet18", side: int = 16) -> torch.nn.Module:
    config = ModelConfig(name=name, head="linear" if name == "cnn9" else "mlp")
    return build_model(config, 3, side, side, 10, np.random.default_rng(0))


def a_setup(name: str = "resnet18", side: int = 16, precision: str = "fp32") -> Setup:
    return Setup(
        partial(make_model, name, side),
        view_set("cifar10"),
        (0.5, 0.5, 0.5),
        (0.25, 0.25, 0.25),
        Sgd(),
        precision,  # type: ignore[arg-type]
    )


def a_plan(n: int = 50, side: int = 16, device: str = "cuda", **changes: object) -> Plan:
    rng = np.random.default_rng(1)
    plan = Plan(
        start=[{k: v.to(device) for k, v in read_weights(make_model(side=side)).items()}],
        images=torch.from_numpy(rng.integers(0, 256, (n, 3, side, side), dtype=np.uint8)).to(
            device
        ),
        views={"x": "weak"},
        columns={"label": torch.from_numpy(rng.integers(0, 10, n)).to(device)},
        loss=local_loss,
        sgd=GENTLE,
        rng=Streams(3, 4, 5),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def both(plan: Plan, setup: Setup) -> tuple[Fitted, Fitted]:
    device = torch.device("cuda")
    eager = EagerBench(setup, device).fit(plan)
    bench = GraphBench(setup, device, compile_model=False)
    with torch.cuda.stream(bench.stream):
        captured = bench.fit(plan)
        again = bench.fit(plan)
    torch.cuda.synchronize()
    for name, tensor in captured.weights[0].items():
        assert torch.equal(tensor, again.weights[0][name]), f"{name} differs when replayed"
    return eager, captured


def difference(start: Weights, one: Weights, other: Weights) -> float:
    """How far two trainings from `start` lie apart, as a share of the way they went."""
    assert set(start) == set(one) == set(other)
    apart = sum(((one[n] - other[n]).double() ** 2).sum() for n in start)
    way = sum(((other[n] - start[n]).double() ** 2).sum() for n in start)
    return float((apart / way).sqrt())


def assert_close(plan: Plan, eager: Fitted, captured: Fitted, tolerance: float = 5e-3) -> None:
    """The same training up to rounding.

    Rounding grows from step to step in a network with BatchNorm (two orders in a few steps at a
    large learning rate), so the tests train gently, and the tolerance is a share of the way.
    """
    assert eager.steps == captured.steps
    if eager.steps == 0:
        assert all(torch.equal(captured.weights[0][n], w) for n, w in plan.start[0].items())
        return
    assert captured.loss == pytest.approx(eager.loss, rel=tolerance)
    for start, mine, theirs in zip(plan.start, captured.weights, eager.weights, strict=True):
        assert difference(start, mine, theirs) < tolerance
    assert (eager.ema is None) == (captured.ema is None)
    if eager.ema is not None and captured.ema is not None:
        assert plan.ema is not None
        assert difference(plan.ema.start, captured.ema, eager.ema) < tolerance
