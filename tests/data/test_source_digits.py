"""The digits are read from scikit-learn's file, without scikit-learn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from fedsieve.data.sources.dataset import every_fifth_per_class
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError


def test_they_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits as sklearn_digits

    theirs, ours = sklearn_digits(), load_digits()
    is_test = every_fifth_per_class(theirs.target)
    for images, labels, part in (
        (ours.train_images, ours.train_labels, ~is_test),
        (ours.test_images, ours.test_labels, is_test),
    ):
        # 17 values far apart: rounded back, every one is what it was.
        np.testing.assert_array_equal(
            np.rint(images[:, 0].numpy() * (16 / 255)), theirs.images[part]
        )
        np.testing.assert_array_equal(labels.numpy(), theirs.target[part])


def test_scikit_learn_is_not_imported_for_them() -> None:
    """Each message to a site may start a process, which would pay for the import."""
    program = (
        "import sys\n"
        "from fedsieve.data.sources.digits import load_digits\n"
        "print(len(load_digits().train_labels), 'sklearn' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1438", "False"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_the_file_it_is_said_what_to_do(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleSpec("sklearn", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path)]
    found = package if is_installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(FedsieveError, match=r"digits\.csv\.gz.*install scikit-learn again\.$"):
        load_digits()
