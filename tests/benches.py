"""Workbenches with small models on which local training can be followed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.data.views import view_set
from fedsieve.local.bench import EagerBench, Setup
from fedsieve.local.plan import Batch, Fitted, Net, Plan, Sgd
from fedsieve.models import ModelConfig, build_model
from fedsieve.types import Outputs, Shard, Streams, Weights

CPU = torch.device("cpu")
CLASSES = 3


class Linear(nn.Module):
    """Logits = W·pixels + b of one-channel 2×2 images, and no features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(None, self.layer(x.flatten(1)))


class Normalised(nn.Module):
    """BatchNorm before the linear layer: a model with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        features = self.norm(x.flatten(1))
        return Outputs(features, self.layer(features))


class Dropping(nn.Module):
    """An ordinary dropout layer, which draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.layer = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(None, self.layer(self.drop(x.flatten(1))))


def small_cnn() -> nn.Module:
    return build_model(ModelConfig(), 1, 8, 8, 10, np.random.default_rng(0))


def cnn9(always_on_dropout: bool = False) -> nn.Module:
    config = ModelConfig(name="cnn9", always_on_dropout=always_on_dropout)
    return build_model(config, 1, 28, 28, CLASSES, np.random.default_rng(0))


def bench_of(
    make_model: Callable[[], nn.Module], sgd: Sgd | None = None, views: str = "plain", **parts: Any
) -> EagerBench:
    setup = Setup(make_model, view_set(views), (0.25,), (0.5,), sgd or Sgd(), **parts)
    return EagerBench(setup, CPU)


def images_of(n: int, side: int = 2, seed: int = 0) -> Tensor:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 1, side, side), dtype=np.uint8)
    return torch.from_numpy(pixels)


def labels_of(n: int, classes: int = CLASSES, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, classes, n))


def bright_shard(wrong: int, n: int = 24) -> Shard:
    """Sample i shows class i mod 3 as a bright pixel; the last `wrong` have the next class."""
    true = torch.arange(n) % CLASSES
    images = torch.zeros(n, 1, 2, 2, dtype=torch.uint8)
    images.view(n, 4)[torch.arange(n), true] = 255
    labels = torch.where(torch.arange(n) < n - wrong, true, (true + 1) % CLASSES)
    return Shard(0, images, labels, torch.arange(n), CLASSES)


def seeing(strength: float, shift: int = 0) -> Weights:
    """A model that gives a bright pixel's class, or the one so many further, 2·strength more than
    the others."""
    return {
        "layer.weight": strength * torch.eye(CLASSES, 4).roll(shift, dims=0),
        "layer.bias": torch.zeros(CLASSES),
    }


def weights_of(make_model: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """Weights unlike those that the bench's own model was made with."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        state = make_model().state_dict()
        return {
            name: (tensor + 0.1 * torch.randn_like(tensor)).abs_()
            if name.endswith("running_var")
            else tensor + 0.1 * torch.randn_like(tensor)
            for name, tensor in state.items()
            if tensor.is_floating_point()
        }


def mean_cross_entropy(batch: Batch, net: Net) -> Tensor:
    per_sample = F.cross_entropy(net(batch["x"]).logits, batch["label"], reduction="none")
    return batch.mean(per_sample)


def plan_of(
    start: Weights | Sequence[Weights], images: Tensor, labels: Tensor, sgd: Sgd, **changes: Any
) -> Plan:
    values: dict[str, Any] = {
        "start": [start] if isinstance(start, Mapping) else start,
        "images": images,
        "views": {"x": "raw"},
        "columns": {"label": labels},
        "loss": mean_cross_entropy,
        "sgd": sgd,
        "rng": Streams(11, 4, 2),
    }
    return Plan(**(values | changes))


@dataclass
class RecordingBench:
    """An eager bench that remembers what it was asked to do, and what came out."""

    inner: EagerBench
    plans: list[Plan] = field(default_factory=list)
    fitted: list[Fitted] = field(default_factory=list)
    views: list[str] = field(default_factory=list)

    @property
    def sgd(self) -> Sgd:
        return self.inner.sgd

    @property
    def trainable(self) -> tuple[str, ...]:
        return self.inner.trainable

    def view(self, name: str, images: Tensor, rng: np.random.Generator) -> Tensor:
        self.views.append(name)
        return self.inner.view(name, images, rng)

    def forward(self, weights: Weights, images: Tensor) -> Outputs:
        return self.inner.forward(weights, images)

    def fit(self, plan: Plan) -> Fitted:
        self.plans.append(plan)
        self.fitted.append(self.inner.fit(plan))
        return self.fitted[-1]
