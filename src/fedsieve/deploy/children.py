"""Flower's processes: their environment, their log, and their end.

Every process started here carries the folder that it belongs to in its environment. So none is left
behind: not those that Flower starts in sessions of their own, nor those of a `fedsieve deploy` that
was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from fedsieve.deploy.folders import Folder
from fedsieve.errors import FedsieveError
from fedsieve.flower import ENVIRONMENT

MARK = "FEDSIEVE_DEPLOYMENT"
"""Environment variable that names the folder a process belongs to."""
GRACE = 10.0
"""Seconds that a process gets to end by itself."""
LARGE_LOG = 20_000_000
"""Bytes of a log after which a new one begins; the one before is kept."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_EMPTY = re.compile(r"\s*(INFO\s*:)?\s*|INFO:     .*")
"""Blank lines, and the start and end of a web server inside Flower."""


def environment(folder: Folder) -> dict[str, str]:
    """What Flower's processes of this folder see."""
    scripts = sysconfig.get_path("scripts")
    here = "127.0.0.1,localhost"
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    return os.environ | {
        # Flower starts its own programs by their names.
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(folder.flower.resolve()),
        **ENVIRONMENT,
        # Parts on one machine talk to each other without the proxy to the outside.
        "NO_PROXY": f"{no_proxy},{here}" if no_proxy else here,
        "no_proxy": f"{no_proxy},{here}" if no_proxy else here,
        "PYTHONUNBUFFERED": "1",
        MARK: str(folder.path.resolve()),
    }


class Child:
    """A running program of Flower's, with its output in a log."""

    def __init__(self, folder: Folder, name: str, command: Sequence[str]) -> None:
        folder.logs.mkdir(parents=True, exist_ok=True)
        self.log = folder.logs / f"{name}.log"
        # For appending, so that the file can be cut while the process writes to it.
        with self.log.open("ab") as out:
            self._read_from = self._began = out.tell()
            # In a session of its own, so that Ctrl-C reaches us alone and we end things in order.
            self._process = subprocess.Popen(
                [program(command[0]), *command[1:]],
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def news(self) -> list[str]:
        """The lines that it has written since the last call, less those that tell nothing."""
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_from += len(whole)
        if self._read_from > LARGE_LOG:
            shutil.copyfile(self.log, self.log.with_suffix(".old.log"))
            os.truncate(self.log, 0)
            self._read_from = self._began = 0
        lines = _COLOUR.sub("", whole.decode(errors="replace")).splitlines()
        return [line for line in lines if not _EMPTY.fullmatch(line)]

    def output(self) -> str:
        """All that it has written, or the last part of much."""
        with self.log.open("rb") as file:
            file.seek(self._began)
            return _COLOUR.sub("", file.read().decode(errors="replace"))

    def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def program(name: str) -> str:
    """The path of a program that comes with Flower."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise FedsieveError(
            f"{name} is missing; install Flower with `pip install fedsieve[flower]`."
        )
    return str(path)


def call(folder: Folder, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of Flower's to its end."""
    return subprocess.run(
        [program(command[0]), *command[1:]],
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def belonging_to(folder: Folder) -> list[int]:
    """The processes that carry this folder's mark (on systems that have /proc, else none)."""
    mark = f"{MARK}={folder.path.resolve()}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or belongs to somebody else
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return sorted(set(found) - {os.getpid()})


def end_all(folder: Folder, *, grace: float = GRACE / 2) -> int:
    """End every process of this folder; the result is how many there were."""
    first = left = belonging_to(folder)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + grace
        while (left := belonging_to(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        if not left:
            break
    return len(first)


@contextlib.contextmanager
def alone_in(folder: Folder, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder; no process of it was there before, and none is left behind."""
    with folder.lock():
        if left := end_all(folder):
            say(f"Ended {left} processes that an earlier run had left behind.")
        try:
            yield
        finally:
            end_all(folder)


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Take a request to terminate, or a closed terminal, for Ctrl-C.

    Only the first one counts, so that nothing cuts the cleaning up short.
    """
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in wanted:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {
        number: signal.signal(number, stop) for number in wanted
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
