"""The contract of a method: what a paper must say for fedsieve to run it anywhere.

A method is five frozen records and some functions on them, all in one file:

    Config   its hyper-parameters                    Server   what lives at the server
    Client   what lives at a site, never sent        Down     all that a site receives
    Up       all that leaves a site

`Method` ties them together. A simple method replaces one or two functions of FedAvg's
(`dataclasses.replace(fedavg.METHOD, name=..., train=...)`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from fedsieve.local.bench import Bench
from fedsieve.types import SERVER, ClientId, Metrics, Shard, Streams, Weights, rng_for


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every method's hyper-parameters; a subclass validates its values when made."""

    presets: ClassVar[Mapping[Any, Any]] = MappingProxyType({})
    """By its name, what each value of a field `preset` gives to the fields that are left out."""
    name: str
    """Name of the method; a subclass fixes it as its default."""


@dataclass(frozen=True)
class Federation:
    """What a server knows of its sites before the first round."""

    sizes: tuple[int, ...]
    """n_k, samples at client k."""
    per_round: int
    """Clients selected in a round."""
    rounds: int
    num_classes: int

    @property
    def clients(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Suspicion:
    """How a client's labels look to a method, one entry per sample in the shard's order."""

    p_wrong: Tensor
    """(n,) probability that the given label is wrong."""
    suggested: Tensor
    """(n,) int64, the label that the method would give."""


class InitServer(Protocol):
    def __call__(self, cfg: Any, weights: Weights, federation: Federation) -> Any: ...


class InitClient(Protocol):
    def __call__(self, cfg: Any, shard: Shard) -> Any: ...


class Select(Protocol):
    def __call__(
        self,
        cfg: Any,
        server: Any,
        round: int,
        rng: Streams,
    ) -> tuple[ClientId, ...]:
        """Who takes part. An engine may also ask about the next round while this one trains, with
        the server as it is then, in order to begin early with what is probably needed."""


class Send(Protocol):
    def __call__(self, cfg: Any, server: Any, round: int, client: ClientId) -> Any: ...


class Train(Protocol):
    def __call__(
        self, cfg: Any, client: Any, down: Any, shard: Shard, bench: Bench, rng: Streams
    ) -> tuple[Any, Any, Metrics]: ...


class Merge(Protocol):
    def __call__(
        self,
        cfg: Any,
        server: Any,
        round: int,
        ups: Mapping[ClientId, Any],
    ) -> tuple[Any, Metrics]: ...


class Begins(Protocol):
    def __call__(self, cfg: Any, federation: Federation) -> int:
        """The first round, counted from 0, that is not a warm-up."""


class Suspect(Protocol):
    def __call__(
        self, cfg: Any, client: Any, down: Any, shard: Shard, bench: Bench
    ) -> Suspicion: ...


@dataclass(frozen=True)
class Sieved:
    """What a server, or the client itself, believes of one client's labels."""

    noise_rate: float
    """Estimated share of wrong labels."""
    p_clean: Tensor | None
    """(n,) probability that each label is right, in the shard's order; None without opinion."""


class Sieve(Protocol):
    def __call__(self, server: Any) -> Mapping[ClientId, Sieved]: ...


class OwnSieve(Protocol):
    def __call__(self, client: Any) -> Sieved | None: ...


class Refined(Protocol):
    def __call__(self, client: Any) -> Tensor | None: ...


class GlobalWeights(Protocol):
    def __call__(self, server: Any) -> Weights: ...


class Peers(Protocol):
    def __call__(self, server: Any) -> tuple[Weights, ...]: ...


class LocalWeights(Protocol):
    def __call__(self, up: Any) -> Weights: ...


class LocalPeers(Protocol):
    def __call__(self, up: Any) -> tuple[Weights, ...]: ...


def begins_at_once(cfg: Any, federation: Federation) -> int:
    """A method without a warm-up."""
    return 0


def weights_of(up: Any) -> Weights:
    """The `weights` of an `Up`."""
    weights: Weights = up.weights
    return weights


def no_peers(server: Any) -> tuple[Weights, ...]:
    """A method that trains one network."""
    return ()


def no_local_peers(up: Any) -> tuple[Weights, ...]:
    """A client that trains one network."""
    return ()


def no_own_sieve(client: Any) -> Sieved | None:
    """A client that leaves the sieving to the server."""
    return None


@dataclass(frozen=True)
class Method:
    """A federated method, complete."""

    name: str
    title: str
    """One line for `fedsieve methods`."""
    paper: str
    """Authors, title, venue, year."""
    config: type[Config]
    server: type[Any]
    client: type[Any]
    down: type[Any]
    up: type[Any]
    init_server: InitServer
    init_client: InitClient
    select: Select
    send: Send
    train: Train
    merge: Merge
    suspect: Suspect
    weights: GlobalWeights
    """The weights of the global model, for evaluation, diagnosis and `model.safetensors`."""
    sieve: Sieve
    """What the server believes of its clients' labels, for diagnosis; empty without a view."""
    refined: Refined
    """(n,) labels that the client last trained on, −1 where it used none; None if as given."""
    local_weights: LocalWeights = weights_of
    """The weights of a client's trained model, for diagnosis."""
    own_sieve: OwnSieve = no_own_sieve
    """What a client last believed of its own labels where that stays at the site, for diagnosis;
    None where it leaves the sieving to the server."""
    peers: Peers = no_peers
    """The weights of further global networks, which are evaluated together with `weights`."""
    local_peers: LocalPeers = no_local_peers
    """The weights of a client's further networks, which must fit the global ones."""
    begins: Begins = begins_at_once
    """When the warm-up is over, for a word of caution where a run is shorter than that."""

    def all_warm_up(self, cfg: Config, federation: Federation) -> str | None:
        """A sentence for someone whose run ends before its method begins; None where it does."""
        begins = self.begins(cfg, federation)
        if begins < federation.rounds:
            return None
        return (
            f"{self.name} begins with round {begins + 1}, but this run ends after round "
            f"{federation.rounds}: all of it is warm-up. Give it more rounds (--rounds), or "
            f"shorten the warm-up (`fedsieve methods {self.name}` lists its settings)."
        )

    def networks(self, server: Any) -> tuple[Weights, ...]:
        """All global networks: what they predict together is what is evaluated."""
        return (self.weights(server), *self.peers(server))

    def local_networks(self, up: Any) -> tuple[Weights, ...]:
        """All networks of a client, in the order of the global ones."""
        return (self.local_weights(up), *self.local_peers(up))


def choose_uniformly(clients: int, count: int, rng: np.random.Generator) -> tuple[ClientId, ...]:
    """`count` distinct clients, every set equally likely, in ascending order."""
    return tuple(sorted(rng.choice(clients, size=min(count, clients), replace=False).tolist()))


def rounds_per_pass(federation: Federation) -> int:
    """⌈K / clients per round⌉, the rounds in which each client can take part once."""
    return max(1, math.ceil(federation.clients / federation.per_round))


def choose_in_turn(clients: int, length: int, round: int, seed: int) -> tuple[ClientId, ...]:
    """Who is asked in a round of a warm-up in which each pass of so many rounds asks every client
    once, in random order; in ascending order."""
    number, position = divmod(round, length)
    # The order belongs to the pass: each of its rounds draws the same one and takes its part.
    order = rng_for(seed, number, SERVER, "warm-up order").permutation(clients)
    return tuple(sorted(np.array_split(order, length)[position].tolist()))
