"""Views for several clients in one call.

A strong view is some hundred small operations, whose launching costs the same for one client's
images as for ten clients'. Threads that prepare clients side by side therefore hand their requests
in and wait; when every thread that is still preparing waits, one of them carries all out together.
A view treats each image by itself, so the result is the same as one by one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedsieve.data.views import View
from fedsieve.data.views.arrays import in_passes


@dataclass(eq=False)
class _Request:
    view: View
    images: Tensor
    uniforms: npt.NDArray[np.float64]
    stream: torch.cuda.Stream | None
    result: Tensor | None = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class ViewsTogether:
    """Where the threads that prepare clients meet to make views."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preparing = 0
        self._waiting: list[_Request] = []

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """This thread prepares a client; others may wait for its request."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1
                batch = self._complete_batch()
            _carry_out(batch)

    def view(self, view: View, images: Tensor, rng: np.random.Generator) -> Tensor:
        """`view(images, rng)`, made together with what other threads ask for."""
        stream = torch.cuda.current_stream() if images.is_cuda else None
        request = _Request(view, images, rng.random((len(images), view.draws)), stream)
        with self._lock:
            self._waiting.append(request)
            batch = self._complete_batch()
        _carry_out(batch)
        request.ready.wait()
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def _complete_batch(self) -> list[_Request]:
        """All requests, once every preparing thread waits; none before."""
        if len(self._waiting) < self._preparing:
            return []
        batch, self._waiting = self._waiting, []
        return batch


def _carry_out(batch: list[_Request]) -> None:
    groups: dict[tuple[View, torch.Size], list[_Request]] = {}
    for request in batch:
        groups.setdefault((request.view, request.images.shape[1:]), []).append(request)
    for (view, _), requests in groups.items():
        try:
            _make(view, requests)
        except BaseException as error:
            for request in requests:
                request.error = error
        finally:
            for request in requests:
                request.ready.set()


def _make(view: View, requests: list[_Request]) -> None:
    """One call for all requests, in order with the streams that made and will use the images."""
    here = torch.cuda.current_stream() if requests[0].stream is not None else None
    for request in requests:
        if here is not None and request.stream is not None and request.stream != here:
            here.wait_stream(request.stream)
            request.images.record_stream(here)
    images = torch.cat([request.images for request in requests])
    uniforms = np.concatenate([request.uniforms for request in requests])
    made = in_passes(view.apply, images, uniforms)
    parts = torch.split(made, [len(request.images) for request in requests])
    for request, part in zip(requests, parts, strict=True):
        if here is not None and request.stream is not None and request.stream != here:
            request.stream.wait_stream(here)
            made.record_stream(request.stream)
        request.result = part
