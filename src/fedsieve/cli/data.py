"""`fedsieve data`: data sets, where they are, and how to get them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.output import console, is_live, print_table
from fedsieve.data.sources import SOURCES, Dataset, load
from fedsieve.data.sources import Progress as OnBytes
from fedsieve.data.sources.download import REMOTES, download
from fedsieve.errors import FedsieveError


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """List the data sources; `get NAME` downloads one, `info NAME` reads and describes one."""

    action: Literal["list", "get", "info"] = field(default="list", metadata=POSITIONAL)
    """What to do."""
    name: str | None = field(default=None, metadata=POSITIONAL)
    """The source to get or describe."""
    path: Path = Path("data")
    """Folder (or file) of the source."""


def main(argv: Sequence[str]) -> int:
    options = parse(DataOptions, "fedsieve data", argv)
    if options.action == "list":
        rows = source_rows(options.path)
        print_table(["source", f"found in {options.path}", "how to get it", "what it is"], rows)
        return 0
    if options.name is None:
        raise FedsieveError(f"Give a name: fedsieve data {options.action} NAME")
    if options.action == "info":
        print(facts(load(options.name, options.path)))
        return 0
    with _bar() as on_bytes:
        files = download(options.name, options.path, on_bytes)
    for file in files:
        print(file)
    print(f"Use it with: --data.source {options.name} --data.path {options.path}")
    return 0


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
