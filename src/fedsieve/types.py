"""The vocabulary that every other module speaks: weights, shards, outputs, and random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

ClientId: TypeAlias = int

Weights: TypeAlias = Mapping[str, Tensor]
"""All floating-point parameters and buffers of a model by name (BatchNorm statistics included)."""

Metrics: TypeAlias = Mapping[str, float]
"""Named numbers about one client's training or one round, written to the run's metrics."""


class Outputs(NamedTuple):
    """What a model returns for a batch of n images."""

    features: Tensor | None
    """(n, d) representation that the head reads, or None where a model has no such thing."""
    logits: Tensor
    """(n, classes) unnormalised class scores."""


@dataclass(frozen=True, slots=True)
class Shard:
    """What one client holds: images, the labels it was *given*, and ids. Never the true labels."""

    client: ClientId
    images: Tensor
    """(n, channels, height, width) uint8"""
    labels: Tensor
    """(n,) int64, the given labels, some of them wrong"""
    ids: Tensor
    """(n,) int64, opaque sample ids, unique in the federation"""
    num_classes: int

    def __len__(self) -> int:
        return len(self.labels)


def rng_for(seed: int, round: int, client: ClientId, purpose: str) -> np.random.Generator:
    """The one source of randomness: a stream that depends on its four arguments and nothing else.

    So a result does not depend on the engine, the order of clients or the number of workers, and
    resuming needs no generator state, only the round number.
    """
    name = f"{seed}/{round}/{client}/{purpose}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
    return np.random.Generator(np.random.Philox(key=key))


SERVER: ClientId = -1
"""The client id that stands for the server in `rng_for`."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The random streams of one participant in one round; `streams("views")` opens one."""

    seed: int
    round: int
    client: ClientId
    part: str = ""
    """Of the round, such as "epoch 3/"; all of it where this is empty."""

    def __call__(self, purpose: str) -> np.random.Generator:
        return rng_for(self.seed, self.round, self.client, self.part + purpose)

    def within(self, part: str) -> Streams:
        """The streams of one part of the round, for what draws the same in several parts."""
        return replace(self, part=f"{self.part}{part}/")


def nothing(*_: object) -> None:
    pass
