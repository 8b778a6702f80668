"""How a federation is founded: who takes part as which client, and what all have to know alike."""

from __future__ import annotations

import json
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tomli_w

from fedsieve.config import from_table, to_table
from fedsieve.data.own.dataset import views_for
from fedsieve.data.sources import SOURCES, Dataset
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.flower.messages import Charter, Hello
from fedsieve.recipe import Recipe, recipe_table
from fedsieve.simulate.world import load_data, resolved
from fedsieve.types import ClientId

FEDERATION = "federation.json"


@dataclass(frozen=True)
class Member:
    """A site of the federation; its place in the list is its client id."""

    site: str
    samples: int


@dataclass(frozen=True)
class Founded:
    """What is settled before the first round and stays."""

    charter: Charter
    members: tuple[Member, ...]

    def client_of(self, site: str) -> ClientId | None:
        return next((k for k, member in enumerate(self.members) if member.site == site), None)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(member.samples for member in self.members)

    def save(self, folder: Path) -> None:
        content = json.dumps(to_table(self), indent=2, ensure_ascii=False)
        write_atomically(folder / FEDERATION, content.encode() + b"\n")

    @staticmethod
    def load(folder: Path) -> Founded | None:
        """As `save` left it, or None before that."""
        path = folder / FEDERATION
        if not path.exists():
            return None
        try:
            return from_table(Founded, json.loads(path.read_bytes()))
        except (ValueError, TypeError, AttributeError, FedsieveError) as error:
            raise FedsieveError(
                f"{path} cannot be read ({error}); start the federation again in a new folder."
            ) from None


def data_of_server(recipe: Recipe) -> Dataset | None:
    """The data that the server tests on: the recipe's. None where the recipe speaks of own data but
    not of their place: then they are at the sites, and the server has none."""
    source = SOURCES.get(recipe.data.source)
    if source is not None and source.is_own and recipe.data.path is None:
        return None
    return load_data(recipe)


def to_send(recipe: Recipe) -> str:
    """The recipe as TOML, without what is of use at the server only: its own paths and device."""
    table = recipe_table(recipe)
    del table["engine"]
    table["data"].pop("path", None)
    table["model"].pop("weights", None)
    return tomli_w.dumps(table)


def found(recipe: Recipe, data: Dataset | None, hellos: Sequence[Hello]) -> Founded:
    """Settle who is which client and what the charter says; `data` are the server's, if any."""
    members = _members(recipe, hellos)
    if data is None:
        charter = _charter_of_sites(recipe, hellos)
    else:
        channels, height, width = data.train_images.shape[1:]
        whole = resolved(recipe, data)
        charter = Charter("", to_send(whole), data.classes, (channels, height, width))
        for hello in hellos:
            strange = sorted(set(hello.classes) - set(data.classes))
            check(
                not strange,
                f"{hello.site} has the classes {', '.join(strange)}, which the server's "
                f"{recipe.data.source} does not know.",
            )
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in recipe.name)[:40].strip("-")
    federation = f"{name or 'run'}-{uuid.uuid4().hex[:12]}"
    return Founded(replace(charter, federation=federation), members)


def _members(recipe: Recipe, hellos: Sequence[Hello]) -> tuple[Member, ...]:
    """The sites in the order of their client ids: as they play the scene's, or by name."""
    playing = {hello.client: hello for hello in hellos if hello.client is not None}
    if playing:
        clients = recipe.scene.clients
        check(
            len(hellos) == len(playing) and set(playing) == set(range(clients)),
            f"The recipe's scene has {clients} clients, so {clients} nodes must play one each, "
            f"client=0 to client={clients - 1} in their node config.",
        )
        ordered = [playing[client] for client in range(clients)]
    else:
        ordered = sorted(hellos, key=lambda hello: hello.site)
    check(
        recipe.clients_per_round <= len(ordered),
        f"clients_per_round is {recipe.clients_per_round}, but only {len(ordered)} sites take "
        "part; lower it in the recipe, or wait for more sites.",
    )
    check(any(hello.samples for hello in ordered), "No site holds a single sample.")
    return tuple(Member(hello.site, hello.samples) for hello in ordered)


def _charter_of_sites(recipe: Recipe, hellos: Sequence[Hello]) -> Charter:
    """Classes: all that are named. Size: the median of the sites' sizes. Normalisation: that of all
    images together, unless the recipe gives one."""
    named = {hello.classes for hello in hellos}
    classes = (
        named.pop() if len(named) == 1 else tuple(sorted({c for h in hellos for c in h.classes}))
    )
    shape = (
        max(hello.shape[0] for hello in hellos),
        statistics.median_low(hello.shape[1] for hello in hellos),
        statistics.median_low(hello.shape[2] for hello in hellos),
    )
    mean, std = _pooled([hello for hello in hellos if hello.samples], shape[0])
    own = recipe.data
    written_out = replace(
        own,
        views=own.views or views_for(*shape),
        mean=own.mean or mean,
        std=own.std or std,
    )
    return Charter("", to_send(replace(recipe, data=written_out)), classes, shape)


def _pooled(hellos: Sequence[Hello], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of all images together: E[x²] − E[x]², from each site's own."""
    count = np.array([hello.samples for hello in hellos], dtype=np.float64)[:, None]
    mean = np.stack([np.broadcast_to(hello.mean, channels) for hello in hellos])
    std = np.stack([np.broadcast_to(hello.std, channels) for hello in hellos])
    check(
        bool(np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()),
        "The images of some site cannot be normalised; are they all of one colour?",
    )
    share = count / count.sum()
    pooled = (share * mean).sum(axis=0)
    variance = (share * (std**2 + mean**2)).sum(axis=0) - pooled**2
    return tuple(pooled.tolist()), tuple(np.sqrt(variance).tolist())
