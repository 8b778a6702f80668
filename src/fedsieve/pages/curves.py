"""Pictures and tables of what several runs logged, line beside line, as papers print them."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsieve.errors import FedsieveError, check
from fedsieve.labels import load_labels
from fedsieve.scenes import load_scene
from fedsieve.simulate.directory import CLIENTS, METRICS, SCENE, read_lines
from fedsieve.simulate.logged import Lines, at_clients, points, round_of, rounds_in
from fedsieve.simulate.results import Outcome, arrange, settings_in
from fedsieve.types import ClientId

Row: TypeAlias = Sequence[str | float | None]

STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TITLES = {
    "accuracy": "test accuracy, %",
    "worst_class_accuracy": "test accuracy on the worst class, %",
}
"""What an axis calls a number, where its name would not do."""
TRUE_RATE = "true_rate"


@dataclass(frozen=True)
class Logs:
    """What a run has logged so far."""

    name: str
    """What its sweep calls it, or its folder, below the one that all runs share."""
    identity: object
    """What it has in common with runs that differ from it in nothing but the seed."""
    seed: object
    rounds: Lines
    clients: Lines
    folder: Path
    title: str | None = None
    """What its sweep calls it and its other seeds together."""


def find_logs(folders: Sequence[Path], *, with_clients: bool = False) -> list[Logs]:
    """The runs below the folders, finished or not, that have logged a round; what they logged of
    their clients, which may be much, only if it is asked for. Where sweeps have labels for all of
    them, they are called by these and stand in the order of the sweep."""
    found: dict[Path, Logs] = {}
    outcomes: dict[Path, Outcome | None] = {}
    for top in folders:
        check(top.is_dir(), f"There is no folder {top}; give the folder that a run was written to.")
        for log in sorted(top.rglob(METRICS)):
            folder, rounds = log.parent, read_lines(log)
            if rounds:
                clients = read_lines(folder / CLIENTS) if with_clients else []
                outcome = _outcome(folder)
                logs = Logs(str(folder), *_which(outcome, folder), rounds, clients, folder)
                found.setdefault(folder.resolve(), logs)
                outcomes.setdefault(folder.resolve(), outcome)
    runs = list(found.values())
    labelled = [outcome for outcome in outcomes.values() if outcome and outcome.labels]
    if len(labelled) == len(runs):
        return _by_labels(runs, labelled)
    names = _names([run.folder for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _by_labels(runs: Sequence[Logs], outcomes: Sequence[Outcome]) -> list[Logs]:
    """The runs of these labelled outcomes, called and ordered as in a table."""
    run_in: dict[Path | None, Logs] = {run.folder: run for run in runs}
    found = [
        replace(
            run := run_in[outcome.folder],
            name=f"{title}, seed {run.seed}" if len(entry) > 1 else title,
            title=title,
        )
        for title, entry in arrange(outcomes).named()
        for outcome in entry
    ]
    names = _distinct([run.name for run in found])
    return [replace(run, name=name) for run, name in zip(found, names, strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """The paths of the folders below the one that holds them all; of a single folder its name."""
    # Not resolved: a link is called as its owner called it.
    paths = [Path(os.path.abspath(folder)) for folder in folders]  # noqa: PTH100
    shared = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [path.relative_to(shared).as_posix() for path in paths]


def _outcome(folder: Path) -> Outcome | None:
    """A run's settings and labels, without a result; None of a folder that does not tell."""
    try:
        settings = settings_in(folder)
    except (OSError, ValueError, TypeError):
        return None
    return Outcome.of(settings, {}, folder, load_labels(folder))


def _which(outcome: Outcome | None, folder: Path) -> tuple[object, object]:
    """A run's identity and its seed; a folder that does not tell is like no other."""
    if outcome is None:
        return folder, None
    return outcome.identity, outcome.settings.get("seed")


def passes(run: Logs) -> dict[int, float]:
    """By round, how often the clients have gone through all data until then: their epochs, each for
    its share of the samples."""
    try:
        epochs = int(settings_in(run.folder)["sgd"]["epochs"])
        sizes = load_scene(run.folder / SCENE).sizes
        trained = [epochs * float(sizes[line["clients"]].sum()) for line in run.rounds]
    except (OSError, ValueError, LookupError, TypeError):
        raise FedsieveError(
            f"{run.folder} does not say who trained on how much; draw it --over rounds."
        ) from None
    rounds = [round_of(line, place) for place, line in enumerate(run.rounds)]
    return dict(zip(rounds, np.cumsum(trained) / sizes.sum(), strict=True))


# -------------------------------------------------------------------------------- over the rounds


@dataclass(frozen=True)
class Curve:
    """A number over the rounds, by one seed or by several."""

    run: str
    rounds: Sequence[int]
    """Counted from 1; those that all seeds have."""
    seeds: Sequence[Sequence[float]]
    """A value for each round, of each seed."""
    passes: Sequence[float] | None = None
    """Through the data, until the end of each round; the mean of the seeds."""
    longest: int = 0
    """The last round of the seed that has most of them."""

    @property
    def means(self) -> list[float]:
        return [statistics.fmean(values) for values in zip(*self.seeds, strict=True)]

    @property
    def least(self) -> list[float]:
        return [min(values) for values in zip(*self.seeds, strict=True)]

    @property
    def most(self) -> list[float]:
        return [max(values) for values in zip(*self.seeds, strict=True)]

    def note(self, number: str) -> str | None:
        """What a mean of seeds that do not end together leaves out, in words."""
        if not self.rounds and self.longest:
            return (
                f"{self.run} has no mean of {number}: its {len(self.seeds)} seeds share no round."
            )
        if self.rounds and self.rounds[-1] < self.longest:
            return (
                f"{self.run} ends {_after(self.rounds[-1])} of {self.longest}: not all of its "
                f"{len(self.seeds)} seeds have {number} beyond."
            )
        return None


@dataclass(frozen=True)
class OverRounds:
    """A panel for each number, with lines over the rounds."""

    panels: Mapping[str, Sequence[Curve]]
    notes: Sequence[str] = ()
    """What the lines leave out, a sentence each."""

    @staticmethod
    def of(
        runs: Sequence[Logs], names: Sequence[str], *, mean: bool, by_passes: bool = False
    ) -> OverRounds:
        """The numbers of these full names; a run that has never logged one has no line in its
        panel. With `mean`, runs that differ in their seed only are one line; `by_passes`, rounds
        stand where so many passes through the data were made."""
        groups: dict[object, dict[object, Logs]] = {}
        for place, run in enumerate(runs):
            group = groups.setdefault(run.identity if mean else place, {})
            group.setdefault(run.seed, run)  # a seed that was run twice counts once
        members = [list(group.values()) for group in groups.values()]
        titles = _distinct([_title(group) if mean else group[0].name for group in members])
        made = {
            run.folder: passes(run)
            for run in runs
            if by_passes and any(points(run.rounds, name) for name in names)
        }
        curves = {
            name: [
                _curve(title, group, name, made)
                for title, group in zip(titles, members, strict=True)
            ]
            for name in names
        }
        notes = [curve.note(name) for name, found in curves.items() for curve in found]
        return OverRounds(
            {name: [curve for curve in found if curve.rounds] for name, found in curves.items()},
            [note for note in notes if note],
        )

    @property
    def lines(self) -> list[str]:
        """The runs that have a line in some panel."""
        return list(dict.fromkeys(curve.run for curves in self.panels.values() for curve in curves))

    def rows(self) -> Iterator[Row]:
        yield ("number", "run", "seeds", "round", "passes", "mean", "least", "most")
        for name, curves in self.panels.items():
            for curve in curves:
                places: Sequence[float | None] = curve.passes or [None] * len(curve.rounds)
                values = (curve.means, curve.least, curve.most)
                for row in zip(curve.rounds, places, *values, strict=True):
                    yield (name, curve.run, len(curve.seeds), *row)

    def draw(self) -> Figure:
        figure, panels = _panels(len(self.panels))
        looks = _looks(self.lines)
        for axes, (name, curves) in zip(panels, self.panels.items(), strict=True):
            for curve in curves:
                style, marker, colour = looks[curve.run]
                where = curve.passes or curve.rounds
                axes.plot(
                    where,
                    curve.means,
                    style,
                    color=colour,
                    marker=marker,
                    markevery=max(1, len(curve.rounds) // 10),
                    markersize=4,
                    label=_shown(curve.run),
                )
                if len(curve.seeds) > 1:
                    axes.fill_between(
                        where, curve.least, curve.most, color=colour, alpha=0.2, linewidth=0
                    )
            axes.set_ylabel(TITLES.get(name, name))
        by_passes = any(curve.passes for curves in self.panels.values() for curve in curves)
        panels[-1].set_xlabel("passes through the data" if by_passes else "round")
        if not by_passes:  # there is no round 2.5
            panels[-1].xaxis.set_major_locator(
                MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1)
            )
        _legend(figure, panels)
        return figure


def _curve(
    title: str, group: Sequence[Logs], name: str, made: Mapping[Path, Mapping[int, float]]
) -> Curve:
    """A number of one run or of several seeds; `made` are the passes of each folder's rounds, if
    the curve is to be drawn over them."""
    found = [(run, dict(values)) for run in group if (values := points(run.rounds, name))]
    rounds = sorted(set.intersection(*(set(values) for _, values in found))) if found else []
    places = [made[run.folder] for run, _ in found if run.folder in made]
    return Curve(
        title,
        rounds,
        [[values[round] for round in rounds] for _, values in found],
        [statistics.fmean(each[round] for each in places) for round in rounds] if places else None,
        max((round for _, values in found for round in values), default=0),
    )


# ------------------------------------------------------------------------------- over the clients


@dataclass(frozen=True)
class AtClients:
    """A number that a run logged of its clients."""

    run: str
    number: str
    values: Mapping[ClientId, float]


@dataclass(frozen=True)
class OverClients:
    """A panel for each point in time, with lines over the clients in the order of their noise."""

    panels: Mapping[int | None, Sequence[AtClients]]
    """After so many rounds; None is the end."""
    noise: Mapping[ClientId, float]
    """The true share of wrong labels, where a simulation knows it."""
    notes: Sequence[str] = ()
    """What the lines leave out, a sentence each."""

    @staticmethod
    def of(runs: Sequence[Logs], names: Sequence[str], after: Sequence[int]) -> OverClients:
        """A line for each run and each number of these full names."""
        noise: dict[ClientId, float] = {}
        for run in runs:
            for client, rate in at_clients(run.clients, TRUE_RATE).items():
                check(
                    noise.setdefault(client, rate) == rate,
                    f"Client {client} has other wrong labels in {run.name} than in another run; "
                    "draw runs of one scene and seed together.",
                )
        panels, notes = {}, []
        for rounds in after or (None,):
            ends = [rounds_in(run.rounds) for run in runs]
            short = [rounds is not None and end < rounds for end in ends]
            check(
                not all(short),
                f"No run has logged {rounds} rounds; the longest ends {_after(max(ends))}, so give "
                "--after no more than that.",
            )
            reached = [run for run, is_short in zip(runs, short, strict=True) if not is_short]
            panels[rounds] = _at_clients(reached, names, rounds)
            check(bool(panels[rounds]), f"No client had logged that {_after(rounds)}.")
            notes += [
                f"{run.name} is left out {_after(rounds)}: it ends {_after(end)}."
                for run, end, is_short in zip(runs, ends, short, strict=True)
                if is_short and _at_clients([run], names, None)
            ]
        return OverClients(panels, noise, notes)

    @property
    def lines(self) -> list[str]:
        """The names of all lines."""
        return list(dict.fromkeys(self._title(line) for line in self._all))

    @property
    def clients(self) -> list[ClientId]:
        """Whoever has a value, the least noisy first, and by number where that is not known."""
        found = {client for line in self._all for client in line.values}
        return sorted(found, key=lambda client: (self.noise.get(client, 0.0), client))

    def rows(self) -> Iterator[Row]:
        yield ("number", "run", "after", "client", TRUE_RATE, "value")
        for after, lines in self.panels.items():
            for line in lines:
                for client in self.clients:
                    if client in line.values:
                        noise, value = self.noise.get(client), line.values[client]
                        yield (line.number, line.run, after, client, noise, value)

    def draw(self) -> Figure:
        figure, panels = _panels(len(self.panels), share_y=True)
        looks, order = _looks(self.lines), self.clients
        for axes, (after, lines) in zip(panels, self.panels.items(), strict=True):
            for line in lines:
                style, marker, colour = looks[self._title(line)]
                axes.plot(
                    *_by_place(line.values, order),
                    linestyle=style,
                    linewidth=0.8,
                    color=colour,
                    marker=marker,
                    markersize=4,
                    label=_shown(self._title(line)),
                )
            if self.noise:
                axes.plot(
                    *_by_place(self.noise, order),
                    color="0.6",
                    linestyle=(0, (1, 1)),
                    linewidth=2,
                    label="share of wrong labels",
                )
            if after is not None:
                axes.set_title(_after(after), fontsize="medium")
            numbers = {line.number for line in lines}
            if len(numbers) == 1:
                axes.set_ylabel(numbers.pop())
        panels[-1].set_xlabel("client, the least noisy first" if self.noise else "client")
        if len(order) <= MOST_NAMED:
            panels[-1].set_xticks(range(len(order)), [str(client) for client in order])
        _legend(figure, panels)
        return figure

    @property
    def _all(self) -> list[AtClients]:
        return [line for lines in self.panels.values() for line in lines]

    def _title(self, line: AtClients) -> str:
        """What tells a line from the others: its run, its number, or both."""
        several_runs = len({other.run for other in self._all}) > 1
        several_numbers = len({other.number for other in self._all}) > 1
        if several_runs and several_numbers:
            return f"{line.run}: {line.number}"
        return line.number if several_numbers else line.run


def _at_clients(runs: Sequence[Logs], names: Sequence[str], after: int | None) -> list[AtClients]:
    return [
        AtClients(run.name, name, values)
        for run in runs
        for name in names
        if (values := at_clients(run.clients, name, after))
    ]


def _by_place(
    values: Mapping[ClientId, float], order: Sequence[ClientId]
) -> tuple[list[int], list[float]]:
    """The places of those clients that have a value, and the values."""
    known = [(place, values[client]) for place, client in enumerate(order) if client in values]
    return [place for place, _ in known], [value for _, value in known]


# -------------------------------------------------------------------------------------- appearance

MOST_NAMED = 25
"""An axis names each of so many clients."""
LONGEST_BESIDE = 24
"""A legend with longer names stands below the panels: beside them it would take their room."""
LONGEST_LINE = 80
"""Letters of a name on one line of the legend."""
ROOM = 0.97
"""The share of a picture's width or height that a legend may take; the rest is its margin."""


def _panels(count: int, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Panels below each other, with one horizontal axis for all of them."""
    figure = Figure(figsize=(7.5, 4.2 if count == 1 else 2.6 * count), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(count, 1, sharex=True, sharey=share_y, squeeze=False)[:, 0])
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _looks(names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Style, marker and colour of each line, told apart without its colour too."""
    looks = itertools.cycle(itertools.product(STYLES, MARKERS))
    return {
        name: (style, marker, f"C{place % 10}")
        for place, (name, (style, marker)) in enumerate(zip(names, looks, strict=False))
    }


def _shown(name: str) -> str:
    """A name as matplotlib shows it: it reads $ as mathematics, and hides a line called _…"""
    return f"{' ' if name.startswith('_') else ''}{name}".replace("$", r"\$")


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels: beside them, or where it would not fit, in room added below."""
    entries = {
        label: line
        for axes in panels
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    lines, names = list(entries.values()), [textwrap.fill(name, LONGEST_LINE) for name in entries]
    if max(map(len, entries), default=0) <= LONGEST_BESIDE:
        legend = figure.legend(lines, names, fontsize="small", loc="outside right center")
        if legend.get_window_extent().height < ROOM * figure.bbox.height:
            return
        legend.remove()
    for columns in range(len(names), 0, -1):
        legend = figure.legend(
            lines, names, fontsize="small", loc="outside lower center", ncols=columns
        )
        size = legend.get_window_extent()
        if columns == 1 or size.width < ROOM * figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + size.height / figure.dpi)
            return
        legend.remove()


def _title(seeds: Sequence[Logs]) -> str:
    """What runs are called together that differ in their seed."""
    return seeds[0].title or _shared_name([run.name for run in seeds])


def _shared_name(names: Sequence[str]) -> str:
    """What the names of runs that differ in their seed have in common; of one run its name."""
    if len(names) == 1:
        return names[0]
    folders = zip(*(_without_seed(name).split("/") for name in names), strict=False)
    shared = "/".join(part for same in folders if (part := _shared_parts(same)))
    return shared or f"{names[0]} and {len(names) - 1} more"


def _shared_parts(names: Sequence[str]) -> str:
    """The parts between hyphens that are the same in all names, each at its place."""
    parts = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(same[0] for same in parts if len(set(same)) == 1)


def _without_seed(name: str) -> str:
    """A run's name without the part that names its seed."""
    return re.sub(r"[-/]?seed-?\d+$", "", name) or name


def _after(rounds: int | None) -> str:
    if rounds is None:
        return "at the end"
    return f"after {rounds} {'round' if rounds == 1 else 'rounds'}"


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where some are alike."""
    return [
        f"{name} #{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
