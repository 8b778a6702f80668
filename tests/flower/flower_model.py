"""A model of a user's own, found by name."""

from __future__ import annotations

from torch import Tensor, nn


class TinyNet(nn.Module):
    def __init__(self, channels: int, height: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(channels * height * width, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x.flatten(1)).relu()
        return features, self.head(features)


def tiny(channels: int, height: int, width: int, num_classes: int) -> nn.Module:
    return TinyNet(channels, height, width, num_classes)
