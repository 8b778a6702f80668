"""`fedsieve audit`: which labels of your own data are wrong, and a model that survives them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedsieve.audit.run import Audit, audit, federation_names
from fedsieve.audit.settings import Asked, Settings, choose
from fedsieve.cli import INTERRUPTED
from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.output import print_table
from fedsieve.cli.progress import Watcher, watcher
from fedsieve.data.own import OwnData, Reading, read_own
from fedsieve.data.own.layout import kind_of, refuse_inside
from fedsieve.data.own.reading import KindOrAuto
from fedsieve.recipe import Recipe
from fedsieve.simulate.control import RunInterruptedError


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Asked):
    """Find the labels of your own images that are probably wrong, and train a model on them. The
    same command again goes on where it was stopped."""

    data: Path = field(metadata=POSITIONAL)
    """A folder with a folder of images for each class, or one of these for each site; or a table
    (path, label, site), or .npz files."""
    out: Path = Path("audit")
    """Folder for everything that is found."""
    test: Path | None = None
    """Data with right labels, to measure the model on."""
    size: int | None = None
    """Side of the images that the models see. Left out: as the images are, at most 64."""
    kind: KindOrAuto = "auto"
    """How the data are laid out, where that cannot be told by looking."""


def main(argv: Sequence[str]) -> int:
    options = parse(AuditOptions, "fedsieve audit", argv)
    if kind_of(options.data, options.kind) != "table":  # which names its images
        refuse_inside(options.data, options.out)
    size = None if options.size is None else (options.size, options.size)
    own = read_own(options.data, Reading(size=size, kind=options.kind))
    settings = choose(own, Asked(**{f.name: getattr(options, f.name) for f in fields(Asked)}))
    test = None if options.test is None else read_own(options.test, own.reading_alike())
    print("\n".join(setting_lines(own, settings)), flush=True)
    watching = watcher("agreement")
    try:
        with watching.shown():
            found = audit(
                own,
                test,
                settings,
                options.out,
                OneBar(watching, options.out, settings),
                command=shlex.join(["fedsieve", "audit", *argv]),
                may_fork_out=True,
            )
    except RunInterruptedError:
        print("fedsieve: Stopped; the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    show(found, options.out)
    return 0


def setting_lines(own: OwnData, settings: Settings) -> list[str]:
    """What was chosen, a line each, with the flag that changes it."""
    channels, height, width = own.images.shape[1:]
    colour = "grey" if channels == 1 else "colour"
    images = f"{len(own):,} in {len(own.classes)} classes, {colour}, {height}x{width} pixels"
    if own.skipped:
        images += f"; {len(own.skipped):,} files left out (`fedsieve data info` says why)"
    lines = [("images", images, "--size"), *settings.words()]
    return [f"{what:8} {chosen} ({flag})" for what, chosen, flag in lines]


def show(found: Audit, out: Path) -> None:
    """The closing table, and where to look."""
    rows = [
        [
            site.name,
            f"{len(site.given):,}",
            f"{site.noise:.1%}",
            f"{site.flagged:,}",
            f"{site.agreed / len(site.given):.0%}",
        ]
        for site in found.sites
    ]
    if len(rows) > 1:
        total = sum(len(site.given) for site in found.sites)
        flagged = sum(site.flagged for site in found.sites)
        overall = [f"{total:,}", f"{found.noise:.1%}", f"{flagged:,}", f"{found.agreement:.0%}"]
        rows.append(["all sites", *overall])
    print_table(["site", "labels", "probably wrong", "flagged", "models agree"], rows)
    if found.caution is not None:
        print(found.caution)
    if found.accuracy is not None:
        print(f"The model is right on {found.accuracy:.1f} % of the test images.")
    print(f"Results in {out}")
    print("  sites/SITE/review.html   check the flagged labels in a browser; stays with the site")
    print("  sites/SITE/suspects.csv  every label of the site, the most suspicious first")
    print("  report.html, summary.csv counts by site, for the coordinator")
    print("  model.safetensors        the model, trained on all labels but the flagged ones")


class OneBar:
    """A reporter that shows all federations of an audit as the rounds of one.

    The agreement beside it is that with given labels: in the folds with those that the model has
    not seen, in the last federation, without test data, with some that it trains on.
    """

    def __init__(self, inner: Watcher, out: Path, settings: Settings) -> None:
        self._inner = inner
        self._out = out
        self._settings = settings
        self._before = 0
        self._is_shown = False

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        """Federations that were finished before never start, so their place tells their number."""
        place = federation_names(self._settings.folds).index(path.name)
        self._before = place * self._settings.rounds
        if not self._is_shown:
            whole = replace(recipe, rounds=self._settings.all_rounds)
            self._inner.started(whole, self._out, self._before + rounds_done)
            self._is_shown = True

    def cautioned(self, sentence: str) -> None:
        self._inner.cautioned(sentence)

    def trained_clients(self, done: int, of: int) -> None:
        self._inner.trained_clients(done, of)

    def finished_round(self, line: Mapping[str, Any]) -> None:
        self._inner.finished_round({**line, "round": self._before + line["round"]})
