"""A report on one run, or on several side by side, as one page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from fedsieve import __version__
from fedsieve.config import field_docs
from fedsieve.errors import check
from fedsieve.methods import METHODS
from fedsieve.pages import plot
from fedsieve.pages.html import render
from fedsieve.pages.plot import Series
from fedsieve.pages.runs import RunRecord, labels_of, read_run
from fedsieve.simulate.by_class import lost_in_words
from fedsieve.simulate.findings import Findings, Site
from fedsieve.simulate.results import TOLD_BY_PATH, flat
from fedsieve.simulate.summary import LAST_ROUNDS

MOST_RUNS = 24
MOST_SITE_ROWS = 30
"""More sites than this are drawn as dots, and only the noisiest get a row."""
MOST_CLASSES = 20
"""More classes than this are shown as a list of pairs, not as a matrix."""
MOST_PAIRS = 15
DASH = "–"


@dataclass(frozen=True, kw_only=True)
class ReportExtras:
    """What a report may say beyond the folders of its runs."""

    title: str | None = None
    lead: str | None = None
    """a sentence or two below the title"""
    findings: Findings | None = None
    """about the labels, in place of what the only run found"""
    links: Mapping[str, str] = field(default_factory=dict)
    """text → file beside the report, such as the page to check labels on"""
    notices: Sequence[str] = ()
    """what a reader must know before trusting the numbers, a sentence or two each"""
    is_tested: bool = True
    """whether accuracy was measured on images that the model had not trained on; if not, the page
    has none"""
    also_sent: str = ""
    """what left a site besides what its method sends, in a sentence"""


@dataclass(frozen=True)
class Table:
    """Text in rows; the first cell of a row is its head."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class Figure:
    """A plot of one run (or of all), and the numbers behind it."""

    title: str
    plot: Markup | None = None
    key: Sequence[tuple[str, str]] = ()
    """(sign, meaning) of marks that have no name of their own in the plot"""
    note: str = ""
    table: Table | None = None
    is_folded: bool = True
    """whether the table is behind a heading that opens it"""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Named:
    """A run and what the report calls it."""

    name: str
    run: RunRecord
    findings: Findings | None
    is_alone: bool

    def heading(self, part: str = "") -> str:
        """Above one of its figures; the only run of a report need not be named."""
        words = [*([] if self.is_alone else [self.name]), *([part] if part else [])]
        return ": ".join(words)


def report_page(
    run_folders: Sequence[Path],
    *,
    command: str | None = None,
    extras: ReportExtras | None = None,
) -> str:
    """A self-contained page on the runs in `run_folders`, finished or not.

    `command` is the command line that makes the page, for the record.
    """
    check(bool(run_folders), "Give at least one folder of a run to report on.")
    check(
        len(run_folders) <= MOST_RUNS,
        f"{len(run_folders)} runs are too many for one report; give at most {MOST_RUNS}.",
    )
    extras = extras or ReportExtras()
    records = [read_run(folder) for folder in run_folders]
    if not extras.is_tested:
        records = [record.without_accuracy() for record in records]
    check(
        extras.findings is None or len(records) == 1,
        "Findings of their own can be added to the report on one run only.",
    )
    width = plot.WHOLE if len(records) == 1 else plot.HALF
    runs = [
        Named(name, record, extras.findings or record.findings, len(records) == 1)
        for name, record in zip(labels_of(records), records, strict=True)
    ]
    sections = [
        _accuracy(runs),
        _noise(runs, width),
        _losses(runs, width),
        _mistaken(runs),
        _suspects(runs, width),
        _sieve(runs),
        _traffic(runs, extras.also_sent),
        _making(runs, command),
    ]
    return render(
        "report.html.jinja",
        styles=("base.css", "report.css"),
        title=extras.title or _title(runs),
        lead=extras.lead,
        links={text: quote(file) for text, file in extras.links.items()},
        notices=[*extras.notices, *_notices(runs)],
        facts=_facts(runs[0]) if len(runs) == 1 else [],
        overview=_overview(runs),
        sections=[section for section in sections if section.figures],
        missing=[section.title for section in sections if not section.figures],
        version=__version__,
    )


# ------------------------------------------------------------------------------------- overview


def _title(runs: Sequence[Named]) -> str:
    names = {str(named.run.config.get("name", named.run.folder.name)) for named in runs}
    about = names.pop() if len(names) == 1 else f"{len(runs)} runs"
    return f"{about}: {runs[0].name}" if len(runs) == 1 else f"{about}: {len(runs)} runs compared"


def _notices(runs: Sequence[Named]) -> list[str]:
    """What a reader must know before trusting the numbers."""
    notices = []
    for named in runs:
        if not named.run.is_finished:
            notices.append(
                f"{named.name} is {named.run.shortfall}; its numbers are those of the rounds that "
                "it completed, and the same command that started it goes on from there."
            )
        if lost := lost_in_words(named.run.summary or {}):
            image = "test image of" if named.run.is_tested else "image given as"
            notices.append(
                f"{named.name}: the final model no longer recognises any {image} {lost}."
            )
        notices += [f"{named.name}: {problem}" for problem in named.run.problems]
    return notices


def _facts(named: Named) -> list[Fact]:
    run, found = named.run, named.findings
    facts = []
    if run.last10 is not None and run.best is not None:
        note = f"best {run.best[1]:.1f} % in round {run.best[0]}"
        facts.append(Fact(f"Accuracy, last {LAST_ROUNDS} rounds", f"{run.last10:.1f} %", note))
    if found is not None:
        truth = "" if found.wrong is None else f"truly {plot.percent(found.wrong / found.samples)}"
        facts.append(Fact("Labels estimated wrong", plot.percent(found.estimated), truth))
        note = f"of {found.samples:,} labels"
        facts.append(Fact("Suspects", f"{found.suspects:,}", note))
    sent = run.bytes_per_site()
    if sent:
        mean = sum(value for _, value in sent) / len(sent)
        facts.append(Fact("Left a site per round", plot.size(mean), "the method’s Up record"))
    return facts


def _overview(runs: Sequence[Named]) -> Table:
    """The runs in a few numbers; the best of a column is marked where all runs share a scene."""
    header = [
        "run",
        f"accuracy, last {LAST_ROUNDS} (%)",
        "best (%)",
        "suspects’ AUROC",
        "bytes up",
        "bytes down",
        "minutes",
        "rounds",
        "folder",
    ]
    is_contest = len(runs) > 1 and len({_scene(named.run) for named in runs}) == 1
    last10 = _marked([named.run.last10 for named in runs], 2, is_contest)
    best = _marked([named.run.best and named.run.best[1] for named in runs], 2, is_contest)
    auroc = _marked([named.run.suspect_auroc for named in runs], 3, is_contest)
    rows = []
    for place, named in enumerate(runs):
        run = named.run
        top = run.best
        up, down = run.total("bytes_up"), run.total("bytes_down")
        done = len(run.lines) if run.is_finished else run.shortfall
        rows.append(
            [
                named.name,
                last10[place],
                best[place] + (f" in round {top[0]}" if top else ""),
                auroc[place],
                DASH if up is None else plot.size(up),
                DASH if down is None else plot.size(down),
                DASH if run.minutes is None else f"{run.minutes:.2f}",
                str(done),
                str(run.folder),
            ]
        )
    marked = "; ★ marks the best of a column" if is_contest else ""
    return Table(header, rows, f"The runs in a few numbers{marked}")


def _marked(values: Sequence[float | None], digits: int, is_contest: bool) -> list[str]:
    texts = [DASH if value is None else f"{value:.{digits}f}" for value in values]
    known = [value for value in values if value is not None]
    if not is_contest or len(known) < 2:
        return texts
    top = f"{max(known):.{digits}f}"
    return [f"{text} ★" if text == top else text for text in texts]


def _scene(run: RunRecord) -> str:
    data = run.config.get("data")
    data = data if isinstance(data, Mapping) else {}
    source = data.get("source")
    path = data.get("path") if source in TOLD_BY_PATH else None
    return json.dumps([source, path, run.config.get("scene")], sort_keys=True, default=str)


# ------------------------------------------------------------------------------------- sections


def _accuracy(runs: Sequence[Named]) -> Section:
    title = "Accuracy, round by round"
    series = [Series(named.name, named.run.accuracy) for named in runs if named.run.accuracy]
    figures = []
    if series:
        drawn = plot.line_plot(title, series, x_title="round", y_title="test accuracy, %")
        figures = [Figure("", drawn, table=_by_round(series, "accuracy by round, %"))]
    text = (
        "Share of the test images whose given label the global model predicts. Where test labels "
        "may be wrong, this is agreement with them."
    )
    return Section(title, text, figures)


def _by_round(series: Sequence[Series], caption: str, most: int = 20) -> Table:
    """About `most` rounds of every line, the last one among them."""
    rounds = sorted({x for line in series for x, _ in line.points})
    kept = {*rounds[:: max(1, -(-len(rounds) // most))], rounds[-1]}
    values = [dict(line.points) for line in series]
    rows = [
        [f"{x:g}", *(f"{line[x]:.2f}" if x in line else DASH for line in values)]
        for x in sorted(kept)
    ]
    return Table(["round", *(line.name for line in series)], rows, caption)


def _noise(runs: Sequence[Named], width: int) -> Section:
    figures = []
    for named in runs:
        if named.findings is None:
            continue
        sites = sorted(named.findings.sites, key=lambda site: -site.estimated)
        is_known = all(site.true is not None for site in sites)
        key = [("●", "estimated"), *([("◇", "true")] if is_known else [])]
        table = Table(
            ["site", "labels", "estimated", *(["true"] if is_known else [])],
            [_site_row(site) for site in sites],
            "share of wrong labels by site",
        )
        shown = sites[:MOST_SITE_ROWS]
        note = (
            f"The {len(shown)} noisiest of {len(sites)} sites." if len(shown) < len(sites) else ""
        )
        if is_known and len(shown) < len(sites):
            all_sites = plot.scatter_plot(f"Noise of all sites, {named.name}", sites)
            figures.append(Figure(named.heading(f"all {len(sites)} sites"), all_sites))
        drawn = plot.site_plot(f"Noise per site, {named.name}", shown, width)
        figures.append(Figure(named.heading(), drawn, key, note, table))
    text = "Share of each site’s labels that the method takes for wrong, the noisiest site first."
    return Section("Noise per site", text, figures)


def _site_row(site: Site) -> list[str]:
    true = [] if site.true is None else [f"{site.true:.1%}"]
    return [site.name, f"{site.samples:,}", f"{site.estimated:.1%}", *true]


def _losses(runs: Sequence[Named], width: int) -> Section:
    figures = []
    for named in runs:
        found = named.findings
        if found is None or found.losses is None:
            continue
        drawn = plot.histogram_plot(f"Losses, {named.name}", found.losses, found.mixture, width)
        key = [("■", "labels")]
        if found.losses.wrong is not None:
            key = [("■", "right labels"), ("▨", "wrong labels")]
        note = "The last bar also holds what is larger."
        if found.mixture is None:
            note += " The losses do not fall into two groups, so there is no mixture."
        figures.append(Figure(named.heading(), drawn, key, note))
    text = (
        "Loss of every given label, and the two normal distributions that fit the losses best: "
        "wrong labels tend to have large ones."
    )
    return Section("Losses and their mixture", text, figures)


def _mistaken(runs: Sequence[Named]) -> Section:
    figures = []
    for named in runs:
        found = named.findings
        if found is None or not found.mistaken:
            continue
        is_known = found.wrong is not None
        rows = [
            [
                found.classes[pair.given],
                found.classes[pair.likely],
                f"{pair.suspects:,}",
                *([f"{pair.true:,}"] if pair.true is not None else []),
            ]
            for pair in found.mistaken[:MOST_PAIRS]
        ]
        header = ["given", "looks like", "suspects", *(["truly mistaken"] if is_known else [])]
        table = Table(header, rows, f"the most frequent of {len(found.mistaken)} pairs")
        drawn = None
        if len(found.classes) <= MOST_CLASSES:
            drawn = plot.confusion_plot(f"Mistaken labels, {named.name}", found)
        figures.append(Figure(named.heading(), drawn, table=table, is_folded=drawn is not None))
    text = "Suspects by the label they were given and the label that the method suggests instead."
    return Section("Which label is mistaken for which", text, figures)


def _suspects(runs: Sequence[Named], width: int) -> Section:
    figures = []
    for named in runs:
        found = named.findings
        if found is None or found.wrong is None or not found.depths:
            continue
        series = [
            Series("precision", [(d.checked, d.wrong / d.checked) for d in found.depths]),
            *(
                [Series("recall", [(d.checked, d.wrong / found.wrong) for d in found.depths])]
                if found.wrong
                else []
            ),
        ]
        drawn = plot.line_plot(
            f"Precision and recall of the suspects, {named.name}",
            series,
            x_title="labels checked, most suspicious first",
            y_title="share",
            y_range=(0, 1),
            y_text=plot.percent,
            width=width,
        )
        note = (
            f"Suspects (p ≥ ½): {found.suspects:,}, of which {found.wrong_suspects:,} are wrong: "
            f"precision {_share(found.precision)}, recall {_share(found.recall)}."
        )
        figures.append(Figure(named.heading(), drawn, note=note))
    text = (
        "Precision is the share of wrong labels among those checked; recall is the share of all "
        "wrong labels that the check has met. It takes the true labels to know."
    )
    return Section("What checking the suspects would find", text, figures)


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


_SIEVE = {
    "sieve_precision": "precision",
    "sieve_recall": "recall",
    "noise_error": "noise error",
}


def _sieve(runs: Sequence[Named]) -> Section:
    figures = []
    for named in runs:
        quality = _present(
            Series(words, named.run.points("diagnostics", name)) for name, words in _SIEVE.items()
        )
        if quality:
            drawn = plot.line_plot(
                f"Quality of the sieve, {named.name}",
                quality,
                x_title="round",
                y_title="share",
                y_range=(0, 1),
                y_text=plot.percent,
                width=plot.HALF,
            )
            figures.append(Figure(named.heading("against the truth"), drawn))
        means = _present(
            Series(f"{part} mean", named.run.points("server", f"mixture_mean_{part}"))
            for part in ("clean", "noisy")
        )
        if means:
            drawn = plot.line_plot(
                f"Mixture of the losses, {named.name}",
                means,
                x_title="round",
                y_title="loss",
                width=plot.HALF,
            )
            figures.append(Figure(named.heading("the mixture it sieves with"), drawn))
    text = (
        "How the method told right labels from wrong ones in each round: precision and recall of "
        "the labels it took for right, and the noise error, the mean difference between a site’s "
        "estimated and true share of wrong labels."
    )
    return Section("The sieve, round by round", text, figures)


def _present(series: Iterable[Series]) -> list[Series]:
    return [line for line in series if line.points]


def _traffic(runs: Sequence[Named], also_sent: str) -> Section:
    title = "What left each site"
    series = [Series(named.name, named.run.bytes_per_site()) for named in runs]
    series = [line for line in series if line.points]
    figures = []
    if series:
        top = max(y for line in series for _, y in line.points)
        drawn = plot.line_plot(
            title,
            series,
            x_title="round",
            y_title="bytes per site",
            y_range=(0, 1.1 * top or 1.0),
            y_text=plot.size,
        )
        figures.append(Figure("", drawn, note="The mean over the sites that took part in a round."))
        for name in dict.fromkeys(named.run.method for named in runs):
            if name in METHODS:
                up = METHODS[name].up
                docs = field_docs(up)
                rows = [[f.name, docs.get(f.name) or _WORDS.get(f.name, "")] for f in fields(up)]
                table = Table(["field", "meaning"], rows, f"what a site sends under {name}")
                figures.append(Figure(f"{name}: all fields of Up", table=table, is_folded=False))
    text = (
        "In each round a site sends its method’s Up record, with the mean metrics of its training. "
        "One on a machine of its own says once, before, its name, how many images it holds, their "
        "size, their pixels’ mean and deviation and the names of its classes. "
        f"{also_sent} Images and single labels stay there."
    )
    return Section(title, text, figures)


_WORDS = {"weights": "the trained model", "samples": "how many samples the site holds"}
"""Fields of Up that the methods leave to their names."""


def _making(runs: Sequence[Named], command: str | None) -> Section:
    names = [named.name for named in runs]
    figures = []
    if command is not None:
        table = Table(["", "command"], [["this report", command]], "how this page was made")
        figures.append(Figure("", table=table, is_folded=False))
    machines = _side_by_side(names, [named.run.environment for named in runs])
    if machines:
        table = Table(["", *names], machines, "command, versions and machine of each run")
        figures.append(Figure("", table=table, is_folded=False))
    settings = _side_by_side(names, [flat(named.run.config) for named in runs])
    if settings:
        differing = [row for row in settings if len(set(row[1:])) > 1]
        if differing:
            table = Table(["setting", *names], differing, "settings in which the runs differ")
            figures.append(Figure("", table=table, is_folded=False))
        figures.append(Figure("", table=Table(["setting", *names], settings, "all settings")))
    return Section("How it was made", "", figures)


def _side_by_side(names: Sequence[str], tables: Sequence[Mapping[str, object]]) -> list[list[str]]:
    keys = dict.fromkeys(key for table in tables for key in table)
    return [[key, *(_cell(table.get(key)) for table in tables)] for key in keys]


def _cell(value: object) -> str:
    return DASH if value is None else str(value)
