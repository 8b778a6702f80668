"""The measured round in other simulators: pfl, and Flower on ray. Both are optional.

They get the same model, data, clients and batches, so after a round their weights agree with the
bare loop's up to rounding, which `check_outcome` demands.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fedsieve.bench.workload import BareLoop, Workload
from fedsieve.local.bench import EVALUATION_CHUNK
from fedsieve.simulate.world import scene_of
from fedsieve.types import Weights


@dataclass(frozen=True)
class Outcome:
    """What a library made of the rounds."""

    seconds: tuple[float, ...]
    """Of each round, its evaluation included."""
    weights: Weights
    """The global model's after the first round, as far as the library keeps them. Later ones drift
    apart, because a rounding error can push a ReLU over its kink."""


def bare_loop(workload: Workload) -> BareLoop:
    """The bare loop at the start of the workload's first round."""
    recipe, data = workload.recipe(), workload.data()
    return BareLoop(recipe, data, scene_of(recipe, data).clients)


# ------------------------------------------------------------------------------------------- pfl


class _PflModel(nn.Module):
    """The bare loop's model with the two functions that pfl asks for."""

    def __init__(self, loop: BareLoop) -> None:
        super().__init__()
        self.model = loop.model
        self._loop = loop

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.train()
        return self._loop.loss(images, labels)

    @torch.no_grad()
    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        self.eval()
        return {"accuracy": Weighted(self._loop.correct(images, labels), len(labels))}


def run_pfl(workload: Workload, rounds: int) -> Outcome:
    """`rounds` rounds of pfl's FederatedAveraging, one process, one thread."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    loop = bare_loop(workload)
    visits = itertools.chain.from_iterable(
        ((client, torch.cat(rows)) for client, rows in workload.plan_of(round))
        for round in range(rounds)
    )
    prepared = iter(list(visits))

    def user(visit: Any) -> Any:
        client, rows = visit
        images, labels = loop.shards[client]
        return Dataset(raw_data=[images[rows], labels[rows]], user_id=str(client))

    times: list[float] = []
    first: dict[str, torch.Tensor] = {}

    class Stopwatch(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, **options: Any) -> Any:
            times.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(self, *args: Any, **options: Any) -> tuple[bool, Any]:
            times.append(time.perf_counter())
            # pfl averages the parameters; BatchNorm's statistics stay as the last client had them.
            first.update(first or {n: p.detach().clone() for n, p in loop.model.named_parameters()})
            return False, Metrics()

    model = _PflModel(loop)
    wrapped = PyTorchModel(
        model=model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )
    users = FederatedDataset(user, lambda: next(prepared))
    evaluation = NNEvalHyperParams(local_batch_size=EVALUATION_CHUNK["cpu"])
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=workload.per_round,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(
            training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]
        ),
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=workload.sgd.epochs,
            local_learning_rate=workload.sgd.lr,
            local_batch_size=workload.sgd.batch_size,
        ),
        model_eval_params=evaluation,
        callbacks=[
            CentralEvaluationCallback(Dataset(raw_data=list(loop.test)), evaluation),
            Stopwatch(),
        ],
        send_metrics_to_platform=False,
    )
    return Outcome(_laps(times), first)


# ---------------------------------------------------------------------------------------- Flower

FLOWER_ENVIRONMENT = MappingProxyType(
    {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_MEMORY_MONITOR": "1",
    }
)
"""Nothing is reported to anyone, and ray does not stop clients when a machine is well filled."""


@functools.cache
def _site(workload: Workload) -> BareLoop:
    """The bare loop of one ray process, made for its first client."""
    torch.set_num_threads(1)
    return bare_loop(workload)


def run_flower(workload: Workload, rounds: int) -> Outcome:
    """`rounds` rounds of Flower's FedAvg in its simulation, one ray process per core."""
    os.environ.update(FLOWER_ENVIRONMENT)
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: Message, context: Context) -> Message:
        loop, config = _site(workload), message.content.config_records["config"]
        client, round = int(str(config["client"])), int(str(config["round"]))
        loop.weights = message.content.array_records["arrays"].to_torch_state_dict()
        weights, samples = loop.train(client, workload.batches(round, client))
        reply = RecordDict()
        reply["arrays"] = ArrayRecord(weights)
        reply["metrics"] = MetricRecord({"num-examples": samples})
        return Message(content=reply, reply_to=message)

    class OurClients(FedAvg):  # type: ignore[misc, unused-ignore]
        """FedAvg with the workload's clients: any node can stand for any of them."""

        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> list[Any]:
            clients = workload.clients_of(server_round - 1)
            nodes = list(grid.get_node_ids())[: len(clients)]

            def content(client: int) -> RecordDict:
                place = ConfigRecord({"client": client, "round": server_round - 1})
                return RecordDict({"arrays": arrays, "config": place})

            return [
                Message(content=content(client), message_type="train", dst_node_id=node)
                for client, node in zip(clients, nodes, strict=True)
            ]

    times: list[float] = []
    first: dict[str, torch.Tensor] = {}

    @server_app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        loop = bare_loop(workload)

        def evaluate(server_round: int, arrays: Any) -> MetricRecord:
            loop.weights = arrays.to_torch_state_dict()
            record = MetricRecord({"accuracy": loop.accuracy()})
            times.append(time.perf_counter())
            if server_round == 1:
                first.update(loop.weights)
            return record

        strategy = OurClients(fraction_evaluate=0.0)
        initial = ArrayRecord(dict(loop.weights))
        strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"include_dashboard": False, "log_to_driver": False},
        },
    )
    return Outcome(_laps(times), first)


def _laps(times: list[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in itertools.pairwise(times))


@dataclass(frozen=True)
class Library:
    """A simulator to compare with."""

    name: str
    packages: tuple[str, ...]
    """What must be importable."""
    run: Callable[[Workload, int], Outcome]

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in self.packages)


LIBRARIES = (
    Library("pfl, one process", ("pfl",), run_pfl),
    Library("Flower's simulation on ray", ("flwr", "ray"), run_flower),
)


def check_outcome(outcome: Outcome, workload: Workload) -> None:
    """Refuse a comparison with a library that did not do the same arithmetic.

    A thousandth of the way that a tensor moved, and the rounding of a sum of ten, are forgiven.
    """
    loop = bare_loop(workload)
    before = loop.weights
    loop.round(workload.plan_of(0))
    for name, tensor in outcome.weights.items():
        moved = (loop.weights[name] - before[name]).abs().max()
        apart = (loop.weights[name] - tensor).abs().max()
        rounding = 10 * torch.finfo(tensor.dtype).eps * tensor.abs().max()
        assert apart <= 1e-3 * moved + rounding, (
            f"{name} moved by {moved:.2e}, but ended {apart:.2e} apart"
        )
