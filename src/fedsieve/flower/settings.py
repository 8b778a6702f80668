"""What `flwr run --run-config` tells the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsieve.errors import check
from fedsieve.recipe import (
    EngineConfig,
    Recipe,
    cells,
    parse_recipe,
    read_recipe,
    recipe_from_table,
)

OF_SIMULATIONS = (
    "stop_after_minutes",
    "stop_after_rounds",
    "client_lines",
    "memorisation_every",
)
"""Settings under `engine` that only a simulation can carry out."""


@dataclass(frozen=True)
class Settings:
    """What `flwr run --run-config` says."""

    recipe: Recipe
    out: Path
    sites: int
    """Sites to wait for."""
    deadline: float
    """Seconds that sites have for a round."""
    wait: float
    """Seconds to wait for sites before giving up; 0: for ever."""
    command: str = ""
    """What a person typed to start this, for the record; empty where it is not known."""

    def __post_init__(self) -> None:
        check(self.sites >= 0, f"sites must be at least 0, not {self.sites}.")
        check(self.deadline > 0, f"deadline must be above 0, not {self.deadline}.")
        check(self.wait >= 0, f"wait must be at least 0, not {self.wait}.")
        for name in OF_SIMULATIONS:
            usual = getattr(EngineConfig(), name)
            check(
                getattr(self.recipe.engine, name) == usual,
                f"engine.{name} is for simulations; on many machines it does nothing, so leave it "
                f"out or set it to {'none' if usual is None else str(usual).lower()}.",
            )
        check(
            self.out.is_absolute(),
            f"out must be the absolute path of a folder at the server, not {str(self.out)!r}: "
            "Flower decides where the server's process runs.",
        )

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        name, text = str(config["recipe"]), str(config["recipe-toml"])
        check(bool(name) != bool(text), "Give either recipe or recipe-toml in --run-config.")
        check(bool(config["out"]), 'Give out="…", the server\'s folder, in --run-config.')
        table = read_recipe(name) if name else parse_recipe(text, "recipe-toml")
        runs = cells(table)
        check(
            len(runs) == 1,
            f"The recipe has a [sweep] of {len(runs)} runs; a federation carries out one.",
        )
        recipe = recipe_from_table(runs[0].table)
        return Settings(
            recipe=recipe,
            out=Path(str(config["out"])).expanduser(),
            sites=int(_number(config, "sites")) or recipe.scene.clients,
            deadline=_number(config, "deadline"),
            wait=_number(config, "wait"),
            command=str(config["command"]),
        )


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config[key]
    check(
        isinstance(value, int | float) and not isinstance(value, bool),
        f"{key} must be a number, not {value!r}.",
    )
    return float(value)
