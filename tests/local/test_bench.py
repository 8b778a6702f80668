"""The workbench apart from training: views, forward passes, precision, repeatable dropout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benches import (
    CLASSES,
    Dropping,
    Linear,
    Normalised,
    bench_of,
    cnn9,
    images_of,
    labels_of,
    mean_cross_entropy,
    plan_of,
    weights_of,
)
from fedsieve.data.views import view_set
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import joint_logits, padding_weight
from fedsieve.local.plan import Batch, Net, Sgd
from fedsieve.models import ModelConfig, build_model
from fedsieve.types import Streams, rng_for
from helpers import assert_same_weights, same_bits


def test_pixels_are_scaled_and_normalised() -> None:
    """(x/255 − 0.25)/0.5: black is −0.5, white is 1.5."""
    images = torch.tensor([[[[0, 255], [51, 102]]]], dtype=torch.uint8)
    out = bench_of(Linear).normalise(images)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy().reshape(-1), [-0.5, 1.5, -0.1, 0.3], atol=1e-6)


def test_a_view_is_that_of_the_data_set() -> None:
    images = images_of(5, side=8)
    bench = bench_of(Linear, views="digits")
    assert torch.equal(bench.view("raw", images, np.random.default_rng(0)), images)
    weak = bench.view("weak", images, np.random.default_rng(3))
    assert torch.equal(weak, view_set("digits").weak(images, np.random.default_rng(3)))
    with pytest.raises(FedsieveError, match="There is no view called 'weka'"):
        bench.view("weka", images, np.random.default_rng(0))


@pytest.mark.parametrize("n", [0, 1, 250, 251, 600])
def test_forward_is_the_model_in_evaluation_mode(n: int) -> None:
    """Chunks of 250 images or not, BatchNorm with its stored statistics, by NumPy."""
    images, weights = images_of(n), weights_of(Normalised, 1)
    out = bench_of(Normalised).forward(weights, images)
    w = {name: tensor.numpy().astype(np.float64) for name, tensor in weights.items()}
    x = (images.numpy().reshape(n, 4) / 255 - 0.25) / 0.5
    scale = w["norm.weight"] / np.sqrt(w["norm.running_var"] + 1e-5)
    features = (x - w["norm.running_mean"]) * scale + w["norm.bias"]
    logits = features @ w["layer.weight"].T + w["layer.bias"]
    assert out.features is not None
    assert out.logits.shape == (n, CLASSES)
    np.testing.assert_allclose(out.features.numpy(), features, atol=1e-5)
    np.testing.assert_allclose(out.logits.numpy(), logits, atol=1e-5)
    assert not out.logits.requires_grad


def test_a_model_without_features_has_none() -> None:
    assert bench_of(Linear).forward(weights_of(Linear, 1), images_of(3)).features is None


def test_networks_together_say_the_mean_of_their_logits() -> None:
    bench, images = bench_of(Linear), images_of(5)
    one, other = weights_of(Linear, 1), weights_of(Linear, 2)
    mean = {name: (one[name] + other[name]) / 2 for name in one}  # the same, for a linear model
    expected = bench.forward(mean, images).logits
    torch.testing.assert_close(joint_logits(bench, [one, other], images), expected)
    alone = joint_logits(bench, [one], images)
    assert torch.equal(alone, bench.forward(one, images).logits)


def test_bf16_is_inside_the_model_only() -> None:
    weights, images = weights_of(Normalised, 1), images_of(300)
    exact = bench_of(Normalised).forward(weights, images)
    rough = bench_of(Normalised, precision="bf16").forward(weights, images)
    assert rough.logits.dtype == torch.float32
    assert not torch.equal(rough.logits, exact.logits)
    torch.testing.assert_close(rough.logits, exact.logits, atol=0.05, rtol=0.05)
    assert torch.equal(rough.logits, rough.logits.bfloat16().float()), "rounded to 8 bits"


def fp32_or_fail(batch: Batch, net: Net) -> Tensor:
    assert net(batch["x"]).logits.dtype == torch.float32
    return mean_cross_entropy(batch, net)


def test_a_loss_sees_fp32_whatever_the_precision() -> None:
    sgd = Sgd(epochs=2, batch_size=4, lr=0.1)
    plan = plan_of(weights_of(Linear, 1), images_of(8), labels_of(8), sgd, loss=fp32_or_fail)
    exact = bench_of(Linear, sgd).fit(plan).weights[0]
    rough = bench_of(Linear, sgd, precision="bf16").fit(plan).weights[0]
    assert rough["layer.weight"].dtype == torch.float32
    assert not torch.equal(rough["layer.weight"], exact["layer.weight"])
    torch.testing.assert_close(rough["layer.weight"], exact["layer.weight"], atol=0.01, rtol=0.05)


def test_the_weight_of_padding_is_zero() -> None:
    assert padding_weight(4, 0, torch.device("cpu")) is None
    weight = padding_weight(4, 3, torch.device("cpu"))
    assert weight is not None
    assert weight.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(FedsieveError, match=r"norm\.weight"):
        bench_of(Normalised).forward(weights_of(Linear, 1), images_of(2))


# ------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("kind", ["global generator", "generator of its own"])
def test_dropout_repeats_and_heeds_neither_history_nor_the_global_generator(kind: str) -> None:
    make, side = (Dropping, 2) if kind == "global generator" else (cnn9, 28)
    sgd = Sgd(epochs=1, batch_size=3, lr=0.1)
    plan = plan_of(weights_of(make, 1), images_of(6, side), labels_of(6), sgd)
    bench = bench_of(make, sgd)
    torch.manual_seed(1)
    once = bench.fit(plan).weights[0]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = bench.fit(plan).weights[0]
    assert_same_weights(once, again)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left as it was"


def first_mask(batch: Batch, net: Net) -> Tensor:
    logits = net(batch["x"]).logits
    MASKS.append(logits.detach().clone())
    return batch.mean(logits.sum(dim=1))


MASKS: list[Tensor] = []


@pytest.mark.parametrize("other", [Streams(11, 4, 3), Streams(11, 5, 2), Streams(12, 4, 2)])
def test_each_client_round_and_seed_drops_something_else(other: Streams) -> None:
    """All images are alike, so batches are alike too and only the dropout differs."""
    images, labels = torch.full((8, 1, 2, 2), 255, dtype=torch.uint8), labels_of(8)
    sgd = Sgd(batch_size=8)
    MASKS.clear()
    for rng in (Streams(11, 4, 2), other):
        plan = plan_of(weights_of(Dropping, 1), images, labels, sgd, loss=first_mask, rng=rng)
        bench_of(Dropping, sgd).fit(plan)
    assert not torch.equal(MASKS[0], MASKS[1])


def test_dropout_that_is_always_on_repeats_too() -> None:
    """A forward pass is the same whatever ran before, in whatever order chunks are evaluated."""

    def always_on() -> nn.Module:
        return cnn9(always_on_dropout=True)

    weights, images = weights_of(always_on, 1), images_of(3, 28)
    sgd = Sgd(batch_size=3)
    torch.manual_seed(1)
    bench = bench_of(always_on, sgd)
    first = bench.forward(weights, images).logits
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert same_bits(bench_of(always_on).forward(weights, images).logits, first)
    bench.fit(plan_of(weights, images, labels_of(3), sgd))
    assert same_bits(bench.forward(weights, images).logits, first)
    assert torch.equal(torch.get_rng_state(), state)
    off = bench_of(cnn9).forward(weights, images).logits
    assert not torch.equal(off, first), "it is on"
    two = Sgd(epochs=2, batch_size=3)
    plain = plan_of(weights, images, labels_of(3), two)
    watched = plan_of(weights, images, labels_of(3), two, observe_after=1)
    assert_same_weights(bench.fit(watched).weights[0], bench.fit(plain).weights[0])


# ------------------------------------------------------------------------------ models of users


USERS_MODULE = """
from torch import nn

def tiny(channels, height, width, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))
"""


def test_a_model_of_the_users_own_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same linear layer, once as `module:function` and once as the class in this test."""
    (tmp_path / "users_bench_module.py").write_text(USERS_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def theirs() -> nn.Module:
        config = ModelConfig(name="users_bench_module:tiny")
        return build_model(config, 1, 2, 2, CLASSES, rng_for(0, 0, 0, "model"))

    sgd = Sgd(epochs=2, batch_size=3, lr=0.1, momentum=0.5)
    mine = weights_of(Linear, 1)
    names = {"layer.weight": "model.1.weight", "layer.bias": "model.1.bias"}
    start = {names[name]: tensor for name, tensor in mine.items()}
    images, labels = images_of(7), labels_of(7)
    got = bench_of(theirs, sgd).fit(plan_of(start, images, labels, sgd)).weights[0]
    expected = bench_of(Linear, sgd).fit(plan_of(mine, images, labels, sgd)).weights[0]
    assert_same_weights(got, {names[name]: tensor for name, tensor in expected.items()})
