"""Residual networks (He et al. 2016), post-activation: 18 and 34 for small images, 50 for large.

Layers bear torchvision's names, so that a weight file of torchvision's ResNet-50 fits.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fedsieve.models.heads import BEHIND_THE_BACKBONE, HeadKind, build_head
from fedsieve.models.norms import NormRelu
from fedsieve.models.weights import check_alike, load_tensors, read_weights, write_weights
from fedsieve.types import Outputs


def _conv(inside: int, outside: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    """Identity where the shape stays, else a 1×1 convolution and BatchNorm."""
    if stride == 1 and inside == outside:
        return nn.Identity()
    return nn.Sequential(_conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))


class BasicBlock(nn.Module):
    """Two conv 3×3, each with BatchNorm, plus the shortcut."""

    expansion = 1

    def __init__(self, inside: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inside, planes, 3, stride)
        self.bn1 = NormRelu(planes)
        self.conv2 = _conv(planes, planes, 3, 1)
        self.bn2 = NormRelu(planes)
        self.downsample = _shortcut(inside, planes, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        joined: Tensor = self.bn2(self.conv2(y), self.downsample(x))
        return joined


class Bottleneck(nn.Module):
    """conv 1×1 – 3×3 – 1×1 (four times as wide), each with BatchNorm, plus the shortcut.

    The stride sits in the 3×3 convolution ("v1.5"), as in torchvision's weight files.
    """

    expansion = 4

    def __init__(self, inside: int, planes: int, stride: int) -> None:
        super().__init__()
        outside = planes * self.expansion
        self.conv1 = _conv(inside, planes, 1, 1)
        self.bn1 = NormRelu(planes)
        self.conv2 = _conv(planes, planes, 3, stride)
        self.bn2 = NormRelu(planes)
        self.conv3 = _conv(planes, outside, 1, 1)
        self.bn3 = NormRelu(outside)
        self.downsample = _shortcut(inside, outside, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x))
        y = self.bn2(self.conv2(y))
        joined: Tensor = self.bn3(self.conv3(y), self.downsample(x))
        return joined


class ResNet(nn.Module):
    """Stem, four stages of 64, 128, 256, 512 planes, mean over the map, `neck`, `head`.

    The stem is conv 3×3 for small images; for large ones conv 7×7 of stride 2 and a max-pool.
    """

    def __init__(
        self,
        channels: int,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        *,
        large_images: bool,
        neck: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(channels, 64, 7, 2) if large_images else _conv(channels, 64, 3, 1)
        self.bn1 = NormRelu(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large_images else nn.Identity()
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], stride=2)
        self.neck = neck
        self.head = head

    def forward(self, x: Tensor) -> Outputs:
        x = self.maxpool(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        outputs: Outputs = self.head(self.neck(x.mean((2, 3))))
        return outputs


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inside: int, planes: int, blocks: int, stride: int
) -> nn.Sequential:
    outside = planes * block.expansion
    return nn.Sequential(
        block(inside, planes, stride),
        *(block(outside, planes, 1) for _ in range(blocks - 1)),
    )


def _for_small_images(
    channels: int, num_classes: int, head: HeadKind, blocks: tuple[int, int, int, int]
) -> ResNet:
    return ResNet(
        channels,
        BasicBlock,
        blocks,
        large_images=False,
        neck=nn.Identity(),
        head=build_head(head, 512, 512, num_classes),
    )


def resnet18(channels: int, num_classes: int, head: HeadKind) -> ResNet:
    """ResNet-18 with the CIFAR stem; 512 features."""
    return _for_small_images(channels, num_classes, head, (2, 2, 2, 2))


def resnet34(channels: int, num_classes: int, head: HeadKind) -> ResNet:
    """ResNet-34 with the CIFAR stem; 512 features."""
    return _for_small_images(channels, num_classes, head, (3, 4, 6, 3))


def resnet50(channels: int, num_classes: int, head: HeadKind, weights: Path | None) -> ResNet:
    """ResNet-50 with the ImageNet stem; 2048 features, or 512 behind a 2048→2048 layer for "mlp".

    `weights` is a local file with torchvision's names; its classifier `fc` is not used.
    """
    model = ResNet(
        channels,
        Bottleneck,
        (3, 4, 6, 3),
        large_images=True,
        neck=nn.Linear(2048, 2048) if head == "mlp" else nn.Identity(),
        head=build_head(head, 2048, 512, num_classes),
    )
    if weights is not None:
        _load_backbone(model, weights)
    return model


def _load_backbone(model: ResNet, path: Path) -> None:
    own = read_weights(model, copy=False)
    stored = {
        name: tensor
        for name, tensor in load_tensors(path).items()
        if tensor.is_floating_point() and not name.startswith("fc.")
    }
    new = {name: tensor for name, tensor in own.items() if name.startswith(BEHIND_THE_BACKBONE)}
    merged = {**stored, **new}
    check_alike(own, merged, "ResNet-50 for these images", str(path))
    write_weights(model, merged)
