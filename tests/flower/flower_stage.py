"""A small federation in one process, whose messages a test may watch and spoil."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contract_stage import recipe_for
from flwr.app import Message

from fedsieve.flower import client
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.server import federate
from fedsieve.flower.settings import Settings
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe

CLIENTS = 4
FIRST_NODE = 100
Spoil = Callable[[Message, Message], Message | None]


def small_recipe(method: str = "fedavg", **settings: Any) -> Recipe:
    """Three rounds of all four clients with 60 digits each."""
    return recipe_for(
        METHODS[method],
        **{
            "clients_per_round": CLIENTS,
            "sgd": {"epochs": 1, "batch_size": 32, "lr": 0.05, "momentum": 0.5},
            "scene": {
                "clients": CLIENTS,
                "partition": {"kind": "balanced-dirichlet", "alpha": 5.0},
                "noise": {"kind": "symmetric", "low": 0.3, "high": 0.7},
            },
        }
        | settings,
    )


def three_clients(method: str, **settings: Any) -> Recipe:
    """For three real processes: all of three clients with 480 digits each."""
    scene = {
        "clients": 3,
        "partition": {"kind": "balanced-dirichlet", "alpha": 5.0},
        "noise": {"kind": "symmetric", "low": 0.3, "high": 0.7},
    }
    return small_recipe(method, clients_per_round=3, scene=scene, **settings)


class Stage:
    """Folders for a server and its sites; `run` is one life of the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "server"
        self.said: list[str] = []

    def nodes(self) -> dict[int, dict[str, Any]]:
        """Node id → config of nodes that play the clients of the scene."""
        return {
            FIRST_NODE + k: {"client": k, "state-path": str(self.state(k))} for k in range(CLIENTS)
        }

    def state(self, client: int) -> Path:
        return self.folder / f"site-{client}"

    def run(
        self,
        recipe: Recipe,
        grid: InProcessGrid | None = None,
        *,
        sites: int = CLIENTS,
        deadline: float = 60.0,
        wait: float = 0.3,
    ) -> dict[str, Any]:
        grid = grid or InProcessGrid(client.app, self.nodes())
        return federate(grid, Settings(recipe, self.out, sites, deadline, wait), self.said.append)


class SpoiledGrid(InProcessGrid):
    """Replies pass through `spoil(message, reply)`; None is a reply that never comes."""

    def __init__(self, nodes: Mapping[int, Mapping[str, Any]], spoil: Spoil) -> None:
        super().__init__(client.app, nodes)
        self._spoil = spoil
        self.seen: list[tuple[Message, Message | None]] = []

    def deliver(self, message: Message) -> Message | None:
        reply = super().deliver(message)
        assert reply is not None
        spoiled = self._spoil(message, reply)
        self.seen.append((message, spoiled))
        return spoiled


def from_client(client: int, kind: str, change: Spoil) -> Spoil:
    """Spoil what this client answers to messages of this kind."""

    def spoil(message: Message, reply: Message) -> Message | None:
        meta = message.metadata
        if meta.dst_node_id == FIRST_NODE + client and meta.message_type == kind:
            return change(message, reply)
        return reply

    return spoil


def untouched(message: Message, reply: Message) -> Message:
    return reply
