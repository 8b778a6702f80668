"""From a recipe and a command line to the runs that they ask for.

An option takes effect in every cell of the recipe's grid:

- An option that sets what an axis of `[sweep]` sweeps takes that axis's place.
- Another `method.name`, `scene.noise.kind` or `scene.partition.kind` than the recipe's drops the
  recipe's other settings of that table and the axes that sweep them: they belong to the old one.
- A setting of a method goes to those cells whose method has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedsieve.cli.options import like, parse_given
from fedsieve.config import from_table, needed
from fedsieve.errors import check
from fedsieve.labels import Label
from fedsieve.methods import METHODS, method
from fedsieve.methods.contract import Config as MethodConfig
from fedsieve.recipe import Recipe, cells, read_recipe, recipe_from_table, with_setting

T = TypeVar("T")

SELECTORS = ("method.name", "scene.partition.kind", "scene.noise.kind")
"""Settings that decide what the other settings of their table mean."""


@dataclass(frozen=True)
class PlannedRun:
    """One run, and the name of its folder."""

    name: str
    recipe: Recipe
    points: tuple[str, ...] = ()
    """What the axes of the recipe's sweep call it."""
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True)
class Grid:
    """All runs of a command."""

    runs: tuple[PlannedRun, ...]
    is_single: bool
    """Whether neither the recipe nor the command line asks for several runs."""
    default_folder: Path
    notes: tuple[str, ...] = ()
    """What someone should know who expected another grid, a sentence each."""

    def folder_of(self, run: PlannedRun, out: Path | None) -> Path:
        """Where a run goes: a single one to `out` itself, one of several below it."""
        if out is not None and self.is_single:
            return out
        return (out or self.default_folder) / run.name

    def only(self, points: Sequence[str]) -> Grid:
        """The part of the grid at these points: of an axis any that is named, else all of it."""
        axes = [
            dict.fromkeys(axis) for axis in zip(*(run.points for run in self.runs), strict=True)
        ]
        known = [point for axis in axes for point in axis]
        for point in points:
            check(
                point in known,
                f"No run of this grid is called {point!r}; --only takes "
                f"{', '.join(map(repr, known)) or 'the labels of a recipe with a sweep'}.",
            )
        wanted = [axis.keys() & set(points) or axis.keys() for axis in axes]
        runs = tuple(
            run
            for run in self.runs
            if all(point in some for point, some in zip(run.points, wanted, strict=True))
        )
        return dataclasses.replace(self, runs=runs)


def read_command(options: type[T], command: str, argv: Sequence[str]) -> tuple[T, Grid]:
    """The options that a command has of its own, and the runs that recipe and settings ask for.

    `options` has a positional field `recipe`, and may have `seeds`.
    """
    source = argv[0] if argv and not argv[0].startswith("-") else None
    table = read_recipe(source)
    table.setdefault("name", "demo" if source is None else Path(source).stem)
    chosen = _word_after("--method.name", argv)
    names = {chosen: None} if chosen else {_method_of(cell.table): None for cell in cells(table)}
    given = parse_given(_options_for(options, table, list(names)), command, argv)

    own_names = {member.name for member in dataclasses.fields(options)}  # type: ignore[arg-type]
    own = {name: value for name, value in given.items() if name in own_names}
    check(
        own.get("recipe") == source,
        f"Put the recipe before the options: {command} {own.get('recipe')} …",
    )
    overrides = {name: value for name, value in given.items() if name not in own_names}
    parsed = from_table(options, own)
    return parsed, expand(table, overrides, getattr(parsed, "seeds", ()))


def expand(table: Mapping[str, Any], overrides: Mapping[str, Any], seeds: Sequence[int]) -> Grid:
    """Every run of the recipe's grid with the overrides, for each of the seeds."""
    check("seed" not in overrides or not seeds, "Give either --seed or --seeds, not both.")
    check(len(set(seeds)) == len(seeds), "--seeds names a seed twice; give each once.")
    given = [*overrides, *(["seed"] if seeds else [])]
    whole, table = table, _without_replaced_axes(table, given, overrides)
    grid = cells(table)
    sweep = table.get("sweep", {})
    settings = [_with_overrides(cell.table, overrides) for cell in grid]
    for path in overrides:
        check(any(_has(cell, path) for cell in settings), _no_such_setting(path, whole))
    runs = []
    for cell, final in zip(grid, settings, strict=True):
        _check_needed(final)
        for seed in seeds or (None,):
            recipe = recipe_from_table(final if seed is None else final | {"seed": seed})
            name = slug(cell.name or recipe.method.name)
            runs.append(
                PlannedRun(
                    name if "seed" in sweep else f"{name}-seed{recipe.seed}",
                    recipe,
                    cell.points,
                    cell.labels,
                )
            )
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    check(twice is None, f"Two runs of the sweep are called {twice!r}; give them other labels.")
    return Grid(
        runs=tuple(runs),
        is_single=not sweep and not seeds,
        default_folder=Path("runs") / (slug(runs[0].recipe.name) + _fingerprint(overrides)),
        notes=tuple(_notes(whole, table, given)),
    )


def _no_such_setting(path: str, whole: Mapping[str, Any]) -> str:
    """What to say of an option that no run has a setting for, with or without the axes of `whole`
    that it takes the place of."""
    owners = {_method_of(cell.table): None for cell in cells(whole) if _has(cell.table, path)}
    if not owners:
        return f"No method of this recipe has a setting {path}."
    return (
        f"--{path} takes the place of the sweep that names a method with this setting; name the "
        f"method, too: --method.name {' or '.join(owners)}."
    )


def _notes(whole: Mapping[str, Any], left: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """A sentence on each axis that went away with more than what was given in its place."""
    axes: Mapping[str, Any] = whole.get("sweep", {})
    found = []
    for axis in [name for name in axes if name not in left.get("sweep", {})]:
        swept = sorted(_swept_by(axis, axes[axis]))
        causes = [path for path in given if any(_overlap(path, one) for one in swept)]
        tables = [*given, *(_table_of(path) for path in causes if path in SELECTORS)]
        others = [one for one in swept if not any(_overlap(path, one) for path in tables)]
        if others:
            found.append(
                f"--{' and --'.join(causes)} takes the place of the grid's axis {axis!r}, which "
                f"also sets {', '.join(others)}; the grid shrinks from {len(cells(whole))} runs "
                f"to {len(cells(left))}."
            )
    return found


def slug(text: str) -> str:
    """`text` as a name of a file on any system."""
    return re.sub(r"[^\w.+=-]+", "_", text).strip(".") or "_"


def _options_for(options: type[Any], table: Mapping[str, Any], names: list[str]) -> type[Any]:
    """The command's own options and all settings of a recipe, for the methods of its grid."""
    held = table.get("method")
    settings = dict(held) if isinstance(held, Mapping) else {}
    settings["name"] = ", ".join(names)
    configs: list[type[Any]] = [_AnyMethod, *(method(name).config for name in names)]
    result = like([options, Recipe], table, replaced={"method": like(configs, settings)})
    if sweep := table.get("sweep"):
        result.__doc__ = (
            f"{result.__doc__}\n\nThis recipe is a grid over {', '.join(sweep)}; an option that "
            "sets one of them takes its place."
        )
    return result


@dataclass(frozen=True, kw_only=True)
class _AnyMethod(MethodConfig):
    """The method and its hyper-parameters."""

    name: Literal[tuple(METHODS)] = "fedavg"  # type: ignore[valid-type]
    """Which method trains; `fedsieve methods` lists them."""


def _word_after(option: str, argv: Sequence[str]) -> str | None:
    """The last value that the command line gives to `option`, before it is parsed."""
    found = [word[len(option) + 1 :] for word in argv if word.startswith(f"{option}=")]
    found += [value for word, value in pairwise(argv) if word == option]
    return found[-1] if found else None


def _method_of(table: Mapping[str, Any]) -> str:
    settings = table.get("method", {})
    return str(settings.get("name", "fedavg")) if isinstance(settings, Mapping) else "fedavg"


def _check_needed(table: Mapping[str, Any]) -> None:
    """Refuse a method that leaves a setting to its user, in words that help to choose it."""
    name, held = _method_of(table), table.get("method", {})
    for setting in needed(method(name).config):
        check(
            setting in held,
            f"Please set method.{setting}: {name} has no default for it, and `fedsieve methods "
            f"{name}` says what it is.",
        )


def _value_at(table: Mapping[str, Any], path: str) -> Any:
    value: Any = table
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _changed(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    """The selectors that the command line sets to another value than the table has."""
    return [s for s in SELECTORS if s in overrides and overrides[s] != _value_at(table, s)]


def _table_of(path: str) -> str:
    return path.rpartition(".")[0]


def _without_replaced_axes(
    table: Mapping[str, Any], replaced: Iterable[str], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe without the axes that sweep what the command line sets."""
    sweep = table.get("sweep")
    if not isinstance(sweep, Mapping):
        return dict(table)
    paths = [*replaced, *(_table_of(selector) for selector in _changed(table, overrides))]
    kept = {
        axis: values
        for axis, values in sweep.items()
        if not any(_overlap(path, swept) for path in paths for swept in _swept_by(axis, values))
    }
    return {**table, "sweep": kept}


def _swept_by(axis: str, values: Any) -> set[str]:
    """The settings that an axis changes."""
    paths: set[str] = set()
    for value in values if isinstance(values, list) else []:
        paths |= (value.keys() - {"label"}) if isinstance(value, Mapping) else {axis}
    return paths


def _overlap(first: str, second: str) -> bool:
    """Whether two settings are the same, or one is a table that holds the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _with_overrides(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(table)
    for path in _changed(table, overrides):
        result = with_setting(result, _table_of(path), {})
        result = with_setting(result, path, overrides[path])
    # A preset first: the switches that are given besides it hold.
    for path in sorted(overrides, key=lambda path: path != "method.preset"):
        if path not in SELECTORS and _has(result, path):
            result = with_setting(result, path, overrides[path])
    return result


def _has(table: Mapping[str, Any], path: str) -> bool:
    """Whether the setting exists with the table's method; only methods differ in that."""
    if not path.startswith("method."):
        return True
    fields = dataclasses.fields(method(_method_of(table)).config)
    return path.removeprefix("method.") in {member.name for member in fields}


def _fingerprint(overrides: Mapping[str, Any]) -> str:
    """ "-" and six hexadecimal digits of the overrides that decide a result; empty without any."""
    deciding = {
        path: value
        for path, value in overrides.items()
        if path not in ("name", "seed") and not path.startswith("engine.")
    }
    if not deciding:
        return ""
    text = json.dumps(deciding, sort_keys=True)
    return "-" + hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
