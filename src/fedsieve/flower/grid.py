"""A federation in one process: Flower's messages without its servers, for tests and measuring."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RAISED = 2
"""Flower's code for a ClientApp that raised an exception."""


class InProcessGrid(Grid):  # type: ignore[misc, unused-ignore]
    """Runs the ClientApp of a node as soon as a message to it is pushed."""

    def __init__(self, client_app: ClientApp, nodes: Mapping[int, Mapping[str, Any]]) -> None:
        """`nodes` is node id → node config."""
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._client_app = client_app
        self.nodes = {
            node: Context(1, node, dict(config), RecordDict(), {}) for node, config in nodes.items()
        }
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        name = uuid4().hex
        message.metadata.__dict__["_message_id"] = name
        reply = self.deliver(message)
        if reply is not None:
            self._replies[name] = reply
        return name

    def deliver(self, message: Message) -> Message | None:
        """The reply of the node that `message` is for; None where none ever comes."""
        try:
            return self._client_app(message, self.nodes[message.metadata.dst_node_id])
        except Exception:
            return Message(Error(RAISED, traceback.format_exc()), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError("Flower has given this up: make a Message instead.")

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("A federation in one process has no run of Flower's.")

    @property
    def run(self) -> Run:
        raise NotImplementedError("A federation in one process has no run of Flower's.")
