"""Where on a GPU the slots of a round work: slices of their own, or all of it for everybody."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsieve.errors import check
from fedsieve.local.slices import Slice, SlicingError, carve, size_of_slices, whole
from fedsieve.recipe import Slicing
from fedsieve.simulate.world import World


@dataclass(frozen=True)
class Places:
    """Where on a GPU the parts of a round work."""

    slots: Sequence[Slice]
    """Largest client first."""
    examiner: Slice
    """Where the global model is tested while the next round trains."""
    views: Slice

    @staticmethod
    def shared(place: Slice, slots: int) -> Places:
        """All in one place."""
        return Places([place] * slots, place, place)


EVEN = 1.25
"""Up to this ratio of a round's largest client to the mean one, each slot has a slice of its own. A
slot with a slice cannot use what the others leave idle when they are done."""
IN_PAIRS = 2.2
"""Up to this ratio, two slots share a slice: that of the largest client and of the smallest, and so
on. Beyond it, all slots share the GPU."""


EXAMINED = 4
"""A spare slice may test so many images for each one that a slot trains on: a forward pass is a
third of a step, and the test should be done before the slots are."""


def slot_places(slicing: Slicing, world: World, slots: int, epochs: int) -> Places:
    """Slices of the GPU where that pays, else all of it for everybody."""
    everything = whole(world.device)
    uneven = unevenness(world, slots)
    if slicing == "always" or (slicing == "auto" and uneven <= IN_PAIRS):
        count = slots if uneven <= EVEN else math.ceil(slots / 2)
        total = everything.multiprocessors
        # What does not divide evenly may be enough for a slice that costs the others nothing.
        trained = epochs * sum(map(len, world.clients)) / len(world.clients)
        spare = (
            size_of_slices(total, count + 1) == size_of_slices(total, count)
            and len(world.test_labels) <= EXAMINED * trained
        )
        try:
            slices = carve(world.device, count + spare)
            shared = slices[:count][::-1][: slots - count]
            examiner = slices[count] if spare else everything
            return Places([*slices[:count], *shared], examiner, everything)
        except SlicingError as reason:
            check(
                slicing == "auto",
                f"engine.slices is 'always', but this is {reason}; use 'auto' or 'never'.",
            )
    return Places.shared(everything, slots)


def unevenness(world: World, selected: int) -> float:
    """Expected size of the largest of `selected` random clients over the mean size."""
    sizes = np.sort([len(indices) for indices in world.clients]).astype(np.float64)
    # P(largest of m draws with replacement ≤ i-th smallest) = (i / K)^m
    below = (np.arange(len(sizes) + 1) / len(sizes)) ** selected
    return float((np.diff(below) * sizes).sum() / sizes.mean())
