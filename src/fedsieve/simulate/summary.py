"""A round and a run in a few numbers: seconds, means over clients, the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedsieve.recipe import Recipe
from fedsieve.simulate.by_class import classes_at_zero, lost_classes
from fedsieve.types import Metrics

LAST_ROUNDS = 10
"""Accuracy is reported as the mean of this many last rounds, as the papers do."""


def summary_of(
    recipe: Recipe,
    lines: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    device: torch.device,
) -> dict[str, Any]:
    """A run's lines of metrics in a few numbers; nothing about accuracy where none was measured."""
    summary: dict[str, Any] = {
        "name": recipe.name,
        "method": recipe.method.name,
        "seed": recipe.seed,
        "rounds": len(lines),
    }
    accuracy = np.array([line["accuracy"] for line in lines if "accuracy" in line])
    if len(accuracy):
        summary |= {
            "last10": float(accuracy[-LAST_ROUNDS:].mean()),
            "best": float(accuracy.max()),
            "best_round": int(accuracy.argmax()),
            "final": float(accuracy[-1]),
        }
    if lines and "worst_class_accuracy" in lines[-1]:
        summary["worst_class_accuracy"] = lines[-1]["worst_class_accuracy"]
    if lost := lost_classes(lines, classes):
        summary["lost_classes"] = lost
        summary["classes_at_zero"] = classes_at_zero(lines)
    seconds = [sum(line["seconds"].values()) for line in lines]
    return summary | {
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "refused_updates": sum(len(line["refused"]) for line in lines),
        "minutes": sum(seconds) / 60,
        "device": str(device),
    }


def client_means(metrics: Sequence[Metrics]) -> dict[str, float]:
    """The mean of every client metric over the clients that report it."""
    names = sorted({name for one in metrics for name in one})
    return {name: float(np.mean([one[name] for one in metrics if name in one])) for name in names}


class Clock:
    """Seconds spent in each phase of a round."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`, which may have had some before."""
        now = time.perf_counter()
        self.laps[phase] = self.laps.get(phase, 0.0) + now - self._since
        self._since = now
