"""The nine-layer network of Co-teaching (Han et al. 2018), which FedLSR and RoFL use too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedsieve.models.heads import HeadKind, build_head
from fedsieve.types import Outputs


class Dropout2d(nn.Module):
    """Drops whole channels with probability `p` and divides the others by 1 − p.

    The mask is drawn from `generator` where one is set, so that the draws of one client do not
    depend on those of another; else from torch's default generator.
    """

    generator: torch.Generator | None

    def __init__(self, p: float, *, always_on: bool) -> None:
        super().__init__()
        self.p = p
        self.always_on = always_on
        self.generator = None

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always_on):
            return x
        draws = torch.rand((*x.shape[:2], 1, 1), generator=self.generator, device=x.device)
        return x * ((draws >= self.p).to(x.dtype) / (1 - self.p))


def _layer(inside: int, outside: int, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=padding, bias=False),
        nn.BatchNorm2d(outside),
        nn.LeakyReLU(0.01),
    )


class Cnn9(nn.Module):
    """Three conv 3×3 of 128, three of 256, then 512, 256, 128 without padding; mean; head.

    The first two stages end in a max-pool 2 and a dropout of 0.25. The published code leaves
    dropout on when it tests; `always_on_dropout` does the same.
    """

    def __init__(
        self, channels: int, num_classes: int, head: HeadKind, *, always_on_dropout: bool
    ) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(
            _layer(channels, 128, 1), _layer(128, 128, 1), _layer(128, 128, 1)
        )
        self.dropout1 = Dropout2d(0.25, always_on=always_on_dropout)
        self.stage2 = nn.Sequential(_layer(128, 256, 1), _layer(256, 256, 1), _layer(256, 256, 1))
        self.dropout2 = Dropout2d(0.25, always_on=always_on_dropout)
        self.stage3 = nn.Sequential(_layer(256, 512, 0), _layer(512, 256, 0), _layer(256, 128, 0))
        self.head = build_head(head, 128, 128, num_classes)

    def forward(self, x: Tensor) -> Outputs:
        x = self.dropout1(F.max_pool2d(self.stage1(x), 2))
        x = self.dropout2(F.max_pool2d(self.stage2(x), 2))
        outputs: Outputs = self.head(self.stage3(x).mean((2, 3)))
        return outputs
