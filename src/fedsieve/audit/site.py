"""What stays with a site: the list of its suspicious labels, and the page to review them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedsieve.audit.suspects import Suspect, write_suspects
from fedsieve.files import write_atomically
from fedsieve.pages import ReviewItem, review_page

SUSPECTS = "suspects.csv"
REVIEW = "review.html"
MOST_REVIEWED = 500
"""Labels on a site's page at most; the list has all of them."""
FEWEST_REVIEWED = 10
"""Shown even where none is flagged, for someone who wants to check that nothing is wrong."""


def write_for_site(
    folder: Path,
    site: str,
    classes: Sequence[str],
    suspects: Sequence[Suspect],
    picture: Callable[[str], bytes],
    key: str,
) -> None:
    """Write both files; `picture` is the PNG of a sample, `key` tells this page's verdicts from
    those of other pages in the same browser."""
    write_suspects(folder / SUSPECTS, suspects)
    flagged = sum(suspect.is_flagged for suspect in suspects)
    items = [
        ReviewItem(
            suspect.id,
            site,
            suspect.given,
            suspect.suggested,
            suspect.p_wrong,
            suspect.rank,
            suspect.reason,
            picture(suspect.id),
        )
        for suspect in suspects[: min(MOST_REVIEWED, max(flagged, FEWEST_REVIEWED))]
    ]
    page = review_page(
        title=f"Suspicious labels at {site}", classes=tuple(classes), items=items, key=key
    )
    write_atomically(folder / REVIEW, page.encode())
