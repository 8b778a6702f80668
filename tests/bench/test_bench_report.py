"""Measurements on paper: tables, JSON, Markdown, and where they come from."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedsieve.bench import report as module
from fedsieve.bench.report import (
    Bar,
    commit,
    machine,
    print_report,
    processor,
    write_json,
    write_markdown,
)

FACTS = {
    "started": "2026-01-02T03:04:05",
    "commit": "abc1234",
    "processor": "a [fast] one",
    "cpus": 4,
    "load": 0.5,
    "python": "3.11.9",
    "torch": "2.13.0",
    "command": "fedsieve bench speed",
}


@dataclass(frozen=True)
class Example:
    machine: Mapping[str, Any]
    numbers: tuple[float, ...] = (1.5, float("inf"))
    title: str = "An example"

    def header(self) -> Sequence[str]:
        return ("what", "how much")

    def cells(self) -> Sequence[Sequence[str]]:
        return [("a [b]", "1.5"), ("c", "∞")]

    def notes(self) -> Sequence[str]:
        return ("Infinity is not much.",)


def test_print_shows_everything() -> None:
    text = io.StringIO()
    print_report(Example(FACTS), Console(file=text, width=100))
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[0] == "An example"
    assert lines[1].split() == ["what", "how", "much"]
    assert "a [b]" in lines[3]
    assert lines[-2] == "Infinity is not much."
    assert lines[-1] == (
        "Measured 2026-01-02 at commit abc1234 on a [fast] one, 4 cores (load before: 0.5), "
        "Python 3.11.9, torch 2.13.0."
    )


def test_json_is_strict(tmp_path: Path) -> None:
    write_json(Example(FACTS), tmp_path / "deep" / "example.json")
    content = json.loads((tmp_path / "deep" / "example.json").read_text(encoding="utf-8"))
    assert content == {"machine": FACTS, "numbers": [1.5, None], "title": "An example"}


def test_markdown_page(tmp_path: Path) -> None:
    write_markdown(Example(FACTS | {"commit": None}), tmp_path / "example.md")
    assert (tmp_path / "example.md").read_text(encoding="utf-8") == (
        "# An example\n\n```\nfedsieve bench speed\n```\n\n"
        "| what | how much |\n| --- | --- |\n| a [b] | 1.5 |\n| c | ∞ |\n\n"
        "- Infinity is not much.\n\n"
        "Measured 2026-01-02 at commit (none yet) on a [fast] one, 4 cores (load before: 0.5), "
        "Python 3.11.9, torch 2.13.0.\n"
    )


@pytest.mark.parametrize(
    ("bar", "text", "good", "bad"),
    [
        (Bar(1.1, at_most=True), "≤ 1.1", 1.1, 1.1001),
        (Bar(20_000, at_most=False), "≥ 20,000", 20_000, 19_999),
    ],
)
def test_bars(bar: Bar, text: str, good: float, bad: float) -> None:
    assert str(bar) == text
    assert bar.holds(good)
    assert not bar.holds(bad)


def test_commit_of_a_repository(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        names = {
            f"GIT_{who}_{what}": "x"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **names},
        )
        return done.stdout.strip()

    assert commit(tmp_path) is None, "outside of a repository"
    git("init")
    assert commit(tmp_path) is None, "before the first commit"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "file").write_text("one")
    git("add", ".")
    git("commit", "-m", "first")
    name = git("rev-parse", "--short", "HEAD")
    assert commit(tmp_path / "src") == name
    (tmp_path / "notes").write_text("not part of the program")
    assert commit(tmp_path / "src") == name
    (tmp_path / "src" / "file").write_text("two")
    assert commit(tmp_path / "src") == f"{name}+"


def test_machine_knows_its_parts() -> None:
    facts = machine()
    assert facts["torch"] == torch.__version__
    assert facts["cpus"] == os.cpu_count()
    assert facts["processor"] == processor()
    assert set(FACTS) <= set(facts)


def test_processor_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **_: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(module.platform, "processor", lambda: "a chip")
    assert processor() == "a chip"


def test_processor_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "core : 1\n")
    monkeypatch.setattr(module.platform, "machine", lambda: "arm64")
    assert processor() == "arm64"
