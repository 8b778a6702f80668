"""Each loss against its formula in NumPy, its limits, its gradient, and shapes it must refuse."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.losses import (
    cross_entropy,
    entropy,
    kl,
    proximal,
    sieving_loss,
    soft_cross_entropy,
    symmetric_cross_entropy,
)

LOGITS = np.array([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0], [-3.0, 4.0, 1.0], [1.0, 2.0, 3.0]])
LABELS = np.array([0, 2, 0, 1])


def tensor(array: np.ndarray, *, grad: bool = False) -> Tensor:
    return torch.tensor(array, dtype=torch.float32, requires_grad=grad)


def test_cross_entropy() -> None:
    expected = -log_softmax(LOGITS, axis=1)[np.arange(4), LABELS]
    values = cross_entropy(tensor(LOGITS), torch.tensor(LABELS))
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert values[1].item() == pytest.approx(np.log(3))  # equal logits


def test_the_bounded_sieving_loss_is_softmax_twice() -> None:
    p = softmax(LOGITS, axis=1)
    expected = np.log(np.exp(p).sum(axis=1)) - p[np.arange(4), LABELS]
    found = sieving_loss(tensor(LOGITS), torch.tensor(LABELS), "bounded")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    plain = sieving_loss(tensor(LOGITS), torch.tensor(LABELS), "cross_entropy")
    np.testing.assert_allclose(plain, -np.log(p[np.arange(4), LABELS]), rtol=1e-5)


def test_the_bounds_of_the_bounded_sieving_loss() -> None:
    """p_y = 1 gives ln(9 + e) − 1, and p_y = 0 with another class certain ln(9 + e)."""
    z = torch.full((1, 10), -50.0)
    z[0, 3] = 50.0
    lowest, highest = (float(sieving_loss(z, torch.tensor([y]), "bounded")[0]) for y in (3, 4))
    assert lowest == pytest.approx(np.log(9 + np.e) - 1)
    assert highest == pytest.approx(np.log(9 + np.e))


def test_entropy_of_an_even_and_of_a_sure_prediction() -> None:
    found = entropy(torch.tensor([[2.0, 2.0, 2.0, 2.0], [50.0, 0.0, 0.0, 0.0]]))
    assert found.tolist() == pytest.approx([np.log(4), 0.0], abs=1e-6)


def test_soft_cross_entropy() -> None:
    """Rows: a certain class, a mixture, a row that sums to 0.3, and no target at all."""
    targets = np.array([[1, 0, 0], [0.2, 0.3, 0.5], [0, 0.3, 0], [0, 0, 0]])
    expected = -(targets * log_softmax(LOGITS, axis=1)).sum(axis=1)
    values = soft_cross_entropy(tensor(LOGITS), tensor(targets))
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert values[3].item() == 0.0
    hard = soft_cross_entropy(tensor(LOGITS), tensor(np.eye(3)[LABELS]))
    np.testing.assert_allclose(hard, cross_entropy(tensor(LOGITS), torch.tensor(LABELS)), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_kl(temperature: float) -> None:
    teacher = LOGITS[::-1].copy()
    p, q = softmax(teacher / temperature, axis=1), softmax(LOGITS / temperature, axis=1)
    expected = (p * (np.log(p) - np.log(q))).sum(axis=1)
    np.testing.assert_allclose(
        kl(tensor(teacher), tensor(LOGITS), temperature), expected, rtol=1e-4, atol=1e-7
    )


def test_kl_of_equal_distributions_is_zero() -> None:
    """Logits that differ by a constant mean the same distribution."""
    np.testing.assert_allclose(kl(tensor(LOGITS), tensor(LOGITS + 5), 0.5), 0, atol=1e-6)


def test_kl_gradient_flows_into_both_sides() -> None:
    """d/ds Σ p(log p − log q) = (q − p)/τ on the student's side; on the teacher's, for p and
    r = log p − log q, it is p(r − Σ p r)/τ."""
    teacher, student = tensor(LOGITS[::-1].copy(), grad=True), tensor(LOGITS, grad=True)
    kl(teacher, student, 0.5).sum().backward()
    p, q = softmax(LOGITS[::-1] / 0.5, axis=1), softmax(LOGITS / 0.5, axis=1)
    ratio = np.log(p) - np.log(q)
    assert student.grad is not None
    assert teacher.grad is not None
    np.testing.assert_allclose(student.grad, (q - p) / 0.5, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        teacher.grad,
        p * (ratio - (p * ratio).sum(axis=1, keepdims=True)) / 0.5,
        rtol=1e-3,
        atol=1e-6,
    )


def test_cross_entropy_gradient() -> None:
    logits = tensor(LOGITS, grad=True)
    cross_entropy(logits, torch.tensor(LABELS)).sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(
        logits.grad, softmax(LOGITS, axis=1) - np.eye(3)[LABELS], rtol=1e-5, atol=1e-7
    )


def test_symmetric_cross_entropy() -> None:
    """The reverse term written out as −Σ p_c log(y_c), with y clipped to 10⁻⁴."""
    p = softmax(LOGITS, axis=1)
    onehot = np.eye(3)[LABELS]
    forward = -np.log(p[np.arange(4), LABELS])
    reverse = -(p * np.log(np.clip(onehot, 1e-4, 1))).sum(axis=1)
    values = symmetric_cross_entropy(tensor(LOGITS), torch.tensor(LABELS), a=0.1, b=1.0)
    np.testing.assert_allclose(values, 0.1 * forward + reverse, rtol=1e-5)
    paper = symmetric_cross_entropy(
        tensor(LOGITS), torch.tensor(LABELS), a=0.0, b=2.0, log_zero=-4.0
    )
    np.testing.assert_allclose(paper, 2 * 4 * (1 - p[np.arange(4), LABELS]), rtol=1e-5)


def test_proximal_is_squared_and_its_gradient_is_the_distance() -> None:
    """½(1² + 2² + 3²) = 7; without the square it would be √14/2."""
    w = [
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.tensor([[5.0]], requires_grad=True),
    ]
    anchor = [torch.zeros(2), torch.tensor([[2.0]])]
    value = proximal(w, anchor)
    assert value.shape == ()
    assert value.item() == pytest.approx(7.0)
    value.backward()
    assert w[0].grad is not None
    assert w[1].grad is not None
    assert w[0].grad.tolist() == [1.0, 2.0]
    assert w[1].grad.tolist() == [[3.0]]


def test_proximal_at_the_anchor_has_a_gradient_of_zero() -> None:
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    value = proximal([w], [w.detach().clone()])
    value.backward()
    assert value.item() == 0.0
    assert w.grad is not None
    assert w.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(half: torch.dtype) -> None:
    logits = tensor(LOGITS).to(half)
    labels = torch.tensor(LABELS)
    exact = logits.double().numpy()
    for values, expected in (
        (cross_entropy(logits, labels), -log_softmax(exact, axis=1)[np.arange(4), LABELS]),
        (soft_cross_entropy(logits, logits), -(exact * log_softmax(exact, axis=1)).sum(axis=1)),
        (kl(logits, logits, 0.5), np.zeros(4)),
        (proximal([logits], [logits * 0]), (exact**2).sum() / 2),
    ):
        assert values.dtype == torch.float32
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


COLUMN, ROW, TABLE = torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        (cross_entropy, (TABLE, torch.zeros(4, 1, dtype=torch.int64))),
        (cross_entropy, (ROW, torch.zeros(4, dtype=torch.int64))),
        (cross_entropy, (TABLE, torch.zeros(3, dtype=torch.int64))),
        (symmetric_cross_entropy, (TABLE, torch.zeros(4, 1, dtype=torch.int64), 1.0, 1.0)),
        (soft_cross_entropy, (TABLE, COLUMN)),
        (soft_cross_entropy, (ROW, ROW)),
        (kl, (TABLE, ROW, 1.0)),
        (kl, (COLUMN, TABLE, 1.0)),
        (kl, (ROW, ROW, 1.0)),
        (proximal, ([ROW], [COLUMN])),
        (proximal, ([ROW], [ROW, ROW])),
        (proximal, ([], [])),
    ],
)
def test_shapes_that_would_broadcast_are_refused(loss, arguments) -> None:
    with pytest.raises(FedsieveError):
        loss(*arguments)
