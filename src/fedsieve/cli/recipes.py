"""`fedsieve recipes`: the recipes that come with fedsieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.cli.output import print_table
from fedsieve.config import unknown_key
from fedsieve.errors import FedsieveError, check
from fedsieve.recipe import shipped_recipes


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """List the recipes that come with fedsieve, with `list NAME` those that have NAME in theirs;
    `show NAME` prints one, `copy NAME FILE` gives you one of your own."""

    action: Literal["list", "show", "copy"] = field(default="list", metadata=POSITIONAL)
    """What to do."""
    name: str | None = field(default=None, metadata=POSITIONAL)
    """The recipe to show or copy, or what the names to list have in them."""
    file: Path | None = field(default=None, metadata=POSITIONAL)
    """The new file of a copy."""


def main(argv: Sequence[str]) -> int:
    options = parse(RecipesOptions, "fedsieve recipes", argv)
    shipped = shipped_recipes()
    check(
        options.file is None or options.action == "copy",
        f"'{options.file}' is one word too many; only `fedsieve recipes copy` takes a file.",
    )
    if options.action == "list":
        part = options.name or ""
        rows = [[name, first_comment(text)] for name, text in shipped.items() if part in name]
        if not rows:
            raise FedsieveError(unknown_key(part, part, shipped, "recipe"))
        print_table(["recipe", "what it is"], rows)
        return 0
    check(options.name is not None, f"Give a name: fedsieve recipes {options.action} NAME")
    assert options.name is not None
    if options.name not in shipped:
        raise FedsieveError(unknown_key(options.name, options.name, shipped, "recipe"))
    text = shipped[options.name]
    if options.action == "show":
        print(text, end="")
        return 0
    if options.file is None:
        raise FedsieveError(f"Give the new file: fedsieve recipes copy {options.name} FILE")
    try:
        with options.file.open("x", encoding="utf-8") as copy:
            copy.write(text)
    except FileExistsError:
        raise FedsieveError(f"{options.file} exists already; give another file.") from None
    print(f"Wrote {options.file}; run it with: fedsieve run {options.file}")
    return 0


def first_comment(text: str) -> str:
    """The first line of a recipe's head, without the sign of a comment."""
    first = text.lstrip().partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
