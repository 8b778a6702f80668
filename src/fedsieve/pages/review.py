"""The page on which a person decides about suspicious labels: keep, relabel, drop or skip."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from fedsieve.errors import check
from fedsieve.formulas import ESCAPED_STARTS
from fedsieve.pages.html import render


@dataclass(frozen=True)
class ReviewItem:
    """One label that someone should look at."""

    id: str
    """name of the sample at its site"""
    site: str
    given: str
    suggested: str
    p_wrong: float
    rank: int
    """1 is the most suspicious"""
    reason: str
    """why the label is suspected, in words"""
    thumbnail: bytes
    """PNG; empty where there is no picture"""


def review_page(
    *, title: str, classes: Sequence[str], items: Sequence[ReviewItem], key: str
) -> str:
    """A self-contained page with `items` in the order given.

    A browser keeps the verdicts under `key`, so it must name this list and no other. The page
    exports them as verdicts.csv: id, site, given, verdict (keep, relabel, drop or skip), new_label.
    """
    _check_items(classes, items)
    return render(
        "review.html.jinja",
        styles=("base.css", "review.css"),
        script="review.js",
        title=title,
        count=len(items),
        data={
            "key": f"fedsieve-review:{key}",
            "classes": list(classes),
            "escaped_starts": list(ESCAPED_STARTS),
            "items": [_row(item) for item in items],
        },
    )


def _row(item: ReviewItem) -> list[str | float]:
    """The order is the one in which review.js takes an item apart."""
    picture = base64.b64encode(item.thumbnail).decode()
    return [
        item.id,
        item.site,
        item.given,
        item.suggested,
        item.p_wrong,
        item.rank,
        item.reason,
        picture,
    ]


def _check_items(classes: Sequence[str], items: Sequence[ReviewItem]) -> None:
    known = set(classes)
    check(len(known) == len(classes), "Two classes have the same name; give them different names.")
    seen = set()
    for item in items:
        for label in (item.given, item.suggested):
            check(label in known, f"{item.id!r}: there is no class {label!r}; give all classes.")
        check(
            0 <= item.p_wrong <= 1,
            f"{item.id!r}: p_wrong must lie between 0 and 1, not {item.p_wrong}.",
        )
        place = (item.id, item.site)
        check(
            place not in seen, f"{item.id!r} of site {item.site!r} is listed twice; list it once."
        )
        seen.add(place)
