"""What a model's config accepts, where its initial weights come from, and pretrained files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedsieve.errors import FedsieveError
from fedsieve.models import SMALLEST_SIDE, ModelConfig, build_model, read_weights


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_initial_weights_come_from_the_rng_alone() -> None:
    config = ModelConfig(name="small", head="mlp")
    torch.manual_seed(1)
    first = read_weights(build_model(config, 1, 28, 28, 10, rng(5)))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = read_weights(build_model(config, 1, 28, 28, 10, rng(5)))
    assert torch.equal(state, torch.get_rng_state())
    other = read_weights(build_model(config, 1, 28, 28, 10, rng(6)))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_one_rng_gives_two_different_models() -> None:
    stream = rng()
    models = [build_model(ModelConfig(), 1, 8, 8, 2, stream) for _ in range(2)]
    assert not torch.equal(models[0].conv1.weight, models[1].conv1.weight)


def test_models_start_in_training_mode() -> None:
    assert all(m.training for m in build_model(ModelConfig(), 1, 8, 8, 2, rng()).modules())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "resnet19"}, "no model 'resnet19'; choose one of small, cnn9"),
        ({"name": "a b:c"}, "no model"),
        ({"name": "pkg:"}, "no model"),
        ({"head": "deep"}, "linear or mlp, not 'deep'"),
        ({"name": "pkg.mod:f", "head": "mlp"}, "build its own head"),
        ({"name": "resnet18", "weights": Path("w.pt")}, "weights is for resnet50 only"),
        ({"name": "resnet50", "weights": Path("w.bin")}, "must end in .safetensors"),
        ({"name": "small", "always_on_dropout": True}, "always_on_dropout is for cnn9 only"),
    ],
)
def test_config_refuses(settings, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        ModelConfig(**settings)


@pytest.mark.parametrize("name", list(SMALLEST_SIDE))
def test_smallest_image(name: str) -> None:
    """The least size works in both directions of the claim: it trains, and one less is refused."""
    side = SMALLEST_SIDE[name]
    model = build_model(ModelConfig(name=name), 1, side, side, 2, rng())
    model(torch.randn(2, 1, side, side)).logits.sum().backward()
    with pytest.raises(FedsieveError, match=f"at least {side}×{side} pixels, not {side - 1}×"):
        build_model(ModelConfig(name=name), 1, side - 1, side, 2, rng())


@pytest.mark.parametrize("shape", [(0, 8, 8, 2), (1, 8, 8, 1)])
def test_build_refuses_nothing_to_tell_apart(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(FedsieveError, match="at least two classes"):
        build_model(ModelConfig(), *shape, rng())


@pytest.fixture(scope="module")
def torchvision_like() -> dict[str, torch.Tensor]:
    """A file as torchvision's: the backbone, integer counters, and a classifier of 1000."""
    model = build_model(ModelConfig(name="resnet50"), 3, 32, 32, 2, rng(9))
    stored = {k: v for k, v in model.state_dict().items() if not k.startswith("head.")}
    return {**stored, "fc.weight": torch.ones(1000, 2048), "fc.bias": torch.ones(1000)}


@pytest.mark.parametrize(("suffix", "head"), [("safetensors", "linear"), ("pth", "mlp")])
def test_pretrained_file(tmp_path: Path, torchvision_like, suffix: str, head: str) -> None:
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(torchvision_like, path)
    else:
        torch.save(torchvision_like, path)
    loaded = read_weights(
        build_model(ModelConfig(name="resnet50", head=head, weights=path), 3, 64, 64, 14, rng(1))
    )
    plain = read_weights(
        build_model(ModelConfig(name="resnet50", head=head), 3, 64, 64, 14, rng(1))
    )
    assert len(loaded) > 200
    for name, tensor in loaded.items():
        expected = plain if name.startswith(("neck.", "head.")) else torchvision_like
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("change", "channels", "sentence"),
    [
        ({}, 1, r"'conv1.weight' is \(64, 1, 7, 7\) in ResNet-50 .* \(64, 3, 7, 7\) in .*w.pt"),
        ({"bn1.weight": None}, 3, "'bn1.weight' of ResNet-50 .* is missing from .*w.pt"),
        ({"extra.weight": torch.ones(1)}, 3, "'extra.weight' of .*w.pt is missing from ResNet-50"),
        ({"epoch": 3}, 3, "must hold named tensors and nothing else"),
    ],
)
def test_pretrained_file_that_does_not_fit(
    tmp_path: Path, torchvision_like, change, channels: int, sentence: str
) -> None:
    stored = {k: v for k, v in {**torchvision_like, **change}.items() if v is not None}
    torch.save(stored, tmp_path / "w.pt")
    config = ModelConfig(name="resnet50", weights=tmp_path / "w.pt")
    with pytest.raises(FedsieveError, match=sentence):
        build_model(config, channels, 32, 32, 2, rng())


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_unreadable_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w.{suffix}"
    config = ModelConfig(name="resnet50", weights=path)
    with pytest.raises(FedsieveError, match="There is no weight file"):
        build_model(config, 3, 32, 32, 2, rng())
    for content in (b"", b"not weights"):
        path.write_bytes(content)
        with pytest.raises(FedsieveError, match="cannot be read as a file of tensors"):
            build_model(config, 3, 32, 32, 2, rng())


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capsys) -> None:
    torch.save({"conv1.weight": Evil()}, tmp_path / "w.pt")
    with pytest.raises(FedsieveError, match="cannot be read"):
        build_model(ModelConfig(name="resnet50", weights=tmp_path / "w.pt"), 3, 32, 32, 2, rng())
    assert "executed" not in capsys.readouterr().out
