"""A round and a run in a few numbers: seconds, means over clients, the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedsieve.recipe import Recipe
from fedsieve.types import Metrics

LAST_ROUNDS = 10
"""Accuracy is reported as the mean of this many last rounds, as the papers do."""
LEAST_IMAGES = 10
"""Test images that a class must have for its accuracy to say anything."""
RECOGNISED = 10.0
"""From this accuracy on the worst class on, in %, a model has recognised all classes."""


def summary_of(
    recipe: Recipe, lines: Sequence[Mapping[str, Any]], device: torch.device
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
    if lost := lost_class(lines):
        summary["lost_class"] = lost
    seconds = [sum(line["seconds"].values()) for line in lines]
    return summary | {
        "bytes_up": sum(line["bytes_up"] for line in lines),
        "bytes_down": sum(line["bytes_down"] for line in lines),
        "refused_updates": sum(len(line["refused"]) for line in lines),
        "minutes": sum(seconds) / 60,
        "device": str(device),
    }


def scores_of(right: Sequence[int], of: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Test accuracy in %, given how many images of each class are classified rightly: of all, and
    of the class that is recognised worst, which is 0 where a model has lost one."""
    scores: dict[str, Any] = {"accuracy": 100 * sum(right) / sum(of)}
    counted = [
        (100 * some / all_, name)
        for some, all_, name in zip(right, of, classes, strict=True)
        if all_ >= LEAST_IMAGES
    ]
    if counted:
        worst, name = min(counted, key=lambda each: each[0])
        scores |= {"worst_class_accuracy": worst, "worst_class": name}
    return scores


def lost_class(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """A class of which no image is recognised in the end, where all classes once were."""
    known = [line for line in lines if "worst_class_accuracy" in line]
    if not known or known[-1]["worst_class_accuracy"] > 0:
        return None
    best = max(line["worst_class_accuracy"] for line in known)
    return str(known[-1]["worst_class"]) if best >= RECOGNISED else None


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
