"""Finished runs as a table: rows are methods, columns are scenes, entries are over seeds."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fedsieve.errors import FedsieveError, check
from fedsieve.labels import Label, load_labels

Settings: TypeAlias = Mapping[str, Any]
"""Dotted setting → value."""

SCENE_SETTINGS = ("data.", "scene.")
"""Settings with these beginnings belong to a column; all others to a row."""
TRUNK = "trunk."
"""Settings with this beginning are those of the run that a fork began from."""
OF_METHOD = ("method.", TRUNK)
"""Settings that mean something among runs of one method only."""
TOLD_BY_PATH = ("folder", "table", "sites", "npz")
"""Sources of which the path says which data they are; the others are the same wherever they lie."""
IRRELEVANT = ("seed", "name")
"""Settings in which the runs of one entry may differ, besides those of the engine."""


NUMBERS = (
    "last10",
    "best",
    "final",
    "worst_class_accuracy",
    "suspect_auroc",
    "noise",
    "refused_updates",
)
"""What is read of a summary, where it is known."""


def summary_in(path: Path) -> dict[str, Any]:
    """A run's summary from its file; a `ValueError` or `TypeError` where that holds none."""
    summary = json.loads(path.read_bytes())
    if not isinstance(summary, dict):
        raise TypeError(f"{path.name} holds no table")
    for name in NUMBERS:
        value = summary.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{path.name} has {value!r} for the number {name}")
    return summary


@dataclass(frozen=True)
class Outcome:
    """A finished run: its settings and its summary."""

    settings: Settings
    summary: Mapping[str, Any]
    folder: Path | None = None
    """Where it lies, if it was found in a folder."""
    labels: tuple[Label, ...] = ()
    """What the sweep that it belongs to calls it."""

    @staticmethod
    def of(
        config: Mapping[str, Any],
        summary: Mapping[str, Any],
        folder: Path | None = None,
        labels: tuple[Label, ...] = (),
    ) -> Outcome:
        """From the nested tables of config.toml and summary.json."""
        settings = flat(config)
        if settings.get("data.source") not in TOLD_BY_PATH:
            settings.pop("data.path", None)  # such data may lie anywhere and are the same
        return Outcome(settings, summary, folder, labels)

    @property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """What two runs of the same entry have in common."""
        return _key(self.settings, lambda path: True)


@dataclass(frozen=True)
class Score:
    """A metric over the seeds of one entry."""

    mean: float
    std: float | None
    """With n − 1 in the denominator; None for a single seed."""
    seeds: int


@dataclass(frozen=True)
class Arranged:
    """Outcomes by row and column."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    entries: Mapping[tuple[str, str], Sequence[Outcome]]

    def score(self, row: str, column: str, metric: str) -> Score | None:
        """The metric of one entry; None where no run of it knows the metric."""
        return score_of(self.entries.get((row, column), ()), metric)

    def named(self) -> Iterator[tuple[str, Sequence[Outcome]]]:
        """The entries, row by row, each with a name that tells it from the others."""
        for row, column in itertools.product(self.rows, self.columns):
            if outcomes := self.entries.get((row, column)):
                yield row if len(self.columns) == 1 else f"{row}, {column}", outcomes

    def in_column(self, column: str) -> list[Outcome]:
        return [o for (_, c), outcomes in self.entries.items() if c == column for o in outcomes]


def find_outcomes(folders: Iterable[Path]) -> tuple[list[Outcome], int]:
    """The finished runs below the folders, and how many unfinished ones lie there, too."""
    found: dict[Path, Outcome] = {}
    unfinished: set[Path] = set()
    for top in folders:
        check(top.is_dir(), f"There is no folder {top}; give the folder that a run was written to.")
        for name, below, files in os.walk(top):
            below.sort()
            if "config.toml" not in files or not holds_run(files):
                continue
            folder = Path(name).resolve()
            if "summary.json" in files:
                found[folder] = _read(Path(name))
            else:
                unfinished.add(folder)
    return list(found.values()), len(unfinished)


def holds_run(files: Collection[str]) -> bool:
    """Whether a folder with these files is that of a run: other programs have a config.toml, too,
    such as Flower's beside the run of a server."""
    return not {"env.json", "metrics.jsonl", "summary.json"}.isdisjoint(files)


def once_per_seed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcomes without those that repeat a seed of the same settings."""
    first: dict[Any, Outcome] = {}
    for outcome in outcomes:
        first.setdefault((outcome.identity, outcome.settings.get("seed")), outcome)
    return list(first.values())


def arrange(outcomes: Sequence[Outcome]) -> Arranged:
    """Put outcomes into rows (methods) and columns (scenes), in the order of their sweep. Rows have
    the names of their labels, others are named by what differs."""
    columns = [_column(outcome) for outcome in outcomes]
    rows = _rows(outcomes, columns)
    row_names, column_names = _names(rows, _row_name), _names(columns, _column_name)
    entries: dict[tuple[str, str], list[Outcome]] = {}
    for place, outcome in zip(zip(row_names, column_names, strict=True), outcomes, strict=True):
        entries.setdefault(place, []).append(outcome)
    return Arranged(_in_order(row_names, rows), _in_order(column_names, columns), entries)


def score_of(outcomes: Sequence[Outcome], metric: str) -> Score | None:
    values = [float(v) for o in outcomes if (v := o.summary.get(metric)) is not None]
    values = [v for v in values if math.isfinite(v)]
    if not values:
        return None
    std = statistics.stdev(values) if len(values) > 1 else None
    return Score(statistics.fmean(values), std, len(values))


def flat(table: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """A nested table as dotted setting → value."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{where}{key}.")
        else:
            result[f"{where}{key}"] = value
    return result


def settings_in(folder: Path) -> dict[str, Any]:
    """The nested settings of the run in a folder, and after which round of which trunk it forked,
    if it did: a fork ends otherwise than a run of the same settings that began by itself or
    elsewhere."""
    settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    environment = folder / "env.json"
    record = json.loads(environment.read_bytes()) if environment.exists() else {}
    if "forked_from" in record:
        settings["fork"] = record["forked_from"].rpartition(", ")[2]  # "round 10"
        settings["trunk"] = record.get("trunk", {})
    return settings


def trunk_settings(folder: Path) -> dict[str, Any]:
    """What may tell the run in a folder from other trunks of the forks from it: the settings of its
    method, and where it forked itself."""
    settings = settings_in(folder)
    method = {name: value for name, value in settings["method"].items() if name != "name"}
    return method | {name: settings[name] for name in ("fork", "trunk") if name in settings}


def _read(folder: Path) -> Outcome:
    config, summary = folder / "config.toml", folder / "summary.json"
    try:
        settings = settings_in(folder)
        if not settings:
            raise ValueError(f"{config.name} is empty")
        return Outcome.of(settings, summary_in(summary), folder, load_labels(folder))
    except (ValueError, TypeError) as error:
        raise FedsieveError(
            f"The results in {folder} cannot be read ({error}); delete or repair that folder."
        ) from None


def _key(settings: Settings, belongs: Any) -> tuple[tuple[str, str], ...]:
    return tuple(
        (path, repr(value))
        for path, value in sorted(settings.items())
        if belongs(path) and path not in IRRELEVANT and not path.startswith("engine.")
    )


@dataclass(frozen=True)
class _Part:
    """What decides the row of an outcome, or its column."""

    settings: Settings
    labels: tuple[Label, ...]
    key: str
    """Equal where the row or the column is the same."""


def _row(outcome: Outcome, explaining: Sequence[Label]) -> _Part:
    """Its labels and its settings outside the scene, but for those that one of these labels stands
    for. What a label of a scene sets besides is no other method: a paper's choice for a noise."""
    settings = {
        path: value
        for path, value in _deciding(outcome, in_scene=False).items()
        if not any(label.stands_for(path) for label in explaining)
    }
    labels = tuple(label for label in outcome.labels if not _of_scene(label))
    return _Part(settings, labels, repr((sorted(settings.items()), labels)))


def _column(outcome: Outcome) -> _Part:
    """Its scene; labels give it a place, but a run without them may have the same."""
    settings = _deciding(outcome, in_scene=True)
    labels = tuple(label for label in outcome.labels if _of_scene(label))
    return _Part(settings, labels, repr(sorted(settings.items())))


def _rows(outcomes: Sequence[Outcome], columns: Sequence[_Part]) -> list[_Part]:
    """The rows. Labels explain settings unless runs of different ones would then count as seeds of
    one entry: first those of rows do not, then none does."""
    rows = [_row(outcome, outcome.labels) for outcome in outcomes]
    for of_scenes_explain in (True, False):
        met: dict[tuple[str, str], set[object]] = {}
        for row, column, outcome in zip(rows, columns, outcomes, strict=True):
            met.setdefault((row.key, column.key), set()).add(outcome.identity)
        mixed = {row for (row, _), identities in met.items() if len(identities) > 1}
        for place, outcome in enumerate(outcomes):
            if rows[place].key in mixed:
                of_scenes = [label for label in outcome.labels if _of_scene(label)]
                rows[place] = _row(outcome, of_scenes if of_scenes_explain else ())
    return rows


def _of_scene(label: Label) -> bool:
    return any(f"{path}.".startswith(SCENE_SETTINGS) for path in label.settings)


def _deciding(outcome: Outcome, *, in_scene: bool) -> dict[str, Any]:
    names = {
        path
        for path, _ in _key(outcome.settings, lambda p: p.startswith(SCENE_SETTINGS) == in_scene)
    }
    return {path: value for path, value in outcome.settings.items() if path in names}


def _names(parts: Sequence[_Part], name: Callable[[_Part, Sequence[_Part]], str]) -> list[str]:
    """A name for each part; equal parts get the same, different parts different names."""
    distinct = {part.key: part for part in parts}
    named: dict[str, str] = {}
    for key, part in distinct.items():
        text = name(part, list(distinct.values()))
        while text in named.values():  # short names may meet
            text += "*"
        named[key] = text
    return [named[part.key] for part in parts]


def _in_order(names: Sequence[str], parts: Sequence[_Part]) -> tuple[str, ...]:
    """Each name once: in the order of the sweep, those without labels as they were found."""
    places: dict[str, tuple[int, ...]] = {}
    for name, part in zip(names, parts, strict=True):
        own = tuple(label.place for label in part.labels)
        places[name] = max(places.get(name, ()), own)
    return tuple(sorted(places, key=lambda name: places[name]))


def _row_name(part: _Part, parts: Sequence[_Part]) -> str:
    """The method and its labels, and what differs from others with these; without labels what
    differs from other such rows."""
    if not part.labels:
        return _row_name_by_settings(part.settings, [p.settings for p in parts if not p.labels])
    namesakes = [other.settings for other in parts if _texts(other) == _texts(part)]
    method = part.settings.get("method.name")  # none where it is what a label stands for
    differing = [
        f"{_leaf(path)}={_text(part.settings[path])}"
        for path in _differing(namesakes)
        if path in part.settings and path != "method.name"
    ]
    return " ".join([*([method] if method else []), *_texts(part), *differing])


def _texts(part: _Part) -> list[str]:
    return [label.text for label in part.labels]


def _column_name(part: _Part, parts: Sequence[_Part]) -> str:
    return _column_name_by_settings(part.settings, [other.settings for other in parts])


def _row_name_by_settings(part: Settings, parts: Sequence[Settings]) -> str:
    """The method, and what differs from other rows; its own settings, and those of the trunk that
    it forked from, only from its namesakes."""
    method = str(part.get("method.name", "?"))
    namesakes = [other for other in parts if other.get("method.name") == method]
    differing = [path for path in _differing(namesakes) if path.startswith(OF_METHOD)]
    differing += [path for path in _differing(parts) if not path.startswith(OF_METHOD)]
    words = [f"{_leaf(path)}={_text(part[path])}" for path in differing if path in part]
    return " ".join([method, *words])


def _column_name_by_settings(part: Settings, parts: Sequence[Settings]) -> str:
    """What differs from other scenes: data, clients, partition and noise; else the data's name."""
    differing = _differing(parts)
    words = [_text(part.get("data.source", "?"))] if "data.source" in differing else []
    if "data.path" in differing and "data.path" in part:
        words.append(_text(Path(str(part["data.path"])).name))
    if "scene.clients" in differing and "scene.clients" in part:
        words.append(f"{part['scene.clients']} clients")
    for section, kind_word in (("scene.partition.", "{}"), ("scene.noise.", "{} noise")):
        kind = part.get(f"{section}kind")
        paths = [path for path in differing if path.startswith(section)]
        if section == "scene.noise." and kind == "none":
            words += ["no noise"] if paths else []
            continue
        if f"{section}kind" in paths and kind is not None:
            words.append(kind_word.format(kind))
        words += [
            f"{_leaf(path)}={_text(part[path])}"
            for path in paths
            if path in part and _leaf(path) != "kind"
        ]
    return ", ".join(words) or _text(part.get("data.source", "all"))


def _differing(parts: Sequence[Settings]) -> list[str]:
    """The settings that are not the same in all parts, in the order in which they were written by
    the part that has most of them. A trunk's are compared among forks, for others have none."""
    paths = dict.fromkeys(path for part in sorted(parts, key=len, reverse=True) for path in part)
    return [
        path
        for path in paths
        if len({repr(p.get(path)) for p in parts if "fork" in p or not path.startswith(TRUNK)}) > 1
    ]


def _leaf(path: str) -> str:
    leaf = path.rpartition(".")[2]
    return f"trunk's {leaf}" if path.startswith(TRUNK) else leaf


_LONGEST = 40
"""Characters of a value in a name: a list may have one for each client."""


def _text(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
