"""FedProx against numbers derived here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benches import CLASSES, CPU, Linear, Normalised, bench_of, images_of, labels_of, weights_of
from fedsieve.errors import FedsieveError
from fedsieve.local.bench import LossNet
from fedsieve.local.plan import Batch, Sgd
from fedsieve.methods import METHODS, fedavg, fedprox
from fedsieve.types import Shard, Streams
from helpers import assert_same_weights

SHARD = Shard(2, images_of(6), labels_of(6), torch.arange(6), CLASSES)
RNG = Streams(11, 4, 2)


def train(
    mu: float, start: dict[str, Tensor], sgd: Sgd, model: type[torch.nn.Module] = Linear
) -> fedavg.Up:
    bench = bench_of(model, sgd)
    down = fedavg.Down(start)
    _, up, _ = fedprox.train(fedprox.Config(mu=mu), fedavg.Client(), down, SHARD, bench, RNG)
    return up


def gradient_of(W: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the mean cross entropy: dz = (softmax(Wx + b) − onehot)/n."""
    x = (SHARD.images.numpy().reshape(6, 4) / 255 - 0.25) / 0.5
    z = np.exp(x @ W.T + b)
    dz = (z / z.sum(axis=1, keepdims=True) - np.eye(CLASSES)[SHARD.labels.numpy()]) / 6
    return dz.T @ x, dz.sum(axis=0)


@pytest.mark.parametrize("mu", [0.5, 3.0, 3])
def test_two_steps_with_the_proximal_term(mu: float) -> None:
    """w₁ = w₀ − η∇F(w₀), for the term has no slope at its anchor, and then
    w₂ = w₁ − η(∇F(w₁) + μ(w₁ − w₀))."""
    start = weights_of(Linear, 1)
    W0, b0 = (start[name].numpy().astype(np.float64) for name in ("layer.weight", "layer.bias"))
    g = gradient_of(W0, b0)
    W1, b1 = W0 - 0.2 * g[0], b0 - 0.2 * g[1]
    g = gradient_of(W1, b1)
    W2, b2 = W1 - 0.2 * (g[0] + mu * (W1 - W0)), b1 - 0.2 * (g[1] + mu * (b1 - b0))
    up = train(mu, start, Sgd(epochs=2, batch_size=6, lr=0.2))
    np.testing.assert_allclose(up.weights["layer.weight"].numpy(), W2, atol=1e-6)
    np.testing.assert_allclose(up.weights["layer.bias"].numpy(), b2, atol=1e-6)
    assert up.samples == 6


def test_the_term_adds_half_mu_times_the_squared_distance_of_parameters_only() -> None:
    """h = F + (μ/2)‖w − w_g‖², ∇h = ∇F + μ(w − w_g); statistics are far away and do not count."""
    own, anchor = weights_of(Normalised, 1), weights_of(Normalised, 2)
    anchor["norm.running_mean"] = anchor["norm.running_mean"] + 1000
    model = Normalised()
    model.load_state_dict(own, strict=False)
    net = LossNet(model, "fp32", CPU)
    values = {"x": torch.randn(4, 1, 2, 2), "label": torch.tensor([0, 1, 2, 0])}
    batch = Batch(values, {"anchor": anchor, "mu": torch.tensor(0.8)}, None)

    def value_and_gradient(loss: Tensor) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return loss.item(), found

    h, with_term = value_and_gradient(fedprox.local_loss(batch, net))
    f, without = value_and_gradient(fedavg.local_loss(batch, net))
    names = list(without)
    assert names == ["norm.weight", "norm.bias", "layer.weight", "layer.bias"]
    distance = sum(float(((own[n] - anchor[n]).double() ** 2).sum()) for n in names)
    assert h - f == pytest.approx(0.4 * distance, rel=1e-4)
    for name in names:
        expected = without[name] + 0.8 * (own[name] - anchor[name])
        torch.testing.assert_close(with_term[name], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mu", [0.0, 0])
def test_without_the_term_it_is_fedavg_bit_for_bit(mu: float) -> None:
    sgd = Sgd(epochs=3, batch_size=4, lr=0.3, momentum=0.9, weight_decay=0.01)
    start = weights_of(Normalised, 1)
    bench = bench_of(Normalised, sgd)
    _, plain, metrics = fedavg.train(
        fedavg.Config(), fedavg.Client(), fedavg.Down(start), SHARD, bench, RNG
    )
    assert_same_weights(train(mu, start, sgd, Normalised).weights, plain.weights)
    assert metrics["loss"] > 0


def test_a_strong_term_keeps_the_client_near() -> None:
    start = weights_of(Linear, 1)
    sgd = Sgd(epochs=20, batch_size=6, lr=0.05)
    moved = [
        float((train(mu, start, sgd).weights["layer.weight"] - start["layer.weight"]).norm())
        for mu in (0.0, 1.0, 10.0)
    ]
    assert moved[0] > moved[1] > moved[2] > 0


def test_a_negative_strength_is_refused() -> None:
    with pytest.raises(FedsieveError, match=r"method\.mu must be at least 0, not -0\.1"):
        fedprox.Config(mu=-0.1)
    for endless in (float("nan"), float("inf")):
        with pytest.raises(FedsieveError, match=r"method\.mu"):
            fedprox.Config(mu=endless)


def test_everything_but_training_is_fedavgs() -> None:
    method = METHODS["fedprox"]
    assert method.train is fedprox.train
    assert method.merge is fedavg.merge
    assert method.select is fedavg.select
    assert method.up is fedavg.Up
