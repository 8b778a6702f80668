"""Views that are asked for before anybody knows the plan that will need them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedsieve.local.bench import Setup
from fedsieve.local.plan import Plan, draws, repeats
from fedsieve.local.together import ViewsTogether, Wish
from fedsieve.types import Streams


@dataclass(frozen=True, eq=False)
class Ahead:
    """The first views of a client's training, asked for before its plan was known."""

    images: Tensor
    rng: Streams
    views: Mapping[str, str]
    epochs: range
    """The first stretch of epochs, for which the views are made."""
    streams: Mapping[str, np.random.Generator]
    """Where the views of later epochs draw from."""
    made: Future[Mapping[str, Tensor]]

    def serves(self, plan: Plan, epochs: range) -> bool:
        """Whether these are the views that `plan` begins with."""
        return plan.images is self.images and (plan.rng, plan.views, epochs) == (
            self.rng,
            self.views,
            self.epochs,
        )


def look_ahead(
    setup: Setup,
    together: ViewsTogether,
    views: Mapping[str, str],
    shards: Mapping[Streams, Tensor],
) -> list[Ahead]:
    """Ask for the `views` with which the training on each client's images will probably begin."""
    firsts = [next(draws(len(images), setup.sgd.epochs)) for images in shards.values()]
    streams = [{name: rng(f"view/{name}") for name in views} for rng in shards]
    made = together.ask_for_all(
        [
            wishes(setup, views, images, own, first)
            for images, own, first in zip(shards.values(), streams, firsts, strict=True)
        ]
    )
    return [
        Ahead(images, rng, views, first, own, future)
        for (rng, images), first, own, future in zip(
            shards.items(), firsts, streams, made, strict=True
        )
    ]


def wishes(
    setup: Setup,
    views: Mapping[str, str],
    images: Tensor,
    streams: Mapping[str, np.random.Generator],
    epochs: range,
) -> dict[str, Wish]:
    """What has to be made for a training on `images` in these epochs."""
    return {
        name: Wish(setup.views[view], images, streams[name], repeats(view, epochs))
        for name, view in views.items()
    }
