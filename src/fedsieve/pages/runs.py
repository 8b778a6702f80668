"""A run's folder as a report reads it: whatever is there, and what is missing or damaged."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedsieve.errors import FedsieveError, check
from fedsieve.labels import LABELS, Label, load_labels
from fedsieve.simulate.directory import CONFIG, ENVIRONMENT, METRICS, SUMMARY, read_lines
from fedsieve.simulate.findings import FINDINGS, Findings, load_findings
from fedsieve.simulate.logged import Points, is_number, points, round_of
from fedsieve.simulate.results import Outcome, arrange, summary_in
from fedsieve.simulate.summary import LAST_ROUNDS

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """What a run left behind."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    findings: Findings | None = None
    labels: tuple[Label, ...] = ()
    """what the sweep that it belongs to calls it"""
    problems: tuple[str, ...] = ()
    """files that could not be read, a sentence each"""
    is_tested: bool = True
    """whether accuracy was measured on images that the model had not trained on"""

    def without_accuracy(self) -> RunRecord:
        """The same where accuracy was measured on what the model had trained on."""
        told = ("accuracy", "class_accuracy", "worst_class_accuracy", "worst_class")
        lines = [{k: v for k, v in line.items() if k not in told} for line in self.lines]
        return replace(self, lines=lines, is_tested=False)

    @property
    def method(self) -> str:
        table = self.config.get("method")
        return str(table.get("name", "?")) if isinstance(table, Mapping) else "?"

    @property
    def rounds_planned(self) -> int | None:
        rounds = self.config.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def is_finished(self) -> bool:
        return self.summary is not None

    @property
    def shortfall(self) -> str:
        """How far an unfinished run got, in words."""
        planned = "" if self.rounds_planned is None else f" of {self.rounds_planned}"
        return f"unfinished: {len(self.lines)}{planned} rounds"

    def points(self, *path: str) -> Points:
        """The rounds with a finite number under `path`, such as ("server", "noise_ratio")."""
        return points(self.lines, ".".join(path))

    @property
    def accuracy(self) -> Points:
        return self.points("accuracy")

    @property
    def last10(self) -> float | None:
        """Mean accuracy of the last ten rounds, in %."""
        values = [value for _, value in self.accuracy[-LAST_ROUNDS:]]
        return sum(values) / len(values) if values else None

    @property
    def best(self) -> tuple[int, float] | None:
        """The (first) round with the highest accuracy."""
        return max(self.accuracy, key=lambda point: point[1], default=None)

    @property
    def minutes(self) -> float | None:
        laps = [line["seconds"] for line in self.lines if isinstance(line.get("seconds"), Mapping)]
        seconds = [float(lap) for parts in laps for lap in parts.values() if is_number(lap)]
        return sum(seconds) / 60 if seconds else None

    def total(self, name: str) -> float | None:
        """Sum of a number over the rounds; None where no round has it."""
        values = [value for _, value in self.points(name)]
        return sum(values) if values else None

    def bytes_per_site(self, name: str = "bytes_up") -> Points:
        """By round, the mean bytes of a site that took part."""
        found = []
        for place, line in enumerate(self.lines):
            sent, clients = line.get(name), line.get("clients")
            if is_number(sent) and isinstance(clients, list) and clients:
                found.append((round_of(line, place), float(sent) / len(clients)))
        return found

    @property
    def suspect_auroc(self) -> float | None:
        value = (self.summary or {}).get("suspect_auroc")
        return float(value) if is_number(value) else None


def read_run(folder: Path) -> RunRecord:
    """Everything in `folder`; a file that is damaged becomes a problem, not an error."""
    check(
        folder.is_dir(), f"There is no folder {folder}; give the folder that a run was written to."
    )
    problems: list[str] = []

    def attempt(name: str, read: Callable[[Path], T], empty: T) -> T:
        path = folder / name
        if not path.exists():
            return empty
        try:
            return read(path)
        except (OSError, ValueError, TypeError, RecursionError, FedsieveError):
            problems.append(f"{name} is damaged and was left out.")
            return empty

    no_table: dict[str, Any] = {}
    no_lines: list[dict[str, Any]] = []
    config = attempt(CONFIG, _toml, no_table)
    lines = attempt(METRICS, _tables, no_lines)
    check(
        bool(config) or bool(lines) or bool(problems),
        f"{folder} does not hold a run; give the folder that `fedsieve run` wrote to.",
    )
    return RunRecord(
        folder=folder,
        config=config,
        environment=attempt(ENVIRONMENT, _table, no_table),
        lines=lines,
        summary=attempt(SUMMARY, summary_in, None),
        findings=attempt(FINDINGS, lambda path: load_findings(path.parent), None),
        labels=attempt(LABELS, lambda path: load_labels(path.parent), ()),
        problems=tuple(problems),
    )


def labels_of(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run: the method, and only what it takes to tell them apart; the
    folder's name where nothing is known of a run's settings."""
    arranged = arrange(
        [
            Outcome.of(run.config, {"place": place}, labels=run.labels)
            for place, run in enumerate(runs)
            if run.config
        ]
    )
    labels = [run.folder.resolve().name for run in runs]
    for name, entry in arranged.named():
        for outcome in entry:
            seed = f", seed {outcome.settings.get('seed', '?')}" if len(entry) > 1 else ""
            labels[outcome.summary["place"]] = name + seed
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label} ({run.folder.name} #{place})" if label in repeated else label
        for place, (label, run) in enumerate(zip(labels, runs, strict=True), start=1)
    ]


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _table(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


def _tables(path: Path) -> list[dict[str, Any]]:
    return [dict(line) for line in read_lines(path)]
