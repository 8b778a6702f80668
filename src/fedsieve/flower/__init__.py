"""The same methods on many machines, carried by Flower (`pip install fedsieve[flower]`).

Import this package before anything of Flower's: it switches Flower's telemetry off, unless the
environment says otherwise.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

ENVIRONMENT = MappingProxyType(
    {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
)
"""For Flower's own programs: they report to nobody, and take the packages that are installed."""

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")


def app_folder() -> Path:
    """The ready Flower app; `flwr run FOLDER …` starts a federation with it."""
    return Path(__file__).parent / "app"
