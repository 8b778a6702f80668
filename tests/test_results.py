"""The programs beside the measured numbers keep up with what they measure."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

RESULTS = Path(__file__).parent.parent / "results"


@pytest.mark.parametrize(
    "program", sorted(RESULTS.rglob("*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_program_finds_all_that_it_imports(program: Path) -> None:
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.main)
