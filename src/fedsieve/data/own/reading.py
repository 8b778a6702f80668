"""What people's own data look like once read: one set of tensors, with names for everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import check

Kind: TypeAlias = Literal["folder", "table", "npz", "sites"]
KindOrAuto: TypeAlias = Literal["auto", Kind]

ONE_SITE = "all"
"""The name of the one site of data that name none."""


@dataclass(frozen=True)
class Reading:
    """How own data are read."""

    size: tuple[int, int] | None = None
    """(height, width) of every image; None: the median height and width of the images, scaled down
    together until the longer one is 64. Images are stretched to it."""
    channels: Literal["auto", 1, 3] = "auto"
    """1 is grey, 3 is colour; "auto": 3 as soon as one image is of a colour mode."""
    classes: tuple[str, ...] | None = None
    """Fixes the names and their order. None: classes.txt where there is one, else the names found,
    sorted."""
    strict: bool = False
    """Refuse the data if anything had to be skipped."""
    max_pixels: int = 50_000_000
    """An image of more pixels is skipped unread: it may be made to fill the memory."""
    kind: KindOrAuto = "auto"
    """Which layout the data have; "auto" looks."""

    def __post_init__(self) -> None:
        check(
            self.size is None or (len(self.size) == 2 and min(self.size) >= 1),
            f"The size of images must be a height and a width of at least 1, not {self.size!r}.",
        )
        check(
            self.channels in ("auto", 1, 3),
            f"The channels of images must be 1 (grey), 3 (colour) or auto, not {self.channels!r}.",
        )
        check(self.max_pixels >= 1, f"max_pixels must be at least 1, not {self.max_pixels}.")
        check(
            self.classes is None or len(set(self.classes)) == len(self.classes) >= 2,
            f"Give at least two classes with different names, not {self.classes!r}.",
        )


AS_FOUND = Reading()
"""Everything is chosen from the data."""


@dataclass(frozen=True)
class Skipped:
    """A file or row that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True, eq=False)
class OwnData:
    """Images with the labels that people gave them.

    Samples are sorted by id; the rows of an .npz file keep their order.
    """

    root: Path
    """The folder that ids are relative to."""
    kind: str
    """"folder", "table", "npz" or "sites"."""
    classes: tuple[str, ...]
    """Class names; a label is an index into them."""
    images: Tensor
    """(n, channels, height, width) uint8"""
    labels: Tensor
    """(n,) int64, as given"""
    ids: tuple[str, ...]
    """A stable name of each sample, always valid UTF-8: the path below the root with "/", or
    "row-<i>" for the rows of an .npz file ("<site>/row-<i>" for a site's). In a name with a
    backslash or bytes that are not UTF-8, the backslash is doubled and such a byte is \\xNN."""
    sites: Mapping[str, NDArray[np.int64]]
    """Site name → indices, ascending; one entry "all" where the data name no sites."""
    skipped: tuple[Skipped, ...]
    """Sorted by id."""

    def __len__(self) -> int:
        return len(self.ids)

    def reading_alike(self) -> Reading:
        """How other data are read so that they fit these: the same size, channels and classes."""
        channels, height, width = self.images.shape[1:]
        return Reading(
            size=(height, width), channels=1 if channels == 1 else 3, classes=self.classes
        )
