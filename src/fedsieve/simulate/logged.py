"""The numbers in a run's logs, by name: round by round, or as they stand at each client.

A number's full name is its path in a line of the log, such as "diagnostics.noise_spearman".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from fedsieve.errors import FedsieveError
from fedsieve.types import ClientId

Lines: TypeAlias = Sequence[Mapping[str, Any]]
Points: TypeAlias = list[tuple[int, float]]
"""(round, counted from 1; value)"""

_PLACES = ("round", "client")
"""Where a line belongs: no numbers to draw."""


def points(lines: Lines, name: str) -> Points:
    """The rounds of metrics.jsonl with a finite number of this full name."""
    found = []
    for place, line in enumerate(lines):
        value = _value(line, name)
        if is_number(value):
            found.append((round_of(line, place), float(value)))
    return found


def at_clients(lines: Lines, name: str, after: int | None = None) -> dict[ClientId, float]:
    """The last number of this full name that clients.jsonl has of each client, or the last one
    `after` so many rounds."""
    found: dict[ClientId, float] = {}
    for place, line in enumerate(lines):
        value, client = _value(line, name), line.get("client")
        in_time = after is None or round_of(line, place) <= after
        if in_time and isinstance(client, int) and is_number(value):
            found[client] = float(value)
    return found


def round_of(line: Mapping[str, Any], place: int) -> int:
    """The round of a line, counted from 1; its `place` in the log where it does not say."""
    round = line.get("round", place)
    return (round if isinstance(round, int) else place) + 1


def rounds_in(lines: Lines) -> int:
    """How many rounds a run has behind it that has logged these lines in metrics.jsonl."""
    return max((round_of(line, place) for place, line in enumerate(lines)), default=0)


def names_in(lines: Lines) -> list[str]:
    """The full names of all numbers in these lines."""
    found: dict[str, None] = {}
    for line in lines:
        found |= dict.fromkeys(name for name in _names(line) if name not in _PLACES)
    return list(found)


def full_name(asked: str, known: Collection[str]) -> str:
    """The number that is meant: a full name, or the last part of only one of those known."""
    if asked in known:
        return asked
    short = {name: name.rpartition(".")[2] for name in known}
    meant = [name for name, last in short.items() if last == asked]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise FedsieveError(f"{asked!r} may be {' or '.join(sorted(meant))}; say which.")
    near = difflib.get_close_matches(asked, {*known, *short.values()}, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(sorted(known))}."
    raise FedsieveError(f"No run has logged a number {asked!r}; {hint}")


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(line: Mapping[str, Any], name: str) -> Any:
    value: Any = line
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _names(table: Mapping[str, Any], where: str = "") -> list[str]:
    found: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            found += _names(value, f"{where}{key}.")
        elif is_number(value):
            found.append(f"{where}{key}")
    return found
