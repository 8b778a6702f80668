"""A run in a few numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedsieve.recipe import Recipe
from fedsieve.simulate.summary import scores_of, summary_of

CPU = torch.device("cpu")


def test_scores_are_of_all_images_and_of_the_class_recognised_worst() -> None:
    # 27 of 48 images; 18/24, 3/12 and 6/12 of the classes.
    assert scores_of((18, 3, 6), (24, 12, 12), "abc") == {
        "accuracy": 56.25,
        "worst_class_accuracy": 25.0,
        "worst_class": "b",
    }


def test_of_classes_that_are_recognised_alike_it_is_the_first() -> None:
    assert scores_of((9, 0, 0), (10, 10, 10), "zya")["worst_class"] == "y"


def test_a_class_with_few_test_images_says_nothing() -> None:
    scores = scores_of((10, 0, 4, 0), (20, 9, 10, 0), "abcd")
    assert scores["worst_class"] == "c"
    assert scores_of((0, 1), (9, 1), "ab") == {"accuracy": 10.0}


def run_with(*worst: float | None) -> dict[str, Any]:
    rest = {"accuracy": 1.0, "seconds": {"train": 1.0}, "bytes_up": 0, "bytes_down": 0}
    named = [
        {} if value is None else {"worst_class_accuracy": value, "worst_class": f"class {place}"}
        for place, value in enumerate(worst)
    ]
    return summary_of(Recipe(), [{**rest, "refused": {}, **each} for each in named], CPU)


def test_the_summary_has_the_last_round_s_worst_class() -> None:
    assert run_with(9.0, 5.0)["worst_class_accuracy"] == 5.0
    assert "worst_class_accuracy" not in run_with(9.0, None)
    assert "worst_class_accuracy" not in run_with()


@pytest.mark.parametrize(
    ("worst", "lost"),
    [
        ((0.0, 10.0, 0.0), "class 2"),
        ((None, 40.0, 3.0, 0.0), "class 3"),  # begun before this was logged
        ((0.0, 9.9, 0.0), None),  # never knew all classes
        ((40.0, 0.0, 0.5), None),  # found again
    ],
)
def test_a_class_is_lost_that_was_recognised_before(
    worst: tuple[float | None, ...], lost: str | None
) -> None:
    assert run_with(*worst).get("lost_class") == lost
