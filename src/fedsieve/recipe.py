"""A recipe: everything that decides the result of a run, and where and how it runs."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from fedsieve.config import from_table, to_table, unknown_key
from fedsieve.data.sources import SOURCES
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError, check
from fedsieve.labels import Label
from fedsieve.local.bench import Precision
from fedsieve.local.plan import Sgd
from fedsieve.methods import METHODS, method
from fedsieve.methods.contract import Config as MethodConfig
from fedsieve.methods.presets import released
from fedsieve.models import ModelConfig
from fedsieve.scenes import SceneConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the images and labels come from."""

    source: str = "digits"
    """Name of a data source; `fedsieve data` lists them."""
    path: Path | None = None
    """Folder or file of the source; embedded ones take none."""
    views: str | None = None
    """Name of the view set that training augments images with. Left out: the source's own."""
    mean: tuple[float, ...] | None = None
    """What normalisation subtracts from each channel of pixels in [0, 1]. Left out, with `std`: the
    source's own."""
    std: tuple[float, ...] | None = None
    """What normalisation then divides by (each above 0)."""

    def __post_init__(self) -> None:
        if self.views is not None:
            view_set(self.views)
        check(
            self.path is None or not _is_embedded(self.source),
            f"{self.source} is built in and takes no path; leave it out, or for images of your own "
            "give --data.source folder, table or sites (`fedsieve run own --data.path …`).",
        )
        check(
            (self.mean is None) == (self.std is None),
            "Give data.mean and data.std together, or neither.",
        )
        values = (*(self.mean or ()), *(self.std or ()))
        check(
            all(map(math.isfinite, values)) and all(value > 0 for value in self.std or ()),
            f"data.mean {self.mean} and data.std {self.std} cannot normalise images; give finite "
            "numbers, each std above 0.",
        )


def _is_embedded(source: object) -> bool:
    return isinstance(source, str) and source in SOURCES and SOURCES[source].place is None


Slicing: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the run is carried out. Nothing here changes the result on a CPU."""

    device: str = "auto"
    """"cpu", "cuda", "cuda:1", …, or "auto": a GPU where there is one."""
    workers: int = 0
    """CPU worker processes; 0 starts one per core once a run turns out to be long."""
    slots: int = 10
    """Clients that train side by side on a GPU; 0 trains one after another without CUDA graphs."""
    slices: Slicing = "auto"
    """Give every slot multiprocessors of its own, or every two slots where clients differ in size:
    "always", "never", or "auto": where they do not differ too much and the GPU can do it."""
    compile: bool = True
    """Compile the model's training step on a GPU."""
    fused_norms: bool = True
    """Leave BatchNorm and what follows it to kernels of fedsieve's own where steps are compiled and
    slots have slices, for which the kernels are made."""
    checkpoint_rounds: int | None = None
    """Checkpoint every so many rounds, besides what `checkpoint_seconds` asks for."""
    checkpoint_seconds: float | None = None
    """Checkpoint at least every so many seconds (at the end of a round). Left out: every minute,
    but not so often that it takes more than a twentieth of the time."""
    stop_after_minutes: float | None = None
    """Checkpoint and stop a run after this time; the same command goes on."""
    stop_after_rounds: int | None = None
    """Checkpoint and stop a run when it has done so many rounds in all: where other runs are to
    fork off (`fedsieve run … --fork`)."""
    keep_states: bool = False
    """Leave the last states of server and clients in the folder of a finished run, for programs of
    your own. fedsieve has no use for them any more, and there may be gigabytes of them."""
    client_memory_mb: int = 0
    """Client states kept in memory (on the GPU, where one is used) before they spill to disk; 0 is
    2 GiB, or half of the GPU's free memory."""
    client_lines: bool = False
    """Write one line per client and round to clients.jsonl."""
    memorisation_every: int = 0
    """Measure every so many rounds which share of the wrong labels the global model has learnt by
    heart, on the weak view of all training images; with client_lines also the local models next to
    the global model they started from. 0: never, for it takes time. Needs the true labels."""

    def __post_init__(self) -> None:
        check(self.workers >= 0, f"engine.workers must be at least 0, not {self.workers}.")
        check(self.slots >= 0, f"engine.slots must be at least 0, not {self.slots}.")
        check(
            self.slices in get_args(Slicing),
            f"engine.slices must be one of {', '.join(get_args(Slicing))}, not {self.slices!r}.",
        )
        check(
            self.checkpoint_rounds is None or self.checkpoint_rounds >= 1,
            f"engine.checkpoint_rounds must be at least 1, not {self.checkpoint_rounds}.",
        )
        check(
            self.memorisation_every >= 0,
            f"engine.memorisation_every must be at least 0, not {self.memorisation_every}.",
        )
        check(
            self.checkpoint_seconds is None or self.checkpoint_seconds >= 0,
            f"engine.checkpoint_seconds must be at least 0, not {self.checkpoint_seconds}.",
        )
        check(
            self.stop_after_minutes is None or self.stop_after_minutes >= 0,
            f"engine.stop_after_minutes must be at least 0, not {self.stop_after_minutes}.",
        )
        check(
            self.stop_after_rounds is None or self.stop_after_rounds >= 1,
            f"engine.stop_after_rounds must be at least 1, not {self.stop_after_rounds}.",
        )
        check(
            self.client_memory_mb >= 0,
            f"engine.client_memory_mb must be at least 0, not {self.client_memory_mb}.",
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run of one method on one scene."""

    name: str = "run"
    """What the run is called in tables and folder names."""
    seed: int = 1
    """Every random draw of the run descends from it."""
    rounds: int = 30
    """R, communication rounds (at least 1)."""
    clients_per_round: int = 10
    """Clients that take part in a round (at least 1)."""
    precision: Precision = "fp32"
    """Arithmetic inside the model; statistics, losses and proxies are always fp32."""
    data: DataConfig = field(default_factory=DataConfig)
    scene: SceneConfig = field(default_factory=SceneConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sgd: Sgd = field(default_factory=Sgd)
    method: MethodConfig = field(default_factory=METHODS["fedavg"].config)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}.")
        check(
            self.clients_per_round >= 1,
            f"clients_per_round must be at least 1, not {self.clients_per_round}.",
        )
        check(0 <= self.seed < 2**32, f"seed must be in [0, 2^32), not {self.seed}.")
        clients = self.scene.clients
        check(
            self.clients_per_round <= clients,
            f"clients_per_round is {self.clients_per_round}, but the scene has only {clients} "
            "clients.",
        )


def recipe_from_table(table: Mapping[str, Any]) -> Recipe:
    """A recipe from its TOML table; `[method] name` decides which settings `[method]` may hold."""
    table = dict(table)
    settings = table.pop("method", {})
    if not isinstance(settings, Mapping):
        raise FedsieveError("method must be a table with a name, such as [method] name = 'fedavg'.")
    config = method(str(settings.get("name", "fedavg"))).config
    recipe = from_table(Recipe, table)
    return replace(recipe, method=from_table(config, settings, "method"))


def recipe_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a TOML table, every setting resolved."""
    return to_table(recipe)


def identity(recipe: Recipe) -> dict[str, Any]:
    """The part of a recipe that decides its result: all but how the engine carries it out."""
    table = recipe_table(recipe)
    del table["engine"]
    table["data"].pop("path", None)  # data may move; a run checks their labels by itself
    return table


def read_recipe(source: str | Path | None) -> dict[str, Any]:
    """The table of a recipe: a file, the name of one that ships with the package, or the demo."""
    return parse_recipe(_recipe_text("demo" if source is None else source), str(source))


def parse_recipe(text: str, what: str) -> dict[str, Any]:
    """The table of a recipe from its TOML; errors call the text `what`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FedsieveError(f"{what} is not valid TOML: {error}.") from None
    except RecursionError:
        raise FedsieveError(f"{what} is nested too deeply; a recipe is flat.") from None


def _recipe_text(source: str | Path) -> str:
    path = Path(source)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig")  # some editors put a mark before the text
        except UnicodeDecodeError:
            raise FedsieveError(f"{path} is not a text file in UTF-8; save it as such.") from None
    check(
        not (path / "config.toml").is_file(),
        f"{source} is a folder of a run; the recipe in it is {path / 'config.toml'}.",
    )
    name = str(source).removeprefix("recipes/").removesuffix(".toml")
    shipped = shipped_recipes()
    begun = [other for other in shipped if other.startswith(name)]
    check(
        name in shipped or not name or not begun,
        f"There is no recipe {str(source)!r}, but {len(begun)} whose names begin so: "
        f"`fedsieve recipes list {name}` lists them.",
    )
    check(
        name in shipped or path.suffix != ".toml",
        f"There is no recipe {str(source)!r}: neither a file, nor among those that ship with "
        "fedsieve, which `fedsieve recipes` lists.",
    )
    if name not in shipped:
        raise FedsieveError(
            unknown_key(str(source), name, shipped, "recipe")
            + " `fedsieve recipes` lists those that ship with fedsieve."
        )
    return shipped[name]


def shipped_recipes() -> dict[str, str]:
    """Name → text of every recipe that ships with the package."""
    root = resources.files("fedsieve") / "recipes"
    found: dict[str, str] = {}

    def walk(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".toml"):
                found[prefix + entry.name.removesuffix(".toml")] = entry.read_text(encoding="utf-8")

    walk(root, "")
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its settings' short name and its table."""

    name: str
    table: dict[str, Any]
    points: tuple[str, ...] = ()
    """What each axis calls this run."""
    labels: tuple[Label, ...] = ()
    """Those of its axes that have labels."""


def cells(table: Mapping[str, Any]) -> list[Cell]:
    """The runs of a recipe: one, or the grid over its `[sweep]`, dotted setting → list of values.

    A value may be a table of several dotted settings with a `label`, when they vary together.
    """
    table = dict(table)
    sweep = table.pop("sweep", {})
    check(isinstance(sweep, Mapping), "sweep must be a table of dotted settings and lists.")
    axes = []
    for key, values in sweep.items():
        check(isinstance(values, list) and bool(values), f"sweep.{key} must be a list of values.")
        points = [_variant(key, value) for value in values]
        axes.append(list(zip(points, _labels(key, values), strict=True)))
    result: list[Cell] = []
    for combination in itertools.product(*axes):
        cell = table
        for (_, settings), _ in combination:
            for path, value in settings.items():
                cell = with_setting(cell, path, value)
        called = tuple(text for (text, _), _ in combination)
        name = "-".join(called)
        check(
            all(name != other.name for other in result),
            f"The sweep has two runs called {name!r}; give their settings different labels.",
        )
        labels = tuple(label for _, label in combination if label is not None)
        result.append(Cell(name, cell, called, labels))
    return result


def _labels(key: str, values: list[Any]) -> list[Label | None]:
    """The labels of an axis's points; none where some point has none."""
    if not all(isinstance(value, Mapping) for value in values):
        return [None] * len(values)
    settings = tuple(dict.fromkeys(path for value in values for path in value if path != "label"))
    return [
        Label(axis=key, text=str(value["label"]), place=place, settings=settings)
        for place, value in enumerate(values)
    ]


def _variant(key: str, value: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(value, Mapping):
        settings = dict(value)
        check("label" in settings, f"A table in sweep.{key} needs a label.")
        return str(settings.pop("label")), settings
    label = str(value) if isinstance(value, str) else f"{key.rpartition('.')[2]}{value}"
    return label, {key: value}


def with_setting(table: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`table` with the setting `path` changed; another method name drops the old settings, another
    preset the switches that a saved recipe has from the old one, and an embedded source the path of
    the one before it."""
    head, _, rest = path.partition(".")
    result = dict(table)
    if not rest:
        result[head] = value
        return result
    inner = result.get(head, {})
    check(isinstance(inner, Mapping), f"{head} is a value, so {path} cannot be set.")
    if path == "method.name" and inner.get("name") != value:
        inner = {}
    if path == "method.preset" and inner.get("preset") != value:
        inner = released(method(str(inner.get("name", "fedavg"))).config, inner)
    if path == "data.source" and _is_embedded(value):
        inner = {key: held for key, held in inner.items() if key != "path"}
    result[head] = with_setting(inner, rest, value)
    return result
