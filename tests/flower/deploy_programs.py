"""Small programs in place of Flower's."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

Scripts: TypeAlias = Callable[[str, str], None]
"""Writes a Python program: its name, and its code below the usual imports."""


def programs_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Make `place` the folder in which programs are found, instead of where Flower's are."""
    place.mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(place))

    def write(name: str, code: str) -> None:
        imports = "import json, os, pathlib, signal, socket, subprocess, sys, time"
        (place / name).write_text(f"#!{sys.executable}\n{imports}\n{code}")
        (place / name).chmod(0o755)

    return write
