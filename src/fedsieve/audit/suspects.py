"""The list of suspicious labels that stays with its site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsieve.data.own.tables import read_columns, write_rows
from fedsieve.errors import FedsieveError, check
from fedsieve.simulate.findings import SUSPECT

COLUMNS = ("id", "given", "suggested", "p_wrong", "rank", "reason")
FLAG = SUSPECT
"""A label is flagged if it is at least this likely to be wrong, as in the report's counts."""


@dataclass(frozen=True)
class Suspect:
    """What an audit thinks of one label."""

    id: str
    given: str
    """class name"""
    suggested: str
    """the most likely class; for a flagged label, of those that it does not say"""
    p_wrong: float
    """probability that the given label is wrong"""
    rank: int
    """1 is the most suspicious label of the site"""
    reason: str

    @property
    def is_flagged(self) -> bool:
        return self.p_wrong >= FLAG


def write_suspects(path: Path, suspects: Sequence[Suspect]) -> None:
    """Write the list as CSV that is safe to open in a spreadsheet, whole or not at all."""
    rows = [
        (s.id, s.given, s.suggested, f"{s.p_wrong:.6f}", str(s.rank), s.reason) for s in suspects
    ]
    write_rows(path, COLUMNS, rows)


def read_suspects(path: Path) -> tuple[Suspect, ...]:
    """The list that `write_suspects` wrote; further columns are passed over."""
    rows = read_columns(path, COLUMNS, "a list of suspects has")
    return tuple(
        _suspect(cells, f"{path}, row {number}") for number, cells in enumerate(rows, start=1)
    )


def _suspect(cells: Sequence[str], where: str) -> Suspect:
    name, given, suggested, p_wrong, rank, reason = cells
    try:
        suspect = Suspect(name, given, suggested, float(p_wrong), int(rank), reason)
    except ValueError:
        raise FedsieveError(
            f"{where}: p_wrong and rank must be numbers, not {p_wrong!r} and {rank!r}."
        ) from None
    check(0 <= suspect.p_wrong <= 1, f"{where}: p_wrong must lie in [0, 1], not {p_wrong}.")
    return suspect
