"""How well classes are recognised, and which are lost."""

from __future__ import annotations

from typing import Any

import pytest

from fedsieve.simulate.by_class import (
    classes_at_zero,
    lost_classes,
    lost_in_words,
    scores_of,
)


def test_scores_are_of_all_images_of_each_class_and_of_the_one_recognised_worst() -> None:
    # 54 of 96 images; 36/48, 5/24 and 13/24 of the classes.
    scores = scores_of((36, 5, 13), (48, 24, 24), "abc")
    assert scores.pop("worst_class_accuracy") == pytest.approx(100 * 5 / 24)
    assert scores == {
        "accuracy": 56.25,
        "class_accuracy": [75.0, 20.83, 54.17],
        "worst_class": "b",
    }


def test_of_classes_that_are_recognised_alike_it_is_the_first() -> None:
    assert scores_of((9, 0, 0), (20, 20, 20), "zya")["worst_class"] == "y"


def test_a_class_with_few_test_images_says_nothing() -> None:
    scores = scores_of((10, 0, 4, 0), (20, 19, 20, 0), "abcd")
    assert scores["class_accuracy"] == [50.0, None, 20.0, None]
    assert scores["worst_class"] == "c"
    # Of a single class that counts nobody can say that it is the worst.
    assert "worst_class" not in scores_of((20, 1), (20, 5), "ab")


def logged(*courses: tuple[float | None, ...]) -> list[dict[str, Any]]:
    """Lines of metrics with the course of each class; None where the round logged nothing."""
    rounds = zip(*courses, strict=True)
    return [
        {"round": t} if None in shares else {"round": t, "class_accuracy": list(shares)}
        for t, shares in enumerate(rounds)
    ]


@pytest.mark.parametrize(
    ("course", "since"),
    [
        ((0.0, 50.0, 3.0, 0.0, 0.0), 4),
        ((50.0, 0.0, 0.0, 0.0, 0.0), 2),
        ((None, 60.0, 0.0, 0.0, 0.0), 3),  # begun before this was logged
        ((0.0, 49.9, 0.0, 0.0, 0.0), None),  # never recognised
        ((90.0, 0.0, 0.0, 0.0, 0.5), None),  # found again
    ],
)
def test_a_class_is_lost_that_was_recognised(
    course: tuple[float | None, ...], since: int | None
) -> None:
    """Whatever becomes of the others: one of these is never recognised in the same round."""
    lines = logged(course, (100.0, 0.0, 0.0, 70.0, 70.0))
    assert lost_classes(lines, "ab") == ({} if since is None else {"a": since})


def test_classes_with_few_images_and_lines_without_classes_lose_nothing() -> None:
    lines = [{"round": t, "class_accuracy": [None, share]} for t, share in enumerate((90.0, 0.0))]
    assert lost_classes(lines, "ab") == {"b": 2}
    assert lost_classes([{"round": 0}], "ab") == {}
    assert lost_classes([], ()) == {}


def test_classes_that_were_never_learnt_are_at_zero_too() -> None:
    lines = logged((0.0, 90.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.5, 4.0))
    lines[-1]["class_accuracy"].append(None)  # has too few test images to say anything
    assert classes_at_zero(lines) == 2
    assert classes_at_zero([{"round": 0}]) == 0


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"lost_classes": {"shirt": 7}}, "'shirt' (since round 7)"),
        ({"lost_classes": {"a": 7, "b": 2}}, "'a' (since round 7) and 1 more class"),
        ({"lost_classes": {"a": 7, "b": 2, "c": 3}}, "'a' (since round 7) and 2 more classes"),
        (
            {"lost_classes": {"a": 7, "b": 2}, "classes_at_zero": 5},
            "'a' (since round 7) and 1 more class, nor of 3 that it never learnt",
        ),
        ({"lost_classes": {"a": 7}, "classes_at_zero": 1}, "'a' (since round 7)"),
        ({"lost_classes": {}, "classes_at_zero": 3}, None),
        ({"lost_classes": {"a": 7}, "classes_at_zero": "all"}, "'a' (since round 7)"),
        ({"lost_classes": {}}, None),
        ({"lost_classes": "shirt"}, None),
        ({}, None),
    ],
)
def test_lost_classes_in_words(summary: dict[str, Any], words: str | None) -> None:
    assert lost_in_words(summary) == words
