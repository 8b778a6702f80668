"""FedGR's equations against numbers worked out by hand or in NumPy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.local.plan import Batch
from fedsieve.methods import fedgr
from fedsieve.methods.fedgr import Objective, Partition, Up
from fedsieve.sieve.gmm import Mixture, fit_mixture
from fedsieve.types import Outputs

Floats = NDArray[np.float64]


def softmax(z: Floats) -> Floats:
    e: Floats = np.exp(z - z.max(axis=1, keepdims=True))
    p: Floats = e / e.sum(axis=1, keepdims=True)
    return p


def ce(z: Floats, y: NDArray[np.int64]) -> Floats:
    return -np.log(softmax(z)[np.arange(len(y)), y])


def kl_rows(teacher: Floats, student: Floats, tau: float) -> Floats:
    p, q = softmax(teacher / tau), softmax(student / tau)
    rows: Floats = (p * np.log(p / q)).sum(axis=1)
    return rows


def a_batch(weight: Tensor | None = None, **values: Tensor) -> Batch:
    return Batch(values, {"lambda_b": torch.tensor(0.7)}, weight)


def draw(seed: int, n: int = 6, classes: int = 4) -> tuple[Floats, NDArray[np.int64], Floats]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, classes)) * 2, rng.integers(classes, size=n), rng.random(n)


def f32(x: Floats) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


# ---------------------------------------------------------------------------- Eqs. 5–8 and 11


@given(seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_per_sample_mix_is_the_cross_entropy_against_equation_11s_soft_label(seed: int) -> None:
    z, y, q = draw(seed)
    pseudo = np.random.default_rng(seed + 1).integers(-1, 4, size=6)
    eye = np.vstack([np.eye(4), np.zeros(4)])  # row −1: no pseudo label, a vector of zeros
    soft = q[:, None] * eye[y] + (1 - q)[:, None] * eye[pseudo]
    expected = -(soft * np.log(softmax(z))).sum() / 6
    found = fedgr.refined_cross_entropy(
        a_batch(), f32(z), torch.tensor(y), f32(q), torch.tensor(pseudo), "per_sample"
    )
    assert float(found) == pytest.approx(expected, rel=1e-5)


@given(seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_batch_mean_mix_is_the_mean_of_the_broadcast_square(seed: int) -> None:
    """(B,1)·(B,) is B×B: entry (i, j) is q_i·CE(z_j, ŷ_j) + (1 − q_i)·CE(z_j, y_j^pse)."""
    z, y, q = draw(seed)
    pseudo = np.random.default_rng(seed + 1).integers(-1, 4, size=6)
    on_pseudo = np.where(pseudo >= 0, ce(z, pseudo.clip(0)), 0)
    column = q[:, None]
    square = column * ce(z, y) + (1 - column) * on_pseudo
    assert square.shape == (6, 6)
    found = fedgr.refined_cross_entropy(
        a_batch(), f32(z), torch.tensor(y), f32(q), torch.tensor(pseudo), "batch_mean"
    )
    assert float(found) == pytest.approx(square.mean(), rel=1e-5)


def test_the_two_mixes_differ_by_hand() -> None:
    """Two classes, logits 0: every CE is ln 2. Sample 0 (q=1), sample 1 (q=0, no pseudo label).

    Per sample: (ln2 + 0)/2. Batch mean: q̄=½, ½·ln2 + ½·mean(CE(y^pse)) = ½·ln2 + ½·(ln2 + 0)/2.
    """
    arguments = (
        a_batch(),
        torch.zeros(2, 2),
        torch.tensor([0, 1]),
        torch.tensor([1.0, 0.0]),
        torch.tensor([0, -1]),
    )
    ln2 = math.log(2)
    assert float(fedgr.refined_cross_entropy(*arguments, "per_sample")) == pytest.approx(ln2 / 2)
    assert float(fedgr.refined_cross_entropy(*arguments, "batch_mean")) == pytest.approx(
        ln2 / 2 + ln2 / 4
    )


def test_three_labelled_samples_of_32_are_divided_by_32() -> None:
    pseudo = torch.full((32,), -1)
    pseudo[[4, 9, 30]] = torch.tensor([1, 0, 2])
    z, _, _ = draw(5, n=32, classes=3)
    rows = [4, 9, 30]
    expected = ce(z[rows], np.array([1, 0, 2])).sum() / 32
    found = fedgr.refined_cross_entropy(
        a_batch(), f32(z), torch.zeros(32, dtype=torch.int64), torch.zeros(32), pseudo, "per_sample"
    )
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_any_label_costs_nothing_and_has_no_gradient() -> None:
    z = torch.randn(4, 3, requires_grad=True)
    loss = fedgr.refined_cross_entropy(
        a_batch(),
        z,
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4),
        torch.full((4,), -1),
        "per_sample",
    )
    (gradient,) = torch.autograd.grad(loss, z)
    assert float(loss.detach()) == 0
    assert float(gradient.abs().max()) == 0


def test_warm_up_columns_give_plain_cross_entropy_in_both_mixes() -> None:
    z, y, _ = draw(7)
    for mix in ("per_sample", "batch_mean"):
        found = fedgr.refined_cross_entropy(
            a_batch(), f32(z), torch.tensor(y), torch.ones(6), torch.tensor(y), mix
        )
        assert float(found) == pytest.approx(ce(z, y).mean(), rel=1e-5)


def test_padding_is_left_out_of_both_mixes() -> None:
    z, y, q = draw(8)
    pseudo = y[::-1].copy()
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0])
    for mix in ("per_sample", "batch_mean"):
        padded = fedgr.refined_cross_entropy(
            a_batch(weight), f32(z), torch.tensor(y), f32(q), torch.tensor(pseudo), mix
        )
        plain = fedgr.refined_cross_entropy(
            a_batch(),
            f32(z[:4]),
            torch.tensor(y[:4]),
            f32(q[:4]),
            torch.tensor(pseudo[:4]),
            mix,
        )
        assert float(padded) == pytest.approx(float(plain), rel=1e-5)


def test_a_column_of_posteriors_is_refused() -> None:
    with pytest.raises(AssertionError, match="meets"):
        fedgr.refined_cross_entropy(
            a_batch(),
            torch.zeros(3, 2),
            torch.zeros(3, dtype=torch.int64),
            torch.ones(3, 1),
            torch.zeros(3, dtype=torch.int64),
            "per_sample",
        )


# ------------------------------------------------------------------------------- Eqs. 9 and 10


@given(losses=st.lists(st.floats(0, 20, width=32), min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_running_mean_is_the_mean_of_all_observations(losses: list[float]) -> None:
    mean = torch.zeros(1)
    for count, loss in enumerate(losses):
        mean = fedgr.running_mean(mean, count, torch.tensor([loss]))
    assert float(mean) == pytest.approx(np.mean(losses), abs=1e-4)


def test_running_mean_refuses_a_column() -> None:
    with pytest.raises(AssertionError):
        fedgr.running_mean(torch.zeros(3), 1, torch.zeros(3, 1))


# -------------------------------------------------------------------------------- label refining


def logits_with_confidence(p: float) -> Tensor:
    """Three classes, class 1 with probability p and the others equal."""
    return torch.tensor([[0.0, math.log(2 * p / (1 - p)), 0.0]])


@pytest.mark.parametrize(("p", "expected"), [(0.8999, -1), (0.9001, 1), (0.999, 1), (0.34, -1)])
def test_a_pseudo_label_needs_more_than_epsilon(p: float, expected: int) -> None:
    z = logits_with_confidence(p)
    assert fedgr.pseudo_labels(z, fedgr.confident(z, 0.9)).tolist() == [expected]


def test_confidence_of_exactly_epsilon_is_not_enough() -> None:
    """softmax of equal logits is exactly ½ for two classes."""
    assert fedgr.confident(torch.zeros(1, 2), 0.5).tolist() == [False]
    assert fedgr.confident(torch.zeros(1, 2), 0.4999).tolist() == [True]


@pytest.mark.parametrize(
    ("noise_ratio", "inclusive", "strict"),
    [(0.79, False, False), (0.8, True, False), (0.81, True, True), (0.0, False, False)],
)
def test_a_client_is_distrusted_from_beta_on(
    noise_ratio: float, inclusive: bool, strict: bool
) -> None:
    assert fedgr.is_distrusted(noise_ratio, 0.8, "inclusive") is inclusive
    assert fedgr.is_distrusted(noise_ratio, 0.8, "strict") is strict


def test_hard_labels_by_hand() -> None:
    """Samples: clean and sure, clean and unsure, noisy and sure, noisy and kept, noisy and none."""
    pseudo = torch.tensor([5, -1, 5, -1, -1])
    kept = torch.tensor([6, 6, 6, 6, -1])
    labels = torch.tensor([0, 1, 2, 3, 4])
    clean = torch.tensor([True, True, False, False, False])
    trusted = fedgr.hard_labels(pseudo, kept, labels, clean, distrusted=False)
    distrusted = fedgr.hard_labels(pseudo, kept, labels, clean, distrusted=True)
    assert trusted.tolist() == [0, 1, 5, 6, -1]
    assert distrusted.tolist() == [5, 6, 5, 6, -1]  # flags ignored


# ----------------------------------------------------------------------------------- Eqs. 12–17


def test_revised_average_by_hand_batchnorm_statistics_included() -> None:
    ema = {"w": torch.tensor([1.0, 2.0]), "bn.running_var": torch.tensor(4.0)}
    new = {"w": torch.tensor([3.0, -2.0]), "bn.running_var": torch.tensor(2.0)}
    found = fedgr.revised(ema, new, torch.tensor(0.9))
    torch.testing.assert_close(found["w"], torch.tensor([1.2, 1.6]))  # .9·1+.1·3, .9·2−.1·2
    assert float(found["bn.running_var"]) == pytest.approx(3.8)
    reset = fedgr.revised(ema, new, torch.tensor(0.0))
    assert torch.equal(reset["w"], new["w"])


def test_two_updates_per_step_are_one_with_the_square_of_the_decay() -> None:
    once, twice = (fedgr.Config(ema_double=double) for double in (False, True))
    assert once.ema_decay == 0.99
    assert twice.ema_decay == pytest.approx(0.9801)
    e, w = 3.0, -1.0
    for _ in range(2):
        e = 0.99 * e + 0.01 * w
    assert twice.ema_decay * 3.0 + (1 - twice.ema_decay) * w == pytest.approx(e)
    second = fedgr.revised({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}, torch.tensor(0.9))
    second = fedgr.revised(second, {"w": torch.tensor(0.0)}, torch.tensor(0.9))
    assert float(second["w"]) == pytest.approx(0.81)


@pytest.mark.parametrize(
    ("distrusted", "reliable", "expected"),
    [(False, 0, 0.9), (True, 0, 0.0), (True, 4, 0.0), (True, 5, 0.9), (True, 10, 0.9)],
)
def test_revision_decay_around_mu(distrusted: bool, reliable: int, expected: float) -> None:
    """Ten samples and μ = ½: five reliable ones are enough, four are not."""
    mask = torch.arange(10) < reliable
    assert float(fedgr.revision_decay(0.9, distrusted, mask, 0.5)) == pytest.approx(expected)


def test_reliable_samples_are_the_union() -> None:
    clean, labelled = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([1, 0, 1, 0]).bool()
    assert fedgr.reliable_samples(clean, labelled).tolist() == [True, True, True, False]


@pytest.mark.parametrize("term", [fedgr.distillation, fedgr.representation])
def test_divergences_match_numpy_and_vanish_for_equal_arguments(term) -> None:  # type: ignore[no-untyped-def]
    teacher, _, _ = draw(1, n=5, classes=7)
    student, _, _ = draw(2, n=5, classes=7)
    found = term(f32(teacher), f32(student), 0.5)
    np.testing.assert_allclose(found, kl_rows(teacher, student, 0.5), rtol=1e-4)
    assert float(term(f32(teacher), f32(teacher), 0.5).abs().max()) < 1e-6


@pytest.mark.parametrize("term", [fedgr.distillation, fedgr.representation])
def test_the_first_argument_of_a_divergence_is_a_constant(term) -> None:  # type: ignore[no-untyped-def]
    teacher, student = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    term(teacher, student, 0.5).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


# ------------------------------------------------------------------------------------------ Eq. 4


class LinearNet:
    """logits = x·A, features = x·B; called with (n, 3)."""

    def __init__(self, a: Floats, b: Floats) -> None:
        self.a, self.b = f32(a), f32(b)
        self.parameters = {"a": self.a}

    def __call__(self, x: Tensor) -> Outputs:
        return Outputs(x @ self.b, x @ self.a)


@pytest.mark.parametrize("teacher", ["revised", "online", None])
@pytest.mark.parametrize("rep", ["cached", "per_batch", None])
def test_local_loss_adds_the_terms_it_is_asked_for(teacher, rep) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    nets = [(rng.normal(size=(3, 4)), rng.normal(size=(3, 5))) for _ in range(3)]  # w_k, w_g, e
    student, weak = rng.normal(size=(6, 3)), rng.normal(size=(6, 3))
    y, q = rng.integers(4, size=6), rng.random(6)
    cached_teacher, cached_features = rng.normal(size=(6, 4)), rng.normal(size=(6, 5))
    z, f = student @ nets[0][0], student @ nets[0][1]
    expected = ce(z, y).mean()  # pseudo label = given label
    if teacher is not None:
        target = cached_teacher if teacher == "revised" else weak @ nets[2][0]
        expected += 0.7 * kl_rows(target, z, 0.5).mean()
    if rep is not None:
        target = cached_features if rep == "cached" else weak @ nets[1][1]
        expected += 0.1 * kl_rows(target, f, 0.5).mean()
    batch = a_batch(
        student=f32(student),
        weak=f32(weak),
        label=torch.tensor(y),
        pseudo=torch.tensor(y),
        q=f32(q),
        teacher_logits=f32(cached_teacher),
        features=f32(cached_features),
    )
    objective = Objective(mix="per_sample", teacher=teacher, rep=rep, temperature=0.5, lambda_r=0.1)
    others = [LinearNet(*nets[1])] if rep == "per_batch" else []
    others += [LinearNet(*nets[2])] if teacher == "online" else []
    loss = partial(fedgr.local_loss, objective)(batch, LinearNet(*nets[0]), *others)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


# --------------------------------------------------------------------------------------- sieving


def test_sieving_fits_one_mixture_to_the_uploads_of_the_round() -> None:
    """30 losses near 0.2 and 20 near 3.0, spread over two clients: flags follow from the gap."""
    rng = np.random.default_rng(0)
    low, high = rng.normal(0.2, 0.05, 30), rng.normal(3.0, 0.3, 20)
    first, second = np.concatenate([low[:25], high[:5]]), np.concatenate([low[25:], high[5:]])
    ups = {
        4: Up({}, 30, torch.arange(30), f32(first)),
        9: Up({}, 20, torch.arange(100, 120), f32(second)),
        11: Up({}, 0, torch.arange(0), torch.zeros(0)),
    }
    partitions, mixture = fedgr.federated_sieving(ups, 0.5, 50)
    assert set(partitions) == {4, 9}
    assert partitions[4].noise_ratio == pytest.approx(5 / 30)
    assert partitions[9].noise_ratio == pytest.approx(15 / 20)
    assert (partitions[9].q >= 0.5).tolist() == [True] * 5 + [False] * 15
    assert partitions[9].ids.tolist() == list(range(100, 120))
    assert mixture.means == pytest.approx((low.mean(), high.mean()), abs=0.01)
    assert fedgr.describe(mixture)["mixture_share_clean"] == pytest.approx(0.6, abs=0.01)


def test_the_mixture_sees_exactly_the_losses_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counting(values: Floats, **settings: Any) -> Mixture:
        lengths.append((len(values), settings))
        return fit_mixture(values, **settings)

    monkeypatch.setattr(fedgr, "fit_mixture", counting)
    ups = {k: Up({}, n, torch.arange(n), torch.rand(n)) for k, n in enumerate((7, 30, 1))}
    fedgr.federated_sieving(ups, 0.5, 50)
    assert lengths == [(38, {"max_iter": 50, "tol": 1e-2, "reg_covar": 5e-4})]


def test_equal_losses_leave_every_label_trusted() -> None:
    ups = {0: Up({}, 3, torch.arange(3), torch.full((3,), 1.5))}
    partitions, mixture = fedgr.federated_sieving(ups, 0.5, 50)
    assert partitions[0].q.tolist() == [1, 1, 1]
    assert partitions[0].noise_ratio == 0
    assert fedgr.describe(mixture)["mixture_degenerate"] == 1


def test_losses_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(FedsieveError, match="not finite"):
        fedgr.federated_sieving(
            {0: Up({}, 2, torch.arange(2), torch.tensor([1.0, math.nan]))}, 0.5, 50
        )


def test_posteriors_are_found_by_id_and_new_samples_count_as_clean() -> None:
    partition = Partition(torch.tensor([30, 10, 20]), torch.tensor([0.3, 0.1, 0.2]), 1.0)
    q = fedgr.posterior_of(partition, torch.tensor([10, 99, 20, 30, 5]))
    torch.testing.assert_close(q, torch.tensor([0.1, 1.0, 0.2, 0.3, 1.0]))
    nothing = Partition(torch.arange(0), torch.zeros(0), 0.0)
    for missing in (None, nothing):
        assert fedgr.posterior_of(missing, torch.arange(3)).tolist() == [1, 1, 1]
