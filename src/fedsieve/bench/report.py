"""What a measurement leaves behind: a table on the screen, JSON and Markdown in files."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedsieve.files import write_atomically
from fedsieve.simulate.directory import environment, finite_json


class Report(Protocol):
    """A measurement that can be shown: a dataclass whose fields go into the JSON file."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def title(self) -> str: ...

    @property
    def machine(self) -> Mapping[str, Any]: ...

    def header(self) -> Sequence[str]: ...

    def cells(self) -> Sequence[Sequence[str]]:
        """The table, one row of text per line."""

    def notes(self) -> Sequence[str]:
        """Sentences that stand below the table."""


@dataclass(frozen=True)
class Bar:
    """What a measured number has to reach."""

    limit: float
    at_most: bool
    """Whether smaller is better."""

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:,g}"


def machine() -> dict[str, Any]:
    """What is measured, on what, when and by which command; ask before measuring.

    The load is how many other processes wanted a core in the last minute.
    """
    load = round(os.getloadavg()[0], 1)
    return {"commit": commit(), "processor": processor(), "load": load, **environment()}


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the working tree around `folder`, with a + if files differ from it; None
    outside of a repository or before its first commit."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return name and name + ("+" if git("status", "--porcelain", "--", ":/src") else "")


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_report(report: Report, console: Console) -> None:
    """The report as a table with its notes."""
    console.print(report.title, soft_wrap=True, markup=False, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in report.header():
        table.add_column(name, overflow="fold")
    for row in report.cells():
        table.add_row(*row)
    console.print(table, markup=False, highlight=False)
    for note in (*report.notes(), _provenance(report)):
        console.print(note, soft_wrap=True, markup=False, highlight=False)


def write_json(report: Report, path: Path) -> None:
    """Every number of the report, and what it was measured on."""
    content = finite_json(dataclasses.asdict(report))
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def write_markdown(report: Report, path: Path) -> None:
    """The report as a page: title, command, table, notes."""
    rows = [f"| {' | '.join(row)} |" for row in (report.header(), *report.cells())]
    rows.insert(1, "|" + " --- |" * len(report.header()))
    notes = [f"- {note}" for note in report.notes()]
    command = f"```\n{report.machine['command']}\n```"
    parts = [f"# {report.title}", command, "\n".join(rows), "\n".join(notes), _provenance(report)]
    write_atomically(path, ("\n\n".join(part for part in parts if part) + "\n").encode())


def _provenance(report: Report) -> str:
    facts = report.machine
    return (
        f"Measured {facts['started'][:10]} at commit {facts['commit'] or '(none yet)'} on "
        f"{facts['processor']}, {facts['cpus']} cores (load before: {facts['load']}), Python "
        f"{facts['python']}, torch {facts['torch']}."
    )
