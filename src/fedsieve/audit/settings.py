"""What an audit does, chosen from the data unless asked otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from fedsieve.config import needed
from fedsieve.data.own import OwnData
from fedsieve.data.own.reading import ONE_SITE
from fedsieve.errors import check
from fedsieve.local.plan import Sgd
from fedsieve.methods import fedcorr, feddiv, fedgr, method
from fedsieve.methods.contract import Config
from fedsieve.models import ModelConfig
from fedsieve.recipe import DataConfig, EngineConfig, Recipe
from fedsieve.scenes import SceneConfig
from fedsieve.simulate.world import pick_device

FOLDS = 5
LARGE_SIDE = 48
"""Images of at least this side get a deeper model where there is a GPU."""
SMALL_SITE = 500
"""Sites of fewer samples train in batches of 16 instead of 32."""
STEPS = 600
"""Local steps of an average site that a federation should come to …"""
FEWEST_ROUNDS, MOST_ROUNDS = 20, 60
"""… within these numbers of rounds."""
MOST_PER_ROUND = 20
"""Sites that take part in one round."""
VIRTUAL_SITES = 5
SMALLEST_VIRTUAL_SITE = 50
GENTLE_SIDE = 24
"""Smaller images do not survive strong augmentation."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person may decide; None leaves it to the data."""

    method: str = "fedavg"
    """Method that trains the models that judge labels and the one you get; `fedsieve methods` lists
    them."""
    model: str | None = None
    """Network. Left out: resnet18 for images of 48 pixels or more on a GPU, else small."""
    rounds: int | None = None
    """Rounds of each federation. Left out: 20 to 60, the fewer the more images a site has."""
    folds: int = FOLDS
    """Federations that judge labels, each of the samples that it has not seen (at least 2)."""
    virtual_sites: int | None = None
    """Sites that data without sites are split into for training. Left out: up to 5."""
    device: str = "auto"
    """Where to train: cpu, cuda, or a GPU where there is one."""
    seed: int = 1
    """What every random draw descends from."""

    def __post_init__(self) -> None:
        check(self.folds >= 2, f"An audit needs at least 2 folds, not {self.folds}.")
        for name in ("rounds", "virtual_sites"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} must be at least 1, not {value}.")
        settings = ", ".join(f"method.{name}" for name in needed(method(self.method).config))
        check(
            not settings,
            f"{self.method} cannot be asked to audit, which leaves {settings} open; choose another "
            "method.",
        )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an audit does."""

    method: str
    model: str
    rounds: int
    folds: int
    sites: int
    """that train: the data's own, or virtual ones"""
    is_virtual: bool
    device: str
    batch_size: int
    side: int
    """shorter side of the images"""
    source: str
    seed: int

    @property
    def all_rounds(self) -> int:
        """Of the folds and of the final model."""
        return self.rounds * (self.folds + 1)

    def recipe(self) -> Recipe:
        """Each of the federations."""
        return Recipe(
            name="audit",
            seed=self.seed,
            rounds=self.rounds,
            clients_per_round=min(self.sites, MOST_PER_ROUND),
            data=DataConfig(source=self.source),
            scene=SceneConfig(clients=self.sites),
            model=ModelConfig(name=self.model),
            sgd=Sgd(batch_size=self.batch_size, lr=0.05, momentum=0.9),
            method=self._method(),
            engine=EngineConfig(device=self.device, checkpoint_seconds=20.0),
        )

    def _method(self) -> Config:
        """The method with what its defaults, made for hundreds of rounds, leave open here."""
        config = method(self.method).config
        own: dict[str, Any] = {}
        if "warmup_rounds" in {field.name for field in fields(config)}:
            own["warmup_rounds"] = self.rounds // 2
        if config is fedgr.Config and self.side < GENTLE_SIDE:
            own["student_view"] = "weak"
        if config is fedcorr.Config:  # five passes of many sites at once are a quarter at the most
            own["walk_clients"] = MOST_PER_ROUND
            own["fine_tuning_rounds"] = self.rounds // 4
        if config is feddiv.Config:
            own["warmup_passes"] = min(feddiv.Config.warmup_passes, self.rounds // 2 // self.sites)
            check(
                own["warmup_passes"] > 0,
                f"feddiv first goes from site to site, so an audit of {self.sites} sites needs at "
                f"least {2 * self.sites} rounds; ask for them with --rounds, or choose another "
                "method.",
            )
        return config(name=self.method, **own)

    def words(self) -> Iterator[tuple[str, str, str]]:
        """(what, chosen, flag) for each setting, in words."""
        yield "method", self.method, "--method"
        yield "folds", f"{self.folds}, so {self.folds + 1} federations with the model", "--folds"
        kind = "virtual sites, for the data name none" if self.is_virtual else "sites"
        yield "sites", f"{self.sites} {kind}", "--virtual_sites" if self.is_virtual else "the data"
        yield "network", self.model, "--model"
        yield "rounds", f"{self.rounds} in each federation", "--rounds"
        yield "device", self.device, "--device"


def choose(own: OwnData, asked: Asked) -> Settings:
    """Settings for these data on this machine."""
    n, side = len(own), min(own.images.shape[2:])
    device = pick_device(asked.device)
    is_virtual = tuple(own.sites) == (ONE_SITE,)
    sites = len(own.sites)
    if is_virtual:
        sites = asked.virtual_sites or max(1, min(VIRTUAL_SITES, n // SMALLEST_VIRTUAL_SITE))
        check(sites <= n, f"{n} images cannot be split into {sites} virtual sites.")
    check(
        n >= 2 * asked.folds,
        f"{n} images are too few for {asked.folds} folds; add images, or lower --folds.",
    )
    deep = device.type == "cuda" and side >= LARGE_SIDE
    held = n / sites
    batch_size = 16 if held < SMALL_SITE else 32
    return Settings(
        method=asked.method,
        model=asked.model or ("resnet18" if deep else "small"),
        rounds=asked.rounds or _rounds(held, batch_size, sites),
        folds=asked.folds,
        sites=sites,
        is_virtual=is_virtual,
        device=str(device),
        batch_size=batch_size,
        side=side,
        source=own.kind,
        seed=asked.seed,
    )


def _rounds(held: float, batch_size: int, sites: int) -> int:
    """Enough for `STEPS` steps at a site of `held` samples, more where sites take turns."""
    wanted = math.ceil(STEPS / max(1.0, held / batch_size))
    turns = math.ceil(sites / MOST_PER_ROUND)
    return turns * min(max(wanted, FEWEST_ROUNDS), MOST_ROUNDS)
