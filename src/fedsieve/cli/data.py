"""`fedsieve data`: data sets, where they are, and how to get them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.output import console, is_live, print_table
from fedsieve.data.own import OwnData, export_digits, read_splits
from fedsieve.data.own.names import some
from fedsieve.data.own.reading import ONE_SITE, Kind, KindOrAuto
from fedsieve.data.sources import SOURCES, Dataset, load
from fedsieve.data.sources import Progress as OnBytes
from fedsieve.data.sources.download import REMOTES, download
from fedsieve.errors import FedsieveError, check

OWN_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind) if SOURCES[kind].is_own}
MOST_SITE_COLUMNS = 10


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """List the data sources; `get NAME` downloads one, `info NAME` reads and describes one (or your
    own data, by their path), `export digits FOLDER` writes the built-in digits as image files."""

    action: Literal["list", "get", "info", "export"] = field(default="list", metadata=POSITIONAL)
    """What to do."""
    name: str | None = field(default=None, metadata=POSITIONAL)
    """The source to get, describe or export."""
    folder: Path | None = field(default=None, metadata=POSITIONAL)
    """The new folder of an export; the true labels go into a table beside it."""
    path: Path = Path("data")
    """Folder (or file) of the source."""
    sites: int = 3
    """Sites of an export."""
    noise: tuple[float, ...] = (0.2,)
    """Share of wrong labels in an export: one for all sites, or one for each."""
    seed: int = 1
    """What the draws of an export descend from."""


def main(argv: Sequence[str]) -> int:
    options = parse(DataOptions, "fedsieve data", argv)
    if options.action == "list":
        rows = source_rows(options.path)
        print_table(["source", f"found in {options.path}", "how to get it", "what it is"], rows)
        return 0
    if options.name is None:
        raise FedsieveError(f"Give a name: fedsieve data {options.action} NAME")
    if options.action == "export":
        _export(options)
        return 0
    if options.action == "info":
        _info(options.name, options.path)
        return 0
    with _bar() as on_bytes:
        files = download(options.name, options.path, on_bytes)
    for file in files:
        print(file)
    print(f"Use it with: --data.source {options.name} --data.path {options.path}")
    return 0


def _info(name: str, path: Path) -> None:
    here = Path(name)
    if name in OWN_KINDS:
        print_own(path, OWN_KINDS[name])
    elif name in SOURCES:
        print(facts(load(name, path)))
        if here.exists():
            print(
                f"This is the source {name}; for what lies here: fedsieve data info {_typed(here)}"
            )
    else:
        check(
            here.exists(),
            f"There is neither a source {name!r} nor a folder or file of this name; `fedsieve "
            "data` lists the sources.",
        )
        print_own(here)


def _typed(path: Path) -> str:
    """A path as one types it for `fedsieve data info`, where the name of a source comes first."""
    return f"./{path}" if str(path) in SOURCES else shlex.quote(str(path))


def _export(options: DataOptions) -> None:
    check(
        options.name == "digits",
        f"Only digits can be exported, not {options.name!r}; the other sources are files already.",
    )
    if options.folder is None:
        raise FedsieveError("Give the new folder: fedsieve data export digits FOLDER")
    truth = export_digits(
        options.folder, sites=options.sites, noise=options.noise, seed=options.seed
    )
    print(f"Wrote {options.folder}, and which labels are wrong to {truth}")
    print(f"Look at it with: fedsieve data info {_typed(options.folder)}")


def print_own(path: Path, kind: KindOrAuto = "auto") -> None:
    """Own data in a few lines, of two splits both, and a command that trains on them."""
    own, test = read_splits(path, kind)
    _print_part(own, path if test is None else own.root, "data")
    if test is not None:
        _print_part(test, test.root, "test")
    for names in spelt_alike(own.classes):
        print(f"Only capitals tell {' and '.join(map(repr, names))} apart; are they one class?")
    print(f"Train on it with: {training_command(own, path)}")


def _print_part(own: OwnData, place: Path, what: str) -> None:
    """Images by class and site, and what was left out, by reason."""
    channels, height, width = own.images.shape[1:]
    print(f"{what:8} {place}, read as {own.kind}")
    print(f"images   {len(own):,} of {channels} x {height} x {width} (channels, height, width)")
    print_table(*class_counts(own))
    if own.skipped:
        rows = [
            [reason, f"{len(ids):,}", some(ids, 3)]
            for reason, ids in sorted(skipped_by_reason(own).items())
        ]
        print_table(["left out", "count", "such as"], rows)


def class_counts(own: OwnData) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table: images of each class, at each site where these are few."""
    sites = own.sites if 1 < len(own.sites) <= MOST_SITE_COLUMNS else {}
    everyone = "images" if len(own.sites) == 1 else f"all {len(own.sites)} sites"
    counted = {
        name: torch.bincount(own.labels[indices], minlength=len(own.classes)).tolist()
        for name, indices in {everyone: np.arange(len(own)), **sites}.items()
    }
    rows = [
        [name, *(f"{counts[label]:,}" for counts in counted.values())]
        for label, name in enumerate(own.classes)
    ]
    rows.append(["all classes", *(f"{sum(counts):,}" for counts in counted.values())])
    return ["class", *counted], rows


def spelt_alike(classes: Sequence[str]) -> list[list[str]]:
    """The groups of classes that differ in capital letters only."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        groups.setdefault(name.casefold(), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def skipped_by_reason(own: OwnData) -> dict[str, list[str]]:
    """Reason → ids of what was left out for it."""
    found: dict[str, list[str]] = {}
    for skipped in own.skipped:
        found.setdefault(skipped.reason, []).append(skipped.id)
    return found


def training_command(own: OwnData, path: Path) -> str:
    """A command that trains on own data as they are."""
    words = ["fedsieve", "run", "own", "--data.source", own.kind, "--data.path", str(path)]
    if tuple(own.sites) == (ONE_SITE,):
        words += ["--scene.partition.kind", "iid"]
    else:
        count = len(own.sites)
        words += ["--scene.clients", str(count), "--clients_per_round", str(min(count, 10))]
    return shlex.join(words)


def source_rows(path: Path) -> list[list[str]]:
    """Name, whether it was found below `path`, how to get it, description."""
    rows = []
    for name, source in SOURCES.items():
        if source.place is None:
            found, how = "built in", "nothing to do"
        elif name in REMOTES:
            found, how = "yes" if is_readable(name, path) else "no", f"fedsieve data get {name}"
        else:
            found, how = "–", f"--data.path: {source.place}"
        rows.append([name, found, how, source.description])
    return rows


def is_readable(name: str, path: Path) -> bool:
    """Whether `path` holds the source in one of the many forms that its reader knows."""
    try:
        load(name, path)
    except FedsieveError:
        return False
    return True


def facts(data: Dataset) -> str:
    """A data set in a few lines."""
    channels, height, width = data.train_images.shape[1:]
    names = ", ".join(data.classes[:10]) + (", …" if len(data.classes) > 10 else "")
    labels = "wrong in part, by nature" if data.train_labels_are_noisy else "taken as right"
    return "\n".join(
        [
            f"source        {data.name}",
            f"classes       {len(data.classes)}: {names}",
            f"train         {len(data.train_labels):,} images, labels {labels}",
            f"test          {len(data.test_labels):,} images",
            f"image         {channels} x {height} x {width} (channels, height, width)",
            f"mean, std     {_numbers(data.mean)}; {_numbers(data.std)}",
            f"augmentation  {data.views}",
        ]
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


@contextmanager
def _bar() -> Iterator[OnBytes | None]:
    """A bar that moves with the bytes of one file after the other; none without a terminal."""
    if not is_live(sys.stderr):
        yield None
        return
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
