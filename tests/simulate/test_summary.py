"""A run in a few numbers."""

from __future__ import annotations

import pytest
import torch

from fedsieve.recipe import Recipe
from fedsieve.simulate.summary import summary_of
from fedsieve.simulate.summary import test_scores as scores

CPU = torch.device("cpu")


def test_scores_are_of_all_images_and_of_the_class_recognised_worst() -> None:
    # 9 of 16 images; 6/8, 1/4 and 2/4 of the classes. Nobody tests the class without images.
    assert scores((6, 1, 2, 0), (8, 4, 4, 0)) == {"accuracy": 56.25, "worst_class": 25.0}


def test_a_lost_class_scores_nothing() -> None:
    assert scores((8, 0), (8, 2)) == {"accuracy": 80.0, "worst_class": 0.0}


@pytest.mark.parametrize(("known", "expected"), [({"worst_class": 5.0}, 5.0), ({}, None)])
def test_the_summary_has_the_worst_class_of_the_last_round(
    known: dict[str, float], expected: float | None
) -> None:
    rest = {"seconds": {"train": 1.0}, "bytes_up": 0, "bytes_down": 0, "refused": {}}
    lines = [{"accuracy": 1.0, "worst_class": 9.0, **rest}, {"accuracy": 1.0, **known, **rest}]
    assert summary_of(Recipe(), lines, CPU).get("worst_class") == expected
