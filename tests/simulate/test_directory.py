"""The folder of a run: whose it is, what it holds, where it goes on."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.methods import fedprox
from fedsieve.recipe import Recipe, recipe_from_table
from fedsieve.simulate.directory import (
    CLIENTS,
    METRICS,
    Checkpoint,
    RunDirectory,
    command_line,
    environment,
    finite_json,
    first_difference,
    read_lines,
    without_secrets,
)
from helpers import tiny_recipe, with_engine


@dataclass(frozen=True)
class Server:
    values: Tensor


def commit(
    directory: RunDirectory, rounds_done: int, clients: Mapping[int, int] | None = None
) -> None:
    directory.commit(directory.checkpoint(rounds_done, clients or {}))


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(FedsieveError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------------- whose it is


def test_a_new_folder_becomes_the_recipes_own(tmp_path: Path) -> None:
    recipe, folder = tiny_recipe(), tmp_path / "deep" / "run"
    directory = RunDirectory(folder)
    directory.claim(recipe)
    directory.claim(recipe)
    table = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    assert recipe_from_table(table) == recipe
    started = json.loads((folder / "env.json").read_bytes())
    assert started["torch"] == torch.__version__
    assert started["gpu"] is None or torch.cuda.is_available()
    assert set(started) == set(environment())


def command_on_record(folder: Path) -> str | None:
    record: dict[str, Any] = json.loads((folder / "env.json").read_bytes())
    command: str | None = record["command"]
    return command


def test_the_command_on_record_is_this_process_s_or_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fedsieve", "run", "demo", "--name", "a b"])
    told = {"own": None, "given": "fedsieve deploy server x", "unknown": ""}
    for name, command in told.items():
        RunDirectory(tmp_path / name).claim(tiny_recipe(), command)
    assert command_on_record(tmp_path / "own") == "fedsieve run demo --name 'a b'"
    assert command_on_record(tmp_path / "given") == "fedsieve deploy server x"
    assert command_on_record(tmp_path / "unknown") is None


def test_a_module_is_named_as_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/lib/fedsieve/__main__.py", "run", "demo"])
    assert command_line() == "python -m fedsieve run demo"


def test_a_secret_is_not_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/usr/bin/mine.py", "--token", "s3cr3t", "run", "--api-Token=s3cr3t", "--out", "x"]
    monkeypatch.setattr(sys, "argv", words)
    RunDirectory(tmp_path).claim(tiny_recipe())
    assert command_on_record(tmp_path) == "mine.py run --out x"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--db.password", "p", "--seed", "3"], ["--seed", "3"]),
        (["-secret=a\nb", "run"], ["run"]),
        (["run", "--token"], ["run"]),
        (["--token", "--secret", "p", "run"], ["run"]),
        (["token", "--out", "secret"], ["token", "--out", "secret"]),
    ],
)
def test_options_that_are_called_secrets_are_left_out(words: list[str], kept: list[str]) -> None:
    assert without_secrets(words) == kept


def test_the_engine_may_change_between_two_starts(tmp_path: Path) -> None:
    recipe, directory = tiny_recipe(), RunDirectory(tmp_path)
    directory.claim(recipe)
    before = (tmp_path / "env.json").read_bytes()
    other = with_engine(recipe, workers=4, checkpoint_rounds=9)
    directory.claim(other)
    table = tomllib.loads((tmp_path / "config.toml").read_text(encoding="utf-8"))
    assert recipe_from_table(table) == other
    assert (tmp_path / "env.json").read_bytes() == before, "the first start is on record"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda r: replace(r, seed=4), "seed = 3 (not 4)"),
        (lambda r: replace(r, rounds=9), "rounds = 4 (not 9)"),
        (lambda r: replace(r, sgd=replace(r.sgd, lr=0.5)), "sgd.lr = 0.05 (not 0.5)"),
        (
            lambda r: replace(r, scene=replace(r.scene, clients=7)),
            "scene.clients = 6 (not 7)",
        ),
        (
            lambda r: replace(r, method=fedprox.Config()),
            "method.name = 'fedavg' (not 'fedprox')",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_folder_of_another_run_is_refused(
    tmp_path: Path, change: Callable[[Recipe], Recipe], difference: str
) -> None:
    recipe, directory = tiny_recipe(), RunDirectory(tmp_path)
    directory.claim(recipe)
    before = (tmp_path / "config.toml").read_bytes()
    assert refusal(lambda: directory.claim(change(recipe))) == (
        f"{tmp_path} already holds a run with {difference}; give another folder with --out, or "
        "delete that one."
    )
    assert (tmp_path / "config.toml").read_bytes() == before


@pytest.mark.parametrize("content", ["seed = = 1", "sede = 1"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.toml").write_text(content, encoding="utf-8")
    text = refusal(lambda: RunDirectory(tmp_path).claim(tiny_recipe()))
    assert text.startswith(f"{tmp_path / 'config.toml'} cannot be read (")
    assert text.endswith("give another folder with --out.")


def test_the_first_difference_of_two_tables() -> None:
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 2}}) is None
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == "a.c = 2 (not 3)"
    assert first_difference({"a": 1}, {}) == "a = 1 (not None)"
    assert first_difference({"a": {"b": 1}}, {"a": 2}) == "a = {'b': 1} (not 2)"
    assert first_difference({"a": 1, "name": "x"}, {"a": 2, "name": "y"}) == "name = 'x' (not 'y')"


def test_a_second_user_of_the_folder_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).lock():

        def second() -> None:
            with RunDirectory(tmp_path).lock():
                pass

        assert refusal(second) == (
            f"Another fedsieve process is running in {tmp_path}; wait for it, or give another "
            "folder with --out."
        )
    second()


def test_a_file_cannot_be_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")

    def lock() -> None:
        with RunDirectory(tmp_path / "file").lock():
            pass

    assert refusal(lock) == (
        f"{tmp_path / 'file'} is a file, not a folder; give another one with --out."
    )


# ------------------------------------------------------------------------------------------ logs


def test_lines_are_visible_at_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS,), None)
        directory.append(METRICS, {"round": 0, "accuracy": 12.5, "loss": math.nan})
        assert directory.lines() == [{"round": 0, "accuracy": 12.5, "loss": None}]
        directory.append(METRICS, {"round": 1})
        assert read_lines(tmp_path / METRICS)[1] == {"round": 1}


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / METRICS) == []


@pytest.mark.parametrize("rest", [b"", b'{"round": 2, "accu', b'{"round": 2}'])
def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / METRICS).write_bytes(b'{"round": 0}\n{"round": 1}\n' + rest)
    assert [line["round"] for line in read_lines(tmp_path / METRICS)] == [0, 1]


def test_logs_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS, "clients.jsonl"), None)
        directory.append(METRICS, {"round": 0})
        directory.append("clients.jsonl", {"client": 7})
        commit(directory, 1)
        directory.append(METRICS, {"round": 1})
        directory.append("clients.jsonl", {"client": 8})
    checkpoint = directory.last_checkpoint()
    assert checkpoint is not None
    assert checkpoint.log_bytes == {METRICS: len('{"round":0}\n'), "clients.jsonl": 13}
    with directory.lock():
        assert len(directory.lines()) == 2
        directory.open_logs((METRICS, "clients.jsonl"), directory.last_checkpoint())
        assert directory.lines() == [{"round": 0}]
        directory.append(METRICS, {"round": 1, "again": True})
    assert directory.lines() == [{"round": 0}, {"round": 1, "again": True}]
    assert directory.lines("clients.jsonl") == [{"client": 7}]


def test_lines_after_the_moment_of_a_checkpoint_are_not_part_of_it(tmp_path: Path) -> None:
    """As when rounds go on while its states are being written."""
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS,), None)
        directory.append(METRICS, {"round": 0})
        checkpoint = directory.checkpoint(1, {})
        directory.append(METRICS, {"round": 1})
        directory.commit(checkpoint)
    with directory.lock():
        directory.open_logs((METRICS,), directory.last_checkpoint())
    assert directory.lines() == [{"round": 0}]


def test_lines_of_clients_may_be_switched_off_and_on_between_checkpoints(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS, CLIENTS), None)
        directory.append(CLIENTS, {"client": 1})
        commit(directory, 1)
    with directory.lock():  # off, and a checkpoint meanwhile
        directory.open_logs((METRICS,), directory.last_checkpoint())
        commit(directory, 2)
    with directory.lock():  # on again, then killed before the next checkpoint
        directory.open_logs((METRICS, CLIENTS), directory.last_checkpoint())
        directory.append(CLIENTS, {"client": 2})
    with directory.lock():
        directory.open_logs((METRICS,), directory.last_checkpoint())
    assert directory.lines(CLIENTS) == [{"client": 1}]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_summary_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    text = refusal(RunDirectory(tmp_path).summary)
    assert text.startswith(f"{tmp_path / 'summary.json'} is damaged (")
    assert "); delete it and give the same command again" in text


def test_a_damaged_log_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"round": \n')
    assert "is damaged" in refusal(lambda: read_lines(tmp_path / METRICS))
    (tmp_path / METRICS).write_text('{"round": 0}\n7\n')
    assert "is damaged" in refusal(lambda: read_lines(tmp_path / METRICS))


def test_without_a_checkpoint_a_log_begins_anew(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"round": 0}\n')
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS,), None)
        assert directory.lines() == []


def test_a_log_that_lost_lines_is_noticed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.lock():
        directory.open_logs((METRICS,), None)
        directory.append(METRICS, {"round": 0})
        commit(directory, 1)
    (tmp_path / METRICS).unlink()
    checkpoint = directory.last_checkpoint()
    with directory.lock():
        text = refusal(lambda: directory.open_logs((METRICS,), checkpoint))
    assert "lacks lines that the checkpoint counts on; delete the folder of that run" in text


# ----------------------------------------------------------------------------------- checkpoints


def test_the_last_commit_is_where_a_run_goes_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.last_checkpoint() is None
    for rounds, number in ((2, 1.5), (4, 2.5)):
        directory.save_server(rounds, Server(torch.tensor([number])))
        commit(directory, rounds, {0: 1, 11: rounds - 1})
    found = directory.last_checkpoint()
    assert found == Checkpoint(4, {0: 1, 11: 3}, {})
    assert found is not None
    assert directory.load_server(found, Server).values.tolist() == [2.5]
    assert [p.name for p in (tmp_path / "checkpoint").glob("server*")] == ["server-4.safetensors"]


def test_a_server_without_a_commit_does_not_count(tmp_path: Path) -> None:
    """The moment between the two writes of a checkpoint."""
    directory = RunDirectory(tmp_path)
    directory.save_server(2, Server(torch.tensor([1.0])))
    commit(directory, 2)
    directory.save_server(4, Server(torch.tensor([2.0])))
    found = directory.last_checkpoint()
    assert found is not None
    assert found.rounds_done == 2
    assert directory.load_server(found, Server).values.tolist() == [1.0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"rounds_done": 1}',
        b'{"rounds_done": "x", "clients": {}, "log_bytes": {}}',
        b'{"rounds_done": 1, "clients": [], "log_bytes": {}}',
        b'{"rounds_done": 1, "clients": {"a": 1}, "log_bytes": {}}',
        b'{"rounds_done": 1, "clients": {}, "log_bytes": 3}',
        b'{"rounds_done": 1, "clients": {}, "log_bytes": {"metrics.jsonl": null}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_commit_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "commit.json").write_bytes(content)
    text = refusal(RunDirectory(tmp_path).last_checkpoint)
    assert text.startswith(f"The checkpoint {tmp_path / 'checkpoint' / 'commit.json'} cannot be")
    assert "; delete the folder of that run, or move it away" in text


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_server_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_server(3, Server(torch.zeros(8)))
    commit(directory, 3)
    checkpoint = directory.last_checkpoint()
    assert checkpoint is not None
    path = tmp_path / "checkpoint" / "server-3.safetensors"
    path.write_bytes(path.read_bytes()[:-8]) if damage == "cut" else path.unlink()
    text = refusal(lambda: directory.load_server(checkpoint, Server))
    assert text.startswith(f"The checkpoint {path} cannot be read (")


def test_a_summary_is_there_when_a_run_is_finished(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.summary() is None
    directory.finish({"best": 1.5, "auroc": math.nan})
    assert directory.summary() == {"best": 1.5, "auroc": None}


def test_json_has_no_nan() -> None:
    value = {1: [1.5, math.nan, (math.inf, "x")], "b": {"c": -math.inf, "d": None}, "e": True}
    assert finite_json(value) == {
        "1": [1.5, None, [None, "x"]],
        "b": {"c": None, "d": None},
        "e": True,
    }
