"""Fixtures that several test folders share."""

from __future__ import annotations

import getpass
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

DATASET_TOOL = Path(__file__).resolve().parents[2] / "shared" / "tools" / "datasets.py"


@pytest.fixture(scope="session")
def cifar10_dir() -> Path:
    """A folder with the real cifar-10-batches-bin, laid out once per machine and user.

    It lives in the system's temp folder, under the hash of the tool that makes it. It is made under
    another name and renamed when whole, so a run that was cut off leaves nothing half done here.
    """
    if not DATASET_TOOL.is_file():
        pytest.skip(f"real CIFAR-10 needs {DATASET_TOOL}, which is not here")
    digest = hashlib.sha256(DATASET_TOOL.read_bytes()).hexdigest()[:16]
    temp = Path(tempfile.gettempdir())
    place = temp / f"fedsieve-cifar10-{getpass.getuser()}-{digest}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=temp, prefix=f"{place.name}-") as draft:
            whole = Path(draft) / "whole"
            command = [sys.executable, str(DATASET_TOOL), "cifar10", str(whole)]
            subprocess.run(command, check=True, capture_output=True)
            if not place.is_dir():  # another run may have been faster
                whole.rename(place)
    return place
