"""MixUp within a batch: H. Zhang, M. Cisse, Y. N. Dauphin, D. Lopez-Paz, "mixup: Beyond Empirical
Risk Minimization", ICLR 2018.

Each step has its λ and a random order of its batch, which pairs the samples. Both come with the
plan, so that a captured step draws nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedsieve.local.plan import Batch, Sgd, count_steps
from fedsieve.losses import cross_entropy


def draw_mixing(
    n: int,
    sgd: Sgd,
    alpha: float,
    rng: np.random.Generator,
    device: torch.device,
    blocks: int = 1,
) -> dict[str, Tensor]:
    """What a plan of n samples needs `per_step`: λ ~ Beta(α, α), 1 where α is 0, and keys whose
    order pairs the samples; the first B of them suit a batch of any size B. Where several `blocks`
    of a batch's size are mixed with each other, there are keys for all of them."""
    steps = count_steps(n, sgd)
    lam = rng.beta(alpha, alpha, size=steps) if alpha > 0 else np.ones(steps)
    keys = rng.random((steps, blocks * sgd.batch_size))
    return {
        "lam": torch.from_numpy(lam.astype(np.float32)).to(device),
        "keys": torch.from_numpy(keys.astype(np.float32)).to(device),
    }


def mixed(batch: Batch) -> tuple[Tensor, Tensor]:
    """x̃ = λ·x_i + (1 − λ)·x_j of the view "x", and the labels y_j; j is a random order of the
    batch."""
    x, labels, lam = batch["x"], batch["label"], batch["lam"]
    order = batch["keys"][: len(labels)].argsort(stable=True)
    return lam * x + (1 - lam) * x[order], labels[order]


def mixed_loss(batch: Batch, others: Tensor, logits: Tensor) -> Tensor:
    """The mean over the batch of λ·CE(z, y_i) + (1 − λ)·CE(z, y_j), for logits z of x̃."""
    return batch.mean(mixed_cross_entropy(logits, batch["label"], others, batch["lam"]))


def mixed_cross_entropy(logits: Tensor, labels: Tensor, others: Tensor, lam: Tensor) -> Tensor:
    """(B,) λ·CE(z, y_i) + (1 − λ)·CE(z, y_j), for logits z of x̃ = λx_i + (1 − λ)x_j."""
    return lam * cross_entropy(logits, labels) + (1 - lam) * cross_entropy(logits, others)
