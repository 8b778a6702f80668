"""How well a model recognises each class, and which classes a run has lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_IMAGES = 20
"""Test images that a class must have for its accuracy to say anything."""
RECOGNISED = 50.0
"""From this accuracy on, in %, a class is recognised, so that it can be lost."""


def scores_of(right: Sequence[int], of: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Test accuracy in %, given how many images of each class are classified rightly: of all, of
    each class, and of the one that is recognised worst. A class with few images has none (None)."""
    by_class = [
        100 * some / all_ if all_ >= LEAST_IMAGES else None
        for some, all_ in zip(right, of, strict=True)
    ]
    scores: dict[str, Any] = {
        "accuracy": 100 * sum(right) / sum(of),
        "class_accuracy": [None if share is None else round(share, 2) for share in by_class],
    }
    counted = [
        (share, name) for share, name in zip(by_class, classes, strict=True) if share is not None
    ]
    if len(counted) > 1:
        worst, name = min(counted, key=lambda each: each[0])
        scores |= {"worst_class_accuracy": worst, "worst_class": name}
    return scores


def lost_classes(lines: Sequence[Mapping[str, Any]], classes: Sequence[str]) -> dict[str, int]:
    """Classes that were recognised in some round, and of which no image is in the end; with the
    round, counted from 1, since when none is."""
    logged = [(line["round"], line["class_accuracy"]) for line in lines if "class_accuracy" in line]
    lost = {}
    for place, name in enumerate(classes):
        course = [(round, by_class[place]) for round, by_class in logged]
        seen = [(round, share) for round, share in course if share]
        if seen and course[-1][1] == 0 and max(share for _, share in seen) >= RECOGNISED:
            last_seen, _ = seen[-1]  # a line counts rounds from 0
            lost[name] = last_seen + 1 + 1
    return lost


def classes_at_zero(lines: Sequence[Mapping[str, Any]]) -> int:
    """Classes of which no image is recognised in the end, lost or never learnt."""
    logged = [line["class_accuracy"] for line in lines if "class_accuracy" in line]
    return logged[-1].count(0) if logged else 0


def lost_in_words(summary: Mapping[str, Any]) -> str | None:
    """The classes that a summary says are lost: the first by name, how many more; and how many
    others are at zero because they were never learnt."""
    lost, at_zero = summary.get("lost_classes"), summary.get("classes_at_zero", 0)
    if not isinstance(lost, Mapping) or not lost:
        return None
    (name, since), *others = lost.items()
    more = f" and {len(others)} more class{'es' * (len(others) > 1)}" if others else ""
    unlearnt = at_zero - len(lost) if isinstance(at_zero, int) else 0
    never = f", nor of {unlearnt} that it never learnt" if unlearnt > 0 else ""
    return f"{name!r} (since round {since}){more}{never}"
