"""The folder of a run: what it wrote, and how it goes on after being cut."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

import fedsieve
from fedsieve.errors import FedsieveError, check
from fedsieve.files import locked, remove_drafts, write_atomically
from fedsieve.recipe import Recipe, identity, recipe_from_table, recipe_table
from fedsieve.serial import decode, encode
from fedsieve.simulate.results import summary_in, trunk_settings
from fedsieve.simulate.store import BEGIN_ANEW, state_file
from fedsieve.types import ClientId, Weights

METRICS = "metrics.jsonl"
CLIENTS = "clients.jsonl"
LOGS = (METRICS, CLIENTS)
SUMMARY = "summary.json"
CONFIG = "config.toml"
ENVIRONMENT = "env.json"
SCENE = "scene.safetensors"
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Model:
    """The global model; encoded it is the file `MODEL`."""

    weights: Weights


@dataclass(frozen=True)
class Checkpoint:
    """A round after which everything is on disk."""

    rounds_done: int
    clients: Mapping[ClientId, int]
    """Client → round of its newest state file."""
    log_bytes: Mapping[str, int]
    """Length of each log at that moment; what stands behind it is cut off when resuming."""


class RunDirectory:
    """One run's folder, opened by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, Any] = {}

    @property
    def client_folder(self) -> Path:
        return self.path / "checkpoint" / "clients"

    @property
    def _commit_file(self) -> Path:
        return self.path / "checkpoint" / "commit.json"

    def _server_file(self, rounds_done: int) -> Path:
        return self.path / "checkpoint" / f"server-{rounds_done}.safetensors"

    def claim(self, recipe: Recipe, command: str | None = None) -> None:
        """Make the folder this recipe's own, or refuse it when it holds another run.

        `command` is for the record: this process's own where it is left out, unknown where empty.
        """
        self.refuse_other(recipe)
        config = self.path / CONFIG
        is_new = not config.exists()
        for folder in (self.path, self.client_folder.parent, self.client_folder):
            remove_drafts(folder)
        write_atomically(config, tomli_w.dumps(recipe_table(recipe)).encode())
        if is_new or not (self.path / ENVIRONMENT).exists():  # a cut fork may have left one
            write_atomically(self.path / ENVIRONMENT, _json(environment(command)))

    def refuse_other(self, recipe: Recipe) -> None:
        """Refuse a folder that holds the run of another recipe."""
        if not (self.path / CONFIG).exists():
            check(
                not self._commit_file.exists(),
                f"{self.path} holds a checkpoint, but no {CONFIG} that says of what; give another "
                "folder with --out, or delete that one.",
            )
            return
        difference = first_difference(identity(self.recipe()), identity(recipe))
        check(
            difference is None,
            f"{self.path} already holds a run with {difference}; "
            "give another folder with --out, or delete that one.",
        )

    def recipe(self) -> Recipe:
        """The recipe of the run that the folder holds."""
        config = self.path / CONFIG
        try:
            return recipe_from_table(tomllib.loads(config.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, FedsieveError) as error:
            raise FedsieveError(
                f"{config} cannot be read ({error}); give another folder with --out."
            ) from None

    def obstacle_to_forking(self, recipe: Recipe) -> str | None:
        """The setting that keeps a run of this recipe from forking from the one here."""
        return first_difference(_common(identity(self.recipe())), _common(identity(recipe)))

    def origin(self) -> Path | None:
        """The run that the one here forked from; None if it began by itself."""
        try:
            record = json.loads((self.path / ENVIRONMENT).read_bytes())
        except (OSError, ValueError):
            return None
        origin = record.get("origin") if isinstance(record, dict) else None
        return Path(origin) if isinstance(origin, str) else None

    def check_fork(self, origin: Path) -> None:
        """Refuse to take a run for a fork of `origin` that began by itself or elsewhere."""
        if not (self.path / CONFIG).exists():
            return
        check(
            self.origin() == origin.resolve(),
            f"{self.path} already holds a run that did not fork from {origin}; give another folder "
            "with --out, or leave --fork out.",
        )

    def begin_as_fork(self, other: RunDirectory, recipe: Recipe) -> None:
        """Take over the last checkpoint of a run that differs in settings of its method only."""
        with other.lock(reading=True):
            origin = other.last_checkpoint()
            if origin is None:
                raise FedsieveError(
                    f"{other.path} has no checkpoint that a run could fork from; let a run stop "
                    "where forks are to begin (engine.stop_after_rounds)."
                )
            check(
                origin.rounds_done < recipe.rounds,
                f"{other.path} has done all {recipe.rounds} rounds, so that a fork has none left; "
                "let a run stop where forks are to begin (engine.stop_after_rounds).",
            )
            difference = other.obstacle_to_forking(recipe)
            check(
                difference is None,
                f"{other.path} is a run with {difference}; a fork may differ in settings of the "
                "method only.",
            )
            self.client_folder.mkdir(parents=True, exist_ok=True)
            for client, round in origin.clients.items():
                _take_over(
                    state_file(other.client_folder, client, round),
                    state_file(self.client_folder, client, round),
                )
            _take_over(
                other._server_file(origin.rounds_done), self._server_file(origin.rounds_done)
            )
            _take_over(other.path / SCENE, self.path / SCENE)
            for name, size in origin.log_bytes.items():
                write_atomically(self.path / name, (other.path / name).read_bytes()[:size])
            record = environment() | {
                "forked_from": f"{other.path}, round {origin.rounds_done}",
                "origin": str(other.path.resolve()),
                "trunk": trunk_settings(other.path),
            }
            write_atomically(self.path / ENVIRONMENT, _json(record))
            # Before the commit: what a folder without a recipe holds nobody could tell.
            write_atomically(self.path / CONFIG, tomli_w.dumps(recipe_table(recipe)).encode())
            write_atomically(self._commit_file, other._commit_file.read_bytes())

    @contextlib.contextmanager
    def lock(self, *, reading: bool = False) -> Iterator[None]:
        """Hold the folder; a second process on it is refused, but for several that only read it.
        The lock dies with its process."""
        check(
            self.path.is_dir() or not self.path.exists(),
            f"{self.path} is a file, not a folder; give another one with --out.",
        )
        busy = (
            f"Another fedsieve process is running in {self.path}; wait for it, or give another "
            "folder with --out."
        )
        with locked(self.path, busy, reading=reading):
            try:
                yield
            finally:
                for log in self._logs.values():
                    log.close()
                self._logs.clear()

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        path = self.path / SUMMARY
        if not path.exists():
            return None
        try:
            return summary_in(path)
        except (ValueError, TypeError) as error:
            raise FedsieveError(
                f"{path} is damaged ({error}); delete it and give the same command again, which "
                "repeats what is no longer saved."
            ) from None

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.path / SUMMARY, _json(summary))

    def tidy_up(self) -> None:
        """Remove what a finished run does not need, unless its recipe said that it is to stay: all
        saved states, the commit that names them first."""
        if self._commit_file.parent.exists() and not self.recipe().engine.keep_states:
            self._commit_file.unlink(missing_ok=True)
            shutil.rmtree(self._commit_file.parent)

    def last_checkpoint(self) -> Checkpoint | None:
        """The last round whose state is complete on disk, or None in a new folder."""
        if not self._commit_file.exists():
            return None
        try:
            raw = json.loads(self._commit_file.read_bytes())
            clients = {int(client): int(round) for client, round in raw["clients"].items()}
            log_bytes = {str(name): int(size) for name, size in raw["log_bytes"].items()}
            return Checkpoint(int(raw["rounds_done"]), clients, log_bytes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(self._commit_file, error) from None

    def load_server(self, checkpoint: Checkpoint, server_type: type[Any]) -> Any:
        path = self._server_file(checkpoint.rounds_done)
        try:
            return decode(server_type, path.read_bytes())
        except (OSError, FedsieveError) as error:
            raise self._unreadable(path, error) from None

    @staticmethod
    def _unreadable(path: Path, error: Exception) -> FedsieveError:
        return FedsieveError(f"The checkpoint {path} cannot be read ({error}); {BEGIN_ANEW}.")

    def save_server(self, rounds_done: int, server: Any) -> None:
        write_atomically(self._server_file(rounds_done), encode(server))

    def checkpoint(self, rounds_done: int, clients: Mapping[ClientId, int]) -> Checkpoint:
        """This moment, with the lines of the logs safe; to be committed when its states are too."""
        for log in self._logs.values():
            log.flush()
            os.fsync(log.fileno())
        logs = [self.path / name for name in LOGS if (self.path / name).exists()]
        return Checkpoint(rounds_done, clients, {log.name: log.stat().st_size for log in logs})

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint whose states are all on disk the one to resume from."""
        record = {
            "rounds_done": checkpoint.rounds_done,
            "clients": checkpoint.clients,
            "log_bytes": checkpoint.log_bytes,
        }
        write_atomically(self._commit_file, _json(record))
        for path in self._commit_file.parent.glob("server-*.safetensors"):
            if path != self._server_file(checkpoint.rounds_done):
                path.unlink()

    def open_logs(self, names: tuple[str, ...], checkpoint: Checkpoint | None) -> None:
        """Cut all logs back to where the checkpoint left them, and open `names` for appending."""
        for name in LOGS:
            path = self.path / name
            size = checkpoint.log_bytes.get(name, 0) if checkpoint else 0
            written = path.stat().st_size if path.exists() else 0
            check(
                written >= size,
                f"{path} lacks lines that the checkpoint counts on; {BEGIN_ANEW}.",
            )
            if written > size:
                os.truncate(path, size)
            if name in names:
                self._logs[name] = path.open("ab")

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Add one line to a log, at once visible to other programs."""
        log = self._logs[name]
        log.write(json.dumps(finite_json(line), separators=(",", ":")).encode() + b"\n")
        log.flush()

    def lines(self, name: str = METRICS) -> list[dict[str, Any]]:
        return read_lines(self.path / name)


def save_model(directory: RunDirectory, weights: Weights) -> None:
    """Write the global model into the run's folder."""
    write_atomically(directory.path / MODEL, encode(Model(weights)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log; one that a crash cut short is left out."""
    if not path.exists():
        return []
    text = path.read_bytes()
    try:
        lines = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except ValueError:
        lines = [None]
    check(
        all(isinstance(line, dict) for line in lines),
        f"{path} is damaged; start the run again in a new folder.",
    )
    return lines


def first_difference(
    held: Mapping[str, Any], wanted: Mapping[str, Any], where: str = ""
) -> str | None:
    """The first setting in which two tables differ, as words, or None."""
    names_first = sorted(held.keys() | wanted.keys(), key=lambda key: (key != "name", key))
    for key in names_first:
        path = f"{where}{key}"
        mine, theirs = held.get(key), wanted.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            inner = first_difference(mine, theirs, f"{path}.")
            if inner is not None:
                return inner
        elif mine != theirs:
            return f"{path} = {mine!r} (not {theirs!r})"
    return None


def _common(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a run and its fork must have in common."""
    return {**table, "name": None, "method": {"name": table["method"]["name"]}}


def _take_over(source: Path, target: Path) -> None:
    """Have a file that nobody changes at another place too, without a copy where possible."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def command_line() -> str:
    """How this process was called, for the record, which others may read."""
    return shlex.join(without_secrets([*_program(), *sys.argv[1:]]))


def _program() -> list[str]:
    name = Path(sys.argv[0]).name
    return ["python", "-m", "fedsieve"] if name == "__main__.py" else [name]


_SECRET = re.compile(r"(?is)--?[\w.-]*(token|secret|password)[\w.-]*(?P<value>=.*)?")
"""An option that is called a secret, with its value where that stands in the same word."""


def without_secrets(words: Sequence[str]) -> list[str]:
    """`words` less the options that are called secrets, and their values.

    No command of ours has one, but programs of others may start runs, too.
    """
    kept: list[str] = []
    is_value = False
    for word in words:
        option = _SECRET.fullmatch(word)
        if option is None and not is_value:
            kept.append(word)
        is_value = option is not None and option["value"] is None
    return kept


def environment(command: str | None = None) -> dict[str, Any]:
    """What the run ran on, for the record; `command` as in `RunDirectory.claim`."""
    return {
        "fedsieve": fedsieve.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": (command_line() if command is None else command) or None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def finite_json(value: Any) -> Any:
    """`value` with NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(finite_json(value), indent=2).encode() + b"\n"
