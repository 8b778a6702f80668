"""What only a simulation can know, on ten samples at three sites."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsieve.methods import fedavg
from fedsieve.methods.contract import Sieved
from fedsieve.simulate.diagnose import (
    Truth,
    auroc,
    beliefs,
    correlation,
    detection,
    diagnose,
    drift,
    noise_estimates,
    per_client,
    refined_labels,
    sieved_labels,
)
from helpers import hand_made_scene

TRUE = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])
GIVEN = np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 0])
#                          ^     ^  ^     ^       samples 3, 5, 6, 8 are wrong
HELD = (np.array([9, 3, 0, 1]), np.array([5, 2]), np.array([8, 6, 7, 4]))
"""Client 0 has 1 wrong of 4, client 1 has 1 of 2, client 2 has 2 of 4."""


def truth() -> Truth:
    scene = hand_made_scene(HELD, GIVEN, TRUE)
    return Truth.of(scene, TRUE)


def sieved(rates: Mapping[int, float], p_clean: Mapping[int, list[float]]) -> dict[int, Sieved]:
    return {
        k: Sieved(rate, torch.tensor(p_clean[k]) if k in p_clean else None)
        for k, rate in rates.items()
    }


def test_the_truth_is_per_client_in_the_order_of_its_shard() -> None:
    known = truth()
    assert known.rates.tolist() == [0.25, 0.5, 0.5]
    assert known.qualities == (0.75, 0.5, 0.5)
    assert known.wrong(0).tolist() == [False, True, False, False]
    assert known.wrong(1).tolist() == [True, False]
    assert known.wrong(2).tolist() == [True, True, False, False]


def test_detection_of_right_labels_by_hand() -> None:
    """Clean: samples 0, 2, 4; said clean (p ≥ ½): 0, 1, 2. Hits 2, precision 2/3, recall 2/3.

    AUROC: of the 3·2 pairs (clean, wrong) clean has the higher p in 0.9>0.5, 0.9>0.4, 0.5=0.5
    (half), 0.5>0.4; 0.1 in none: 3.5/6.
    """
    p = np.array([0.9, 0.5, 0.5, 0.4, 0.1])
    wrong = np.array([False, True, False, True, False])
    found = detection(p, wrong)
    assert found["sieve_accuracy"] == pytest.approx(3 / 5), "0, 2 and 3 are judged rightly"
    assert found["sieve_precision"] == pytest.approx(2 / 3)
    assert found["sieve_recall"] == pytest.approx(2 / 3)
    assert found["sieve_f1"] == pytest.approx(2 / 3)
    assert found["sieve_auroc"] == pytest.approx(3.5 / 6)


def test_detection_with_different_precision_and_recall() -> None:
    """One of one said clean is clean, of four: precision 1, recall 1/4, F1 = 2·¼/(5/4) = 0.4."""
    found = detection(np.array([0.9, 0.1, 0.2, 0.3]), np.zeros(4, dtype=bool))
    assert found["sieve_precision"] == 1.0
    assert found["sieve_recall"] == 0.25
    assert found["sieve_f1"] == pytest.approx(0.4)
    assert math.isnan(found["sieve_auroc"]), "all labels are right: there is nothing to separate"


def test_a_sieve_that_trusts_nothing_has_no_precision() -> None:
    found = detection(np.zeros(3), np.array([True, False, False]))
    assert (found["sieve_precision"], found["sieve_recall"], found["sieve_f1"]) == (0, 0, 0)


def test_auroc_limits() -> None:
    positive = np.array([True, True, False])
    assert auroc(np.array([3.0, 2.0, 1.0]), positive) == 1.0
    assert auroc(np.array([1.0, 2.0, 3.0]), positive) == 0.0
    assert auroc(np.array([1.0, 1.0, 1.0]), positive) == 0.5
    assert math.isnan(auroc(np.array([1.0, 2.0]), np.array([False, False])))
    diverged = np.array([0.5, math.nan, 0.1])
    assert math.isnan(auroc(diverged, positive)), "a run must not fail at its end for that"


def test_noise_estimates_by_hand() -> None:
    """Estimates 0.1, 0.3, 0.8 of true ¼, ½, ½; with means 0.4 and 5/12:

    Σ(e − 0.4)(t − 5/12) = (−0.3)(−1/6) + (−0.1)(1/12) + (0.4)(1/12) = 0.05 + 0.025 = 0.075,
    Σ(e − 0.4)² = 0.26, Σ(t − 5/12)² = 1/24, so r = 0.075/√(0.26/24).
    Ranks 1, 2, 3 and 1, 2.5, 2.5: Σ = 1·1 + 0·0.5 + 1·0.5 = 1.5, √(2·1.5), ρ = √3/2.
    Errors 0.15, 0.2, 0.3. Sizes 4, 2, 4 have the ranks 2.5, 1, 2.5: Σ = −1·0.5 + 0 + 1·0.5 = 0.
    """
    found = noise_estimates(sieved({0: 0.1, 1: 0.3, 2: 0.8}, {}), truth())
    assert found == {
        "noise_pearson": pytest.approx(0.075 / math.sqrt(0.26 / 24)),
        "noise_spearman": pytest.approx(math.sqrt(3) / 2),
        "noise_error": pytest.approx(0.65 / 3),
        "noise_mse": pytest.approx((0.15**2 + 0.2**2 + 0.3**2) / 3),
        "noise_size_spearman": pytest.approx(0.0),
    }


def test_opinions_on_samples_are_pooled_over_the_clients_that_have_one() -> None:
    """Clients 0 and 2, wrong = [F T F F | T T F F], said clean = [T F T F | T F T T]:

    hits 2 + 2 = 4 of 5 said clean, of 5 clean.
    """
    p_clean = {0: [0.9, 0.2, 0.6, 0.4], 2: [0.7, 0.1, 0.8, 0.95]}
    found = sieved_labels(sieved({2: 0.5, 1: 0.4, 0: 0.3}, p_clean), truth())
    assert found["sieve_precision"] == pytest.approx(4 / 5)
    assert found["sieve_recall"] == pytest.approx(4 / 5)
    # Clean 0.9 0.6 0.4 0.8 0.95 against wrong 0.2 0.7 0.1: 3 + 2 + 2 + 3 + 3 of 15 pairs.
    assert found["sieve_auroc"] == pytest.approx(13 / 15)


def test_without_opinions_there_is_nothing_to_detect() -> None:
    assert sieved_labels(sieved({0: 0.5, 1: 0.5}, {}), truth()) == {}


def test_fewer_than_two_clients_are_no_statistics() -> None:
    assert noise_estimates({}, truth()) == {}
    assert noise_estimates(sieved({1: 0.5}, {1: [0.5, 0.5]}), truth()) == {}


def test_correlation_needs_variation() -> None:
    a = np.array([1.0, 2.0, 4.0])
    assert correlation(a, 3 * a - 1) == pytest.approx(1.0)
    assert correlation(a, -a) == pytest.approx(-1.0)
    assert math.isnan(correlation(a, np.ones(3)))
    assert math.isnan(correlation(np.ones(3), a))
    assert math.isnan(correlation(a[:1], a[:1]))


def test_one_client_for_its_own_line() -> None:
    known = truth()
    with_opinion = per_client(Sieved(0.75, torch.tensor([0.9, 0.8])), known, 1)
    assert with_opinion["noise_rate"] == 0.75
    assert with_opinion["true_rate"] == 0.5
    assert with_opinion["sieve_precision"] == 0.5
    assert with_opinion["sieve_recall"] == 1.0
    assert with_opinion["sieve_auroc"] == 0.0
    assert per_client(Sieved(0.25, None), known, 0) == {"noise_rate": 0.25, "true_rate": 0.25}
    assert per_client(None, known, 0) == {"true_rate": 0.25}


def refining(labels: Mapping[int, list[int] | None]) -> Any:
    """A method whose client states are client ids, with these refined labels."""

    def refined(client: int) -> Tensor | None:
        found = labels[client]
        return None if found is None else torch.tensor(found)

    return replace(fedavg.METHOD, refined=refined)


def test_refined_labels_by_hand() -> None:
    """Client 0 truly has 0 0 0 1 and trained on 0 0 2 and nothing; client 1 has 2 2, on 1 2.

    Five of six samples had a label, three of those (two at client 0, one at client 1) were right.
    """
    method = refining({0: [0, 0, 2, -1], 1: [1, 2], 2: None})
    assert refined_labels(method, {0: 0, 1: 1, 2: 2}, truth()) == {
        "refined_share": pytest.approx(5 / 6),
        "refined_accuracy": pytest.approx(3 / 5),
    }


def test_refined_labels_limits() -> None:
    assert refined_labels(refining({2: None}), {2: 2}, truth()) == {}
    nothing = refining({1: [-1, -1]})
    assert refined_labels(nothing, {1: 1}, truth()) == {
        "refined_share": 0.0,
        "refined_accuracy": 0.0,
    }


def test_a_client_that_sieves_for_itself_is_heard_before_the_server() -> None:
    """States are client ids; client 0 has an opinion of its own, client 1 only the server's."""
    own = Sieved(0.5, torch.tensor([0.9, 0.2, 0.9, 0.2]))
    method = replace(fedavg.METHOD, own_sieve=lambda client: own if client == 0 else None)
    of_server = sieved({0: 0.1, 1: 0.4}, {0: [0.0] * 4})
    assert beliefs(method, of_server, {0: 0, 1: 1, 2: 2}) == {0: own, 1: of_server[1]}
    method = replace(method, sieve=lambda server: of_server)
    found = diagnose(method, None, {0: 0}, truth())
    # Wrong is [F T F F]; said clean [T F T F]: three of four are right.
    assert found["sieve_accuracy"] == 0.75
    assert found["sieve_precision"] == 1
    assert found["noise_error"] == pytest.approx((0.15 + 0.1) / 2), "rates are the server's"


def test_methods_leave_the_sieving_to_the_server_by_default() -> None:
    assert beliefs(fedavg.METHOD, {}, {0: fedavg.Client()}) == {}


def test_drift_is_the_mean_squared_way_over_trainable_parameters() -> None:
    """‖(3, 4)‖² + 2² = 29 and 1² + 0 = 1; statistics do not count: mean 15."""
    sent = {"w": torch.zeros(2), "b": torch.ones(1), "running_mean": torch.zeros(1)}
    local = [
        {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([3.0]), "running_mean": torch.ones(1)},
        {"w": torch.tensor([0.0, -1.0]), "b": torch.ones(1), "running_mean": torch.ones(1)},
    ]
    assert drift(local, sent, ("w", "b")) == pytest.approx(15)
    assert drift([sent], sent, ("w", "b")) == 0


def test_diagnose_puts_both_together() -> None:
    method = replace(
        refining({1: [2, 2]}), sieve=lambda server: sieved({0: 0.25, 1: 0.5, 2: 0.5}, {})
    )
    found = diagnose(method, None, {1: 1}, truth())
    assert found == {
        "noise_pearson": pytest.approx(1.0),
        "noise_spearman": pytest.approx(1.0),
        "noise_error": 0.0,
        "noise_mse": 0.0,
        # Ranks 1, 2.5, 2.5 and 2.5, 1, 2.5: Σ = −1·0.5 − 0.5·1 + 0.5·0.5 = −0.75, norms² 1.5, 1.5.
        "noise_size_spearman": pytest.approx(-0.5),
        "refined_share": 1.0,
        "refined_accuracy": 1.0,
    }
    assert diagnose(fedavg.METHOD, None, {}, truth()) == {}
