"""The published losses, one function each. All compute in float32 and check their shapes.

Unless said otherwise they return one value per sample, (n,), for the caller to weigh and average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsieve.errors import FedsieveError

SievingLoss: TypeAlias = Literal["cross_entropy", "bounded"]
"""By which loss a mixture tells wrong labels from right ones."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(z)_y, for logits z (n, classes) and class numbers y (n,)."""
    _check_rows(logits, labels)
    return F.cross_entropy(logits.float(), labels, reduction="none")


def sieving_loss(logits: Tensor, labels: Tensor, kind: SievingLoss) -> Tensor:
    """CE(z, y), or where "bounded" CE(softmax(z), y) = log Σ_j e^{p_j} − p_y: softmax twice, as in
    the programs of FedCorr and FedDiv, which keeps the loss in an interval of length 1."""
    return cross_entropy(logits.softmax(dim=1) if kind == "bounded" else logits, labels)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_c t_c log softmax(z)_c, for logits z and targets t, both (n, classes).

    A row of targets may sum to less than 1; a row of zeros gives 0.
    """
    _check_tables(logits, targets)
    return -(targets.float() * F.log_softmax(logits.float(), dim=1)).sum(dim=1)


def entropy(logits: Tensor) -> Tensor:
    """(n,) −Σ_c p_c log p_c, with p = softmax(z) of logits (n, classes)."""
    return soft_cross_entropy(logits, logits.softmax(dim=1))


def kl(teacher_logits: Tensor, student_logits: Tensor, temperature: float) -> Tensor:
    """Σ_c p_c (log p_c − log q_c), with p = softmax(teacher/τ) and q = softmax(student/τ).

    There is no factor τ². Gradients flow into both sides: hand over `teacher.detach()` where the
    teacher is a constant.
    """
    _check_tables(teacher_logits, student_logits)
    log_p = F.log_softmax(teacher_logits.float() / temperature, dim=1)
    log_q = F.log_softmax(student_logits.float() / temperature, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def symmetric_cross_entropy(
    logits: Tensor, labels: Tensor, a: float, b: float, log_zero: float = math.log(1e-4)
) -> Tensor:
    """a·CE + b·RCE (Wang et al. 2019), where RCE = −Σ_c p_c log(onehot_c) = −A·(1 − p_y).

    `log_zero` is A, which stands for the logarithm of 0.
    """
    ce = cross_entropy(logits, labels)
    return a * ce + b * log_zero * torch.expm1(-ce)


def proximal(parameters: Sequence[Tensor], anchor: Sequence[Tensor]) -> Tensor:
    """½ Σ ‖w − w_g‖² as one number, whose gradient is w − w_g (FedProx's term for μ = 1).

    `parameters` are the trainable ones, without BatchNorm's statistics; `anchor` is in the same
    order.
    """
    if not parameters or len(parameters) != len(anchor):
        raise FedsieveError(
            f"The proximal term compares {len(parameters)} parameters with {len(anchor)} anchors; "
            "give one anchor for each of at least one parameter."
        )
    distances = []
    for parameter, fixed in zip(parameters, anchor, strict=True):
        if parameter.shape != fixed.shape:
            raise FedsieveError(
                f"A parameter of shape {tuple(parameter.shape)} met an anchor of shape "
                f"{tuple(fixed.shape)}; give both in the same order."
            )
        distances.append(F.mse_loss(parameter.float(), fixed.float(), reduction="sum"))
    return torch.stack(distances).sum() / 2


def _check_rows(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise FedsieveError(
            f"Logits (n, classes) meet labels (n,) here, not {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}; reshape them before the loss."
        )


def _check_tables(first: Tensor, second: Tensor) -> None:
    if first.ndim != 2 or second.shape != first.shape:
        raise FedsieveError(
            f"Two tensors of one shape (n, columns) meet here, not {tuple(first.shape)} and "
            f"{tuple(second.shape)}; reshape them before the loss."
        )
