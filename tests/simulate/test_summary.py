"""A run in a few numbers."""

from __future__ import annotations

from typing import Any

import torch

from fedsieve.recipe import Recipe
from fedsieve.simulate.summary import summary_of

CPU = torch.device("cpu")


def summary_with(*shares: tuple[float, float]) -> dict[str, Any]:
    rest = {"accuracy": 1.0, "seconds": {"train": 1.0}, "bytes_up": 0, "bytes_down": 0}
    lines = [
        {
            **rest,
            "round": t,
            "refused": {},
            "class_accuracy": both,
            "worst_class_accuracy": min(both),
        }
        for t, both in enumerate(shares)
    ]
    return summary_of(Recipe(), lines, ("cat", "dog"), CPU)


def test_the_summary_has_the_worst_class_s_accuracy_and_what_is_lost() -> None:
    summary = summary_with((80.0, 60.0), (70.0, 5.0))
    assert summary["worst_class_accuracy"] == 5.0
    assert "lost_classes" not in summary
    summary = summary_with((80.0, 60.0), (70.0, 0.0))
    assert summary["worst_class_accuracy"] == 0.0
    assert summary["lost_classes"] == {"dog": 2}
    assert "worst_class_accuracy" not in summary_with()
