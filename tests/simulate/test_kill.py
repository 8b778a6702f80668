"""Real processes that are killed without a word, asked to stop, or get in each other's way."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import crash_driver
import pytest
from crash_driver import ROUNDS, STOPPED, carry_out, recipe_of

from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.simulate.directory import RunDirectory, read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.workers import PRELOAD
from helpers import REMEMBERING, assert_same_run, with_engine

METHOD_NAMES = ("remembering", "fedgr")


@pytest.fixture(autouse=True)
def _a_method_that_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "remembering", REMEMBERING)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an undisturbed run of a method, made once."""
    made: dict[str, Path] = {}

    def of(method: str) -> Path:
        if method not in made:
            made[method] = tmp_path_factory.mktemp("whole") / "run"
            run(recipe_of(method), made[method])
        return made[method]

    return of


def start(
    recipe: Recipe,
    folder: Path,
    die_in: tuple[str, int] | None = None,
    disk_pause: float = 0.0,
) -> BaseProcess:
    """A process of its own, forked from a server that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=carry_out, args=(recipe, folder, die_in, 0.03, disk_pause))
    process.start()
    return process


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.002)


def wait_for_lines(folder: Path, count: int) -> None:
    wait_for(lambda: len(read_lines(folder / "metrics.jsonl")) >= count)


def kill(process: BaseProcess, number: signal.Signals = signal.SIGKILL) -> int:
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_killed_again_and_again(tmp_path: Path, whole: Callable[[str], Path], method: str) -> None:
    """After 1 line, after 3, after 4, after 7: with and without a checkpoint in between."""
    recipe = recipe_of(method, checkpoint_rounds=2)
    for lines in (1, 3, 4, 7):
        process = start(recipe, tmp_path)
        wait_for_lines(tmp_path, lines)
        assert kill(process) == -signal.SIGKILL
        assert not (tmp_path / "summary.json").exists()
    run(recipe, tmp_path)
    assert_same_run(whole(method), tmp_path)


@pytest.mark.parametrize(
    "die_in", [("fsync", 3), ("fsync", 5), ("fsync", 8), ("replace", 5), ("replace", 7)], ids=str
)
def test_killed_while_writing(
    tmp_path: Path, whole: Callable[[str], Path], die_in: tuple[str, int]
) -> None:
    """Files 1 to 3 are config, environment and scene, then come checkpoints of five and more."""
    recipe = recipe_of("remembering", checkpoint_rounds=1)
    process = start(recipe, tmp_path, die_in)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    run(recipe, tmp_path)
    assert_same_run(whole("remembering"), tmp_path)
    assert list(tmp_path.rglob("*.draft")) == []


def test_killed_again_and_again_while_rounds_go_on_beside_the_writing(
    tmp_path: Path, whole: Callable[[str], Path]
) -> None:
    """A checkpoint is always under way, and takes several rounds."""
    recipe = recipe_of("remembering", checkpoint_rounds=50)
    recipe = with_engine(recipe, checkpoint_seconds=0.0)
    ahead = []
    for lines in (2, 4, 5, 6, 7):
        process = start(recipe, tmp_path, disk_pause=0.03)
        wait_for_lines(tmp_path, lines)
        assert kill(process) == -signal.SIGKILL
        assert not (tmp_path / "summary.json").exists()
        checkpoint = RunDirectory(tmp_path).last_checkpoint()
        done = 0 if checkpoint is None else checkpoint.rounds_done
        ahead.append(len(read_lines(tmp_path / "metrics.jsonl")) - done)
    assert max(ahead) > 0, "rounds were ahead of the last checkpoint"
    run(recipe, tmp_path)
    assert_same_run(whole("remembering"), tmp_path)
    assert list(tmp_path.rglob("*.draft")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(
    tmp_path: Path, whole: Callable[[str], Path], number: signal.Signals
) -> None:
    recipe = recipe_of("remembering", checkpoint_rounds=50)
    process = start(recipe, tmp_path)
    wait_for_lines(tmp_path, 2)
    assert kill(process, number) == STOPPED
    checkpoint = RunDirectory(tmp_path).last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.rounds_done == len(read_lines(tmp_path / "metrics.jsonl")) >= 2
    run(recipe, tmp_path)
    assert_same_run(whole("remembering"), tmp_path)


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    recipe = recipe_of("remembering")
    process = start(recipe, tmp_path)
    wait_for_lines(tmp_path, 1)
    with pytest.raises(FedsieveError, match="Another fedsieve process is running in"):
        run(recipe, tmp_path)
    kill(process)
    assert run(recipe, tmp_path)["rounds"] == ROUNDS, "a lock dies with its process"


# ------------------------------------------------------------------ as a command, with workers


def processes_of_session(session: int) -> list[int]:
    """Every live process of a session: a command and all that descends from it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid = int(entry.name)
                zombie = ") Z " in (entry / "stat").read_text(encoding="utf-8", errors="replace")
                if os.getsid(pid) == session and not zombie:
                    found.append(pid)
            except OSError:  # it ended while we looked
                continue
    return found


def start_command(method: str, folder: Path, pause: float) -> subprocess.Popen[bytes]:
    """`python crash_driver.py` in a session of its own, with two worker processes."""
    driver = Path(crash_driver.__file__)
    path = os.pathsep.join([str(driver.parents[1]), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(driver), method, str(folder), "2", str(pause)],
        start_new_session=True,
        env=environment,
    )


def test_workers_outlast_ctrl_c_and_end_with_their_command(
    tmp_path: Path, whole: Callable[[str], Path]
) -> None:
    """Ctrl-C reaches the workers too, but it is for the main process to let the round finish; and
    when that is killed, no worker may stay behind that nobody waits for."""
    command = start_command("fedgr", tmp_path, pause=0.1)
    try:
        wait_for_lines(tmp_path, 1)
        workers = [pid for pid in processes_of_session(command.pid) if pid != command.pid]
        assert len(workers) >= 2
        for _ in range(8):  # at rest and at work
            for pid in workers:
                # Some other process of the session may have ended; were it a worker, the pool
                # would be broken and no further line would come.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
            time.sleep(0.03)
        wait_for_lines(tmp_path, 4)
        os.kill(command.pid, signal.SIGKILL)
        assert command.wait(30) == -signal.SIGKILL
        wait_for(lambda: not processes_of_session(command.pid), 10)
    finally:
        for pid in processes_of_session(command.pid):
            os.kill(pid, signal.SIGKILL)
    assert not (tmp_path / "summary.json").exists()
    run(recipe_of("fedgr"), tmp_path)
    assert_same_run(whole("fedgr"), tmp_path)
