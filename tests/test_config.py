"""Tables to configuration classes and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.config import from_table, to_table, unknown_key
from fedsieve.errors import FedsieveError, check


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 2
    rate: float = 0.5

    def __post_init__(self) -> None:
        check(self.depth > 0, f"depth must be above 0, not {self.depth}.")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    count: int
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    place: Path | None = None
    pair: tuple[int, float] = (1, 2.0)
    many: tuple[str, ...] = ()
    size: int | str = "auto"
    extra: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


GOOD: dict[str, Any] = {"name": "n", "count": 3}


def refusal(table: dict[str, Any], where: str = "") -> str:
    with pytest.raises(FedsieveError) as caught:
        from_table(Outer, table, where)
    text = str(caught.value)
    assert "\n" not in text
    assert text[-1] in ".?"
    return text


def test_values_take_the_type_of_their_field() -> None:
    made = from_table(
        Outer,
        GOOD
        | {
            "place": "some/where",
            "pair": [4, 5],
            "many": ["a", "b"],
            "size": 7,
            "extra": {"anything": 1},
            "inner": {"rate": 1},
        },
    )
    assert made == Outer(
        name="n",
        count=3,
        place=Path("some/where"),
        pair=(4, 5.0),
        many=("a", "b"),
        size=7,
        extra={"anything": 1},
        inner=Inner(rate=1.0),
    )
    assert type(made.pair[1]) is float
    assert type(made.inner.rate) is float


def test_what_is_left_out_takes_its_default() -> None:
    assert from_table(Outer, GOOD) == Outer(name="n", count=3)
    assert from_table(Outer, GOOD | {"place": None}).place is None


def test_an_instance_passes_as_it_is() -> None:
    inner = Inner(depth=9)
    assert from_table(Outer, GOOD | {"inner": inner}).inner is inner


def test_an_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    assert refusal(GOOD | {"cuont": 1}) == "There is no setting 'cuont'; did you mean 'count'?"
    assert refusal(GOOD | {"inner": {"dept": 1}}) == (
        "There is no setting 'inner.dept'; did you mean 'depth'?"
    )


def test_an_unknown_key_like_no_other_lists_what_is_possible() -> None:
    assert refusal(GOOD | {"inner": {"xyz": 1}}) == (
        "There is no setting 'inner.xyz'; possible are depth, rate."
    )
    assert unknown_key("a.b", "b", []) == "There is no setting 'a.b'; possible are none."


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": 1.0}, "count must be a whole number, not 1.0."),
        ({"count": True}, "count must be a whole number, not True."),
        ({"count": "1"}, "count must be a whole number, not '1'."),
        ({"name": 5}, "name must be text, not 5."),
        ({"flag": 1}, "flag must be true or false, not 1."),
        ({"inner": {"rate": "high"}}, "inner.rate must be a number, not 'high'."),
        ({"inner": {"rate": True}}, "inner.rate must be a number, not True."),
        ({"inner": 3}, "inner must be a table, not 3."),
        ({"place": 3}, "place must be a path, not 3."),
        ({"pair": 3}, "pair must be a list, not 3."),
        ({"pair": [1]}, "pair must be a list of 2, not [1]."),
        ({"pair": [1, "x"]}, "pair[1] must be a number, not 'x'."),
        ({"many": ["a", 1]}, "many[1] must be text, not 1."),
        (
            {"mode": "fats"},
            "mode must be one of 'fast', 'slow', not 'fats'; did you mean 'fast'?",
        ),
        ({"mode": 3}, "mode must be one of 'fast', 'slow', not 3."),
        ({"mode": [1]}, "mode must be one of 'fast', 'slow', not [1]."),
        ({"size": 1.5}, "size must be text, not 1.5."),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    assert refusal(GOOD | change) == sentence


def test_where_leads_the_name() -> None:
    assert refusal(GOOD | {"count": "1"}, "table") == (
        "table.count must be a whole number, not '1'."
    )


def test_settings_without_default_are_asked_for_together() -> None:
    assert refusal({}) == "Please set name and count."
    assert refusal({"name": "n"}, "outer") == "Please set outer.count."


def test_a_class_refuses_its_own_values() -> None:
    assert refusal(GOOD | {"inner": {"depth": 0}}) == "depth must be above 0, not 0."


OUTERS = st.builds(
    Outer,
    name=st.text(max_size=4),
    count=st.integers(),
    flag=st.booleans(),
    mode=st.sampled_from(["fast", "slow"]),
    place=st.none() | st.sampled_from([Path("a"), Path("b/c")]),
    pair=st.tuples(st.integers(), st.floats(allow_nan=False)),
    many=st.lists(st.text(max_size=2), max_size=3).map(tuple),
    size=st.integers() | st.just("auto"),
    extra=st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    inner=st.builds(Inner, depth=st.integers(1), rate=st.floats(allow_nan=False)),
)


@settings(max_examples=50, deadline=None)
@given(OUTERS)
def test_a_table_gives_back_what_it_was_made_of(outer: Outer) -> None:
    table = to_table(outer)
    assert from_table(Outer, table) == outer
    assert ("place" in table) == (outer.place is not None), "TOML has no None"
    for value in table.values():
        assert isinstance(value, str | int | float | bool | list | dict)
