"""Networks by name. Every model takes (n, channels, height, width) floats and returns `Outputs`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import numpy as np
import torch
from torch import nn

from fedsieve.errors import check
from fedsieve.models.cnn9 import Cnn9, Dropout2d
from fedsieve.models.custom import build_custom
from fedsieve.models.heads import HeadKind
from fedsieve.models.resnet import resnet18, resnet34, resnet50
from fedsieve.models.small import SmallCnn
from fedsieve.models.weights import read_weights, write_weights

__all__ = [
    "SMALLEST_SIDE",
    "Dropout2d",
    "HeadKind",
    "ModelConfig",
    "build_model",
    "read_weights",
    "write_weights",
]

SMALLEST_SIDE = MappingProxyType(
    {"small": 8, "cnn9": 28, "resnet18": 8, "resnet34": 8, "resnet50": 32}
)
"""The built-in models, and the least height and width of an image that each can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which network to train."""

    name: str = "small"
    """One of "small", "cnn9", "resnet18", "resnet34", "resnet50", or "package.module:function" for
    a function of yours that returns a torch.nn.Module. It may take any of the keyword arguments
    channels, height, width, num_classes, and its model returns logits or (features, logits)."""
    head: HeadKind = "linear"
    """What follows the backbone: "linear" is one Linear; "mlp" is z = BatchNorm(Linear), then
    Linear(ReLU(z)), and z is the feature."""
    weights: Path | None = None
    """Only for resnet50: a local .safetensors, .pth or .pt file with torchvision's names."""
    always_on_dropout: bool = False
    """Only for cnn9: leave dropout on when testing, as the published code does."""

    def __post_init__(self) -> None:
        built_in = self.name in SMALLEST_SIDE
        check(
            built_in or re.fullmatch(r"\w+(\.\w+)*:\w+", self.name) is not None,
            f"There is no model {self.name!r}; choose one of {', '.join(SMALLEST_SIDE)}, or name "
            'a function of yours as "package.module:function".',
        )
        check(
            self.head in get_args(HeadKind),
            f"The head of a model is linear or mlp, not {self.head!r}.",
        )
        check(
            built_in or self.head == "linear",
            f"head = {self.head!r} is for built-in models; let {self.name!r} build its own head.",
        )
        check(
            self.weights is None or self.name == "resnet50",
            f"weights is for resnet50 only; leave it out for {self.name!r}.",
        )
        check(
            self.weights is None or self.weights.suffix in (".safetensors", ".pth", ".pt"),
            f"The weight file {self.weights} must end in .safetensors, .pth or .pt.",
        )
        check(
            not self.always_on_dropout or self.name == "cnn9",
            f"always_on_dropout is for cnn9 only; leave it out for {self.name!r}.",
        )


def build_model(
    config: ModelConfig,
    channels: int,
    height: int,
    width: int,
    num_classes: int,
    rng: np.random.Generator,
) -> nn.Module:
    """The network, on the CPU in training mode, its initial weights drawn from `rng` alone.

    Torch's own generators are left as they were.
    """
    check(
        min(channels, height, width) >= 1 and num_classes >= 2,
        f"A model needs images and at least two classes, not {num_classes} classes of images of "
        f"{channels}×{height}×{width}.",
    )
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would reseed the generators of all GPUs as well.
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        return _build(config, channels, height, width, num_classes)


def _build(
    config: ModelConfig, channels: int, height: int, width: int, num_classes: int
) -> nn.Module:
    least = SMALLEST_SIDE.get(config.name)
    if least is None:
        return build_custom(
            config.name, channels=channels, height=height, width=width, num_classes=num_classes
        )
    check(
        min(height, width) >= least,
        f"{config.name} needs images of at least {least}×{least} pixels, not {height}×{width}; "
        "choose another model or larger images.",
    )
    match config.name:
        case "small":
            return SmallCnn(channels, height, width, num_classes, config.head)
        case "cnn9":
            return Cnn9(
                channels, num_classes, config.head, always_on_dropout=config.always_on_dropout
            )
        case "resnet18":
            return resnet18(channels, num_classes, config.head)
        case "resnet34":
            return resnet34(channels, num_classes, config.head)
        case _:
            return resnet50(channels, num_classes, config.head, config.weights)
