"""`fedsieve deploy site`: a SuperNode that is started again whenever that can help."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedsieve.deploy.children import Child, alone_in, stopping_on_signals
from fedsieve.deploy.folders import SiteConfig, SiteFolder
from fedsieve.deploy.keys import private_folder
from fedsieve.deploy.knock import knock
from fedsieve.deploy.supervise import Clock, Ending, RealClock, keep_connected
from fedsieve.errors import check
from fedsieve.files import write_atomically
from fedsieve.ports import free_port

POLL_SECONDS = 0.5
REVIEW = "review.html"
"""What a site writes last of its results; named here, too, since its writers need PyTorch."""
SILENT = (
    "The server does not answer (it has stopped, or the network is down); the site keeps trying."
)

_RETRY = re.compile(r"WARNING\s*: +Connection attempt failed, retrying in .*")
_HEARD = re.compile(r"INFO\s*: +(Connection successful after|Receiving:|Sent successfully).*")
"""Flower's lines while the server does not answer, and those that show that it does."""


@dataclass(frozen=True, kw_only=True)
class SiteData:
    """What a site trains on: data of its own, or one client of the recipe's scene."""

    path: Path | None = None
    source: str | None = None
    client: int | None = None

    def __post_init__(self) -> None:
        check(
            self.path is not None or self.client is not None,
            "Give the site's images with --data FOLDER.",
        )
        check(
            self.path is None or self.path.exists(),
            f"There is no {self.path}; give the site's images with --data FOLDER.",
        )

    def settings(self) -> dict[str, Any]:
        """As Flower hands them to the app at this site."""
        return {
            name: value
            for name, value in {
                "data-path": None if self.path is None else str(self.path.resolve()),
                "data-source": self.source,
                "client": self.client,
            }.items()
            if value is not None
        }


def take_part(
    folder: SiteFolder,
    data: SiteData,
    say: Callable[[str], None],
    echo: Callable[[str], None],
    clock: Clock | None = None,
) -> None:
    """Keep this site connected to its server until someone stops it.

    `say` gets our sentences and `echo` the lines of the SuperNode's log.
    """
    clock = clock or RealClock()
    terminal = Terminal(folder.state, say, echo)
    config = folder.config()
    key = folder.public_key()
    with stopping_on_signals(), alone_in(folder, say):
        flower = private_folder(folder.flower)
        private_folder(folder.state)
        write_atomically(flower / "ca.crt", config.authority.encode())
        node = {
            "site": config.name,
            "state-path": str(folder.state.resolve()),
            **data.settings(),
        }
        write_atomically(flower / "node-config.toml", tomli_w.dumps(node).encode())
        keep_connected(
            ask=lambda: knock(config, key, time.time),
            run_node=lambda: _run_node(folder, config, terminal, clock),
            say=say,
            clock=clock,
        )


def _run_node(folder: SiteFolder, config: SiteConfig, terminal: Terminal, clock: Clock) -> Ending:
    """Run a SuperNode to its end."""
    command = ["flower-supernode", "--superlink", str(config.server)]
    if config.insecure:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str((folder.flower / "ca.crt").resolve())]
        command += ["--auth-supernode-private-key", str(folder.key_file.resolve())]
    command += ["--host", "127.0.0.1", "--port", str(free_port())]
    command += ["--node-config", str((folder.flower / "node-config.toml").resolve())]
    node = Child(folder, "supernode", command)
    try:
        while (status := node.poll()) is None:
            terminal.show(node.news())
            clock.sleep(POLL_SECONDS)
        terminal.show(node.news())
        return Ending(status, node.output())
    finally:
        node.stop()


class Terminal:
    """What a person at the site sees while a SuperNode runs.

    The lines of its log, but one sentence for all of Flower's attempts to reach a silent server,
    and another one when results have come, which Flower does not know of.
    """

    def __init__(
        self, state: Path, say: Callable[[str], None], echo: Callable[[str], None]
    ) -> None:
        self._state, self._say, self._echo = state, say, echo
        self._is_silent = False
        self._pages = self._written()

    def show(self, news: list[str]) -> None:
        """Tell of results that have come, and pass on the new lines of the log."""
        before, self._pages = self._pages, self._written()
        for page, at in self._pages.items():
            if before.get(page) != at:
                self._say(f"Finished; suspects and the review page are in {page.parent}.")
        for line in news:
            self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        if _RETRY.fullmatch(line):
            if not self._is_silent:
                self._say(SILENT)
            self._is_silent = True
            return
        if _HEARD.fullmatch(line):
            self._is_silent = False
        self._echo(line)

    def _written(self) -> dict[Path, int]:
        """When each page of results was written."""
        found = {}
        for page in sorted(self._state.glob(f"*/{REVIEW}")):
            with contextlib.suppress(FileNotFoundError):  # someone has just deleted it
                found[page] = page.stat().st_mtime_ns
        return found
