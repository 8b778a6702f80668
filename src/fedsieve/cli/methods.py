"""`fedsieve methods`: which methods there are, and what can be set in each."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedsieve.cli.options import (
    POSITIONAL,
    class_doc,
    default_of,
    metavar,
    parse,
    text_of,
)
from fedsieve.cli.output import print_table
from fedsieve.config import field_docs, needed
from fedsieve.methods import METHODS, method
from fedsieve.methods.contract import Config


@dataclass(frozen=True, kw_only=True)
class MethodsOptions:
    """List the methods, or explain the settings of one."""

    name: str | None = field(default=None, metadata=POSITIONAL)
    """A method whose settings are to be explained."""


def main(argv: Sequence[str]) -> int:
    options = parse(MethodsOptions, "fedsieve methods", argv)
    if options.name is None:
        rows = [[m.name, m.title, m.paper] for m in METHODS.values()]
        print_table(["method", "what it does", "paper"], rows)
        return 0
    chosen = method(options.name)
    doc = class_doc(chosen.config)
    title = f"{chosen.name}: {chosen.title}\n{chosen.paper}" + (f"\n{doc}" if doc else "")
    rows = setting_rows(chosen.config)
    if rows:
        print_table(["setting", "values", "default", "meaning"], rows, title=title)
    else:
        print(f"{title}\n{chosen.name} has no settings of its own.")
    return 0


def setting_rows(config: type[Config]) -> list[list[str]]:
    """Option, kind of value, default and meaning of each hyper-parameter."""
    hints, docs = typing.get_type_hints(config), field_docs(config)
    return [
        [
            f"--method.{member.name}",
            metavar(hints[member.name]),
            "must be set" if member.name in needed(config) else text_of(default_of(member)),
            docs.get(member.name, ""),
        ]
        for member in dataclasses.fields(config)
        if member.name != "name"
    ]
