"""A site: its settings, its data, and its own folder, which outlives every process of Flower's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import torch
from torch import Tensor

from fedsieve.data.own.layout import root_of
from fedsieve.data.own.read import read_own
from fedsieve.data.own.reading import ONE_SITE, Kind, Reading
from fedsieve.data.sources import SOURCES, Dataset, load
from fedsieve.data.sources.dataset import channel_statistics
from fedsieve.errors import FedsieveError, check
from fedsieve.files import locked, remove_drafts, write_atomically
from fedsieve.flower.messages import Charter, Hello, check_name
from fedsieve.local.bench import EagerBench, Setup
from fedsieve.recipe import Recipe, parse_recipe, recipe_from_table
from fedsieve.serial import decode, encode
from fedsieve.simulate.runners import set_gpu_arithmetic
from fedsieve.simulate.world import World, make_world, pick_device, scene_of, setup_for
from fedsieve.types import ClientId, Shard

T = TypeVar("T")

OWN_KINDS = ("auto", *get_args(Kind))
"""What `data-source` may be at a site with data of its own, besides the name of a source."""
SETTINGS = ("data-path", "data-source", "state-path", "site", "client")


@dataclass(frozen=True)
class Place:
    """A node's settings: who it is and where its data and its own folder are."""

    site: str
    state: Path
    source: str
    data: Path | None
    client: int | None
    """The client of the recipe's scene that this node plays; None at a real site."""

    @staticmethod
    def of(node_config: Mapping[str, Any]) -> Place:
        """From `--node-config`; unknown keys are Flower's or another app's."""
        values = {key: node_config[key] for key in SETTINGS if key in node_config}
        for key, value in values.items():
            kind = int if key == "client" else str
            check(
                type(value) is kind,
                f"The node's setting {key} must be {'a number' if kind is int else 'text'}, "
                f"not {value!r}.",
            )
        client = values.get("client")
        name = values.get("site") or (None if client is None else f"client-{client}")
        if name is None or not values.get("state-path"):
            raise FedsieveError(
                "A site needs a name and a folder of its own; give the node "
                '\'site="…" state-path="…"\' in --node-config.'
            )
        data = values.get("data-path")
        return Place(
            site=check_name("site name", name),
            state=Path(values["state-path"]).expanduser(),
            source=values.get("data-source", ""),
            data=Path(data).expanduser() if data else None,
            client=client,
        )

    def folder(self, federation: str) -> Path:
        """Where this site keeps its state and its results of one federation."""
        return self.state / check_name("federation", federation)


# ------------------------------------------------------------------------------------- its data


@dataclass(frozen=True, eq=False)
class SiteData:
    """All that a site holds."""

    images: Tensor
    """(n, channels, height, width) uint8"""
    labels: Tensor
    """(n,) int64, as given"""
    names: tuple[str, ...]
    """What the site itself calls each sample; never sent."""
    numbers: Tensor | None
    """(n,) int64, what the server knows each sample as; None: just numbers."""
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def shard(self, client: ClientId) -> Shard:
        """The site as a client, with sample ids that no other site has."""
        ids = self.numbers
        if ids is None:
            ids = torch.arange(len(self.labels)) + (client << 32)
        return Shard(client, self.images, self.labels, ids, len(self.classes))


def hello(place: Place, recipe_toml: str) -> Hello:
    """Who this site is, for the server."""
    return kept(place, "hello", None, Hello, lambda: _hello(place, recipe_toml))


def _hello(place: Place, recipe_toml: str) -> Hello:
    data = data_of(place, recipe_toml, None)
    return Hello(
        site=place.site,
        client=place.client,
        samples=len(data.labels),
        classes=data.classes,
        shape=data.shape,
        mean=data.mean,
        std=data.std,
    )


@functools.lru_cache(maxsize=32)
def data_of(place: Place, recipe_toml: str, charter: Charter | None) -> SiteData:
    """The site's data, read so that they fit the charter where there is one already."""
    if place.client is not None:
        data = _client_of_scene(recipe_toml, place.source, place.data, place.client)
    elif charter is None:  # seen once, to say hello, which is kept itself
        data = load_site(place, None)
    else:
        data = kept(place, "images", charter, SiteData, lambda: load_site(place, charter))
    if charter is not None:
        check(
            (data.classes, data.shape) == (charter.classes, charter.shape),
            f"The federation has images of {charter.shape} in the classes "
            f"{', '.join(charter.classes)}; this site has {data.shape} in "
            f"{', '.join(data.classes)}.",
        )
    return data


def kept(
    place: Place, name: str, charter: Charter | None, kind: type[T], make: Callable[[], T]
) -> T:
    """What `make` makes of a real site's own files, kept in the site's folder until they change.

    Each message may come to a new process, and to decode all images takes longer than to train.
    """
    if place.client is not None or place.data is None:
        return make()
    how = None if charter is None else (charter.classes, charter.shape)
    key = hashlib.sha256(repr((place, how)).encode())
    for file in sorted(root_of(place.data).rglob("*")):
        if file.is_file() and not file.is_relative_to(place.state):
            seen = file.stat()
            key.update(repr((str(file), seen.st_size, seen.st_mtime_ns)).encode())
    path = place.state / f"{name}-{key.hexdigest()[:32]}.safetensors"
    if path.exists():
        with contextlib.suppress(FedsieveError):  # a damaged one is made again
            return decode(kind, path.read_bytes())
    made = make()
    for old in place.state.glob(f"{name}-*.safetensors"):
        old.unlink(missing_ok=True)
    write_atomically(path, encode(made))
    return made


def load_site(place: Place, charter: Charter | None) -> SiteData:
    """The data of a real site: its own files, or the training part of a source."""
    if place.source in SOURCES and not SOURCES[place.source].is_own and place.source != "npz":
        data = load(place.source, place.data)
        count = len(data.train_labels)
        return SiteData(
            images=data.train_images,
            labels=data.train_labels,
            names=tuple(map(str, range(count))),
            numbers=None,
            classes=data.classes,
            mean=data.mean,
            std=data.std,
        )
    kind = place.source or "auto"
    check(
        kind in OWN_KINDS,
        f"There is no data source {kind!r}; data-source is one of "
        f"{', '.join((*OWN_KINDS, *SOURCES))}.",
    )
    if place.data is None:
        raise FedsieveError("A site needs data; give the node 'data-path=\"…\"' in --node-config.")
    reading = Reading(kind=cast(Any, kind))
    if charter is not None:
        channels, height, width = charter.shape
        reading = dataclasses.replace(
            reading,
            size=(height, width),
            channels=cast(Any, channels),
            classes=charter.classes,
        )
    own = read_own(place.data, reading)
    names = tuple(own.sites)
    check(
        names == (ONE_SITE,) or place.site in names,
        f"The data at {place.data} are those of {', '.join(names)}; none of them is {place.site}.",
    )
    held = torch.from_numpy(own.sites[ONE_SITE if names == (ONE_SITE,) else place.site])
    images = own.images[held]
    mean, std = channel_statistics(images)
    return SiteData(
        images=images,
        labels=own.labels[held],
        names=tuple(own.ids[i] for i in held.tolist()),
        numbers=None,
        classes=own.classes,
        mean=mean,
        std=std,
    )


def _client_of_scene(
    recipe_toml: str, source: str, path: Path | None, client: ClientId
) -> SiteData:
    """What a client of the recipe's scene holds: a part for a node in a trial or a test."""
    world, data = _scene(recipe_toml, source, path)
    check(
        0 <= client < len(world.clients),
        f"The recipe's scene has {len(world.clients)} clients; there is no client {client}.",
    )
    shard = world.shard(client)
    return SiteData(
        images=shard.images,
        labels=shard.labels,
        names=tuple(map(str, shard.ids.tolist())),
        numbers=shard.ids,
        classes=data.classes,
        mean=data.mean,
        std=data.std,
    )


@functools.lru_cache(maxsize=1)
def _scene(recipe_toml: str, source: str, path: Path | None) -> tuple[World, Dataset]:
    recipe = recipe_of(recipe_toml)
    data = load(source or recipe.data.source, path)
    return make_world(data, scene_of(recipe, data), torch.device("cpu")), data


@functools.lru_cache(maxsize=4)
def recipe_of(recipe_toml: str) -> Recipe:
    """The recipe in a message of the server's, checked like any other."""
    return recipe_from_table(parse_recipe(recipe_toml, "The server's recipe"))


@functools.lru_cache(maxsize=1)
def bench_of(charter: Charter) -> EagerBench:
    """The workbench of this process for a federation."""
    recipe = recipe_of(charter.recipe)
    setup = setup_for(recipe, charter.shape, len(charter.classes))
    return make_bench(setup, recipe.engine.device)


def make_bench(setup: Setup, device_name: str) -> EagerBench:
    """A workbench on the device called so, with the arithmetic of the setup's precision."""
    device = pick_device(device_name)
    if device.type == "cuda":
        set_gpu_arithmetic(setup.precision)
    return EagerBench(setup, device)


# ----------------------------------------------------------------------------------- its folder


class SiteFolder:
    """State and results of one site in one federation.

    `state-T.safetensors` is the state after round T. A new one is written before an old one goes,
    and the one that the server named stays until the server names a later one. So a site that was
    killed at any moment, or is asked for a round again, starts from the right state.
    """

    def __init__(self, path: Path, state_type: type[Any]) -> None:
        self.path = path
        self._type = state_type
        self.keeps_state = bool(dataclasses.fields(state_type))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; another process of the same site waits. It dies with its process."""
        with locked(self.path):
            remove_drafts(self.path)
            yield

    def load(self, round: int) -> Any | None:
        """The state after `round`, or None where there is none."""
        path = self._file(round)
        if not self.keeps_state or not path.exists():
            return None
        return decode(self._type, path.read_bytes())

    def commit(self, round: int, state: Any, after: int) -> None:
        """Keep the state after `round`, and the one of round `after` that it came from."""
        if not self.keeps_state:
            return
        write_atomically(self._file(round), encode(state))
        keep = {self._file(round), self._file(after)}
        for path in self.path.glob("state-*.safetensors"):
            if path not in keep:
                path.unlink()

    def _file(self, round: int) -> Path:
        return self.path / f"state-{round}.safetensors"
