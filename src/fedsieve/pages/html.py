"""Self-contained pages: one file that loads nothing, and runs no script but ours.

Everything a template shows is escaped. Scripts and styles stand in the page and are named by their
hash in its Content-Security-Policy, so that a browser refuses any other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, *, styles: Sequence[str], script: str | None = None, **parts: Any) -> str:
    """The page `template` with the package's `styles` and `script`, as text that UTF-8 can hold."""
    style = "".join(asset(name) for name in styles)
    code = None if script is None else asset(script)
    text = (
        _environment()
        .get_template(template)
        .render(
            style=Markup(style),
            script=None if code is None else Markup(code),
            policy=policy(style, code),
            **parts,
        )
    )
    return well_formed(text)


def policy(style: str, script: str | None) -> str:
    """Nothing may be loaded but pictures inside the page, its one style and its one script."""
    rules = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": _hash_of(style),
        "script-src": "'none'" if script is None else _hash_of(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def well_formed(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 does not have, as replacement characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def asset(name: str) -> str:
    """A style or script of this package."""
    return (resources.files(__package__) / "static" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
