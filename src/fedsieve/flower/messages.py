"""What server and sites say to each other, besides a method's own `Down` and `Up`.

    hello   the server asks a node who it is          Charter's recipe → Hello
    round   the server asks a site for its part       Order and Down → Up and metrics
    finish  the server hands over the final model     Order, Down and Model → nothing

A privacy review reads `Hello` and the method's `Up`: nothing else leaves a site, but for the mean
metrics of its local training and, if something fails there, the kind of the error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fedsieve.errors import check

HELLO, ROUND, FINISH = "query.hello", "train.round", "evaluate.finish"
"""Message types: Flower's category and our action."""

FAILED = 100
"""Code of a reply that says a site failed; Flower's own codes end at 8."""

NOTHING_YET = -1
"""In `Order.after`: the site has not yet taken part."""


@dataclass(frozen=True)
class Question:
    """What a node needs to know to say who it is."""

    recipe: str
    """TOML"""


@dataclass(frozen=True)
class Hello:
    """Who a node is and what it holds, in numbers about all of its samples together."""

    site: str
    """The site's own stable name."""
    client: int | None
    """The client of the recipe's scene that the node plays; None at a site with data of its own."""
    samples: int
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """(channels, height, width) of its images."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Per channel, of pixels in [0, 1]."""


@dataclass(frozen=True)
class Charter:
    """What all sites of a federation must know alike; it stays the same from the first round."""

    federation: str
    """Name of the federation, unique: a site keeps its state of each one apart."""
    recipe: str
    """TOML; views and normalisation are written out."""
    classes: tuple[str, ...]
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class Order:
    """Which part of the work the receiving site has to do."""

    charter: Charter
    client: int
    round: int
    after: int
    """The round whose state the site has to go on from: the last one in which the server used its
    reply. So neither a repeated round nor a refused reply leaves a trace."""


@dataclass(frozen=True)
class Receipt:
    """Which order a reply answers, and with which method."""

    method: str
    client: int
    round: int


def check_name(kind: str, name: str) -> str:
    """`name`, refused unless it can be a folder's name and a word in a log."""
    check(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name) is not None,
        f"The {kind} {name[:80]!r} must begin with a letter or digit and go on with at most 79 "
        "letters, digits, dots, dashes or underscores.",
    )
    return name
