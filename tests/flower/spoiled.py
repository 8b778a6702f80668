"""Replies as no honest site would send them. Without pytest: real sites use them, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedsieve.flower.messages import Receipt
from fedsieve.flower.records import from_content, metrics_of, to_content
from fedsieve.methods import fedavg, fedgr

Spoil: TypeAlias = Callable[[Message, Message], Message]
"""Message and honest reply → what is sent instead."""


def up_in(reply: Message, kind: type[Any] = fedavg.Up) -> tuple[Any, Receipt, dict[str, float]]:
    records = from_content(reply.content, {"up": kind, "receipt": Receipt})
    return records["up"], records["receipt"], metrics_of(reply.content)


def with_up(change: Callable[[Any], Any], kind: type[Any] = fedavg.Up) -> Spoil:
    """The same reply with another update in it."""

    def spoil(message: Message, reply: Message) -> Message:
        up, receipt, metrics = up_in(reply, kind)
        return Message(to_content(metrics, up=change(up), receipt=receipt), reply_to=message)

    return spoil


def one_value(value: float) -> Callable[[fedavg.Up], fedavg.Up]:
    def change(up: fedavg.Up) -> fedavg.Up:
        name, tensor = next(iter(up.weights.items()))
        spoiled = tensor.clone()
        spoiled.view(-1)[0] = value
        return replace(up, weights={**up.weights, name: spoiled})

    return change


def fewer_classes(up: fedavg.Up) -> fedavg.Up:
    """As of a site that knows seven of the ten classes."""
    return replace(up, weights={n: t[:7] if len(t) == 10 else t for n, t in up.weights.items()})


def one_dimension_more(up: fedavg.Up) -> fedavg.Up:
    return replace(up, weights={n: t[None] for n, t in up.weights.items()})


def foreign(message: Message, reply: Message) -> Message:
    up, receipt, metrics = up_in(reply)
    other = fedgr.Up(up.weights, up.samples, torch.arange(2), torch.zeros(2))
    return Message(to_content(metrics, up=other, receipt=receipt), reply_to=message)


def disguised(message: Message, reply: Message) -> Message:
    """FedProx has the same Up as FedAvg; only the receipt tells them apart."""
    up, receipt, metrics = up_in(reply)
    receipt = replace(receipt, method="fedprox")
    return Message(to_content(metrics, up=up, receipt=receipt), reply_to=message)


def a_gigabyte(message: Message, reply: Message) -> Message:
    nothing = ArrayRecord()
    nothing["zeros"] = Array("uint8", (2**30,), "numpy.ndarray", bytes(2**30))
    return Message(RecordDict({"up.tensors": nothing}), reply_to=message)


DEADLINE = 90.0
"""Long enough for the honest sites on a busy machine: the last round takes as long as this."""


def late(message: Message, reply: Message) -> Message:
    time.sleep(DEADLINE + 5)
    return reply


ROUND_BY_ROUND: tuple[Mapping[int, tuple[Spoil, str]], ...] = (
    {
        1: (with_up(one_value(float("nan"))), "is not finite"),
        2: (with_up(one_dimension_more), "does not fit the global model"),
    },
    {
        1: (with_up(fewer_classes), "does not fit the global model"),
        2: (foreign, "fields samples, weights"),
    },
    {
        1: (late, f"did not answer within {DEADLINE:g} seconds"),
        2: (a_gigabyte, "bytes; at most"),
    },
)
"""What clients do in each round of a federation, and what the server says to it."""
