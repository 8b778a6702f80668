"""A run that is cut anywhere and started again ends as one that was not: every bit, every line."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.simulate import rounds as rounds_module
from fedsieve.simulate import run as run_module
from fedsieve.simulate import saving
from fedsieve.simulate.directory import Checkpoint, RunDirectory, read_lines
from fedsieve.simulate.rounds import seconds_between_checkpoints
from fedsieve.simulate.run import run
from fedsieve.simulate.store import ClientStore
from helpers import (
    REMEMBERING,
    Cut,
    CutAfter,
    assert_same_run,
    few_digits,
    timeless_lines,
    tiny_recipe,
    with_engine,
)


@pytest.fixture(autouse=True, scope="module")
def _small_and_tight() -> Iterator[None]:
    """A method that remembers, few digits, and memory for two states of 55 kB, so that others have
    to spill between checkpoints."""

    def tight(*arguments: Any, **named: Any) -> ClientStore:
        return ClientStore(*arguments, **(named | {"budget_bytes": 120_000}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "remembering", REMEMBERING)
        patch.setattr(rounds_module, "ClientStore", tight)
        patch.setattr(run_module, "load_data", lambda recipe: few_digits())
        yield


def recipe_of(rounds: int, checkpoint_rounds: int, *, keep_states: bool = True) -> Recipe:
    return with_engine(
        replace(tiny_recipe("remembering"), rounds=rounds),
        checkpoint_rounds=checkpoint_rounds,
        client_lines=True,
        keep_states=keep_states,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of an undisturbed run of so many rounds, made once."""
    made: dict[int, Path] = {}

    def of(rounds: int) -> Path:
        if rounds not in made:
            made[rounds] = tmp_path_factory.mktemp("whole") / "run"
            run(recipe_of(rounds, 50), made[rounds])
        return made[rounds]

    return of


def assert_ends_alike(whole: Path, cut: Path, *, keep_states: bool = True) -> None:
    assert_same_run(whole, cut)
    assert timeless_lines(whole, "clients.jsonl") == timeless_lines(cut, "clients.jsonl")
    assert list(cut.rglob("*.draft")) == []
    if not keep_states:
        assert not (cut / "checkpoint").exists()
        return
    last = RunDirectory(cut).last_checkpoint()
    assert last is not None
    states = {path.stem for path in (cut / "checkpoint/clients").iterdir()}
    assert states == {f"{client}-{round}" for client, round in last.clients.items()}


@pytest.mark.parametrize("checkpoint_rounds", [1, 3, 50])
def test_cut_after_any_round(
    tmp_path: Path, whole: Callable[[int], Path], checkpoint_rounds: int
) -> None:
    recipe = recipe_of(6, checkpoint_rounds)
    for last in range(6):
        folder = tmp_path / str(last)
        with pytest.raises(Cut):
            run(recipe, folder, CutAfter(last))
        assert len(read_lines(folder / "metrics.jsonl")) == last + 1, "the log was ahead"
        run(recipe, folder)
        assert_ends_alike(whole(6), folder)


def test_cut_after_every_round(tmp_path: Path, whole: Callable[[int], Path]) -> None:
    recipe = recipe_of(6, 1)
    for last in range(6):
        with pytest.raises(Cut):
            run(recipe, tmp_path, CutAfter(last))
    run(recipe, tmp_path)
    assert_ends_alike(whole(6), tmp_path)


def crash_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Let the n-th call of `owner.name` be the last thing that happens."""
    original = getattr(owner, name)
    calls = itertools.count(1)  # of two threads

    def counting(*arguments: Any, **named: Any) -> Any:
        call = next(calls)
        # Cut just before a file is safe, so that half of it is lost (of a log only what is new, so
        # nothing here), and just after one has come or gone.
        if call == number and name == "fsync":
            file = Path(f"/proc/self/fd/{arguments[0]}").readlink()
            if file.suffix != ".jsonl":
                os.truncate(file, file.stat().st_size // 2)
            raise Cut
        result = original(*arguments, **named)
        if call == number:
            raise Cut
        return result

    monkeypatch.setattr(owner, name, counting)


@pytest.mark.parametrize("keep_states", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [(Path, "replace", 1), (os, "fsync", 3), (Path, "unlink", 1)],
    ids=["replace", "fsync", "unlink"],
)
def test_cut_at_every_moment_of_writing(
    tmp_path: Path,
    whole: Callable[[int], Path],
    owner: Any,
    name: str,
    step: int,
    keep_states: bool,
) -> None:
    """One or two checkpoints, each of some client states, a server, a log and a commit. A cut just
    before the n-th file is safe is the same but for its draft, so every third one is enough."""
    recipe = recipe_of(3, 2, keep_states=keep_states)
    for number in range(1, 100, step):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, owner, name, number)
            try:
                run(recipe, folder)
                break
            except Cut:
                pass
        run(recipe, folder)
        assert_ends_alike(whole(3), folder, keep_states=keep_states)
    # config, env, scene, model, summary; a checkpoint: at least 3 states, server, commit
    least = {"replace": 5 + 3 + 2, "fsync": 5 + 3 + 2, "unlink": 1}[name]
    if keep_states and name != "unlink":
        least += 1 + 2  # one more of at least 1 state, server, commit
    assert number > least, "every such moment was tried"


def test_a_finished_run_keeps_no_states_unless_it_is_asked_to(tmp_path: Path) -> None:
    run(recipe_of(3, 1, keep_states=False), tmp_path / "default")
    run(recipe_of(3, 50, keep_states=True), tmp_path / "kept")
    assert not (tmp_path / "default/checkpoint").exists()
    kept = RunDirectory(tmp_path / "kept").last_checkpoint()
    assert kept is not None
    assert kept.rounds_done == 3


def test_the_store_did_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above mean what they say."""
    spilled = []
    write = ClientStore._write

    def noting(store: ClientStore, client: int) -> None:
        spilled.append(client)
        write(store, client)

    monkeypatch.setattr(ClientStore, "_write", noting)
    with pytest.raises(Cut):
        run(recipe_of(6, 50), tmp_path, CutAfter(4))
    assert len(spilled) >= 5


def test_the_engine_may_change_when_a_run_goes_on(
    tmp_path: Path, whole: Callable[[int], Path]
) -> None:
    with pytest.raises(Cut):
        run(recipe_of(6, 2), tmp_path, CutAfter(2))
    run(with_engine(recipe_of(6, 2), checkpoint_rounds=1, checkpoint_seconds=0.0), tmp_path)
    assert_ends_alike(whole(6), tmp_path)


def test_checkpoints_are_made_by_the_clock_too(tmp_path: Path) -> None:
    recipe = with_engine(recipe_of(6, 50), checkpoint_seconds=0.0)
    with pytest.raises(Cut):
        run(recipe, tmp_path, CutAfter(3))
    checkpoint = RunDirectory(tmp_path).last_checkpoint()
    assert checkpoint is not None
    assert 1 <= checkpoint.rounds_done <= 3, (
        "one was begun after round 0, and others when it was done"
    )


def test_dear_checkpoints_are_made_less_often_unless_one_says_how_often() -> None:
    """16 s are a twentieth of 320 s."""
    assert seconds_between_checkpoints(None, 0.5) == 60
    assert seconds_between_checkpoints(None, 16.0) == pytest.approx(320)
    assert seconds_between_checkpoints(5.0, 16.0) == 5


def test_how_long_the_last_one_took_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it a good minute later, and so a checkpoint takes one: the next
    is due after twenty more, which is after the end of these six rounds."""
    looks = itertools.count(time.monotonic(), 61.0)
    clock = SimpleNamespace(monotonic=lambda: next(looks), perf_counter=time.perf_counter)
    monkeypatch.setattr(rounds_module, "time", clock)
    monkeypatch.setattr(saving, "time", clock)
    saved = []
    commit = RunDirectory.commit

    def noting(directory: RunDirectory, checkpoint: Checkpoint) -> None:
        saved.append(checkpoint.rounds_done)
        commit(directory, checkpoint)

    monkeypatch.setattr(RunDirectory, "commit", noting)
    run(with_engine(recipe_of(6, 50), checkpoint_rounds=None), tmp_path)
    assert saved == [1, 6]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(6, 1)
    with pytest.raises(Cut):
        run(recipe, tmp_path, CutAfter(3))
    for state in (tmp_path / "checkpoint" / "clients").iterdir():
        state.write_bytes(b"damaged")
    with pytest.raises(FedsieveError, match=r"The saved state of client \d cannot be read"):
        run(recipe, tmp_path)


def test_data_that_changed_under_a_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(6, 1)
    with pytest.raises(Cut):
        run(recipe, tmp_path, CutAfter(1))
    load = run_module.load_data

    def other(recipe: Recipe, labels: int) -> Any:
        data = load(recipe)
        changed = data.train_labels.clone()
        changed[labels] = (changed[labels] + 1) % 10
        return replace(data, train_labels=changed)

    monkeypatch.setattr(run_module, "load_data", partial(other, labels=7))
    with pytest.raises(FedsieveError, match="The data are not those that the run"):
        run(recipe, tmp_path)
