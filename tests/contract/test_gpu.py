"""Every registered method: captured steps give the plain loop's weights, in exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contract_stage import QUICK

from fedsieve.data.sources import Dataset
from fedsieve.local.bench import EagerBench
from fedsieve.local.graph import GraphBench
from fedsieve.local.plan import Sgd
from fedsieve.methods import METHODS
from fedsieve.methods.contract import Federation
from fedsieve.models import ModelConfig
from fedsieve.recipe import Recipe
from fedsieve.scenes import SceneConfig
from fedsieve.serial import to_device, values_of
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.simulate.world import (
    Job,
    initial_weights,
    make_setup,
    make_world,
    run_client,
    scene_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small_colour_images() -> Dataset:
    rng = np.random.default_rng(0)

    def images(n: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, (n, 3, 16, 16), dtype=np.uint8))

    return Dataset(
        name="random",
        classes=("a", "b", "c"),
        train_images=images(120),
        train_labels=torch.from_numpy(rng.integers(0, 3, 120)),
        test_images=images(10),
        test_labels=torch.from_numpy(rng.integers(0, 3, 10)),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        views="cifar10",
    )


LEARNING_RATE = 1e-4
"""Small steps: with ten times larger ones FedGR carries weights that are a rounding apart to places
a quarter of the way from each other, on the plain loop as well."""
SMALLER = {"rofl": 1e-6}
"""RoFL, which sums squared distances of features, does so at 1e-4."""


@pytest.mark.parametrize("name", sorted(METHODS))
def test_graph_equals_eager(name: str) -> None:
    set_gpu_arithmetic("fp32")
    chosen, device = METHODS[name], torch.device("cuda")
    recipe = Recipe(
        clients_per_round=2,
        scene=SceneConfig(clients=2),
        model=ModelConfig(name="resnet18"),
        sgd=Sgd(
            epochs=2,
            batch_size=16,
            lr=SMALLER.get(name, LEARNING_RATE),
            momentum=0.5,
            weight_decay=5e-4,
        ),
        method=chosen.config(**QUICK.get(name, {})),  # type: ignore[call-arg]
    )
    data = small_colour_images()
    setup = make_setup(recipe, data)
    world = make_world(data, scene_of(recipe, data), device)
    federation = Federation((60, 60), 2, 5, 3)
    server = chosen.init_server(
        recipe.method, to_device(initial_weights(setup), device), federation
    )
    eager, graph = EagerBench(setup, device), GraphBench(setup, device, compile_model=False)
    jobs = [Job(k, None, chosen.send(recipe.method, server, 0, k)) for k in (0, 1)]
    for round in range(3):  # in which every method comes to its last phase
        expected = [run_client(recipe, world, eager, round, job) for job in jobs]
        with torch.cuda.stream(graph.stream):
            got = [run_client(recipe, world, graph, round, job) for job in jobs]
        torch.cuda.synchronize()
        for mine, theirs, job in zip(got, expected, jobs, strict=True):
            start = {f"weights.{name}": tensor for name, tensor in job.down.weights.items()}
            left, right = (values_of(result.up)[0] for result in (mine, theirs))
            assert set(left) == set(right)
            statistics = {n for n in start if "running" in n}
            # Shares of the way that training went: rounding grows from step to step.
            for names, most in ((statistics, 1e-3), (set(start) - statistics, 0.1)):
                way = sum((right[n] - start[n]).norm() ** 2 for n in names)
                apart = sum((right[n] - left[n]).norm() ** 2 for n in names)
                assert float(apart) <= most**2 * float(way)  # which is 0 where ρ = 0
            for other in set(right) - set(start):
                torch.testing.assert_close(left[other], right[other], rtol=1e-3, atol=1e-3)
        ups = {result.client: result.up for result in expected}
        server, _ = chosen.merge(recipe.method, server, round, ups)
        jobs = [
            Job(r.client, r.state, chosen.send(recipe.method, server, round + 1, r.client))
            for r in expected
        ]
