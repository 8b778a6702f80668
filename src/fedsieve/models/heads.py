"""What turns a representation into class scores."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.types import Outputs

HeadKind: TypeAlias = Literal["linear", "mlp"]

BEHIND_THE_BACKBONE = ("neck.", "head.")
"""How the names of those weights begin that no file of pretrained weights holds."""


class LinearHead(nn.Module):
    """logits = Linear(x); the features are x itself."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.classify = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(x, self.classify(x))


class MlpHead(nn.Module):
    """z = BatchNorm(Linear(x), no bias), logits = Linear(ReLU(z)); the features are z."""

    def __init__(self, width: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.classify = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Outputs:
        z = self.norm(self.project(x))
        return Outputs(z, self.classify(F.relu(z)))


def build_head(kind: HeadKind, width: int, hidden: int, num_classes: int) -> nn.Module:
    """The head for a backbone whose output is `width` wide; `hidden` is the width of an MLP's z."""
    if kind == "mlp":
        return MlpHead(width, hidden, num_classes)
    return LinearHead(width, num_classes)
