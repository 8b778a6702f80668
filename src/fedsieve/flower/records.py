"""Our records as Flower's, and back, without pickle.

A record travels as two of Flower's: its tensors by path in an `ArrayRecord`, each in NumPy's own
format, and the JSON skeleton that holds everything else in a `ConfigRecord`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedsieve.errors import FedsieveError, check
from fedsieve.serial import put_together, take_apart
from fedsieve.types import Metrics

T = TypeVar("T")

_SKELETON = "skeleton"
_TENSORS = ".tensors"
_METRICS = "metrics"
MOST_DIMENSIONS = 64
"""What NumPy allows an array."""
_DTYPES = frozenset(
    np.dtype(kind)
    for kind in (
        *(np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64),
        *(np.float16, np.float32, np.float64),
    )
)


def to_content(metrics: Metrics | None = None, /, **records: object) -> RecordDict:
    """The content of a message that carries these records by name, and metrics."""
    return Packer().content(metrics, **records)


class Packer:
    """Makes the contents of several messages; a tensor that is in many of them is copied once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Array]] = {}
        """By the tensor's identity, which is its own as long as it is kept here."""

    def content(self, metrics: Metrics | None = None, /, **records: object) -> RecordDict:
        content = RecordDict()
        for name, record in records.items():
            skeleton, tensors = take_apart(record)
            content[name] = ConfigRecord({_SKELETON: skeleton})
            if tensors:
                arrays = ArrayRecord()
                for path, tensor in tensors.items():
                    arrays[path] = self._array(path, tensor)
                content[name + _TENSORS] = arrays
        if metrics is not None:
            content[_METRICS] = MetricRecord({name: float(v) for name, v in metrics.items()})
        return content

    def _array(self, path: str, tensor: Tensor) -> Array:
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, _to_array(path, tensor)
        return self._made[id(tensor)][1]


def from_content(content: RecordDict, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The records of a message by name, each of the class that `kinds` names for it.

    Refused is a message that lacks one of them, or holds anything besides them and metrics.
    """
    known = {*kinds, *(name + _TENSORS for name in kinds), _METRICS}
    strange = sorted(set(content) - known)
    check(not strange, f"The message holds {', '.join(strange)}, which nobody asked for.")
    return {name: read(content, name, kind) for name, kind in kinds.items()}


def metrics_of(content: RecordDict) -> dict[str, float]:
    """The metrics that a message carries; lists are refused, for they could be about samples."""
    record = content.get(_METRICS, MetricRecord())
    if not isinstance(record, MetricRecord):
        raise FedsieveError("The metrics of a message must be a table of numbers.")
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            raise FedsieveError(f"The metric {name!r} of a message must be one number.")
        metrics[name] = float(value)
    return metrics


def content_bytes(content: RecordDict) -> int:
    """Bytes of a message's records, known without decoding any of them."""
    return sum(int(record.count_bytes()) for record in content.values())


def read(content: RecordDict, name: str, kind: type[T]) -> T:
    """One record of a message."""
    config, arrays = content.get(name), content.get(name + _TENSORS, ArrayRecord())
    if not isinstance(config, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise FedsieveError(f"The message holds no {name}.")
    skeleton = config.get(_SKELETON)
    if not isinstance(skeleton, str) or len(config) != 1:
        raise FedsieveError(f"The {name} of the message has no skeleton of its own.")
    tensors = {path: _from_array(path, array) for path, array in arrays.items()}
    record = put_together(kind, skeleton, tensors)
    unused = sorted(set(tensors) - set(take_apart(record)[1]))
    check(not unused, f"A {kind.__name__} has no {', '.join(unused)}.")
    return record


def _to_array(path: str, tensor: Tensor) -> Array:
    host = tensor.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        raise TypeError(f"{path}: NumPy has no bfloat16; keep float32 in records")
    return Array(host.numpy())


def _from_array(path: str, array: Array) -> Tensor:
    """The tensor of one array; nothing is allocated before its header fits its length."""
    file = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(file)
        check(version == (1, 0), f"{path} is in an unknown version of NumPy's format.")
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    except FedsieveError:
        raise
    except Exception as error:  # the parser of the header has many ways to fail
        kind = type(error).__name__
        raise FedsieveError(f"{path} is not an array in NumPy's format ({kind}).") from None
    begin = file.tell()
    check(
        dtype in _DTYPES and not fortran_order,
        f"{path} must be a plain array of numbers in C order.",
    )
    check(
        len(shape) <= MOST_DIMENSIONS
        and all(type(side) is int and 0 <= side < 2**63 for side in shape),
        f"{path} is said to be {shape}, which is no shape of an array.",
    )
    check(
        len(array.data) - begin == math.prod(shape) * dtype.itemsize,
        f"{path} is said to be {shape}, but has {len(array.data) - begin} bytes.",
    )
    values: np.ndarray[Any, Any] = np.ndarray(shape, dtype, array.data, begin)
    return torch.tensor(values)
