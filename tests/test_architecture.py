"""Dependencies point one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "fedsieve"
AT_THE_BOTTOM = {
    "types",
    "errors",
    "serial",
    "config",
    "packed",
    "files",
    "labels",
    "ports",
    "formulas",
}
"""Modules that the page does not place because they know of nothing above them."""
AT_THE_TOP = {"__main__"}


def layers() -> dict[str, int]:
    """Part of the package → its layer, as printed on the page."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"`(types ← [^`]*)`", text)
    found = dict.fromkeys(AT_THE_BOTTOM, 0)
    groups = printed.split("←")
    for place, group in enumerate(groups):
        found |= dict.fromkeys((part.strip() for part in group.split(",")), place)
    return found | dict.fromkeys(AT_THE_TOP, len(groups))


def imports() -> Iterator[tuple[Path, str, str]]:
    """(file, the part it belongs to, a part that it imports) of every import, late ones too."""
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
                if node.module == "fedsieve":
                    names = [f"fedsieve.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                if top == "fedsieve" and rest and not rest.startswith("__"):
                    yield file, own, rest.partition(".")[0]


def test_no_part_imports_one_above_it() -> None:
    layer = layers()
    upwards = [
        f"{file.relative_to(PACKAGE)} imports {part}"
        for file, own, part in imports()
        if own not in ("__init__", "flower_app") and layer[part] > layer[own]
    ]
    assert upwards == []


def test_every_part_is_on_the_page() -> None:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.name[0] != "_"}
    folders = {part for part in parts if (PACKAGE / part / "__init__.py").exists()}
    modules = {part for part in parts if (PACKAGE / f"{part}.py").exists()}
    assert (folders | modules) - {"recipes"} <= set(layers())
