"""Which of Flower's nodes is which site, and messages to them with a deadline.

Flower's node ids change when a site restarts without a key of its own, and its own way to wait for
replies looks every three seconds. So sites are known by the names that they give themselves, and
waiting is done here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedsieve.errors import FedsieveError
from fedsieve.flower.messages import FAILED, HELLO, Hello, check_name
from fedsieve.flower.records import content_bytes, from_content

Say: TypeAlias = Callable[[str], None]
"""Tells the operator of the federation something."""
K = TypeVar("K")

MOST_HELLO_BYTES = 2**20
MOST_QUOTED = 300
"""Characters of a sentence about something that a node sent."""
ASK_AGAIN_SECONDS = 30.0
"""A node that could not say who it is gets asked again after this time."""
HELLO_SECONDS = 3600.0
"""What a node has to say who it is: it may have to read all its images first."""
LATE_SECONDS = 30.0
"""How long Flower keeps a message beyond its deadline."""
NODE_UNAVAILABLE = 5
"""Flower's code for a node that has gone."""


@dataclass(frozen=True)
class Parcel:
    """Something for one node."""

    node: int
    kind: str
    content: RecordDict

    def message(self, ttl: float) -> Message:
        return Message(self.content, self.node, self.kind, ttl=ttl)


def exchange(
    grid: Grid, parcels: Mapping[K, Parcel], seconds: float, meanwhile: Callable[[], None]
) -> dict[K, Message]:
    """Send every parcel and gather the replies; those that are not there in time are missing.

    `meanwhile` is called now and then as long as replies are missing.
    """
    end = time.monotonic() + seconds
    messages = [parcel.message(seconds + LATE_SECONDS) for parcel in parcels.values()]
    # Flower gives no id to a message that it could not take.
    numbers = grid.push_messages(messages)
    waiting = {number: key for number, key in zip(numbers, parcels, strict=False) if number}
    replies: dict[K, Message] = {}
    pause = 0.02
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            # By the message that it answers: for a dead node it is the SuperLink that replies.
            key = waiting.pop(reply.metadata.reply_to_message_id, None)
            if key is not None:
                replies[key] = reply
        left = end - time.monotonic()
        if not waiting or left <= 0:
            break
        time.sleep(min(pause, left))
        meanwhile()
        pause = min(2 * pause, 1.0)
    return replies


class Roster:
    """The nodes that are connected, by site."""

    def __init__(self, grid: Grid, question: RecordDict, say: Say) -> None:
        self._grid = grid
        self._question = question
        self._say = say
        self._asked: dict[str, int] = {}
        """Message that was sent → node that owes an answer to it."""
        self._known: dict[int, Hello] = {}
        """Node → who it is, in the order of arrival."""
        self._silent_until: dict[int, float] = {}
        """Node that is of no use → when to ask it again."""
        self._doubles: set[int] = set()

    def look(self) -> None:
        """Notice who has come and gone; newcomers are asked who they are, without waiting."""
        online = set(self._grid.get_node_ids())
        self._known = {node: hello for node, hello in self._known.items() if node in online}
        self._asked = {number: node for number, node in self._asked.items() if node in online}
        now = time.monotonic()
        busy = {node for node, until in self._silent_until.items() if until > now}
        new = sorted(online - set(self._known) - set(self._asked.values()) - busy)
        if new:
            parcels = [Parcel(node, HELLO, self._question) for node in new]
            numbers = self._grid.push_messages([p.message(HELLO_SECONDS) for p in parcels])
            self._asked |= {n: node for n, node in zip(numbers, new, strict=False) if n}
        if self._asked:
            for reply in self._grid.pull_messages(list(self._asked)):
                node = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    self._hear(node, reply)

    def _hear(self, node: int, reply: Message) -> None:
        try:
            self._known[node] = hello_in(reply)
        except FedsieveError as error:
            self._silent_until[node] = time.monotonic() + ASK_AGAIN_SECONDS
            self._say(f"Node {node} is not a site of this federation: {harmless(str(error))}")

    def sites(self) -> dict[str, tuple[int, Hello]]:
        """Site → its node and what it said of itself.

        Of two nodes with the same name the first one counts as long as it is connected: nobody can
        take over the part of a site that is there.
        """
        found: dict[str, tuple[int, Hello]] = {}
        for node, hello in self._known.items():
            if hello.site not in found:
                found[hello.site] = node, hello
            elif node not in self._doubles:
                self._doubles.add(node)
                self._say(
                    f"Node {node} says that it is {hello.site}, but so does node "
                    f"{found[hello.site][0]}; it has to wait until that one has gone."
                )
        return found

    def lose(self, node: int) -> None:
        """Forget a node of which Flower says that it has gone."""
        self._known.pop(node, None)
        self._silent_until[node] = time.monotonic() + ASK_AGAIN_SECONDS


def hello_in(reply: Message) -> Hello:
    """What a node says of itself, checked."""
    if reply.has_error():
        raise FedsieveError(problem_of(reply))
    size = content_bytes(reply.content)
    if size > MOST_HELLO_BYTES:
        raise FedsieveError(f"its answer has {size:,} bytes.")
    hello: Hello = from_content(reply.content, {"hello": Hello})["hello"]
    check_name("site name", hello.site)
    if hello.samples < 0 or min(hello.shape) < 1 or len(hello.mean) != len(hello.std):
        raise FedsieveError("its answer makes no sense.")
    return hello


def problem_of(reply: Message) -> str:
    """What went wrong at a node, as far as the server may know."""
    if reply.error.code == NODE_UNAVAILABLE:
        return "it is no longer connected."
    if reply.error.code == FAILED:
        kind = reply.error.reason or ""
        named = kind if kind.isidentifier() and len(kind) <= 80 else "an error"
        return f"it failed with {named}; its own errors.log says more."
    return f"it failed (Flower's error {reply.error.code})."


def harmless(text: str) -> str:
    """A sentence that may quote what a node sent, fit for a line of a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:MOST_QUOTED])
