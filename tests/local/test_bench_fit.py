"""Local training: the workbench against loops and numbers written out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benches import (
    CPU,
    Linear,
    Normalised,
    bench_of,
    images_of,
    labels_of,
    mean_cross_entropy,
    plan_of,
    small_cnn,
    weights_of,
)
from fedsieve.data.sources.digits import load_digits
from fedsieve.data.views import view_set
from fedsieve.local.plan import Batch, Ema, Net, Sgd, Stepped, count_steps
from fedsieve.types import Outputs, rng_for
from helpers import assert_same_weights, same_bits

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


# ------------------------------------------------------------------- against a bare PyTorch loop


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize("view", ["raw", "weak", "strong"])
def test_fit_is_the_plain_loop_bit_for_bit(tail: str, view: str) -> None:
    """30 digits in batches of 8, three epochs, fresh views in every epoch, BatchNorm, momentum."""
    sgd = Sgd(epochs=3, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-3, tail=tail)  # type: ignore[arg-type]
    data = load_digits()
    images, labels = data.train_images[:30], data.train_labels[:30]
    start = weights_of(small_cnn, 3)

    model = small_cnn().train()
    model.load_state_dict(start, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    # These names of streams are part of what makes runs repeatable.
    order_rng, view_rng = rng_for(11, 4, 2, "batches"), rng_for(11, 4, 2, "view/x")
    losses = []
    for _ in range(3):
        order = order_rng.permutation(30)
        seen = view_set("digits")[view](images, view_rng)
        pieces = [order[first : first + 8] for first in range(0, 30, 8)]
        if tail == "drop":
            pieces.pop()
        for piece in pieces:
            is_real = torch.arange(8 if tail == "pad" else len(piece)) < len(piece)
            rows = np.concatenate([piece, order[: len(is_real) - len(piece)]])
            x = seen[rows].float() * (1 / torch.tensor(127.5)) - 0.5  # mean 0.25, std 0.5
            each = F.cross_entropy(model(x).logits, labels[rows], reduction="none")
            loss = (each * is_real).sum() / is_real.sum() if not is_real.all() else each.mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())

    plan = plan_of(start, images, labels, sgd, views={"x": view})
    fitted = bench_of(small_cnn, sgd, "digits").fit(plan)
    assert fitted.steps == len(losses) == {"keep": 12, "drop": 9, "pad": 12}[tail]
    (trained,) = fitted.weights
    assert_same_weights(trained, {name: model.state_dict()[name] for name in trained})
    assert "bn1.running_mean" in trained
    assert fitted.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert fitted.ema is None
    assert fitted.observed is None


# ----------------------------------------------------------------------- against NumPy, by hand


def softmax(z: FloatArray) -> FloatArray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    result: FloatArray = e / e.sum(axis=1, keepdims=True)
    return result


def cross_entropy_gradient(
    W: FloatArray, b: FloatArray, x: FloatArray, y: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Of the mean of −log softmax(Wx + b)_y: ∂/∂z = (p − onehot)/n, ∂/∂W = ∂zᵀx, ∂/∂b = Σ∂z."""
    dz = (softmax(x @ W.T + b) - np.eye(3)[y]) / len(x)
    return dz.T @ x, dz.sum(axis=0)


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.5, 0.05)])
def test_three_steps_of_momentum_and_weight_decay(momentum: float, decay: float) -> None:
    """g = ∇F + λw, v ← m·v + g from v = 0, w ← w − η·v; the whole data is one batch."""
    images, labels = images_of(6), labels_of(6)
    start = weights_of(Linear, 1)
    sgd = Sgd(epochs=3, batch_size=6, lr=0.2, momentum=momentum, weight_decay=decay)
    fitted = bench_of(Linear, sgd).fit(plan_of(start, images, labels, sgd))

    x = (images.numpy().reshape(6, 4) / 255 - 0.25) / 0.5
    w = [start[name].numpy().astype(np.float64) for name in ("layer.weight", "layer.bias")]
    v = [np.zeros_like(tensor) for tensor in w]
    losses = []
    for _ in range(3):
        p = softmax(x @ w[0].T + w[1])
        losses.append(-np.log(p[np.arange(6), labels.numpy()]).mean())
        gradient = cross_entropy_gradient(w[0], w[1], x, labels.numpy())
        v = [momentum * vi + g + decay * wi for vi, g, wi in zip(v, gradient, w, strict=True)]
        w = [wi - 0.2 * vi for wi, vi in zip(w, v, strict=True)]
    assert fitted.steps == 3
    assert fitted.loss == pytest.approx(np.mean(losses), rel=1e-5)
    for name, expected in zip(("layer.weight", "layer.bias"), w, strict=True):
        np.testing.assert_allclose(fitted.weights[0][name].numpy(), expected, atol=1e-6)


def test_a_scaled_update_scales_gradient_decay_and_momentum() -> None:
    """u = s ⊙ (∇F + λw), v ← m·v + u from v = 0, w ← w − η·v; the bias has no entry."""
    images, labels = images_of(6), labels_of(6)
    start = weights_of(Linear, 1)
    sgd = Sgd(epochs=3, batch_size=6, lr=0.2, momentum=0.5, weight_decay=0.1)
    scale = np.array([[1.0, 0.0, 0.3, 2.0], [0.0, 0.0, 1.0, 0.5], [0.7, 1.0, 0.0, 0.0]])
    entries = {"layer.weight": torch.from_numpy(scale).float()}
    fitted = bench_of(Linear, sgd).fit(plan_of(start, images, labels, sgd, update_scale=entries))

    x = (images.numpy().reshape(6, 4) / 255 - 0.25) / 0.5
    w = [start[name].numpy().astype(np.float64) for name in ("layer.weight", "layer.bias")]
    v = [np.zeros_like(tensor) for tensor in w]
    for _ in range(3):
        gradient = cross_entropy_gradient(w[0], w[1], x, labels.numpy())
        u = [s * (g + 0.1 * wi) for s, g, wi in zip((scale, 1.0), gradient, w, strict=True)]
        v = [0.5 * vi + ui for vi, ui in zip(v, u, strict=True)]
        w = [wi - 0.2 * vi for wi, vi in zip(w, v, strict=True)]
    for name, expected in zip(("layer.weight", "layer.bias"), w, strict=True):
        np.testing.assert_allclose(fitted.weights[0][name].numpy(), expected, atol=1e-6)
    kept = torch.from_numpy(scale) == 0
    assert same_bits(fitted.weights[0]["layer.weight"][kept], start["layer.weight"][kept])


@pytest.mark.parametrize("models", [1, 2])
def test_a_scale_of_zero_keeps_every_parameter_and_one_changes_nothing(models: int) -> None:
    """Scales that broadcast; BatchNorm's statistics are no parameters and go on."""
    images, labels = images_of(9), labels_of(9)
    starts = [weights_of(Normalised, seed) for seed in range(models)]
    sgd = Sgd(epochs=2, batch_size=3, lr=0.1, momentum=0.9, weight_decay=0.01)
    bench = bench_of(Normalised, sgd)
    loss = both if models == 2 else mean_cross_entropy

    def fit(**changes: object) -> tuple[dict[str, Tensor], ...]:
        fitted = bench.fit(plan_of(starts, images, labels, sgd, loss=loss, **changes))
        return tuple(dict(weights) for weights in fitted.weights)

    trainable = [name for name, _ in Normalised().named_parameters()]
    frozen = fit(update_scale={name: torch.zeros(()) for name in trainable})
    for start, weights in zip(starts, frozen, strict=True):
        assert_same_weights({n: weights[n] for n in trainable}, {n: start[n] for n in trainable})
        assert not torch.equal(weights["norm.running_mean"], start["norm.running_mean"])
    plain = fit()
    for entries in ({}, {"layer.weight": torch.ones(1, 4), "norm.bias": torch.ones(())}):
        for scaled_, expected in zip(fit(update_scale=entries), plain, strict=True):
            assert_same_weights(scaled_, expected)


def test_momentum_starts_at_zero_in_every_round() -> None:
    """Two fits of one step differ from one fit of two steps by the momentum m·v₁, no more."""
    images, labels = images_of(4), labels_of(4)
    sgd = Sgd(epochs=1, batch_size=4, lr=0.1, momentum=0.9)
    bench = bench_of(Linear, sgd)
    start = weights_of(Linear, 2)
    once = bench.fit(plan_of(start, images, labels, sgd)).weights[0]
    twice = bench.fit(plan_of(dict(once), images, labels, sgd)).weights[0]
    long = Sgd(epochs=2, batch_size=4, lr=0.1, momentum=0.9)
    in_one = bench.fit(plan_of(start, images, labels, long)).weights[0]
    for name, w0 in start.items():
        carried = 0.9 * (once[name] - w0)  # −η·m·v₁ = m·(w₁ − w₀)
        torch.testing.assert_close(in_one[name], twice[name] + carried, atol=1e-6, rtol=0)


# --------------------------------------------------------------------------------- limit cases


@pytest.mark.parametrize(("n", "tail"), [(0, "keep"), (0, "pad"), (1, "keep"), (3, "drop")])
def test_without_a_step_the_weights_stay(n: int, tail: str) -> None:
    sgd = Sgd(epochs=2, batch_size=4, tail=tail)  # type: ignore[arg-type]
    start, average = weights_of(Normalised, 1), weights_of(Normalised, 2)
    plan = plan_of(start, images_of(n), labels_of(n), sgd, ema=Ema(average, 0.9), observe_after=1)
    fitted = bench_of(Normalised, sgd).fit(plan)
    assert (fitted.steps, fitted.loss, fitted.observed) == (0, 0.0, None)
    assert_same_weights(fitted.weights[0], start)
    assert fitted.ema is not None
    assert_same_weights(fitted.ema, average)


@pytest.mark.parametrize("n", [1, 3, 6])
def test_padding_changes_no_gradient(n: int) -> None:
    """One padded batch against one batch of just the samples, of a model without BatchNorm."""
    images, labels = images_of(n), labels_of(n)
    start = weights_of(Linear, 1)
    padded = Sgd(epochs=2, batch_size=8, lr=0.3, momentum=0.5, tail="pad")
    fitted = bench_of(Linear).fit(plan_of(start, images, labels, padded))
    x = (images.numpy().reshape(n, 4) / 255 - 0.25) / 0.5
    W, b = (start[name].numpy().astype(np.float64) for name in ("layer.weight", "layer.bias"))
    first = cross_entropy_gradient(W, b, x, labels.numpy())
    W1, b1 = W - 0.3 * first[0], b - 0.3 * first[1]
    second = cross_entropy_gradient(W1, b1, x, labels.numpy())
    expected = W1 - 0.3 * (0.5 * first[0] + second[0])
    assert fitted.steps == 2
    np.testing.assert_allclose(fitted.weights[0]["layer.weight"].numpy(), expected, atol=1e-6)


def test_fit_hands_out_copies() -> None:
    sgd = Sgd(batch_size=4)
    start = weights_of(Linear, 1)
    before = {name: tensor.clone() for name, tensor in start.items()}
    bench = bench_of(Linear, sgd)
    first = bench.fit(plan_of(start, images_of(4), labels_of(4), sgd))
    kept = {name: tensor.clone() for name, tensor in first.weights[0].items()}
    bench.fit(plan_of(weights_of(Linear, 9), images_of(4), labels_of(4), sgd))
    assert_same_weights(start, before)
    assert_same_weights(first.weights[0], kept)


def test_views_of_many_epochs_do_not_depend_on_how_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sgd = Sgd(epochs=4, batch_size=5)
    data = load_digits()
    start = weights_of(small_cnn, 1)
    plan = plan_of(start, data.train_images[:10], data.train_labels[:10], sgd, views={"x": "weak"})
    at_once = bench_of(small_cnn, sgd, "digits").fit(plan)
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 30)  # three epochs, then one
    in_parts = bench_of(small_cnn, sgd, "digits").fit(plan)
    assert_same_weights(at_once.weights[0], in_parts.weights[0])


# --------------------------------------------------------- averages, frozen and second models


def test_the_moving_average_follows_each_step() -> None:
    """e₃ = d³e₀ + (1−d)(d²w₁ + d·w₂ + w₃), for statistics as for parameters."""
    images, labels = images_of(6), labels_of(6)
    start, average = weights_of(Normalised, 1), weights_of(Normalised, 2)
    bench = bench_of(Normalised)

    def after(epochs: int, ema: Ema | None) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        sgd = Sgd(epochs=epochs, batch_size=6, lr=0.2, momentum=0.5)
        fitted = bench.fit(plan_of(start, images, labels, sgd, ema=ema))
        return dict(fitted.weights[0]), None if fitted.ema is None else dict(fitted.ema)

    w1, w2 = after(1, None)[0], after(2, None)[0]
    w3, e3 = after(3, Ema(average, 0.7))
    assert e3 is not None
    for name, e0 in average.items():
        expected = 0.343 * e0 + 0.3 * (0.49 * w1[name] + 0.7 * w2[name] + w3[name])
        torch.testing.assert_close(e3[name], expected, atol=1e-6, rtol=1e-6)
    assert "norm.running_mean" in e3
    assert_same_weights(w3, after(3, None)[0])


def pulled_to_others(batch: Batch, net: Net, frozen: Net, average: Net) -> Tensor:
    own, fixed, mean = net(batch["x"]), frozen(batch["x"]), average(batch["x"])
    SEEN.append((fixed, mean))
    distance = (own.logits - fixed.logits) ** 2 + (own.logits - mean.logits) ** 2
    return batch.mean(distance.mean(dim=1))


SEEN: list[tuple[Outputs, Outputs]] = []


def test_frozen_models_and_the_average_are_only_looked_at() -> None:
    images, labels = images_of(5), labels_of(5)
    start, fixed, average = (weights_of(Normalised, seed) for seed in (1, 2, 3))
    sgd = Sgd(epochs=2, batch_size=5, lr=0.1)
    bench = bench_of(Normalised, sgd)
    SEEN.clear()
    plan = plan_of(
        start,
        images,
        labels,
        sgd,
        loss=pulled_to_others,
        frozen=[fixed],
        ema=Ema(average, 0.5, in_loss=True),
    )
    fitted = bench.fit(plan)
    order = rng_for(11, 4, 2, "batches").permutation(5)
    others = bench_of(Normalised, sgd)
    for seen, weights in zip(SEEN[0], (fixed, average), strict=True):
        assert not seen.logits.requires_grad
        expected = others.forward(weights, images[order]).logits  # evaluation mode
        torch.testing.assert_close(seen.logits, expected)
    # The second step sees the same frozen model and the average after one step.
    first = others.fit(
        plan_of(
            start,
            images,
            labels,
            Sgd(epochs=1, batch_size=5, lr=0.1),
            loss=pulled_to_others,
            frozen=[fixed],
            ema=Ema(average, 0.5, in_loss=True),
        )
    )
    assert first.ema is not None
    rng = rng_for(11, 4, 2, "batches")
    rng.permutation(5)
    again = images[rng.permutation(5)]
    torch.testing.assert_close(SEEN[1][0].logits, others.forward(fixed, again).logits)
    torch.testing.assert_close(SEEN[1][1].logits, others.forward(first.ema, again).logits)
    assert fitted.steps == 2
    assert len(fitted.weights) == 1
    # Nothing was written to the frozen model: gradient, parameter or statistic.
    held = bench.model(1)
    assert all(parameter.grad is None for parameter in held.parameters())
    assert_same_weights({k: v for k, v in held.state_dict().items() if k in fixed}, fixed)


def both(batch: Batch, one: Net, other: Net) -> Tensor:
    return mean_cross_entropy(batch, one) + mean_cross_entropy(batch, other)


def test_two_models_train_side_by_side() -> None:
    """A loss that adds two losses trains two models as if each were alone."""
    images, labels = images_of(9), labels_of(9)
    starts = [weights_of(Normalised, 1), weights_of(Normalised, 2)]
    sgd = Sgd(epochs=2, batch_size=3, lr=0.1, momentum=0.9, weight_decay=0.01)
    bench = bench_of(Normalised, sgd)
    together = bench.fit(plan_of(starts, images, labels, sgd, loss=both))
    for start, weights in zip(starts, together.weights, strict=True):
        alone = bench.fit(plan_of(start, images, labels, sgd)).weights[0]
        assert_same_weights(weights, alone)


# ------------------------------------------------------------------------------------ observing


def test_what_is_observed_is_the_model_after_that_many_epochs() -> None:
    data = load_digits()
    images, labels = data.train_images[:20], data.train_labels[:20]
    start = weights_of(small_cnn, 1)

    def fit(epochs: int, observe_after: int | None) -> tuple[dict[str, Tensor], Outputs | None]:
        sgd = Sgd(epochs=epochs, batch_size=8, lr=0.1, momentum=0.5)
        plan = plan_of(start, images, labels, sgd, views={"x": "weak"}, observe_after=observe_after)
        fitted = bench_of(small_cnn, sgd, "digits").fit(plan)
        return dict(fitted.weights[0]), fitted.observed

    three, observed = fit(3, 2)
    two, nothing = fit(2, None)
    assert nothing is None
    assert observed is not None
    expected = bench_of(small_cnn, views="digits").forward(two, images)
    assert same_bits(observed.logits, expected.logits)
    assert observed.features is not None
    assert expected.features is not None
    assert same_bits(observed.features, expected.features)
    assert_same_weights(three, fit(3, None)[0])  # looking does not change what is looked at


# ----------------------------------------------------------------------------------- constants


def scaled(batch: Batch, net: Net) -> Tensor:
    table = batch.constants["table"]
    assert isinstance(table, Tensor)
    return batch.scalar("factor") * table[1] * mean_cross_entropy(batch, net)


@pytest.mark.parametrize("factor", [2.0, 2])
def test_constants_reach_the_loss_as_tensors(factor: float) -> None:
    """With plain SGD a loss times 2·3 is a learning rate times 6."""
    images, labels = images_of(4), labels_of(4)
    start = weights_of(Linear, 1)
    small, large = Sgd(batch_size=4, lr=0.01), Sgd(batch_size=4, lr=0.06)
    constants = {"factor": factor, "table": torch.tensor([9.0, 3.0])}
    bench = bench_of(Linear)
    got = bench.fit(plan_of(start, images, labels, small, loss=scaled, constants=constants))
    expected = bench.fit(plan_of(start, images, labels, large))
    for name, tensor in expected.weights[0].items():
        torch.testing.assert_close(got.weights[0][name], tensor, atol=1e-7, rtol=1e-6)
    assert bench.device == CPU


# ------------------------------------------------------------------------------ values per step


def scaled_by_step(batch: Batch, net: Net) -> Tensor:
    PER_STEP.append((batch["factor"], batch["order"]))
    return batch["factor"] * mean_cross_entropy(batch, net)


PER_STEP: list[tuple[Tensor, Tensor]] = []


def test_each_step_reads_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples in batches of 4, 4 and 2, twice; views are made for one epoch at a time."""
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 10)
    images, labels = images_of(10), labels_of(10)
    sgd = Sgd(epochs=2, batch_size=4, lr=0.1)
    steps = count_steps(10, sgd)
    assert steps == 6
    per_step = {
        "factor": torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 2.0]),
        "order": torch.arange(24).view(6, 4),
    }
    start = weights_of(Linear, 1)
    PER_STEP.clear()
    plan = plan_of(start, images, labels, sgd, loss=scaled_by_step, per_step=per_step)
    fitted = bench_of(Linear, sgd).fit(plan)
    assert [float(factor) for factor, _ in PER_STEP] == [1.0, 0.0, 0.5, 0.0, 0.0, 2.0]
    assert [order.tolist() for _, order in PER_STEP] == [
        [*range(4 * t, 4 * t + 4)] for t in range(6)
    ]
    # Only steps 0, 2 and 5 move the weights, each with its factor as its learning rate.
    rng = rng_for(11, 4, 2, "batches")
    orders = [rng.permutation(10), rng.permutation(10)]
    x = (images.numpy().reshape(10, 4) / 255 - 0.25) / 0.5
    W, b = (start[name].numpy().astype(np.float64) for name in ("layer.weight", "layer.bias"))
    for rows, factor in ((orders[0][:4], 1.0), (orders[0][8:], 0.5), (orders[1][8:], 2.0)):
        dW, db = cross_entropy_gradient(W, b, x[rows], labels.numpy()[rows])
        W, b = W - 0.1 * factor * dW, b - 0.1 * factor * db
    np.testing.assert_allclose(fitted.weights[0]["layer.weight"].numpy(), W, atol=1e-6)
    np.testing.assert_allclose(fitted.weights[0]["layer.bias"].numpy(), b, atol=1e-6)


# ----------------------------------------------------------------------- carried from step to step


def steadied(batch: Batch, net: Net) -> Stepped:
    """CE, and how far the mean logits have gone since the last step; two more tensors change
    places."""
    logits = net(batch["x"]).logits
    mean = logits.mean(dim=0)
    loss = batch.mean(F.cross_entropy(logits, batch["label"], reduction="none"))
    carried = {"last": mean, "one": batch["other"], "other": batch["one"]}
    return Stepped(loss + ((mean - batch["last"]) ** 2).sum(), carried)


def test_what_a_step_carries_over_the_next_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples in batches of 4, 4 and 2, three times; views are made one epoch at a time."""
    monkeypatch.setattr("fedsieve.local.plan.IMAGES_PER_DRAW", 10)
    images, labels = images_of(10), labels_of(10)
    sgd = Sgd(epochs=3, batch_size=4, lr=0.1)
    start, first = weights_of(Linear, 1), torch.tensor([0.5, -1.0, 2.0])
    carried = {"last": first, "one": torch.ones(2), "other": torch.zeros(2)}
    plan = plan_of(start, images, labels, sgd, loss=steadied, carried=carried)
    bench = bench_of(Linear, sgd)
    fitted = bench.fit(plan)

    rng = rng_for(11, 4, 2, "batches")
    x = (images.flatten(1).float() / 255 - 0.25) / 0.5
    w, b = (start[f"layer.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
    last = first
    for _ in range(3):
        order = torch.from_numpy(rng.permutation(10))
        for rows in (order[:4], order[4:8], order[8:]):
            logits = x[rows] @ w.T + b
            mean = logits.mean(dim=0)
            loss = F.cross_entropy(logits, labels[rows]) + ((mean - last) ** 2).sum()
            slopes = torch.autograd.grad(loss, (w, b))
            with torch.no_grad():
                w -= 0.1 * slopes[0]
                b -= 0.1 * slopes[1]
            last = mean.detach()
    torch.testing.assert_close(fitted.weights[0]["layer.weight"], w.detach())
    torch.testing.assert_close(fitted.weights[0]["layer.bias"], b.detach())
    torch.testing.assert_close(fitted.carried["last"], last)
    assert fitted.carried["one"].tolist() == [0.0, 0.0], "after nine steps"
    assert fitted.carried["other"].tolist() == [1.0, 1.0]
    assert not fitted.carried["last"].requires_grad
    again = bench.fit(plan)  # begins where the plan does, not where the last training ended
    assert_same_weights(again.weights[0], fitted.weights[0])
    assert_same_weights(again.carried, fitted.carried)


def test_without_a_step_what_is_carried_stays() -> None:
    sgd = Sgd(batch_size=4, tail="drop")
    carried = {"last": torch.ones(3), "one": torch.ones(2), "other": torch.zeros(2)}
    plan = plan_of(
        weights_of(Linear, 1), images_of(3), labels_of(3), sgd, loss=steadied, carried=carried
    )
    fitted = bench_of(Linear, sgd).fit(plan)
    assert fitted.steps == 0
    assert_same_weights(fitted.carried, carried)


def towards_the_images_beside(batch: Batch, net: Net) -> Tensor:
    BESIDE.append((len(batch["x"]), batch["u"]))
    return net(batch["u"]).logits.sum() + 0 * mean_cross_entropy(batch, net)


BESIDE: list[tuple[int, Tensor]] = []


def test_a_step_reads_images_besides_its_batch() -> None:
    """Ten samples in batches of 4, 4 and 2, and in each step three other images. For the sum of
    the logits each row of W goes down by the sum of the images, and each of b by their number."""
    sgd = Sgd(epochs=1, batch_size=4, lr=0.1)
    beside = images_of(9, seed=8).view(3, 3, 1, 2, 2)
    start = weights_of(Linear, 1)
    BESIDE.clear()
    plan = plan_of(
        start,
        images_of(10),
        labels_of(10),
        sgd,
        loss=towards_the_images_beside,
        step_images={"u": beside},
    )
    fitted = bench_of(Linear, sgd).fit(plan).weights[0]
    x = (beside.flatten(3).float() / 255 - 0.25) / 0.5
    assert [size for size, _ in BESIDE] == [4, 4, 2]
    torch.testing.assert_close(torch.stack([u.flatten(2) for _, u in BESIDE]), x)
    total = x.sum(dim=(0, 1))
    torch.testing.assert_close(fitted["layer.weight"], start["layer.weight"] - 0.1 * total)
    torch.testing.assert_close(fitted["layer.bias"], start["layer.bias"] - 0.1 * 9)
