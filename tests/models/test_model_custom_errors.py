"""A user's own module that fails is told in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsieve.errors import FedsieveError
from fedsieve.models import ModelConfig, build_model


@pytest.mark.parametrize(
    ("name", "source", "sentence"),
    [
        ("breaks_on_import", "undefined_name\n", "fails on import: NameError"),
        ("breaks_when_called", "def make():\n    raise ValueError('no')\n", "make a model: Value"),
    ],
)
def test_errors_in_a_users_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, sentence: str
) -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FedsieveError, match=sentence):
        build_model(ModelConfig(name=f"{name}:make"), 3, 8, 8, 2, np.random.default_rng(0))
