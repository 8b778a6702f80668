"""Checkpoints that are written while the next rounds train."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.serial import decode
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate import run as run_module
from fedsieve.simulate import saving
from fedsieve.simulate.control import RunInterruptedError, Silent
from fedsieve.simulate.directory import METRICS, Checkpoint, RunDirectory, read_lines
from fedsieve.simulate.run import run
from fedsieve.simulate.saving import Saver
from fedsieve.simulate.store import ClientStore, Snapshot, state_file
from helpers import (
    REMEMBERING,
    Cut,
    assert_same_run,
    few_digits,
    same_bits,
    tiny_recipe,
    with_engine,
)

PATIENCE = 30.0
"""Seconds after which a test has failed that waits for a thread."""


@dataclass(frozen=True)
class State:
    values: Tensor


def state(number: float) -> State:
    return State(torch.tensor([float(number)]))


class Gate:
    """Holds everybody up who comes to `method` of `owner` until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.arrived = threading.Event()
        self._opened = threading.Event()
        original = getattr(owner, method)

        def held_up(*arguments: Any) -> Any:
            self.arrived.set()
            assert self._opened.wait(PATIENCE)
            return original(*arguments)

        patch.setattr(owner, method, held_up)

    def open(self) -> None:
        self._opened.set()


def fail_at(patch: pytest.MonkeyPatch, owner: type, method: str, error: BaseException) -> None:
    def failing(*_: Any) -> None:
        raise error

    patch.setattr(owner, method, failing)


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -------------------------------------------------------------------------------- by hand


@dataclass
class Desk:
    """A folder, a store and a saver, without a run around them."""

    directory: RunDirectory
    store: ClientStore
    saver: Saver

    def round(self, round: int, *clients: int) -> None:
        """What a round leaves: states, whose value is the round, and a line."""
        for client in clients:
            self.store.put(client, state(round), round)
        self.directory.append(METRICS, {"round": round})

    def begin(self, rounds_done: int) -> None:
        self.saver.begin(rounds_done, state(rounds_done))

    def last(self) -> Checkpoint | None:
        return self.directory.last_checkpoint()

    def held_by(self, checkpoint: Checkpoint) -> tuple[float, dict[int, float], int]:
        """The server's and the clients' values and the lines that someone who resumes finds."""
        server = self.directory.load_server(checkpoint, State)
        store = ClientStore(
            self.directory.client_folder,
            State,
            budget_bytes=10**9,
            device=torch.device("cpu"),
            committed=checkpoint.clients,
        )
        clients = {client: store.get(client) for client in checkpoint.clients}
        log = (self.directory.path / METRICS).read_bytes()[: checkpoint.log_bytes[METRICS]]
        values = {client: float(held.values) for client, held in clients.items() if held}
        return float(server.values), values, log.count(b"\n")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    directory, cpu = RunDirectory(tmp_path), torch.device("cpu")
    with directory.lock():
        directory.open_logs((METRICS,), None)
        store = ClientStore(
            directory.client_folder, State, budget_bytes=10**9, device=cpu, committed={}
        )
        yield Desk(directory, store, Saver(directory, store, cpu))


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Snapshot, "write"), (RunDirectory, "save_server"), (RunDirectory, "commit")],
)
def test_what_is_committed_is_the_moment_of_the_beginning(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    gate = Gate(monkeypatch, owner, method)
    with desk.saver:
        desk.round(0, 4, 7)
        desk.begin(1)
        assert gate.arrived.wait(PATIENCE)
        desk.round(1, 7, 9)
        desk.round(2, 9)
        assert desk.saver.is_writing()
        assert desk.last() is None
        gate.open()
        desk.saver.wait()
        assert not desk.saver.is_writing()
        checkpoint = desk.last()
        assert checkpoint is not None
        assert desk.held_by(checkpoint) == (1, {4: 0, 7: 0}, 1)
        desk.begin(3)
    after = desk.last()
    assert after is not None
    assert desk.held_by(after) == (3, {4: 0, 7: 1, 9: 2}, 3)
    names = sorted(path.name for path in desk.directory.client_folder.iterdir())
    assert names == ["4-0.safetensors", "7-1.safetensors", "9-2.safetensors"]


def test_the_one_before_stays_whole_while_the_next_is_written(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with desk.saver:
        desk.round(0, 4, 7)
        desk.begin(1)
        desk.saver.wait()
        gate = Gate(monkeypatch, RunDirectory, "commit")
        desk.round(1, 7)
        desk.begin(2)
        assert gate.arrived.wait(PATIENCE)
        desk.round(2, 4)
        older = desk.last()
        assert older is not None
        assert (older.rounds_done, older.clients) == (1, {4: 0, 7: 0})
        assert desk.directory.load_server(older, State) == state(1)
        names = {path.name for path in desk.directory.client_folder.iterdir()}
        assert names == {"4-0.safetensors", "7-0.safetensors", "7-1.safetensors"}
        gate.open()
        desk.saver.wait()
        newer = desk.last()
        assert newer is not None
        assert desk.held_by(newer) == (2, {4: 0, 7: 1}, 2)


def test_one_is_written_at_a_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, most, order = 0, 0, []
    save_server, commit = RunDirectory.save_server, RunDirectory.commit

    def coming(directory: RunDirectory, rounds_done: int, server: Any) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.01)
        save_server(directory, rounds_done, server)

    def going(directory: RunDirectory, checkpoint: Checkpoint) -> None:
        nonlocal at_work
        commit(directory, checkpoint)
        order.append(checkpoint.rounds_done)
        at_work -= 1

    monkeypatch.setattr(RunDirectory, "save_server", coming)
    monkeypatch.setattr(RunDirectory, "commit", going)
    with desk.saver:
        for round in range(5):
            desk.round(round, round)
            desk.begin(round + 1)
    assert most == 1
    assert order == [1, 2, 3, 4, 5]


def poll_until_done(saver: Saver) -> None:
    limit = time.monotonic() + PATIENCE
    while saver.is_writing():
        assert time.monotonic() < limit


@pytest.mark.parametrize(
    "notice",
    [Saver.wait, poll_until_done, lambda saver: saver.begin(3, state(3))],
    ids=["wait", "poll", "begin"],
)
@pytest.mark.parametrize(
    ("owner", "method"),
    [(Snapshot, "write"), (RunDirectory, "save_server"), (RunDirectory, "commit")],
)
def test_a_full_disk_is_told_in_one_sentence_and_leaves_the_last_commit(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    notice: Callable[[Saver], None],
) -> None:
    desk.round(0, 4)
    desk.begin(1)
    desk.saver.wait()
    fail_at(monkeypatch, owner, method, disk_full())
    desk.round(1, 4)
    desk.begin(2)
    with pytest.raises(FedsieveError) as caught:
        notice(desk.saver)
    assert str(caught.value) == (
        "The checkpoint after round 2 cannot be written ([Errno 28] No space left on device); "
        "free some space and give the same command again, it goes on from what was saved."
    )
    desk.saver.wait()  # an error is told once
    checkpoint = desk.last()
    assert checkpoint is not None
    assert desk.held_by(checkpoint) == (1, {4: 0}, 1)


def test_other_errors_of_a_disk_are_told_without_a_cure_for_a_full_one(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, RunDirectory, "commit", PermissionError(errno.EACCES, "Permission denied"))
    desk.begin(1)
    with pytest.raises(FedsieveError, match=r"Permission denied.*; put that right and give"):
        desk.saver.wait()


def test_an_error_of_the_run_comes_first_and_tells_of_the_checkpoint(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, RunDirectory, "commit", disk_full())
    desk.begin(1)
    with pytest.raises(ZeroDivisionError) as caught, desk.saver:
        raise ZeroDivisionError
    assert ["No space left on device" in note for note in caught.value.__notes__] == [True]


def test_leaving_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, RunDirectory, "commit")
    with suppress(Cut), desk.saver:
        desk.begin(1)
        threading.Timer(0.05, gate.open).start()
        raise Cut
    assert desk.last() is not None


def test_who_is_in_a_hurry_waits_for_one_file_only(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C while the checkpoint that the first asked for is at its first file."""
    gate = Gate(monkeypatch, Snapshot, "write")
    wait_for, calls = saving.wait_for, 0

    def interrupted(writing: list[Any]) -> None:
        nonlocal calls
        calls += 1
        assert gate.arrived.wait(PATIENCE)
        if calls == 1:
            raise KeyboardInterrupt
        gate.open()
        wait_for(writing)

    monkeypatch.setattr(saving, "wait_for", interrupted)
    desk.round(0, 1, 2, 3)
    desk.begin(1)
    with pytest.raises(KeyboardInterrupt), desk.saver:
        desk.saver.wait()
    assert [path.name for path in desk.directory.client_folder.iterdir()] == ["1-0.safetensors"]
    assert desk.last() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_states_on_a_gpu_are_written_while_it_computes(tmp_path: Path) -> None:
    """Channels last, as convolutions train, and newer ones made while the old ones are copied."""
    device, directory = torch.device("cuda"), RunDirectory(tmp_path)
    store = ClientStore(
        directory.client_folder, State, budget_bytes=10**10, device=device, committed={}
    )
    first = {
        client: torch.randn(256, 256, 3, 3, device=device).to(memory_format=torch.channels_last)
        for client in range(20)
    }
    with Saver(directory, store, device) as saver:
        for client, values in first.items():
            store.put(client, State(values), 0)
        saver.begin(1, state(1))
        while saver.is_writing():
            for client, values in first.items():
                store.put(client, State(values + 1), 1)
    checkpoint = directory.last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.clients == dict.fromkeys(first, 0)
    for client, values in first.items():
        saved = decode(State, state_file(directory.client_folder, client, 0).read_bytes())
        assert same_bits(saved.values, values.cpu())


# -------------------------------------------------------------------------------- in a run


class Reporter(Silent):
    """Does something after a round."""

    def __init__(self, after: Mapping[int, Callable[[], None]]) -> None:
        self._after = after

    def finished_round(self, line: Mapping[str, Any]) -> None:
        if line["round"] in self._after:
            self._after[line["round"]]()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that remembers, few digits, and memory for two states of 55 kB."""

    def tight(*arguments: Any, **named: Any) -> ClientStore:
        return ClientStore(*arguments, **(named | {"budget_bytes": 120_000}))

    monkeypatch.setitem(METHODS, "remembering", REMEMBERING)
    monkeypatch.setattr(rounds_module, "ClientStore", tight)
    monkeypatch.setattr(run_module, "load_data", lambda recipe: few_digits())


def recipe_of(**engine: Any) -> Recipe:
    return with_engine(replace(tiny_recipe("remembering"), rounds=6), **engine)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The folder of a run without checkpoints."""
    run(recipe_of(checkpoint_seconds=1e9), tmp_path / "whole")
    return tmp_path / "whole"


def note_beginnings(patch: pytest.MonkeyPatch) -> list[int]:
    """How far each checkpoint goes that is begun from now on."""
    begun: list[int] = []
    begin = Saver.begin

    def noting(saver: Saver, rounds_done: int, server: Any) -> None:
        begun.append(rounds_done)
        begin(saver, rounds_done, server)

    patch.setattr(Saver, "begin", noting)
    return begun


def last_checkpoint(folder: Path) -> Checkpoint:
    checkpoint = RunDirectory(folder).last_checkpoint()
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize(
    ("owner", "method"), [(Snapshot, "write"), (RunDirectory, "commit")], ids=["first", "last"]
)
def test_rounds_go_on_while_one_is_written_and_it_stays_what_it_was(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """Always due, but the first cannot end before round 4 has, where the run is cut."""
    folder, recipe = tmp_path / "cut", recipe_of(checkpoint_seconds=0.0)

    def cut() -> None:
        gate.open()
        raise Cut

    with monkeypatch.context() as patch:
        begun, gate = note_beginnings(patch), Gate(patch, owner, method)
        with pytest.raises(Cut):
            run(recipe, folder, Reporter({4: cut}))
    assert begun == [1], "none is begun beside it"
    checkpoint = last_checkpoint(folder)
    assert checkpoint.rounds_done == 1
    log = (folder / METRICS).read_bytes()
    assert log.count(b"\n") == 5
    assert checkpoint.log_bytes[METRICS] == log.index(b"\n") + 1
    assert set(checkpoint.clients.values()) == {0}
    run(recipe, folder)
    assert_same_run(whole, folder)


def test_a_run_with_a_slow_disk_ends_alike(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint takes until round 3, and what comes meanwhile has to spill."""
    begun, gate = note_beginnings(monkeypatch), Gate(monkeypatch, Snapshot, "write")
    folder = tmp_path / "slow"
    run(recipe_of(checkpoint_seconds=0.0, keep_states=True), folder, Reporter({3: gate.open}))
    assert begun[0] == 1
    assert begun[1] >= 4
    assert last_checkpoint(folder).rounds_done == 6
    assert_same_run(whole, folder)


def test_checkpoints_that_are_asked_for_by_round_are_all_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    commit = RunDirectory.commit

    def slow(directory: RunDirectory, checkpoint: Checkpoint) -> None:
        time.sleep(0.1)  # longer than a round
        commit(directory, checkpoint)
        done.append(checkpoint.rounds_done)

    monkeypatch.setattr(RunDirectory, "commit", slow)
    run(recipe_of(checkpoint_rounds=1), tmp_path)
    assert done[:5] == [1, 2, 3, 4, 5], "that after the last round may be given up"


def test_a_full_disk_ends_the_run_at_the_next_round_and_it_goes_on_when_there_is_room(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recipe = tmp_path / "full", recipe_of(checkpoint_rounds=1)
    commit = RunDirectory.commit

    def full(directory: RunDirectory, checkpoint: Checkpoint) -> None:
        if checkpoint.rounds_done == 3:
            raise disk_full()
        commit(directory, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "commit", full)
        with pytest.raises(FedsieveError, match=r"after round 3 cannot be written .*free some"):
            run(recipe, folder)
    assert len(read_lines(folder / METRICS)) == 4
    assert last_checkpoint(folder).rounds_done == 2
    run(recipe, folder)
    assert_same_run(whole, folder)


def test_a_last_checkpoint_that_fails_leaves_no_summary(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recipe = tmp_path / "full", recipe_of(keep_states=True)
    with monkeypatch.context() as patch:
        fail_at(patch, RunDirectory, "commit", disk_full())
        with pytest.raises(FedsieveError, match="after round 6 cannot be written"):
            run(recipe, folder)
    assert not (folder / "summary.json").exists()
    run(recipe, folder)
    assert_same_run(whole, folder)


def slow_commits(patch: pytest.MonkeyPatch) -> None:
    commit = RunDirectory.commit

    def slow(directory: RunDirectory, checkpoint: Checkpoint) -> None:
        time.sleep(0.1)
        commit(directory, checkpoint)

    patch.setattr(RunDirectory, "commit", slow)


def test_a_last_checkpoint_that_is_kept_is_complete_before_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    finish = RunDirectory.finish

    def noting(directory: RunDirectory, summary: Mapping[str, Any]) -> None:
        found.append(last_checkpoint(tmp_path).rounds_done)
        finish(directory, summary)

    monkeypatch.setattr(RunDirectory, "finish", noting)
    slow_commits(monkeypatch)
    run(recipe_of(keep_states=True), tmp_path)
    assert found == [6]


def test_a_last_checkpoint_that_is_not_kept_holds_nobody_up(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first state cannot be written before the summary is there; then it is given up."""
    written: list[int] = []
    ready = threading.Event()
    write, summary = Snapshot.write, rounds_module.Simulation.summary

    def slow(snapshot: Snapshot, client: int) -> None:
        assert ready.wait(60)
        written.append(client)
        write(snapshot, client)

    def noting(simulation: rounds_module.Simulation) -> dict[str, Any]:
        found = summary(simulation)
        assert written == []
        threading.Timer(0.2, ready.set).start()  # when the run has begun to give up
        return found

    monkeypatch.setattr(Snapshot, "write", slow)
    monkeypatch.setattr(rounds_module.Simulation, "summary", noting)
    run(recipe_of(checkpoint_seconds=1e9), tmp_path / "hasty")
    assert len(written) == 1, "the rest was given up"
    assert not (tmp_path / "hasty/checkpoint").exists()
    assert_same_run(whole, tmp_path / "hasty")


def test_if_the_summary_fails_no_round_is_lost(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recipe = tmp_path / "fails", recipe_of(checkpoint_seconds=1e9)
    with monkeypatch.context() as patch:
        fail_at(patch, rounds_module.Simulation, "summary", MemoryError())
        with pytest.raises(MemoryError):
            run(recipe, folder)
    assert last_checkpoint(folder).rounds_done == 6
    run(recipe, folder)
    assert_same_run(whole, folder)


@pytest.mark.parametrize("stop", [{"stop_after_rounds": 2}, {"stop_after_minutes": 0.0}])
def test_a_run_that_is_stopped_has_saved_its_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Mapping[str, Any]
) -> None:
    slow_commits(monkeypatch)
    with pytest.raises(RunInterruptedError):
        run(recipe_of(checkpoint_seconds=0.0, **stop), tmp_path)
    assert last_checkpoint(tmp_path).rounds_done == len(read_lines(tmp_path / METRICS))
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


def test_a_run_that_cannot_save_does_not_say_that_it_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, RunDirectory, "commit", disk_full())
    with pytest.raises(FedsieveError, match="after round 2 cannot be written"):
        run(recipe_of(stop_after_rounds=2), tmp_path)
