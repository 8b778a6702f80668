"""Views for several clients in one call.

A strong view is some hundred small operations, whose launching costs the same for one client's
images as for ten clients'. Threads that prepare clients side by side therefore hand their requests
in and wait; when every thread that is still preparing waits, all are carried out together, by a
thread with a slice of the GPU of its own: the views of later epochs are made while earlier epochs
train. A view treats each image by itself, so the result is the same as one by one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsieve.data.views import View
from fedsieve.data.views.arrays import in_passes
from fedsieve.local.slices import Slice, thread_in


@dataclass(frozen=True, eq=False)
class Wish:
    """`view` of the images, `repeats` times over. The images must be there: no stream may still
    have to make them."""

    view: View
    images: Tensor
    rng: np.random.Generator
    repeats: int


@dataclass(eq=False)
class _Request:
    wishes: Mapping[str, Wish]
    uniforms: Mapping[str, npt.NDArray[np.float64]]
    result: Future[Mapping[str, Tensor]] = field(default_factory=Future)
    made: dict[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None

    @staticmethod
    def of(wishes: Mapping[str, Wish]) -> _Request:
        """With the random numbers that the wishes need."""
        uniforms = {
            name: wish.rng.random((wish.repeats * len(wish.images), wish.view.draws))
            for name, wish in wishes.items()
        }
        return _Request(wishes, uniforms)


class ViewsTogether:
    """Where the threads that prepare clients meet to have views made."""

    def __init__(self, place: Slice | None = None) -> None:
        self._lock = threading.Lock()
        self._preparing = 0
        self._waiting: list[_Request] = []
        self._place = place
        self._maker = ThreadPoolExecutor(1) if place is None else thread_in(place, "views")

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return None if self._place is None else self._place.stream()

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """This thread prepares a client; others may wait for its requests."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1
                self._start_if_complete()

    def ask(self, wishes: Mapping[str, Wish]) -> Future[Mapping[str, Tensor]]:
        """Have views made, together with what other threads ask for. Random numbers are drawn now.
        A thread asks for one lot at a time."""
        request = _Request.of(wishes)
        with self._lock:
            self._waiting.append(request)
            self._start_if_complete()
        return request.result

    def ask_for_all(
        self, lots: Sequence[Mapping[str, Wish]]
    ) -> Sequence[Future[Mapping[str, Tensor]]]:
        """Have the views of several clients made, without waiting for what others ask for."""
        requests = [_Request.of(wishes) for wishes in lots]
        self._start(requests)
        return [request.result for request in requests]

    def _start_if_complete(self) -> None:
        """Have all requests carried out, once every preparing thread has asked."""
        if self._waiting and len(self._waiting) >= self._preparing:
            batch, self._waiting = self._waiting, []
            self._start(batch)

    def _start(self, batch: Sequence[_Request]) -> None:
        self._maker.submit(self._carry_out, batch).add_done_callback(
            functools.partial(_tell_failure, batch)
        )

    def _carry_out(self, batch: Sequence[_Request]) -> None:
        """One call for all wishes of the same view and size of image."""
        groups: dict[tuple[View, torch.Size], list[tuple[_Request, str]]] = {}
        for request in batch:
            for name, wish in request.wishes.items():
                groups.setdefault((wish.view, wish.images.shape[1:]), []).append((request, name))
        for (view, _), members in groups.items():
            try:
                with torch.cuda.stream(self._stream):
                    _make(view, members)
                if self._stream is not None:
                    self._stream.synchronize()
            except BaseException as error:
                for request, _ in members:
                    request.error = error
        for request in batch:
            if request.error is None:
                request.result.set_result(request.made)
            else:
                request.result.set_exception(request.error)

    def close(self) -> None:
        if self._place is None:
            self._maker.shutdown()


def _tell_failure(batch: Sequence[_Request], carried_out: Future[None]) -> None:
    """Nobody waits for ever, even if the thread that makes views could not begin."""
    if error := carried_out.exception():
        for request in batch:
            if not request.result.done():
                request.result.set_exception(error)


def _make(view: View, members: Sequence[tuple[_Request, str]]) -> None:
    wishes = [request.wishes[name] for request, name in members]
    images = torch.cat([wish.images.repeat(wish.repeats, 1, 1, 1) for wish in wishes])
    uniforms = np.concatenate([request.uniforms[name] for request, name in members])
    made = in_passes(view.apply, images, uniforms)
    parts = torch.split(made, [wish.repeats * len(wish.images) for wish in wishes])
    for (request, name), part in zip(members, parts, strict=True):
        request.made[name] = part
