"""Options made from dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.cli.options import (
    POSITIONAL,
    class_doc,
    like,
    metavar,
    nearest_option,
    option_names,
    parse,
    parse_given,
    text_of,
    value_of,
)
from fedsieve.config import field_docs
from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Sgd
from fedsieve.methods import METHODS
from fedsieve.models import ModelConfig
from fedsieve.recipe import DataConfig, EngineConfig, Recipe
from fedsieve.scenes import Noise, Partition


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Inside."""

    rate: float = 0.5
    """How fast,
    in a second line."""
    kind: Literal["a", "b"] = "a"
    weights: tuple[float, ...] = (1.0,)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise FedsieveError("rate must not be negative.")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Outside."""

    place: str | None = field(default=None, metadata=POSITIONAL)
    """Where."""
    inner: Inner = field(default_factory=Inner)
    batch_size: int = 3


@dataclass(frozen=True, kw_only=True)
class Derived(Inner):
    rate: float = 0.1
    extra: bool = False
    """More."""


def test_docs_come_from_the_source_of_the_class_and_its_bases():
    assert field_docs(Inner) == {"rate": "How fast, in a second line."}
    assert field_docs(Derived) == {"rate": "How fast, in a second line.", "extra": "More."}
    assert class_doc(Inner) == "Inside."
    assert class_doc(Derived) == ""


def test_only_what_was_given_is_returned():
    options = like([Outer], {"inner": {"rate": 0.7}})
    argv = ["here", "--inner.rate", "-1", "--batch-size=8", "--inner.limit", "none"]
    given_values = parse_given(options, "test", argv)
    assert given_values == {
        "place": "here",
        "inner.rate": -1,
        "batch_size": 8,
        "inner.limit": None,
    }
    assert parse_given(options, "test", []) == {}


def test_several_values_of_a_list():
    assert parse_given(like([Inner], {}), "test", ["--weights", "1", ".5"]) == {"weights": [1, 0.5]}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["0.5"], [0.5]),
        (["1", "-.5"], [1, -0.5]),
        (["[0.5]"], [0.5]),
        (["[0.5, 1]"], [0.5, 1]),
        (["none"], None),
        (["x"], ["x"]),
    ],
)
def test_numbers_of_a_list_that_may_be_left_out(words, value):
    options = like([DataConfig], {})
    assert parse_given(options, "test", ["--mean", *words, "--views", "v"])["mean"] == value


def test_text_in_brackets_is_no_list():
    @dataclass(frozen=True, kw_only=True)
    class Named:
        names: tuple[str, ...] = ()

    assert parse_given(like([Named], {}), "test", ["--names", "[1]"]) == {"names": ["[1]"]}


def test_the_help_shows_docs_defaults_and_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_given(like([Outer], {"inner": {"rate": 0.7}}), "fedsieve test", ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "usage: fedsieve test" in text
    assert "--inner.rate NUMBER How fast, in a second line. (default: 0.7)" in text
    assert "--inner.kind a|b" in text
    assert "[PLACE] Where." in text


def test_a_class_of_its_own_is_checked_like_a_recipe():
    assert parse(Derived, "test", ["--extra", "true", "--rate", "2"]) == Derived(extra=True, rate=2)
    with pytest.raises(FedsieveError, match="rate must be a number, not 'x'"):
        parse(Derived, "test", ["--rate", "x"])
    with pytest.raises(FedsieveError, match="rate must not be negative"):
        parse(Derived, "test", ["--rate=-1"])
    with pytest.raises(FedsieveError, match=r"kind must be one of 'a', 'b', not 'c'"):
        parse(Derived, "test", ["--kind", "c"])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--inner.rat", "1"], "There is no option --inner.rat; did you mean --inner.rate?"),
        (["--rate=1"], "There is no option --rate; did you mean --inner.rate?"),
        (["--batchsize", "1"], "There is no option --batchsize; did you mean --batch_size?"),
        (["--xyzzy"], "There is no option --xyzzy; `test --help` lists the options."),
        (
            ["here", "there"],
            "'there' is one word too many; `test --help` shows what belongs where.",
        ),
    ],
)
def test_unknown_words(argv, sentence):
    with pytest.raises(FedsieveError) as error:
        parse_given(like([Outer], {}), "test", argv)
    assert str(error.value) == sentence


def test_a_missing_value_ends_in_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_given(like([Outer], {}), "test", ["--batch_size"])
    assert stop.value.code == 2
    assert "--batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hint", "text", "value"),
    [
        (int, "3", 3),
        (int, "3.0", 3.0),
        (float, ".5", 0.5),
        (float, "1e-3", 0.001),
        (float, "abc", "abc"),
        (float, "none", "none"),
        (bool, "true", True),
        (bool, "False", False),
        (str, "3", "3"),
        (Path, "true", "true"),
        (Literal["1", "2"], "1", "1"),
        (float | None, "none", None),
        (Path | None, "None", None),
        (str | None, "3", "3"),
        (tuple[tuple[float, ...], ...], "[[1, 0], [0, 1]]", [[1, 0], [0, 1]]),
        (int, "__import__('os')", "__import__('os')"),
        (int, "(" * 5000, "(" * 5000),
    ],
)
def test_text_becomes_the_value_that_is_wanted(hint, text, value):
    result = value_of(hint, text)
    assert result == value
    assert type(result) is type(value)


@settings(max_examples=50, deadline=None)
@given(
    st.one_of(
        st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
    )
)
def test_a_value_survives_the_way_to_text_and_back(value):
    assert value_of(float | None, text_of(value)) == value


@pytest.mark.parametrize(
    ("value", "text"), [((), "none"), ((1, 2.5), "[1, 2.5]"), ([[True]], "[[true]]"), ("a", "a")]
)
def test_values_as_text(value, text):
    assert text_of(value) == text


def test_metavars():
    assert metavar(Literal["x", "y"]) == "x|y"
    assert metavar(int | None) == "INTEGER"
    assert metavar(tuple[int, int]) == "LIST"
    assert metavar(bool) == "true|false"


def test_nearest_option_prefers_the_same_last_word():
    assert nearest_option("lr", ["lrr", "sgd.lr"]) == "sgd.lr"
    assert nearest_option("zzz", ["sgd.lr"]) is None


def test_every_setting_of_a_recipe_is_an_option_with_a_doc():
    names = option_names(like([Recipe], {}))
    assert {"seed", "sgd.lr", "scene.noise.low", "engine.device", "method.name"} <= set(names)
    sections = (DataConfig, EngineConfig, Sgd, Noise, Partition, ModelConfig)
    for cls in [*sections, *(m.config for m in METHODS.values())]:
        assert {member.name for member in fields(cls)} - {"name"} <= set(field_docs(cls))
