"""What only a simulation can know: how right a method's beliefs about labels are.

These functions see the true labels, and what clients never send (`drift` needs neither). Their
results go into the metrics and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedsieve.methods.contract import Method, Sieved
from fedsieve.scenes import Scene
from fedsieve.types import ClientId, Metrics, Weights


@dataclass(frozen=True)
class Truth:
    """Which labels of which client are wrong, and what they should be."""

    scene: Scene
    labels: npt.NDArray[np.int64]
    """(N,) the true labels"""
    rates: npt.NDArray[np.float64]
    """(K,) the true share of wrong labels of each client"""

    @staticmethod
    def of(scene: Scene, labels: npt.NDArray[np.int64]) -> Truth:
        return Truth(scene, labels, scene.true_rates(labels))

    @property
    def qualities(self) -> tuple[float, ...]:
        """(K) the true share of right labels of each client: what an oracle would say."""
        return tuple((1 - self.rates).tolist())

    def wrong(self, client: ClientId) -> npt.NDArray[np.bool_]:
        """(n_k,) which of the client's labels are wrong, in the shard's order."""
        held = self.scene.clients[client]
        wrong: npt.NDArray[np.bool_] = self.scene.given[held] != self.labels[held]
        return wrong


def diagnose(
    method: Method, server: Any, clients: Mapping[ClientId, Any], truth: Truth
) -> dict[str, float]:
    """The round's diagnostics: noise rates of all clients, single labels of the round's."""
    sieved = method.sieve(server)
    result = dict(noise_estimates(sieved, truth))
    result.update(sieved_labels(beliefs(method, sieved, clients), truth))
    result.update(refined_labels(method, clients, truth))
    return result


def beliefs(
    method: Method, sieved: Mapping[ClientId, Sieved], clients: Mapping[ClientId, Any]
) -> dict[ClientId, Sieved]:
    """What is believed of these clients' labels: by the client where it sieves for itself, else by
    the server; clients of whom nobody has a view are missing."""
    found = {}
    for client, state in clients.items():
        belief = method.own_sieve(state) or sieved.get(client)
        if belief is not None:
            found[client] = belief
    return found


def noise_estimates(sieved: Mapping[ClientId, Sieved], truth: Truth) -> Metrics:
    """Estimated against true noise rates, over all clients that were sieved; and, as a warning,
    against the clients' sizes, of which an estimate should know nothing."""
    if len(sieved) < 2:
        return {}
    # Not above: a server of real sites starts often, and needs nothing of this file but `drift`.
    from scipy import stats

    clients = sorted(sieved)
    estimated = np.array([sieved[k].noise_rate for k in clients])
    true, sizes = truth.rates[clients], truth.scene.sizes[clients]
    return {
        "noise_pearson": correlation(estimated, true),
        "noise_spearman": correlation(stats.rankdata(estimated), stats.rankdata(true)),
        "noise_error": float(np.abs(estimated - true).mean()),
        "noise_mse": float(((estimated - true) ** 2).mean()),
        "noise_size_spearman": correlation(stats.rankdata(estimated), stats.rankdata(sizes)),
    }


def sieved_labels(sieved: Mapping[ClientId, Sieved], truth: Truth) -> Metrics:
    """The sieve as a detector of right labels, over these clients together."""
    opinions = {k: s.p_clean for k, s in sieved.items() if s.p_clean is not None}
    if not opinions:
        return {}
    p_clean = np.concatenate([opinions[k].numpy(force=True) for k in sorted(opinions)])
    return detection(p_clean, np.concatenate([truth.wrong(k) for k in sorted(opinions)]))


def per_client(sieved: Sieved | None, truth: Truth, client: ClientId) -> Metrics:
    """One client's true noise, and what its sieve, if any, made of it, for the per-client lines."""
    result = {"true_rate": float(truth.rates[client])}
    if sieved is None:
        return result
    result["noise_rate"] = sieved.noise_rate
    if sieved.p_clean is not None:
        result |= detection(sieved.p_clean.numpy(force=True), truth.wrong(client))
    return result


def detection(p_clean: npt.NDArray[Any], wrong: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Accuracy of "clean" (p ≥ ½) and "wrong", precision, recall and F1 of "clean", and AUROC."""
    clean, said_clean = ~wrong, p_clean >= 0.5
    hits = int((clean & said_clean).sum())
    precision = hits / max(1, int(said_clean.sum()))
    recall = hits / max(1, int(clean.sum()))
    return {
        "sieve_accuracy": float((clean == said_clean).mean()),
        "sieve_precision": precision,
        "sieve_recall": recall,
        "sieve_f1": 2 * precision * recall / max(1e-12, precision + recall),
        "sieve_auroc": auroc(p_clean, clean),
    }


def auroc(score: npt.NDArray[Any], positive: npt.NDArray[np.bool_]) -> float:
    """Area under the ROC curve; NaN where all samples are of one kind, or where a model that has
    all but diverged has no score for some."""
    if positive.all() or not positive.any() or np.isnan(score).any():
        return float("nan")
    from sklearn.metrics import roc_auc_score  # not above, as with scipy

    return float(roc_auc_score(positive, score))


def refined_labels(
    method: Method, clients: Mapping[ClientId, Any], truth: Truth
) -> dict[str, float]:
    """How many samples of the round had a label to train on, and how many of those were right."""
    used = right = total = 0
    for client, state in clients.items():
        labels = method.refined(state)
        if labels is None:
            continue
        trained_on = labels.numpy(force=True)
        has_label = trained_on >= 0
        total += len(trained_on)
        used += int(has_label.sum())
        true = truth.labels[truth.scene.clients[client]]
        right += int((has_label & (trained_on == true)).sum())
    if total == 0:
        return {}
    return {"refined_share": used / total, "refined_accuracy": right / max(1, used)}


def correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Pearson's r; NaN where one side does not vary."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def drift(local: Sequence[Weights], sent: Weights, trainable: Collection[str]) -> float:
    """(1/|S|) Σ_k ‖θ_k − θ‖² over the trainable parameters: how far clients went from the model
    that they were sent. FedDiv's supplement calls it quantised training stability (Fig. 4)."""
    start = [sent[name] for name in trainable]
    lengths = [
        torch.stack(
            torch._foreach_norm(torch._foreach_sub([own[name] for name in trainable], start))
        )
        for own in local
    ]
    return float(torch.stack(lengths).double().square().sum()) / len(local)
