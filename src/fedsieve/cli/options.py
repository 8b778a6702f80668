"""Options of the command line from dataclasses: the class, its docs and its defaults are the help.

The class that tyro fills in is only *like* the one it is made from: it checks nothing, and it marks
what the command line gave. The values then take the same way as those of a recipe's TOML file
(`fedsieve.config.from_table`), so both kinds of mistakes are told in the same sentences.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import tyro

from fedsieve.config import field_docs, from_table
from fedsieve.errors import FedsieveError, check

T = TypeVar("T")

POSITIONAL = {"positional": True}
"""Metadata of a field that is given by its place instead of its name."""


@dataclass(frozen=True)
class Given:
    """A value that stood on the command line, in contrast to a default."""

    value: Any


def parse(cls: type[T], command: str, argv: Sequence[str]) -> T:
    """The options of `cls` from the command line of `command`, a full name like "fedsieve run"."""
    return from_table(cls, parse_given(like([cls], {}), command, argv))


def parse_given(options: type[Any], command: str, argv: Sequence[str]) -> dict[str, Any]:
    """Dotted name → value of every option on the command line; unknown ones are refused."""
    filled, unknown = tyro.cli(
        options, prog=command, args=list(argv), return_unknown_args=True, use_underscores=True
    )
    if unknown:
        raise FedsieveError(_unknown(unknown[0], command, option_names(options)))
    return dict(_given(filled))


def like(
    classes: Sequence[type[Any]],
    defaults: Mapping[str, Any],
    *,
    replaced: Mapping[str, type[Any]] | None = None,
) -> type[Any]:
    """A class with the fields of all `classes`, for tyro.

    `defaults` (nested, as in TOML) replace the classes' own; `replaced` gives fields another class.
    """
    members: dict[str, tuple[str, Any, Any]] = {}
    for cls in classes:
        hints, docs = typing.get_type_hints(cls), field_docs(cls)
        for member in dataclasses.fields(cls):
            name, hint = member.name, hints[member.name]
            if name in members:
                continue
            default = defaults.get(name, default_of(member))
            inner = (replaced or {}).get(name)
            if inner is None and dataclasses.is_dataclass(hint):
                nested = defaults.get(name)
                inner = like([hint], nested if isinstance(nested, Mapping) else {})  # type: ignore[list-item]
            if inner is not None:
                members[name] = (name, inner, dataclasses.field(default_factory=inner))
            else:
                place = name.upper() if member.metadata == POSITIONAL else None
                kind = _option(hint, docs.get(name, ""), place)
                members[name] = (name, kind, _default_field(default))
    result = dataclasses.make_dataclass(
        classes[0].__name__, list(members.values()), frozen=True, kw_only=True
    )
    result.__doc__ = class_doc(classes[0])
    return result


def class_doc(cls: type[Any]) -> str:
    """The docstring of a class; empty where it has none of its own."""
    doc = cls.__dict__.get("__doc__") or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc  # what dataclass writes by itself


def default_of(member: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field; None where it has none."""
    if member.default is not dataclasses.MISSING:
        return member.default
    factory = member.default_factory
    return None if factory is dataclasses.MISSING else factory()


def option_names(options: type[Any]) -> list[str]:
    """The dotted names of all options of a class that `like` made, positional ones left out."""
    names: list[str] = []
    for member in dataclasses.fields(options):
        if dataclasses.is_dataclass(member.type):
            names += [f"{member.name}.{name}" for name in option_names(member.type)]  # type: ignore[arg-type]
        elif tyro.conf.Positional not in typing.get_args(member.type):
            names.append(member.name)
    return names


def nearest_option(name: str, names: Sequence[str]) -> str | None:
    """The option that someone who wrote `name` most likely meant."""
    same_leaf = [n for n in names if n.rpartition(".")[2] == name]
    near = same_leaf or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return near[0] if near else None


def value_of(hint: Any, text: str) -> Any:
    """The value that `text` stands for where `hint` is wanted; text that fits nothing stays text.

    Numbers, lists and None are written as in Python, truth values as in TOML or Python.
    """
    kinds = [kind for kind in _alternatives(hint) if kind is not type(None)]
    wants_text = any(kind in (str, Path) or typing.get_origin(kind) is Literal for kind in kinds)
    if text in ("none", "None") and len(kinds) < len(_alternatives(hint)):
        return None
    if wants_text:
        return text
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def text_of(value: Any) -> str:
    """A value as one would write it on the command line."""
    match value:
        case None | ():
            return "none"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return "[" + ", ".join(text_of(item) for item in value) + "]"
        case _:
            return str(value)


def metavar(hint: Any) -> str:
    """What the help shows for a value of this kind."""
    words = {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT", Path: "PATH"}
    shown = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            shown += [str(choice) for choice in typing.get_args(kind)]
        elif kind is not type(None):
            shown.append(words.get(kind, "LIST"))
    return "|".join(shown)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _option(hint: Any, doc: str, place: str | None) -> Any:
    """The annotation that makes tyro take a value's text and leave the judging to us.

    `place` is what the help calls a value that is given by its place; None for one with a name.
    """
    item = _item_of(hint)
    shown = metavar(hint if item is None else item)
    if place is not None and typing.get_origin(hint) is not Literal:
        shown = place

    def from_words(words: list[str]) -> Given:
        if item is None or (item in (int, float) and len(words) == 1):
            whole = value_of(hint, words[0])
            if item is None or whole is None or isinstance(whole, list | tuple):
                return Given(whole)
        return Given([value_of(item, word) for word in words])

    def to_words(value: Any) -> list[str]:
        return (
            [text_of(entry) for entry in value] if item is not None and value else [text_of(value)]
        )

    spec = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1 if item is None else "*",
        metavar=shown if item is None else f"{shown} …",
        instance_from_str=from_words,
        is_instance=lambda value: True,
        str_from_instance=to_words,
    )
    marks = () if place is None else (tyro.conf.Positional,)
    return Annotated[(Any, spec, tyro.conf.arg(help=doc), *marks)]


def _item_of(hint: Any) -> Any:
    """What a plain list such as `tuple[int, ...]`, or none, holds; None for every other kind."""
    match [kind for kind in _alternatives(hint) if kind is not type(None)]:
        case [kind] if typing.get_origin(kind) is tuple:
            arguments = typing.get_args(kind)
            if len(arguments) == 2 and arguments[1] is Ellipsis:
                return arguments[0] if arguments[0] in (int, float, str, Path) else None
    return None


def _default_field(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: value)


def _given(filled: Any, where: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for member in dataclasses.fields(filled):
        value = getattr(filled, member.name)
        if isinstance(value, Given):
            found.append((where + member.name, value.value))
        elif dataclasses.is_dataclass(value):
            found += _given(value, f"{where}{member.name}.")
    return found


def _unknown(word: str, command: str, names: Sequence[str]) -> str:
    check(
        word.startswith("-"),
        f"{word!r} is one word too many; `{command} --help` shows what belongs where.",
    )
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    near = nearest_option(name, names)
    hint = f"did you mean --{near}?" if near else f"`{command} --help` lists the options."
    return f"There is no option {word.partition('=')[0]}; {hint}"
