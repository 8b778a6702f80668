"""Where the clients' states live between their rounds: in memory up to a budget, beyond it on disk.

A state is written to `CLIENT-ROUND.safetensors` when it spills or when a checkpoint commits it, and
never overwritten, so the files that the last checkpoint names stay whole while the run goes on.

A checkpoint is written from a `Snapshot`, which another thread may do while the store goes on: the
two share nothing but states, which never change, and never write the same file.
"""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomically
from fedsieve.serial import decode, encode, payload_bytes, to_device
from fedsieve.types import ClientId

BEGIN_ANEW = (
    "delete the folder of that run, or move it away, and its command begins it anew; the other "
    "runs of a grid stay as they are"
)
"""What to do about a run whose checkpoint is damaged."""


def state_file(folder: Path, client: ClientId, round: int) -> Path:
    """The file of a client's state after a round."""
    return folder / f"{client}-{round}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The newest state of every client at one moment."""

    folder: Path
    rounds: Mapping[ClientId, int]
    """Client → round of its newest state, whose file a commit names."""
    unsaved: Mapping[ClientId, Any]
    """Client → that state, if it has no file yet."""

    def write(self, client: ClientId) -> None:
        """Write one of the unsaved states."""
        write_atomically(
            state_file(self.folder, client, self.rounds[client]), encode(self.unsaved[client])
        )

    def remove_older(self) -> None:
        """Remove the files that are of no use once these states are committed; those that the store
        has written since are newer, and stay."""
        for path in self.folder.glob("*.safetensors"):
            named = re.fullmatch(r"(\d+)-(\d+)", path.stem)
            if named and int(named[2]) < self.rounds.get(int(named[1]), 0):
                path.unlink()


class ClientStore:
    """State of every client that has taken part, by client id."""

    def __init__(
        self,
        folder: Path,
        state_type: type[Any],
        *,
        budget_bytes: int,
        device: torch.device,
        committed: Mapping[ClientId, int],
    ) -> None:
        self._folder = folder
        self._type = state_type
        self._stateless = not dataclasses.fields(state_type)
        self._budget = budget_bytes
        self._device = device
        self._memory: OrderedDict[ClientId, Any] = OrderedDict()
        self._sizes: dict[ClientId, int] = {}
        self._unsaved: dict[ClientId, int] = {}
        """Client → round of a state that is in memory only."""
        self._being_saved: dict[ClientId, int] = {}
        """Client → round of a state that is in memory and in a snapshot, but not on disk yet."""
        self._bytes_replaced = 0
        """Of states that only the snapshot holds, because newer ones have come."""
        self._on_disk: dict[ClientId, int] = dict(committed)
        """Client → round of the newest state on disk."""
        self.bytes_in_memory = 0
        """Of the states that are here, and of those that a snapshot still holds."""
        self._discard_uncommitted()

    def get(self, client: ClientId) -> Any | None:
        """The client's state, or None before its first round."""
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        if client not in self._on_disk:
            return None
        state = self._read(client)
        self._remember(client, state)
        return state

    def _read(self, client: ClientId) -> Any:
        path = self._path(client, self._on_disk[client])
        try:
            state = decode(self._type, path.read_bytes())
        except (OSError, FedsieveError) as error:
            raise FedsieveError(
                f"The saved state of client {client} cannot be read ({path}: {error}); "
                f"{BEGIN_ANEW}."
            ) from None
        return to_device(state, self._device)

    def put(self, client: ClientId, state: Any, round: int) -> None:
        """Keep the state that the client had at the end of `round`."""
        if self._stateless:
            return
        self._unsaved[client] = round
        if self._being_saved.pop(client, None) is not None:
            self._bytes_replaced += self._sizes.pop(client)  # which the snapshot goes on holding
        self._remember(client, state)

    def snapshot(self) -> Snapshot:
        """What a checkpoint of this moment consists of; `saved` says that all of it is on disk."""
        self._being_saved |= self._unsaved
        self._unsaved.clear()
        unsaved = {client: self._memory[client] for client in self._being_saved}
        return Snapshot(self._folder, self._on_disk | self._being_saved, unsaved)

    def saved(self) -> None:
        """Take note that the last snapshot is on disk."""
        self._on_disk |= self._being_saved
        self._being_saved.clear()
        self.bytes_in_memory -= self._bytes_replaced
        self._bytes_replaced = 0
        self._make_room()

    def _discard_uncommitted(self) -> None:
        committed = {self._path(client, round) for client, round in self._on_disk.items()}
        for path in self._folder.glob("*.safetensors"):
            if path not in committed:
                path.unlink()

    def _path(self, client: ClientId, round: int) -> Path:
        return state_file(self._folder, client, round)

    def _remember(self, client: ClientId, state: Any) -> None:
        self._memory[client] = state
        self._memory.move_to_end(client)
        self.bytes_in_memory -= self._sizes.get(client, 0)
        self._sizes[client] = payload_bytes(state)
        self.bytes_in_memory += self._sizes[client]
        self._make_room()

    def _make_room(self) -> None:
        """Forget the states that were not used for the longest time, down to the budget; but not
        the one that was used last, nor what a snapshot holds as well, which would free nothing."""
        if self.bytes_in_memory <= self._budget:
            return
        for client in list(self._memory)[:-1]:
            if client in self._being_saved:
                continue
            if client in self._unsaved:
                self._write(client)
            del self._memory[client]
            self.bytes_in_memory -= self._sizes.pop(client)
            if self.bytes_in_memory <= self._budget:
                break

    def _write(self, client: ClientId) -> None:
        round = self._unsaved.pop(client)
        write_atomically(self._path(client, round), encode(self._memory[client]))
        self._on_disk[client] = round
