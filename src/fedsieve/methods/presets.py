"""Settings that a method takes from a preset, and settings that have a fixed choice of values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from fedsieve.errors import check
from fedsieve.methods.contract import Config

T = TypeVar("T")


def fill_in(config: Config) -> None:
    """Give every switch that was left out (None) the value of the preset that `config` names.

    Called when a configuration is made, so that a saved one says what ran.
    """
    presets, preset = config.presets, getattr(config, "preset")  # noqa: B009
    check(preset in presets, _one_of("preset", tuple(presets), preset))
    for switch in dataclasses.fields(presets[preset]):
        if getattr(config, switch.name) is None:
            object.__setattr__(config, switch.name, getattr(presets[preset], switch.name))


def released(kind: type[Config], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a saved configuration, ready for another preset: without the switches that
    have the value of the present one. Settings that do not name every switch are no saved ones, and
    what they name was chosen."""
    preset = kind.presets.get(settings.get("preset"))
    if preset is None:
        return dict(settings)
    switches = dataclasses.asdict(preset)
    if not switches.keys() <= settings.keys():
        return dict(settings)
    absent = object()
    return {n: value for n, value in settings.items() if value != switches.get(n, absent)}


def switches_of(config: Config, kind: type[T]) -> T:
    """The switches as they were filled in."""
    names = [switch.name for switch in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(config, name) for name in names})


def check_choices(config: Config) -> None:
    """Refuse a value that is not among those which the type of its field, a `Literal`, lists."""
    for name, hint in typing.get_type_hints(type(config)).items():
        allowed = _listed(hint)
        if allowed:
            value = getattr(config, name)
            check(value in allowed, _one_of(name, allowed, value))


def _listed(hint: Any) -> tuple[object, ...]:
    """The values of a `Literal`, or of one among alternatives; None counts as a value there."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    parts = typing.get_args(hint)
    listed = [value for part in parts for value in _listed(part)]
    return (*listed, *([None] if listed and type(None) in parts else []))


def _one_of(name: str, allowed: tuple[object, ...], value: object) -> str:
    listed = ", ".join(repr(choice) for choice in allowed if choice is not None)
    return f"method.{name} must be one of {listed}, not {value!r}."
