"""Where the clients' states live between their rounds: in memory up to a budget, beyond it on disk.

A state is written to `CLIENT-ROUND.safetensors` when it spills or when a checkpoint commits it, and
never overwritten, so the files that the last checkpoint names stay whole while the run goes on.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomically
from fedsieve.serial import decode, encode, payload_bytes, to_device
from fedsieve.types import ClientId


def state_file(folder: Path, client: ClientId, round: int) -> Path:
    """The file of a client's state after a round."""
    return folder / f"{client}-{round}.safetensors"


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
        self._on_disk: dict[ClientId, int] = dict(committed)
        """Client → round of the newest state on disk."""
        self.bytes_in_memory = 0
        self._discard_uncommitted()

    def get(self, client: ClientId) -> Any | None:
        """The client's state, or None before its first round."""
        if client in self._memory:
            self._memory.move_to_end(client)
            return self._memory[client]
        if client not in self._on_disk:
            return None
        path = self._path(client, self._on_disk[client])
        try:
            state = decode(self._type, path.read_bytes())
        except (OSError, FedsieveError) as error:
            raise FedsieveError(
                f"The saved state of client {client} cannot be read ({path}: {error}); "
                "start the run again in a new folder."
            ) from None
        state = to_device(state, self._device)
        self._remember(client, state)
        return state

    def put(self, client: ClientId, state: Any, round: int) -> None:
        """Keep the state that the client had at the end of `round`."""
        if self._stateless:
            return
        self._unsaved[client] = round
        self._remember(client, state)

    def save(self) -> Mapping[ClientId, int]:
        """Write every unsaved state; the result names the file of every client (its round)."""
        for client in sorted(self._unsaved):
            self._write(client)
        return dict(self._on_disk)

    def forget_old(self, committed: Mapping[ClientId, int]) -> None:
        """Remove files that no checkpoint names any more."""
        keep = {self._path(client, round).name for client, round in committed.items()}
        keep |= {self._path(client, round).name for client, round in self._on_disk.items()}
        for path in self._folder.glob("*.safetensors"):
            if path.name not in keep:
                path.unlink()

    def _discard_uncommitted(self) -> None:
        if self._folder.is_dir():
            self.forget_old({})

    def _path(self, client: ClientId, round: int) -> Path:
        return state_file(self._folder, client, round)

    def _remember(self, client: ClientId, state: Any) -> None:
        self._memory[client] = state
        self._memory.move_to_end(client)
        self.bytes_in_memory -= self._sizes.get(client, 0)
        self._sizes[client] = payload_bytes(state)
        self.bytes_in_memory += self._sizes[client]
        while self.bytes_in_memory > self._budget and len(self._memory) > 1:
            oldest = next(iter(self._memory))
            if oldest in self._unsaved:
                self._write(oldest)
            del self._memory[oldest]
            self.bytes_in_memory -= self._sizes.pop(oldest)

    def _write(self, client: ClientId) -> None:
        round = self._unsaved.pop(client)
        write_atomically(self._path(client, round), encode(self._memory[client]))
        self._on_disk[client] = round
