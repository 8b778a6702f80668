"""Models as vectors: nothing is lost, and a step over a vector is a step of SGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graph_stage import make_model

from fedsieve.local.flat import Replica, flatten, update
from fedsieve.models.weights import read_weights
from fedsieve.packed import shaped


def test_pieces_of_a_flat_vector_lie_channels_last_and_flatten_back() -> None:
    flat = torch.arange(24.0 + 5)
    kernel = shaped(flat[5:], torch.Size((2, 3, 2, 2)))
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert kernel[1, 2, 0, 1] == 5 + 12 + (0 * 2 + 1) * 3 + 2  # out, then row, column, channel
    assert torch.equal(flatten(kernel), flat[5:])
    assert torch.equal(flatten(shaped(flat[3:11], torch.Size((2, 4)))), flat[3:11])


def test_a_replica_is_its_model() -> None:
    model = make_model("small")
    weights = read_weights(model)
    replica = Replica(model, "fp32", trained=True)
    replica.load(weights)
    read = replica.read()
    assert set(read) == set(weights)
    for name in weights:
        assert torch.equal(read[name], weights[name]), name
    assert replica.flat.numel() == sum(p.numel() for p in model.parameters())


def test_a_shadow_follows_convolutions_and_linear_layers_only() -> None:
    model = make_model("small")
    weights = read_weights(model)
    replica = Replica(model, "bf16", trained=True)
    replica.load(weights)
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.BatchNorm2d | torch.nn.BatchNorm1d)
        for name, _ in module.named_parameters()
    }
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in norms else torch.bfloat16), name
        torch.testing.assert_close(parameter.float(), weights[name], rtol=2**-8, atol=1e-6)
        assert torch.equal(replica.parameters[name].detach(), weights[name])


def test_update_is_sgd_with_momentum_and_weight_decay() -> None:
    """g + λw = 3 + .1; v = .5·2 + 3.1 = 4.1; w = 1 − .01·4.1 = .959; e = .9·0 + .1·.959."""
    w, v, e = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.0])
    shadow = torch.zeros(1, dtype=torch.bfloat16)
    update(w, v, torch.tensor([3.0]), None, shadow, e, 0.01, 0.5, 0.1, 0.9)
    assert v.item() == pytest.approx(4.1)
    assert w.item() == pytest.approx(0.959)
    assert e.item() == pytest.approx(0.0959)
    assert shadow.item() == pytest.approx(0.959, rel=2**-8)


def test_update_scales_gradient_and_decay_before_the_momentum() -> None:
    """u = s·(g + λw) = .2·3.1 = .62 and 0; v = .5·2 + u; from v = 0, s = 0 keeps a weight."""
    w, v = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([2.0, 2.0, 0.0])
    scale = torch.tensor([0.2, 0.0, 0.0])
    update(w, v, torch.full((3,), 3.0), scale, None, None, 0.01, 0.5, 0.1, 0.0)
    np.testing.assert_allclose(v.numpy(), [1.62, 1.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(w.numpy(), [1 - 0.0162, 0.99, 0.1], rtol=1e-6)
    assert torch.equal(w[2], torch.tensor(0.1))


def test_pieces_of_a_vector_go_by_the_names_of_a_replica() -> None:
    replica = Replica(make_model("small"), "bf16", trained=True)
    flat = torch.zeros_like(replica.flat)
    for i, part in enumerate(replica.piece_layout.cut(flat).values()):
        part.fill_(i)
    read = replica.piece_layout.cut(flat)
    assert list(read) == replica.names
    assert all(bool((part == i).all()) for i, part in enumerate(read.values()))
    assert {n: p.shape for n, p in read.items()} == {
        n: p.shape for n, p in replica.parameters.items()
    }
