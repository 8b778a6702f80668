"""Which views belong to which data: the named view sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TypeVar

from fedsieve.data.views.view import (
    CentreCrop,
    Chain,
    Raw,
    Resize,
    Rotate,
    SimClr,
    Strong,
    StrongResized,
    View,
    Weak,
)
from fedsieve.errors import FedsieveError

_RAW = Raw()
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ViewSet:
    """The views of one data set, by the names that methods ask for."""

    raw: View = _RAW
    """What is tested and sieved: never random."""
    weak: View = _RAW
    """What plain training and pseudo labels see."""
    strong: View = _RAW
    """What a student sees while a teacher looks at the weak view."""
    aug: View = _RAW
    """The second, distorted version of a self-regularised method (FedLSR)."""

    def __getitem__(self, name: str) -> View:
        """The view called `name`."""
        known: dict[str, View] = {field.name: getattr(self, field.name) for field in fields(self)}
        return _named(known, name, "view")


def view_set(name: str) -> ViewSet:
    """The view set called `name`: that of a source (cifar10, cifar100, mnist, digits, clothing1m),
    plain, or one of those that a paper's experiments ask for."""
    return _named(_PRESETS, name, "view set")


_CLOTHING_SIDE = 224
_RESIZED = Resize(_CLOTHING_SIDE)

_PRESETS: Mapping[str, ViewSet] = {
    "cifar10": ViewSet(weak=Weak(), strong=Strong(), aug=SimClr()),
    "cifar100": ViewSet(weak=Weak(rotate=20.0), strong=Strong(), aug=SimClr()),
    # A mirrored digit or shoe is another one, so no flip. Padding is 2 of 28 pixels, since the
    # garments of Fashion-MNIST reach the frame and more would cut them.
    "mnist": ViewSet(
        weak=Weak(padding=2, flip=False), strong=Strong(padding=2, flip=False), aug=Rotate()
    ),
    # One pixel of 8 is already as much as 4 of 32.
    "digits": ViewSet(
        weak=Weak(padding=1, flip=False), strong=Strong(padding=1, flip=False), aug=Rotate()
    ),
    # From sources of 256 x 256 pixels.
    "clothing1m": ViewSet(
        raw=CentreCrop(_CLOTHING_SIDE),
        weak=Weak(padding=0, size=_CLOTHING_SIDE),
        strong=StrongResized(_CLOTHING_SIDE),
        aug=Chain((CentreCrop(_CLOTHING_SIDE), SimClr())),
    ),
    "plain": ViewSet(),
    # FedLSR and its baselines train on the images as they are; the second version alone is
    # distorted.
    "fedlsr-mnist": ViewSet(aug=Rotate()),
    "fedlsr-cifar10": ViewSet(aug=SimClr()),
    "fedlsr-clothing1m": ViewSet(
        raw=_RESIZED, weak=_RESIZED, strong=_RESIZED, aug=Chain((_RESIZED, SimClr()))
    ),
    # FedDiv and FedCorr test on whole images, made smaller, instead of their middle.
    "feddiv-clothing1m": ViewSet(
        raw=_RESIZED,
        weak=Weak(padding=0, size=_CLOTHING_SIDE),
        strong=StrongResized(_CLOTHING_SIDE),
        aug=Chain((_RESIZED, SimClr())),
    ),
    # What FedLSR's Table 1 trains plain FedAvg on.
    "flip": ViewSet(weak=Weak(padding=0)),
    "rotate5": ViewSet(weak=Rotate(5.0)),
    "rotate15": ViewSet(weak=Rotate(15.0)),
    "rotate30": ViewSet(weak=Rotate(30.0)),
}


def _named(known: Mapping[str, _T], name: str, kind: str) -> _T:
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}" if near else f"choose one of {', '.join(known)}"
    raise FedsieveError(f"There is no {kind} called {name!r}; {hint}?")
