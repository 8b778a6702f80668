"""A real browser for the pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages_window import Window

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium of this machine; it lives no longer than a file of tests, because while
    it does no other event loop can run."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture
def window(chromium: Any, tmp_path: Path) -> Iterator[Window]:
    opened = Window(chromium, tmp_path)
    yield opened
    opened.context.close()
