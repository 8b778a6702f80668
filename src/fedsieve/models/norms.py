"""BatchNorm with what follows it in a residual block, as one module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class NormRelu(nn.BatchNorm2d):
    """BatchNorm, plus a shortcut where there is one, then ReLU.

    One module, because a GPU does it in one go (`local/fused.py`); its weights have the names and
    shapes of `nn.BatchNorm2d`'s.
    """

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return F.relu(y if shortcut is None else y + shortcut)
