"""Settings from presets, and settings with a fixed choice of values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.methods import contract
from fedsieve.methods.presets import check_choices, fill_in, released, switches_of


@dataclass(frozen=True)
class Switches:
    depth: int
    colour: Literal["red", "blue"]


PRESETS = {"plain": Switches(1, "red"), "fancy": Switches(7, "blue")}


@dataclass(frozen=True, kw_only=True)
class Config(contract.Config):
    presets = PRESETS
    name: Literal["thing"] = "thing"
    preset: Literal["plain", "fancy"] = "plain"
    depth: int | None = None
    colour: Literal["red", "blue"] | None = None
    shape: Literal["round", "square"] | None = None
    rate: float = 0.5

    def __post_init__(self) -> None:
        fill_in(self)
        check_choices(self)


def test_what_is_left_out_comes_from_the_preset() -> None:
    assert switches_of(Config(), Switches) == Switches(1, "red")
    assert switches_of(Config(preset="fancy"), Switches) == Switches(7, "blue")
    assert switches_of(Config(preset="fancy", depth=0), Switches) == Switches(0, "blue")


def test_what_no_preset_has_may_stay_open() -> None:
    assert Config().shape is None
    assert Config(shape="round").shape == "round"


def test_a_saved_configuration_takes_another_preset_for_what_it_had_from_the_old_one() -> None:
    saved = asdict(Config(depth=3, rate=0.25))
    rest = {"name": "thing", "preset": "plain", "depth": 3, "shape": None, "rate": 0.25}
    assert released(Config, saved) == rest
    again = Config(**{**rest, "preset": "fancy"})  # type: ignore[arg-type]
    assert (again.depth, again.colour, again.rate) == (3, "blue", 0.25)


def test_what_a_recipe_names_was_chosen() -> None:
    """Not every switch is named, so this was written by a person: red is what they want."""
    written = {"name": "thing", "preset": "plain", "colour": "red"}
    assert released(Config, written) == written
    assert released(contract.Config, {"name": "thing"}) == {"name": "thing"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"preset": "odd"}, "method.preset must be one of 'plain', 'fancy', not 'odd'."),
        ({"colour": "green"}, "method.colour must be one of 'red', 'blue', not 'green'."),
        ({"shape": "flat"}, "method.shape must be one of 'round', 'square', not 'flat'."),
    ],
)
def test_other_values_are_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(FedsieveError) as caught:
        Config(**settings)  # type: ignore[arg-type]
    assert str(caught.value) == sentence
