"""How many wrong labels a model has learnt by heart: the memorisation rate.

Measured as in the FedGR paper (its Fig. 1 and 5–17): evaluation mode, weak view, all samples that
the clients hold. Only a simulation can do it, for it takes the true labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedsieve.local.bench import Bench, joint_logits
from fedsieve.simulate.diagnose import Truth
from fedsieve.simulate.world import World
from fedsieve.types import ClientId, Metrics, Weights, rng_for

Labels: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tally:
    """Predictions ŷ* counted against given labels ŷ and true labels y."""

    right: int = 0
    """#{ŷ = y}"""
    wrong: int = 0
    """#{ŷ ≠ y}"""
    right_fitted: int = 0
    """#{ŷ = y, ŷ* = y}"""
    wrong_fitted: int = 0
    """#{ŷ ≠ y, ŷ* = ŷ}"""
    wrong_seen_through: int = 0
    """#{ŷ ≠ y, ŷ* = y}"""

    @staticmethod
    def of(predicted: Labels, given: Labels, true: Labels) -> Tally:
        """Count (n,) predictions."""
        assert predicted.shape == given.shape == true.shape
        wrong, as_given, as_true = given != true, predicted == given, predicted == true
        return Tally(
            right=int((~wrong).sum()),
            wrong=int(wrong.sum()),
            right_fitted=int((~wrong & as_true).sum()),
            wrong_fitted=int((wrong & as_given).sum()),
            wrong_seen_through=int((wrong & as_true).sum()),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.right + other.right,
            self.wrong + other.wrong,
            self.right_fitted + other.right_fitted,
            self.wrong_fitted + other.wrong_fitted,
            self.wrong_seen_through + other.wrong_seen_through,
        )

    def metrics(self) -> dict[str, float]:
        """The shares; NaN where there is nothing to take a share of."""
        return {
            "memorised": _share(self.wrong_fitted, self.wrong),
            "memorised_of_all": _share(self.wrong_fitted, self.right + self.wrong),
            "noisy_accuracy": _share(self.wrong_seen_through, self.wrong),
            "clean_accuracy": _share(self.right_fitted, self.right),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def memorisation(
    bench: Bench,
    world: World,
    truth: Truth,
    seed: int,
    round: int,
    networks: Sequence[Weights],
    at_clients: Mapping[ClientId, Mapping[str, Sequence[Weights]]],
) -> tuple[Metrics, dict[ClientId, dict[str, float]]]:
    """What the global networks together make of all labels, and what others make of single
    clients'.

    `at_clients` names the networks to try together on a client's own samples; NAME's numbers are
    called NAME_memorised and so on. All models see the same weak view of a client's samples.
    """
    total = Tally()
    per_client: dict[ClientId, dict[str, float]] = {}
    for client, held in enumerate(world.clients):
        if not len(held):
            continue
        rng = rng_for(seed, round, client, "memorisation")
        weak = bench.view("weak", world.shard(client).images, rng)
        given, true = truth.scene.given[held], truth.labels[held]
        total += Tally.of(_predict(bench, networks, weak), given, true)
        if client in at_clients:
            tallies = {
                name: Tally.of(_predict(bench, own, weak), given, true)
                for name, own in at_clients[client].items()
            }
            per_client[client] = {
                f"{name}_{metric}": value
                for name, tally in tallies.items()
                for metric, value in tally.metrics().items()
            }
    return total.metrics(), per_client


def _predict(bench: Bench, networks: Sequence[Weights], images: Tensor) -> Labels:
    """(n,) the most likely class of each image."""
    predicted: Labels = joint_logits(bench, networks, images).argmax(dim=1).numpy(force=True)
    return predicted
