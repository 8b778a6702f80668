"""The registry of methods: one paper, one file."""

from __future__ import annotations

import difflib

from fedsieve.errors import FedsieveError
from fedsieve.methods import fedavg, feddiv, fedes, fedgr, fedlsr, fedprox, fedsce
from fedsieve.methods.contract import Method

METHODS: dict[str, Method] = {
    m.METHOD.name: m.METHOD for m in (fedavg, fedprox, fedsce, fedgr, fedlsr, fedes, feddiv)
}


def method(name: str) -> Method:
    """The registered method called `name`."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1) or sorted(METHODS)
        raise FedsieveError(
            f"There is no method {name!r}; did you mean {near[0]!r}? `fedsieve methods` lists them."
        )
    return METHODS[name]
