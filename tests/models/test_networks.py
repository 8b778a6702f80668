"""The built-in networks: parameter counts by hand, shapes, heads, and published structure."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from fedsieve.models import Dropout2d, ModelConfig, build_model
from fedsieve.models.heads import LinearHead, MlpHead
from fedsieve.models.resnet import BasicBlock, Bottleneck
from fedsieve.types import Outputs

SMALL_IMAGES = ["small", "cnn9", "resnet18", "resnet34"]


def build(
    name: str, channels: int = 3, side: int = 32, classes: int = 10, seed: int = 0, **settings
) -> nn.Module:
    config = ModelConfig(name=name, **settings)
    return build_model(config, channels, side, side, classes, np.random.default_rng(seed))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def conv_bn(inside: int, outside: int, size: int) -> int:
    """A convolution without bias and the scale and shift of its BatchNorm."""
    return inside * outside * size * size + 2 * outside


def linear(inside: int, outside: int) -> int:
    return inside * outside + outside


def basic_stages(blocks: list[int]) -> int:
    """Each first block of stages 2 to 4 has a 1×1 shortcut and reads half the width."""
    total, inside = 0, 64
    for planes, number in zip((64, 128, 256, 512), blocks, strict=True):
        for _ in range(number):
            total += conv_bn(inside, planes, 3) + conv_bn(planes, planes, 3)
            total += conv_bn(inside, planes, 1) if inside != planes else 0
            inside = planes
    return total


def bottleneck_stages(blocks: list[int]) -> int:
    total, inside = 0, 64
    for planes, number in zip((64, 128, 256, 512), blocks, strict=True):
        for first in [True] + [False] * (number - 1):
            total += conv_bn(inside, planes, 1) + conv_bn(planes, planes, 3)
            total += conv_bn(planes, 4 * planes, 1)
            total += conv_bn(inside, 4 * planes, 1) if first else 0
            inside = 4 * planes
    return total


@pytest.mark.parametrize(
    ("name", "blocks", "published"),
    [("resnet18", [2, 2, 2, 2], 11_173_962), ("resnet34", [3, 4, 6, 3], 21_282_122)],
)
def test_cifar_resnet_parameters(name: str, blocks: list[int], published: int) -> None:
    backbone = conv_bn(3, 64, 3) + basic_stages(blocks)
    assert backbone + linear(512, 10) == published
    assert count(build(name)) == published
    mlp = 512 * 512 + 2 * 512 + linear(512, 10)
    assert count(build(name, head="mlp")) == backbone + mlp


def test_resnet50_parameters() -> None:
    backbone = conv_bn(3, 64, 7) + bottleneck_stages([3, 4, 6, 3])
    assert backbone + linear(2048, 1000) == 25_557_032
    assert count(build("resnet50", side=224, classes=1000)) == 25_557_032
    mlp = linear(2048, 2048) + 2048 * 512 + 2 * 512 + linear(512, 14)
    assert count(build("resnet50", side=224, classes=14, head="mlp")) == backbone + mlp


def test_cnn9_parameters() -> None:
    widths = [(3, 128), (128, 128), (128, 128), (128, 256), (256, 256), (256, 256)]
    widths += [(256, 512), (512, 256), (256, 128)]
    expected = sum(conv_bn(a, b, 3) for a, b in widths) + linear(128, 10)
    assert count(build("cnn9")) == expected
    assert len([m for m in build("cnn9").modules() if isinstance(m, nn.Conv2d)]) == 9


@pytest.mark.parametrize(
    ("channels", "side", "grid"),
    [(1, 8, 2), (1, 9, 3), (1, 28, 4), (3, 32, 4), (3, 36, 3), (3, 64, 4)],
)
def test_small_parameters(channels: int, side: int, grid: int) -> None:
    """A side of 28 leaves 7 after two strides, 4 cells of 2; of 36, 9 and 3 cells of 3."""
    model = build("small", channels, side)
    cells = 32 * grid * grid
    expected = conv_bn(channels, 16, 3) + conv_bn(16, 32, 3) + linear(cells, 64) + linear(64, 10)
    assert count(model) == expected <= 60_000
    assert model(torch.zeros(2, channels, side, side)).logits.shape == (2, 10)


def test_small_takes_oblong_images() -> None:
    config = ModelConfig(name="small", head="mlp")
    model = build_model(config, 3, 9, 30, 4, np.random.default_rng(0))
    outputs = model(torch.zeros(3, 3, 9, 30))
    assert outputs.logits.shape == (3, 4)
    assert outputs.features.shape == (3, 64)


@pytest.mark.parametrize("name", [*SMALL_IMAGES, "resnet50"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_outputs_and_head(name: str, head: str) -> None:
    model = build(name, classes=7, head=head)
    outputs = model.eval()(torch.randn(2, 3, 32, 32))
    width = {"small": 64, "cnn9": 128, "resnet50": 2048 if head == "linear" else 512}.get(name, 512)
    assert isinstance(outputs, Outputs)
    assert outputs.features.shape == (2, width)
    assert outputs.logits.shape == (2, 7)
    classify = model.head.classify
    read = outputs.features if head == "linear" else outputs.features.clamp(min=0)
    torch.testing.assert_close(outputs.logits, read @ classify.weight.T + classify.bias)
    assert isinstance(model.head, LinearHead if head == "linear" else MlpHead)
    if head == "mlp":
        assert model.head.project.bias is None
        assert (outputs.features < 0).any()  # before the ReLU


@pytest.mark.parametrize("name", [*SMALL_IMAGES, "resnet50"])
def test_every_convolution_is_without_bias_and_normalised(name: str) -> None:
    modules = list(build(name).modules())
    convs = [m for m in modules if isinstance(m, nn.Conv2d)]
    norms = [m for m in modules if isinstance(m, nn.BatchNorm2d)]
    assert [c.bias for c in convs] == [None] * len(convs)
    assert [c.out_channels for c in convs] == [n.num_features for n in norms]
    assert {(n.momentum, n.eps) for n in norms} == {(0.1, 1e-5)}


@pytest.mark.parametrize(
    ("name", "side", "maps"),
    [("resnet18", 32, (32, 16, 8, 4)), ("resnet34", 28, (28, 14, 7, 4)),
     ("resnet50", 224, (56, 28, 14, 7))],
)  # fmt: skip
def test_resnet_maps(name: str, side: int, maps: tuple[int, ...]) -> None:
    """No stride or pool in the CIFAR stem; a quarter of the side behind ImageNet's."""
    model = build(name, side=side).eval()
    seen = []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        stage.register_forward_hook(lambda _, __, out: seen.append(out.shape[2]))
    with torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    assert tuple(seen) == maps


@pytest.mark.parametrize(("block", "last"), [(BasicBlock, "bn2"), (Bottleneck, "bn3")])
def test_block_without_its_branch_is_relu(block: type[nn.Module], last: str) -> None:
    """Post-activation: the sum passes a ReLU, so a silent branch leaves max(x, 0)."""
    built = block(4 * block.expansion, 4, 1)
    nn.init.zeros_(getattr(built, last).weight)
    x = torch.randn(2, 4 * block.expansion, 5, 5)
    torch.testing.assert_close(built(x), x.clamp(min=0))
    assert isinstance(built.downsample, nn.Identity)


def test_bottleneck_strides_in_the_3x3() -> None:
    block = Bottleneck(256, 128, 2)
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


def test_resnet50_bears_torchvisions_names() -> None:
    """The names of torchvision's state dict, written out from its published structure."""
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    names = ["conv1.weight", *(f"bn1.{part}" for part in norm)]
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block, layer in itertools.product(range(blocks), (1, 2, 3)):
            at = f"layer{stage}.{block}"
            names += [f"{at}.conv{layer}.weight", *(f"{at}.bn{layer}.{part}" for part in norm)]
        at = f"layer{stage}.0.downsample"
        names += [f"{at}.0.weight", *(f"{at}.1.{part}" for part in norm)]
    own = [name for name in build("resnet50").state_dict() if not name.startswith("head.")]
    assert sorted(own) == sorted(names)


def test_cnn9_dropout_is_off_when_testing() -> None:
    images = torch.randn(2, 3, 32, 32)
    model = build("cnn9").eval()
    assert torch.equal(model(images).logits, model(images).logits)
    published = build("cnn9", always_on_dropout=True).eval()
    assert not torch.equal(published(images).logits, published(images).logits)


def test_dropout_drops_whole_channels_and_keeps_the_mean() -> None:
    """A quarter of 40,000 channels, ± 5 standard deviations of √(p(1−p)/n) = 0.0022."""
    dropout = Dropout2d(0.25, always_on=False)
    out = dropout(torch.ones(200, 200, 2, 2))
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out[:, :, 0, 0], out[:, :, 1, 1])
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.011)
    assert dropout.eval()(out) is out


def test_dropout_follows_its_own_generator() -> None:
    model = build("cnn9").train()
    images = torch.randn(2, 3, 32, 32)

    def logits(seed: int) -> torch.Tensor:
        mine = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for module in mine.modules():
            if isinstance(module, Dropout2d):
                module.generator = generator
        assert not [name for name in mine.state_dict() if "dropout" in name]
        state = torch.get_rng_state()
        result = mine(images).logits
        assert torch.equal(state, torch.get_rng_state())
        return result

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
