"""A window of a browser, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Window:
    """A browser window with storage of its own, that notes whatever goes wrong in it."""

    def __init__(self, browser: Any, folder: Path, **options: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **options)
        self.context.set_default_timeout(5_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        self._folder = folder
        self.page = self.another()

    def another(self) -> Any:
        """One more page with the same storage."""
        page = self.context.new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("dialog", self._refuse)
        return page

    def _refuse(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def show(self, html: str, name: str = "page.html") -> Any:
        """Open a page from a file, as a person would."""
        file = self._folder / name
        file.write_text(html, encoding="utf-8")
        self.page.goto(file.as_uri())
        return self.page
