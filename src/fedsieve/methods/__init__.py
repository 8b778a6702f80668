"""The registry of methods: one paper, one file."""

from __future__ import annotations

from fedsieve.config import unknown_key
from fedsieve.errors import FedsieveError
from fedsieve.methods import (
    arfl,
    fedavg,
    fedcorr,
    fedcoteaching,
    feddiv,
    feddividemix,
    fedes,
    fedgr,
    fedjointopt,
    fedlsr,
    fedmixup,
    fednoro,
    fedprox,
    fedsce,
    rofl,
)
from fedsieve.methods.contract import Method

METHODS: dict[str, Method] = {
    m.METHOD.name: m.METHOD
    for m in (
        fedavg,
        fedprox,
        fedsce,
        fedmixup,
        fedjointopt,
        arfl,
        fedcoteaching,
        feddividemix,
        rofl,
        fedcorr,
        fednoro,
        fedgr,
        fedlsr,
        fedes,
        feddiv,
    )
}


def method(name: str) -> Method:
    """The registered method called `name`."""
    if name not in METHODS:
        hint = unknown_key(name, name, METHODS, "method")
        raise FedsieveError(f"{hint} `fedsieve methods` says what they do.")
    return METHODS[name]
