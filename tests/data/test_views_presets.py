"""The named view sets: what the published settings ask for, and what a wrong name says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedsieve.data.views import (
    CentreCrop,
    Chain,
    Raw,
    Resize,
    Rotate,
    SimClr,
    Strong,
    StrongResized,
    View,
    ViewSet,
    Weak,
    view_set,
)
from fedsieve.errors import FedsieveError


def test_cifar_sets_differ_in_the_rotation_of_the_weak_view_only() -> None:
    ten, hundred = view_set("cifar10"), view_set("cifar100")
    assert ten == ViewSet(
        raw=Raw(),
        weak=Weak(padding=4, flip=True, rotate=0.0),
        strong=Strong(padding=4, flip=True, operations=3, cutout=0.5),
        aug=SimClr(0.8, 0.8, 0.8, 0.2, jitter=0.8, grey=0.2, flip=True),
    )
    assert hundred.weak == Weak(padding=4, flip=True, rotate=20.0)
    assert (hundred.raw, hundred.strong, hundred.aug) == (ten.raw, ten.strong, ten.aug)


def test_clothing_set_cuts_256_to_224() -> None:
    views = view_set("clothing1m")
    assert views.raw == CentreCrop(224)
    assert views.weak == Weak(padding=0, flip=True, size=224)
    assert views.strong == StrongResized(224, (0.08, 1.0), (3 / 4, 4 / 3), True, 3, 0.5)
    assert views.aug == Chain((CentreCrop(224), SimClr()))


@pytest.mark.parametrize("name", ["mnist", "digits"])
def test_figures_are_never_mirrored(name: str) -> None:
    views = view_set(name)
    assert isinstance(views.weak, Weak)
    assert isinstance(views.strong, Strong)
    assert not views.weak.flip
    assert not views.strong.flip
    assert views.aug == Rotate(30.0)


@pytest.mark.parametrize(
    ("name", "aug"), [("fedlsr-mnist", Rotate(30.0)), ("fedlsr-cifar10", SimClr())]
)
def test_fedlsr_trains_on_images_as_they_are_and_a_distorted_copy(name: str, aug: View) -> None:
    assert view_set(name) == ViewSet(raw=Raw(), weak=Raw(), strong=Raw(), aug=aug)


def test_fedlsr_resizes_photographs_without_cutting() -> None:
    whole = Resize(224)
    aug = Chain((whole, SimClr()))
    assert view_set("fedlsr-clothing1m") == ViewSet(raw=whole, weak=whole, strong=whole, aug=aug)


def test_feddiv_cuts_photographs_in_training_alone() -> None:
    views, whole = view_set("feddiv-clothing1m"), Resize(224)
    assert views.raw == whole
    assert views.weak == Weak(padding=0, flip=True, size=224)
    assert (views.strong, views.aug) == (StrongResized(224), Chain((whole, SimClr())))


def test_single_augmentations_are_for_plain_training_only() -> None:
    weak: dict[str, View] = {f"rotate{d}": Rotate(float(d)) for d in (5, 15, 30)}
    weak["flip"] = Weak(padding=0, flip=True)
    for name, view in weak.items():
        assert view_set(name) == ViewSet(weak=view)


def test_the_flip_set_mirrors_half_of_the_images_and_does_nothing_else() -> None:
    images = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (400, 1, 5, 5), dtype=np.uint8)
    )
    made = view_set("flip").weak(images, np.random.default_rng(1))
    mirrored = (made == images.flip(3)).flatten(1).all(dim=1)
    kept = (made == images).flatten(1).all(dim=1)
    assert bool((mirrored ^ kept).all())
    assert 160 < int(mirrored.sum()) < 240  # four standard deviations of Binomial(400, 1/2)


@pytest.mark.parametrize(
    ("name", "shape", "side"),
    [
        ("cifar10", (3, 32, 32), 32),
        ("cifar100", (3, 32, 32), 32),
        ("mnist", (1, 28, 28), 28),
        ("digits", (1, 8, 8), 8),
        ("clothing1m", (3, 256, 256), 224),
        ("plain", (3, 7, 7), 7),
        ("fedlsr-mnist", (1, 28, 28), 28),
        ("fedlsr-cifar10", (3, 32, 32), 32),
        ("fedlsr-clothing1m", (3, 256, 256), 224),
        ("feddiv-clothing1m", (3, 256, 256), 224),
        ("flip", (3, 32, 32), 32),
        ("rotate5", (1, 28, 28), 28),
    ],
)
def test_each_set_fits_its_images(name: str, shape: tuple[int, int, int], side: int) -> None:
    images = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8)
    )
    for view in ("raw", "weak", "strong", "aug"):
        made = view_set(name)[view](images, np.random.default_rng(1))
        assert made.shape == (3, shape[0], side, side), view
        assert made.dtype == torch.uint8


def test_raw_views_take_nothing_from_the_generator() -> None:
    for name in ("cifar10", "cifar100", "mnist", "digits", "clothing1m", "plain"):
        assert view_set(name)["raw"].draws == 0
    plain = view_set("plain")
    assert {plain[view] for view in ("raw", "weak", "strong", "aug")} == {Raw()}


def test_sets_are_hashable_and_shared() -> None:
    assert hash(view_set("mnist")) == hash(view_set("mnist"))
    assert len({view_set("cifar10"), view_set("cifar10"), view_set("digits")}) == 2


def test_a_wrong_name_gets_the_nearest_ones() -> None:
    with pytest.raises(FedsieveError, match=r"view set called 'cifar'.*cifar10.*cifar100"):
        view_set("cifar")
    with pytest.raises(FedsieveError, match="choose one of cifar10, cifar100, mnist"):
        view_set("zzzz")
    with pytest.raises(FedsieveError, match=r"view called 'strng'.*strong"):
        view_set("cifar10")["strng"]
