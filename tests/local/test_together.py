"""Views made together equal views made alone."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsieve.data.views import Raw, Strong, View, Weak
from fedsieve.local.slices import Slice
from fedsieve.local.together import ViewsTogether, Wish


def some_images(seed: int, n: int, side: int = 16) -> Tensor:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), dtype=np.uint8)
    return torch.from_numpy(pixels)


def view_of(
    together: ViewsTogether, view: View, images: Tensor, rng: np.random.Generator
) -> Tensor:
    return together.ask({"it": Wish(view, images, rng, 1)}).result(timeout=10)["it"]


class Threads(ABC):
    """Runs one function per client side by side and keeps what it returns or raises."""

    def __init__(self, together: ViewsTogether, count: int) -> None:
        self.together = together
        self.results: dict[int, Tensor | BaseException] = {}
        self.barrier = threading.Barrier(count)
        self.count = count

    @abstractmethod
    def client(self, k: int) -> Tensor:
        """What the thread of client k does."""

    def work(self, k: int) -> None:
        with self.together.preparing():
            self.barrier.wait(timeout=10)
            try:
                self.results[k] = self.client(k)
            except BaseException as error:
                self.results[k] = error

    def run(self) -> None:
        threads = [threading.Thread(target=self.work, args=(k,)) for k in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert len(self.results) == self.count, "a thread is stuck"


class Mixed(Threads):
    """Clients ask for different views, sizes and numbers of views."""

    def client(self, k: int) -> Tensor:
        images = some_images(k, 3 + k, 16 if k % 2 else 12)
        made = view_of(self.together, Weak(), images, np.random.default_rng(100 + k))
        if k != 2:  # one client needs a single view, the others go on without it
            made = view_of(self.together, Strong(), made, np.random.default_rng(200 + k))
        return made


def alone(k: int) -> Tensor:
    images = some_images(k, 3 + k, 16 if k % 2 else 12)
    made = Weak()(images, np.random.default_rng(100 + k))
    return made if k == 2 else Strong()(made, np.random.default_rng(200 + k))


@pytest.mark.parametrize("count", [1, 5])
def test_together_equals_alone(count: int) -> None:
    threads = Mixed(ViewsTogether(), count)
    threads.run()
    for k in range(count):
        made = threads.results[k]
        assert isinstance(made, Tensor), made
        assert torch.equal(made, alone(k)), k


def test_without_other_threads_a_view_is_made_at_once() -> None:
    images = some_images(0, 4)
    made = view_of(ViewsTogether(), Raw(), images, np.random.default_rng(0))
    assert torch.equal(made, images)


@dataclass(frozen=True)
class Broken(View):
    draws = 1

    def apply(self, images: Tensor, uniforms: object) -> Tensor:
        raise ValueError("no such view")


class OneBroken(Threads):
    def client(self, k: int) -> Tensor:
        view = Broken() if k == 0 else Weak()
        return view_of(self.together, view, some_images(k, 2), np.random.default_rng(k))


def test_an_error_reaches_those_who_asked_and_nobody_else() -> None:
    threads = OneBroken(ViewsTogether(), 3)
    threads.run()
    assert isinstance(threads.results[0], ValueError)
    for k in (1, 2):
        assert isinstance(threads.results[k], Tensor)


class OneLeaves(Threads):
    def client(self, k: int) -> Tensor:
        if k == 0:
            raise RuntimeError("left without asking")
        return view_of(self.together, Weak(), some_images(k, 2), np.random.default_rng(k))


def test_a_thread_that_leaves_does_not_keep_the_others_waiting() -> None:
    threads = OneLeaves(ViewsTogether(), 3)
    threads.run()
    assert all(isinstance(threads.results[k], Tensor) for k in (1, 2))


class NoPlace(Slice):
    """A share of a GPU that no thread can enter."""

    def enter(self) -> None:
        raise ValueError("no such device")


def test_a_place_that_no_thread_can_enter_is_told_every_time() -> None:
    place = NoPlace(torch.device("cpu"), 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such device"):
            ViewsTogether(place)


class NoStream(Slice):
    """A share of a GPU that has no stream left."""

    def enter(self) -> None:
        pass

    def stream(self) -> torch.cuda.Stream:
        raise ValueError("no more streams")


def test_those_who_wait_hear_that_their_views_could_not_be_begun() -> None:
    together = ViewsTogether(NoStream(torch.device("cpu"), 1))
    wish = Wish(Weak(), some_images(0, 3), np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="no more streams"):
        together.ask({"it": wish}).result(timeout=10)
