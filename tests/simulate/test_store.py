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
from fedsieve.simulate.store import ClientStore, Snapshot
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


def write(snapshot: Snapshot) -> None:
    for client in snapshot.unsaved:
        snapshot.write(client)


def save(store: ClientStore) -> Snapshot:
    """What a checkpoint does with a store, all at once."""
    snapshot = store.snapshot()
    write(snapshot)
    store.saved()
    return snapshot


def names(rounds: Mapping[int, int]) -> list[str]:
    return sorted(f"{client}-{round}.safetensors" for client, round in rounds.items())


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
    assert save(store).rounds == {0: 1, 5: 1}
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    store.put(5, state(6), 2)
    store.put(5, state(7), 3)
    snapshot = save(store)
    assert snapshot.rounds == {0: 1, 5: 3}
    assert files(tmp_path) == ["0-1.safetensors", "5-1.safetensors", "5-3.safetensors"]
    for name, time in before.items():
        assert (tmp_path / name).stat().st_mtime_ns == time, "a file is never written twice"
    snapshot.remove_older()
    assert files(tmp_path) == ["0-1.safetensors", "5-3.safetensors"]


def test_a_spilled_state_does_not_touch_what_the_last_checkpoint_names(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=SIZE)
    store.put(0, state(1), 1)
    snapshot = save(store)
    store.put(0, state(2), 2)
    store.put(1, state(3), 2)  # spills client 0's state of round 2
    assert files(tmp_path) == ["0-1.safetensors", "0-2.safetensors"]
    snapshot.remove_older()
    assert files(tmp_path) == ["0-1.safetensors", "0-2.safetensors"], "both may still be needed"
    # A crash here: the next process goes on from the checkpoint, as if round 2 had never been.
    resumed = store_in(tmp_path, committed=snapshot.rounds)
    assert files(tmp_path) == ["0-1.safetensors"]
    assert resumed.get(0).values[0] == 1  # type: ignore[union-attr]
    assert resumed.get(1) is None


def test_files_that_no_checkpoint_names_are_discarded_when_resuming(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for round in (1, 2):
        store.put(0, state(round), round)
        store.put(3, state(round), round)
        save(store)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    store_in(tmp_path, committed={0: 1})
    assert files(tmp_path) == ["0-1.safetensors", "notes.txt"]


def test_a_stateless_client_leaves_nothing(tmp_path: Path) -> None:
    store = ClientStore(
        tmp_path, Stateless, budget_bytes=1, device=torch.device("cpu"), committed={}
    )
    store.put(0, Stateless(), 0)
    assert save(store).rounds == {}
    assert store.get(0) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "missing", "other record"])
def test_a_damaged_state_is_named_in_one_sentence(tmp_path: Path, damage: str) -> None:
    store = store_in(tmp_path)
    store.put(4, state(1), 9)
    committed = save(store).rounds
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
    assert "; delete the folder of that run, or move it away" in text
    assert "\n" not in text


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "get", "snapshot", "write", "note", "crash"]),
        st.integers(0, 4),
    ),
    max_size=40,
)


class Writing:
    """A checkpoint that is written file by file while other things happen."""

    def __init__(self, store: ClientStore, held: Mapping[int, float]) -> None:
        self.snapshot = store.snapshot()
        self.held = dict(held)
        self._left = list(self.snapshot.unsaved)
        self.committed = False

    def step(self) -> None:
        if self._left:
            self.snapshot.write(self._left.pop())
        elif not self.committed:
            self.committed = True
        else:
            self.snapshot.remove_older()


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, room=st.integers(1, 6))
def test_a_store_is_a_dictionary_that_survives_crashes(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], room: int
) -> None:
    """Against two plain dictionaries: what is there now, and what was at the last checkpoint. The
    writing of one goes on between whatever else happens, and a crash may come anywhere in it."""
    folder = tmp_path_factory.mktemp("store")
    now: dict[int, float] = {}
    safe: dict[int, float] = {}
    committed: Mapping[int, int] = {}
    writing: Writing | None = None
    store = store_in(folder, budget=room * SIZE)
    for round, (action, client) in enumerate(actions):
        if action == "put":
            now[client] = float(round)
            store.put(client, state(round), round)
        elif action == "snapshot" and writing is None:
            writing = Writing(store, now)
        elif action == "write" and writing is not None:
            writing.step()
            if writing.committed:
                safe, committed = writing.held, writing.snapshot.rounds
        elif action == "note" and writing is not None and writing.committed:
            writing.snapshot.remove_older()
            store.saved()
            writing = None
        elif action == "crash":
            store = store_in(folder, budget=room * SIZE, committed=committed)
            now, writing = dict(safe), None
            assert files(folder) == names(committed)
        held = store.get(client)
        assert (None if held is None else float(held.values[0])) == now.get(client)
        held_anyway = 1 + (0 if writing is None else len(writing.snapshot.unsaved))
        assert store.bytes_in_memory <= max(room, held_anyway) * SIZE
        assert set(names(committed)) <= set(files(folder))
    resumed = store_in(folder, committed=committed)
    for client, value in safe.items():
        assert float(resumed.get(client).values[0]) == value  # type: ignore[union-attr]


def test_newer_states_do_not_change_a_snapshot(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(0, state(1), 1)
    store.put(1, state(1), 1)
    snapshot = store.snapshot()
    store.put(0, state(2), 2)
    store.put(2, state(2), 2)
    write(snapshot)
    store.saved()
    assert snapshot.rounds == {0: 1, 1: 1}
    assert files(tmp_path) == ["0-1.safetensors", "1-1.safetensors"]
    committed = store_in(tmp_path, committed=snapshot.rounds)
    assert [float(committed.get(k).values[0]) for k in (0, 1)] == [1, 1]  # type: ignore[union-attr]
    after = store.snapshot()
    assert after.rounds == {0: 2, 1: 1, 2: 2}
    assert sorted(after.unsaved) == [0, 2], "what is newer than the snapshot is still to be saved"


def test_what_is_being_saved_is_neither_lost_nor_written_twice(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=2 * SIZE)
    kept = state(1)
    store.put(0, kept, 1)
    snapshot = store.snapshot()
    store.put(1, state(2), 2)
    store.put(2, state(3), 3)  # no room for three: client 1's state spills, client 0's need not
    assert files(tmp_path) == ["1-2.safetensors"]
    assert store.get(0) is kept
    write(snapshot)
    store.saved()
    assert files(tmp_path) == ["0-1.safetensors", "1-2.safetensors"]
    assert [store.get(k).values[0] for k in range(3)] == [1, 2, 3]  # type: ignore[union-attr]


def test_a_newer_state_that_spills_is_not_mistaken_for_the_one_being_saved(tmp_path: Path) -> None:
    store = store_in(tmp_path, budget=SIZE)
    store.put(0, state(1), 1)
    snapshot = store.snapshot()
    store.put(0, state(2), 2)
    store.put(1, state(2), 2)  # client 0's newer state spills
    assert store.get(0).values[0] == 2  # type: ignore[union-attr]
    store.get(1)
    write(snapshot)
    store.saved()
    snapshot.remove_older()
    assert store.get(0).values[0] == 2  # type: ignore[union-attr]
    assert store.snapshot().rounds == {0: 2, 1: 2}


def test_states_of_a_snapshot_count_as_memory(tmp_path: Path) -> None:
    """Three of them, and one newer: together no more than there is room for."""
    store = store_in(tmp_path, budget=4 * SIZE)
    for client in range(3):
        store.put(client, state(client), 1)
    snapshot = store.snapshot()
    for client in range(3):
        store.put(client, state(9), 2)
        assert store.bytes_in_memory == 4 * SIZE
    assert files(tmp_path) == ["0-2.safetensors", "1-2.safetensors"]
    write(snapshot)
    store.saved()
    for client in range(3):
        store.get(client)
    assert store.bytes_in_memory == 3 * SIZE, "all may come back when it is written"


def test_a_snapshot_does_not_drive_out_what_it_holds_itself(tmp_path: Path) -> None:
    """Ten states, all of them in the snapshot, and room for twelve: of three newer ones one must
    go, and nobody else."""
    store = store_in(tmp_path, budget=12 * SIZE)
    kept = [state(client) for client in range(10)]
    for client, held in enumerate(kept):
        store.put(client, held, 1)
    store.snapshot()
    for client in range(3):
        store.put(client, state(9), 2)
    assert files(tmp_path) == ["0-2.safetensors"]
    assert all(store.get(client) is kept[client] for client in range(3, 10))


def test_a_snapshot_that_was_never_written_is_part_of_the_next(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put(0, state(1), 1)
    store.put(1, state(1), 1)
    store.snapshot()
    store.put(1, state(2), 2)
    again = store.snapshot()
    assert again.rounds == {0: 1, 1: 2}
    assert {client: float(held.values[0]) for client, held in again.unsaved.items()} == {0: 1, 1: 2}
