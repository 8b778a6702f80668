"""A recipe that runs in a fraction of a second, and a way to call the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsieve.cli import main

TINY = """\
# A recipe for tests.
name = "tiny"
rounds = 2
clients_per_round = 2

[scene]
clients = 4

[scene.noise]
kind = "symmetric"
low = 0.5
high = 0.9

[sgd]
batch_size = 64
lr = 0.05

[engine]
device = "cpu"
workers = 1
"""


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str


Cli = Callable[..., Answer]


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, without a terminal."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """Call the command line within this process."""

    def call(*argv: str | os.PathLike[str]) -> Answer:
        capfd.readouterr()
        status = main([os.fspath(word) for word in argv])
        return Answer(status, *capfd.readouterr())

    return call
