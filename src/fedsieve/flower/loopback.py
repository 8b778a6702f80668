"""A SuperLink and SuperNodes as processes on this machine, without TLS: for trials and measuring.

For real federations there is `fedsieve deploy`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w

from fedsieve.errors import FedsieveError, check
from fedsieve.flower import ENVIRONMENT, app_folder
from fedsieve.ports import free_port
from fedsieve.recipe import Recipe, recipe_table

HOST = "127.0.0.1"
START_SECONDS = 120.0


class Loopback:
    """The processes of one federation; leaving the context kills them all."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets the logs, Flower's own files and the folders of the sites."""
        self.folder = folder
        self.app = app_folder()
        """What `flwr run` sends to the nodes."""
        self.port = free_port()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._link: subprocess.Popen[bytes] | None = None
        self._scripts = Path(sys.executable).parent
        home = folder / "flwr-home"
        home.mkdir(parents=True, exist_ok=True)
        table = {"superlink": {"here": {"address": f"{HOST}:{self.port}", "insecure": True}}}
        (home / "config.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
        # SuperLink and SuperNodes find Flower's other programs by their names.
        path = f"{self._scripts}{os.pathsep}{os.environ.get('PATH', '')}"
        self._env = {**os.environ, **ENVIRONMENT, "PATH": path, "FLWR_HOME": str(home)}

    def __enter__(self) -> Loopback:
        self.start_link()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in list(self.nodes):
            self.kill_node(name)
        self.kill_link()

    def start_link(self) -> None:
        """Start the SuperLink and wait until it listens."""
        self._link = self._start(
            "superlink",
            "flower-superlink",
            "--insecure",
            *("--host", HOST, "--port", str(self.port)),
            # So that it knows its SuperNodes after a restart; without it they would end.
            *("--database", str(self.folder / "superlink.db")),
            "--disable-runtime-dependency-installation",
        )
        end = time.monotonic() + START_SECONDS
        while not _listens(self.port):
            check(time.monotonic() < end, f"The SuperLink does not start; see {self.folder}.")
            time.sleep(0.1)

    def kill_link(self) -> None:
        if self._link is not None:
            _kill(self._link)
        self._link = None

    def start_node(
        self, name: str, config: Mapping[str, str | int], port: int | None = None
    ) -> None:
        """Start a SuperNode; `port` is the SuperLink's, or of something between them."""
        words = (f"{key}={json.dumps(value)}" for key, value in config.items())
        self.nodes[name] = self._start(
            name,
            "flower-supernode",
            "--insecure",
            *("--superlink", f"{HOST}:{port or self.port}"),
            *("--host", HOST, "--port", str(free_port())),
            *("--node-config", " ".join(words)),
        )

    def play_client(self, client: int, port: int | None = None) -> None:
        """Start a SuperNode that plays a client of the recipe's scene."""
        config: dict[str, str | int] = {
            "client": client,
            "state-path": str(self.site_folder(client)),
        }
        self.start_node(f"node-{client}", config, port)

    def site_folder(self, client: int) -> Path:
        return self.folder / f"site-{client}"

    def kill_node(self, name: str) -> None:
        _kill(self.nodes.pop(name))

    def submit(self, recipe: Recipe, out: Path, **settings: Any) -> None:
        """`flwr run`: let the federation carry out the recipe, or go on with it."""
        file = self.folder / "run-config.toml"
        table = {"recipe-toml": tomli_w.dumps(recipe_table(recipe)), "out": str(out), **settings}
        file.write_text(tomli_w.dumps(table), encoding="utf-8")
        self.ask("run", str(self.app), "here", "--run-config", str(file))

    def ask(self, *words: str) -> str:
        """What the command `flwr` prints."""
        done = subprocess.run(
            [str(self._scripts / "flwr"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._env,
            cwd=self.folder,
            check=False,
        )
        if done.returncode:
            raise FedsieveError(f"flwr {words[0]} failed: {done.stdout.strip()}")
        return done.stdout

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            # In a session of its own, so that it can be killed together with its children.
            return subprocess.Popen(
                [str(self._scripts / program), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self.folder,
                start_new_session=True,
            )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def _kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9, the process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
