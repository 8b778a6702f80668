"""Client states between rounds: in memory up to a budget, beyond it on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.methods.fedavg import Client as Stateless
from fedsieve.simulate.store import ClientStore
from helpers import same_bits


@dataclass(frozen=True)
class State:
    values: Tensor
    visits: int


SIZE = 4 * 100 + 8
"""Bytes of a state with 100 float32 and one number."""


def state(number: float, visits: int = 1) -> State:
    return State(torch.full((100,), float(number)), visits)


def store_in(
    folder: Path, budget: int = 10**9, committed: Mapping[int, int] | None = None
) -> ClientStore:
    return ClientStore(
        folder,
        State,
        budget_bytes=budget,
        device=torch.device("cpu"),
        committed=committed or {},
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_client_has_no_state_before_its_first_round(tmp_path: Path) -> None:
    store = store_in(tmp_path / "clients")
    assert store.get(3) is None
    kept = state(1.0)
    store.put(3, kept, 0)
    assert store.get(3) is kept
    assert store.bytes_in_memory == SIZE
    assert files(tmp_path / "clients") == [], "nothing is written before it must be"


def test_the_oldest_states_spill_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=2 * SIZE)
    kept = {client: State(torch.randn(100), client) for client in range(4)}
    for client, held in kept.items():
        store.put(client, held, 7)
        assert store.bytes_in_memory <= 2 * SIZE
    assert files(tmp_path) == ["0-7.safetensors", "1-7.safetensors"]
    for client, held in kept.items():
        back = store.get(client)
        assert isinstance(back, State)
        assert same_bits(back.values, held.values)
        assert back.visits == client
        assert store.bytes_in_memory <= 2 * SIZE


def test_reading_a_state_keeps_it_in_memory(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=2 * SIZE)
    store.put(0, state(0), 1)
    store.put(1, state(1), 1)
    store.get(0)
    store.put(2, state(2), 1)
    assert files(tmp_path) == ["1-1.safetensors"], "client 1 was used longest ago"


def test_one_state_above_the_budget_is_still_kept(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=1)
    store.put(0, state(5), 1)
    assert store.get(0).values[0] == 5  # type: ignore[union-attr]
    store.put(1, state(6), 1)
    assert files(tmp_path) == ["0-1.safetensors"]
    assert store.bytes_in_memory == SIZE


def test_a_state_that_changed_size_is_counted_anew(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(0, state(5), 1)
    store.put(0, State(torch.zeros(1), 1), 2)
    assert store.bytes_in_memory == 4 + 8


def test_saving_writes_what_is_new_and_names_every_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(0, state(0), 1)
    store.put(5, state(5), 1)
    assert store.save() == {0: 1, 5: 1}
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    store.put(5, state(6), 2)
    store.put(5, state(7), 3)
    assert store.save() == {0: 1, 5: 3}
    assert files(tmp_path) == ["0-1.safetensors", "5-1.safetensors", "5-3.safetensors"]
    for name, time in before.items():
        assert (tmp_path / name).stat().st_mtime_ns == time, "a file is never written twice"
    store.forget_old({0: 1, 5: 3})
    assert files(tmp_path) == ["0-1.safetensors", "5-3.safetensors"]


def test_a_spilled_state_does_not_touch_what_the_last_checkpoint_names(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=SIZE)
    store.put(0, state(1), 1)
    committed = store.save()
    store.put(0, state(2), 2)
    store.put(1, state(3), 2)  # spills client 0's state of round 2
    assert files(tmp_path) == ["0-1.safetensors", "0-2.safetensors"]
    store.forget_old(committed)
    assert files(tmp_path) == ["0-1.safetensors", "0-2.safetensors"], "both may still be needed"
    # A crash here: the next process goes on from the checkpoint, as if round 2 had never been.
    resumed = store_in(tmp_path, committed=committed)
    assert files(tmp_path) == ["0-1.safetensors"]
    assert resumed.get(0).values[0] == 1  # type: ignore[union-attr]
    assert resumed.get(1) is None


def test_files_that_no_checkpoint_names_are_discarded_when_resuming(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for round in (1, 2):
        store.put(0, state(round), round)
        store.put(3, state(round), round)
        store.save()
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    store_in(tmp_path, committed={0: 1})
    assert files(tmp_path) == ["0-1.safetensors", "notes.txt"]


def test_a_stateless_client_leaves_nothing(tmp_path: Path) -> None:
    store = ClientStore(
        tmp_path, Stateless, budget_bytes=1, device=torch.device("cpu"), committed={}
    )
    store.put(0, Stateless(), 0)
    assert store.save() == {}
    assert store.get(0) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "missing", "other record"])
def test_a_damaged_state_is_named_in_one_sentence(tmp_path: Path, damage: str) -> None:
    store = store_in(tmp_path)
    store.put(4, state(1), 9)
    committed = store.save()
    path = tmp_path / "4-9.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"something else")
    with pytest.raises(FedsieveError) as caught:
        store_in(tmp_path, committed=committed).get(4)
    text = str(caught.value)
    assert text.startswith("The saved state of client 4 cannot be read")
    assert "4-9.safetensors" in text
    assert text.endswith("start the run again in a new folder.")
    assert "\n" not in text


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "checkpoint", "crash"]), st.integers(0, 4)),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(actions=ACTIONS, room=st.integers(1, 4))
def test_a_store_is_a_dictionary_that_survives_crashes(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], room: int
) -> None:
    """Against two plain dictionaries: what is there now, and what was at the last checkpoint."""
    folder = tmp_path_factory.mktemp("store")
    now: dict[int, float] = {}
    safe: dict[int, float] = {}
    committed: Mapping[int, int] = {}
    store = store_in(folder, budget=room * SIZE)
    for round, (action, client) in enumerate(actions):
        if action == "put":
            now[client] = float(round)
            store.put(client, state(round), round)
        elif action == "checkpoint":
            committed = store.save()
            store.forget_old(committed)
            safe = dict(now)
            assert len(files(folder)) == len(committed)
        elif action == "crash":
            store = store_in(folder, budget=room * SIZE, committed=committed)
            now = dict(safe)
        held = store.get(client)
        assert (None if held is None else float(held.values[0])) == now.get(client)
        assert store.bytes_in_memory <= room * SIZE
