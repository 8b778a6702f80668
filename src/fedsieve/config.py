"""Configuration classes from plain tables (TOML) and back, with errors a person can act on."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from fedsieve.errors import FedsieveError

T = TypeVar("T")

OPTION = {"option": True}
"""Metadata of a field without a default that a command line must give by its name."""


def from_table(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass `cls`; unknown keys and wrong types are refused by name."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    for key in table:
        if key not in names:
            raise FedsieveError(unknown_key(_join(where, key), key, names))
    values = {key: _convert(hints[key], value, _join(where, key)) for key, value in table.items()}
    options = {f.name for f in dataclasses.fields(cls) if f.metadata == OPTION}  # type: ignore[arg-type]
    missing = [
        f"--{name}" if name in options else _join(where, name)
        for name in needed(cls)
        if name not in values
    ]
    if missing:
        raise FedsieveError(f"Please set {' and '.join(missing)}.")
    return cls(**values)


def needed(cls: type[Any]) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


def to_table(config: Any) -> dict[str, Any]:
    """`config` as nested plain tables; None is left out, for TOML has no such value."""
    return {
        f.name: _plain(value)
        for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) is not None
    }


def unknown_key(path: str, key: str, names: typing.Iterable[str], kind: str = "setting") -> str:
    """The sentence for a key that does not exist, with the nearest right one."""
    names = list(names)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    listed = f"possible are {', '.join(names) or 'none'}." if len(names) < 20 else "none is near."
    hint = f"did you mean {near[0]!r}?" if near else listed
    return f"There is no {kind} {path!r}; {hint}"


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_table(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        _expect(isinstance(value, Mapping), path, "a table", value)
        return from_table(hint, value, path)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        sentences = []
        for option in (a for a in arguments if a is not type(None)):
            try:
                return _convert(option, value, path)
            except FedsieveError as error:
                sentences.append(str(error))
        raise FedsieveError(sentences[-1])
    if origin is Literal:
        near = difflib.get_close_matches(str(value), [str(a) for a in arguments], n=1)
        hint_text = f"; did you mean {near[0]!r}?" if near else "."
        _expect(
            value in arguments, path, f"one of {', '.join(map(repr, arguments))}", value, hint_text
        )
        return value
    if origin is tuple:
        _expect(isinstance(value, list | tuple), path, "a list", value)
        kinds = arguments
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            kinds = (arguments[0],) * len(value)
        _expect(len(kinds) == len(value), path, f"a list of {len(kinds)}", value)
        items = enumerate(zip(kinds, value, strict=True))
        return tuple(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in items)
    if hint is Path:
        _expect(isinstance(value, str | Path) and value != "", path, "a path", value)
        return Path(value).expanduser()
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _expect(number, path, "a number", value)
        _expect(abs(value) < 1e300 or isinstance(value, float), path, "a smaller number", value)
        return float(value)
    kind = {int: "a whole number", str: "text", bool: "true or false"}.get(hint)
    if kind is not None:
        _expect(type(value) is hint, path, kind, value)
    return value


def _expect(ok: bool, path: str, kind: str, value: Any, end: str = ".") -> None:
    if not ok:
        raise FedsieveError(f"{path} must be {kind}, not {value!r}{end}")


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Field → the string below it in the source of the class or of a base."""
    docs: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = " ".join(doc.split())
    return docs
