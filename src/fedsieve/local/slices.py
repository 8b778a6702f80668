"""Slices of a GPU: multiprocessors that belong to one slot alone.

A step of batch 32 is a few hundred kernels, each far too small for a large GPU. On a shared GPU
ten such steps side by side compete: every kernel was chosen for an empty GPU and spreads over all
of it. In a CUDA green context a stream owns a few multiprocessors, kernels are chosen for those,
and the slots do not disturb each other but for the memory.

A thread enters its slice once and stays. What has to be known: cuDNN and cuBLAS work reliably only
while the slice's context is current. So backward passes must run in the thread itself and not in
autograd's own; and code that `torch.compile` made begins by setting the device, which would make
the whole GPU's context current again, so in a slice that does nothing. Events of one context cannot
be recorded in another, so work that crosses slices is ordered by waiting on the host. A library's
handle works only in the context in which it was made, and torch hands those of a thread that ended
to the next new one; so threads that work on a GPU do not end (`thread_in`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

_SM = 1
"""CU_DEV_RESOURCE_TYPE_SM"""
_IN_PAIRS = 1
"""CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING: multiples of two instead of eight will do."""
_LARGE = 32
"""Slices of at least so many multiprocessors are made of groups of eight that lie together: for
those cuBLAS chooses kernels whose blocks want to run on neighbours."""
_NON_BLOCKING = 1
"""CU_GREEN_CTX_DEFAULT_STREAM and CU_STREAM_NON_BLOCKING alike."""
_RESOURCE_BYTES, _COUNT_OFFSET = 144, 96
"""Size of CUdevResource, and where it keeps the number of multiprocessors."""


class SlicingError(Exception):
    """This GPU or its driver cannot be sliced."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A share of a GPU, or (without a context) all of it; there is one object for each."""

    device: torch.device
    multiprocessors: int
    context: ctypes.c_void_p | None = None
    new_stream: Callable[[], int] | None = None

    def enter(self) -> None:
        """Make this the slice in which the calling thread works from now on."""
        _entered.slice = None
        torch.cuda.set_device(self.device)
        if self.context is not None:
            # A thread of autograd's own would work outside the slice.
            torch.autograd.set_multithreading_enabled(False)
            _stay_in_slices()
            _entered.slice = self
            _call("cuCtxSetCurrent", self.context)

    def stream(self) -> torch.cuda.Stream:
        """A new stream whose work runs on this slice."""
        if self.new_stream is None:
            return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.ExternalStream(self.new_stream(), self.device)  # type: ignore[no-untyped-call]


@functools.cache
def thread_in(place: Slice, name: str) -> ThreadPoolExecutor:
    """The one thread of this name in `place`; it stays until the process ends."""
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    thread.submit(place.enter).result()
    return thread


_entered = threading.local()
"""`slice` is the one that a thread is in, if any."""
_set_device = torch.cuda.set_device


def _stay_in_slices() -> None:
    """Let `torch.cuda.set_device` do nothing in threads that are in a slice of that device."""
    torch.cuda.set_device = _set_device_outside_slices


@functools.wraps(_set_device)
def _set_device_outside_slices(device: torch.types.Device) -> None:
    here: Slice | None = getattr(_entered, "slice", None)
    if here is None or _index(device) != here.device.index:
        _set_device(device)


def _index(device: torch.types.Device) -> int | None:
    return device if isinstance(device, int) else torch.device(device or "cuda").index


def whole(device: torch.device) -> Slice:
    """The GPU as it is."""
    # With its number, without which no thread can be bound to it.
    return _whole(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _whole(index: int) -> Slice:
    properties = torch.cuda.get_device_properties(index)
    return Slice(torch.device("cuda", index), properties.multi_processor_count)


def size_of_slices(multiprocessors: int, count: int) -> int:
    """How many of a GPU's multiprocessors each of `count` equal slices has."""
    size = multiprocessors // count
    return size // 8 * 8 if size >= _LARGE else size // 2 * 2


def carve(device: torch.device, count: int) -> tuple[Slice, ...]:
    """`count` slices of equal size; `SlicingError` where that cannot be had."""
    return _carved(whole(device), count)


@functools.cache
def _carved(everything: Slice, count: int) -> tuple[Slice, ...]:
    device = everything.device
    size = size_of_slices(everything.multiprocessors, count)
    if size < 2:
        raise SlicingError(f"a GPU with too few multiprocessors for {count} slices")
    number, resource = ctypes.c_int(), _resource()
    _call("cuDeviceGet", ctypes.byref(number), device.index)
    _call("cuDeviceGetDevResource", number, resource, _SM)
    groups, made = (ctypes.c_char * (_RESOURCE_BYTES * count))(), ctypes.c_uint(count)
    _call(
        "cuDevSmResourceSplitByCount",
        groups,
        ctypes.byref(made),
        resource,
        _resource(),
        0 if size >= _LARGE else _IN_PAIRS,
        size,
    )
    if made.value < count:
        raise SlicingError(f"a GPU that gives {made.value} slices instead of {count}")
    parts = [groups.raw[i * _RESOURCE_BYTES : (i + 1) * _RESOURCE_BYTES] for i in range(count)]
    return tuple(_slice(device, number, part) for part in parts)


def _slice(device: torch.device, number: ctypes.c_int, part: bytes) -> Slice:
    resource = _resource(part)
    description, green, context = (ctypes.c_void_p() for _ in range(3))
    _call("cuDevResourceGenerateDesc", ctypes.byref(description), resource, 1)
    _call("cuGreenCtxCreate", ctypes.byref(green), description, number, _NON_BLOCKING)
    _call("cuCtxFromGreenCtx", ctypes.byref(context), green)
    size = ctypes.c_uint.from_buffer(resource, _COUNT_OFFSET).value
    return Slice(device, size, context, functools.partial(_new_stream, green))


def _new_stream(green: ctypes.c_void_p) -> int:
    stream = ctypes.c_void_p()
    _call("cuGreenCtxStreamCreate", ctypes.byref(stream), green, _NON_BLOCKING, 0)
    assert stream.value is not None
    return stream.value


def _resource(content: bytes = b"") -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(content, _RESOURCE_BYTES)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the CUDA driver."""
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        raise SlicingError("a CUDA driver without green contexts") from None
    if status := function(*arguments):
        raise SlicingError(f"{name} failed with status {status}")
