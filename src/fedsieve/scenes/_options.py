"""Checks that the two option classes of a scene share."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

from fedsieve.errors import check

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse a `value` that is none of `choices`."""
    check(value in choices, f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_belongs(
    config: DataclassInstance, where: str, chosen: str, used: Collection[str]
) -> None:
    """Refuse every option that was set although the `chosen` kind does not use it."""
    for field in fields(config):
        assert field.default is not MISSING, "every option of a scene has a default"
        is_set = getattr(config, field.name) != field.default
        check(
            field.name in used or not is_set,
            f"{where}.{field.name} means nothing with {chosen}; remove it.",
        )


def check_given(
    config: DataclassInstance, where: str, chosen: str, needed: Collection[str]
) -> None:
    """Refuse a config in which one of the options that the `chosen` kind needs is missing."""
    for name in needed:
        check(getattr(config, name) is not None, f"{where}.{name} must be set with {chosen}.")


def check_between(name: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Refuse a number outside [low, high]; None stands for "not set" and passes."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
    check(is_number and low <= value <= high, f"{name} must be {limits}, not {value!r}.")
    check(math.isfinite(value), f"{name} must be a finite number, not {value!r}.")


def check_whole(name: str, value: int | None, low: int) -> None:
    """Refuse anything but a whole number of at least `low`; None stands for "not set"."""
    if value is None:
        return
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    check(is_whole and value >= low, f"{name} must be a whole number >= {low}, not {value!r}.")
