"""What the sweep of a recipe calls its runs: the labels of their rows and columns in a paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsieve.config import from_table, to_table
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically

LABELS = "labels.json"
"""The file in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a labelled axis of a sweep calls one of its points."""

    axis: str
    text: str
    place: int
    """Of the point on its axis."""
    settings: tuple[str, ...]
    """All that the axis sets at any of its points: what the label stands for."""

    def stands_for(self, setting: str) -> bool:
        """Whether this dotted setting, or a table that holds it, is set by the axis."""
        return any(f"{setting}.".startswith(f"{path}.") for path in self.settings)


def save_labels(labels: Sequence[Label], folder: Path) -> None:
    """Note in a run's folder what its sweep calls it, if it is part of one that has labels."""
    if not labels:
        return
    table = [to_table(label) for label in labels]
    write_atomically(folder / LABELS, json.dumps(table, indent=1).encode() + b"\n")


def load_labels(folder: Path) -> tuple[Label, ...]:
    """What `save_labels` noted; none for a run by itself."""
    path = folder / LABELS
    if not path.exists():
        return ()
    try:
        table = json.loads(path.read_bytes())
        check(isinstance(table, list), "it holds no list")
        return tuple(from_table(Label, label) for label in table)
    except (ValueError, TypeError, FedsieveError) as error:
        raise FedsieveError(f"{path} cannot be read ({error}); delete it.") from None
