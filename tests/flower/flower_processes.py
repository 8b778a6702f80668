"""Real processes of Flower's for tests: waiting for what they do, and listening in."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsieve.flower.loopback import HOST, Loopback
from fedsieve.recipe import Recipe

PATIENCE = 400.0
"""Seconds that anything here may take, on a machine that others use, too."""


class Fleet(Loopback):
    """Processes that a test can wait for."""

    def run(self, recipe: Recipe, out: Path, **settings: Any) -> dict[str, Any]:
        """`flwr run`, and wait for its end; the result is the summary."""
        self.submit(recipe, out, **settings)
        return self.wait_for_summary(out)

    def results(self, client: int, out: Path) -> Path:
        """What a client keeps of the federation whose server's folder is `out`."""
        founded = json.loads((out / "federation.json").read_bytes())
        return self.site_folder(client) / str(founded["charter"]["federation"])

    def wait_for_summary(self, out: Path) -> dict[str, Any]:
        self.wait_until((out / "summary.json").exists, "the run to finish")
        summary: dict[str, Any] = json.loads((out / "summary.json").read_bytes())
        return summary

    def wait_for_round(self, out: Path, rounds_done: int) -> None:
        """Until the server has committed so many rounds."""
        commit = out / "checkpoint" / "commit.json"
        self.wait_until(
            lambda: (
                commit.exists() and json.loads(commit.read_bytes())["rounds_done"] >= rounds_done
            ),
            f"round {rounds_done}",
        )

    def wait_until(self, happened: Callable[[], bool], what: str, pause: float = 0.1) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            assert time.monotonic() < end, f"waited in vain for {what}\n{self.logs()}"
            time.sleep(pause)

    def said_by_server(self) -> str:
        """`flwr log` of the newest run: what a person at the server reads."""
        log = (self.folder / "superlink.log").read_text(errors="replace")
        (*_, newest) = re.findall(r"Created run (\d+)", log)
        return self.ask("log", newest, "here", "--show")

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in sorted(self.folder.glob("*.log"))
        )


class Recorder:
    """A TCP proxy that keeps every byte that clients send towards `port`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._sent: list[bytearray] = []
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def sent(self) -> bytes:
        """What was sent so far, connection by connection."""
        return b"\0".join(bytes(part) for part in list(self._sent))

    def forget(self) -> None:
        for part in self._sent:
            part.clear()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                link = socket.create_connection((HOST, self._to))
            except OSError:
                return
            kept = bytearray()
            self._sent.append(kept)
            threading.Thread(target=_pump, args=(client, link, kept), daemon=True).start()
            threading.Thread(target=_pump, args=(link, client, None), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    try:
        while data := source.recv(2**16):
            if kept is not None:
                kept += data
            target.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, target):
            end.close()
