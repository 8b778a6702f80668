"""Frozen state to bytes and back, without pickle.

A *record* is a frozen dataclass whose fields are numbers, strings, tensors, None, other records,
and tuples or mappings of those. `encode` turns it into one safetensors blob: the tensors as they
are, and a JSON skeleton in the header. `decode` rebuilds it, guided by the field types of the
class, and refuses anything that does not fit them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.packed import Packed

T = TypeVar("T")

_SKELETON = "skeleton"


def encode(record: object) -> bytes:
    """`record` as one safetensors blob; tensors come to the host, numbers keep all their bits."""
    skeleton, tensors = take_apart(record)
    # Put in order where they lie: a GPU does that much faster than the host.
    host = {name: t.detach().contiguous().to("cpu") for name, t in tensors.items()}
    return safetensors.torch.save(_unshared(host), {_SKELETON: skeleton})


def decode(cls: type[T], blob: bytes) -> T:
    """The record of class `cls` that `encode` wrote into `blob`."""
    try:
        tensors = safetensors.torch.load(blob)
        (header_size,) = struct.unpack("<Q", blob[:8])
        header = json.loads(blob[8 : 8 + header_size])
        skeleton = header["__metadata__"][_SKELETON]
    except (
        safetensors.SafetensorError,
        struct.error,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        raise FedsieveError(f"These bytes are not a {cls.__name__} record: {error}.") from None
    return put_together(cls, skeleton, tensors)


def take_apart(record: object) -> tuple[str, dict[str, Tensor]]:
    """The JSON skeleton of `record`, and its tensors by path."""
    tensors: dict[str, Tensor] = {}
    skeleton = _strip(record, "", tensors)
    return json.dumps(skeleton), tensors


def put_together(cls: type[T], skeleton: str, tensors: Mapping[str, Tensor]) -> T:
    """The record of class `cls` that `take_apart` took apart."""
    try:
        parsed = json.loads(skeleton)
    except (ValueError, TypeError, RecursionError) as error:
        raise FedsieveError(f"These bytes are not a {cls.__name__} record: {error}.") from None
    record: T = _build(cls, parsed, cls.__name__, tensors)
    return record


def values_of(
    record: object, *, packed: bool = False
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Every tensor and every other number inside `record`, by path, in one pass; `packed` weights
    are one tensor each, or as many as they have pieces."""
    tensors: dict[str, Tensor] = {}
    skeleton = _strip(record, "", tensors, packed=packed)
    return tensors, dict(_numbers(skeleton, ""))


def payload_bytes(record: object) -> int:
    """Bytes that `record` needs on a wire: its tensors, 8 for each number, and its strings."""
    if isinstance(record, Tensor):
        return record.nbytes
    if isinstance(record, Packed):
        return record.vector.nbytes
    if isinstance(record, str):
        return len(record.encode())
    if isinstance(record, int | float):
        return 8
    if isinstance(record, Mapping):
        return sum(map(payload_bytes, record.values()))
    if isinstance(record, tuple):
        return sum(map(payload_bytes, record))
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return sum(payload_bytes(getattr(record, f.name)) for f in dataclasses.fields(record))
    if record is None:
        return 0
    raise TypeError(f"a {type(record).__name__} cannot be part of a record")


def to_device(record: T, device: torch.device) -> T:
    """The same record with every tensor on `device`."""
    moved: T = _moved(record, device)
    return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Packed):
        return Packed(value.vector.to(device), value.layout)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, Mapping):
        return {key: _moved(v, device) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(v, device) for v in value)
    return value


def _numbers(skeleton: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(skeleton, int | float):
        try:
            yield path, float(skeleton)
        except OverflowError:  # a whole number of more than 308 digits
            yield path, math.inf if skeleton > 0 else -math.inf
    elif isinstance(skeleton, dict):
        for key, item in skeleton.items():
            yield from _numbers(item, _join(path, key))
    elif isinstance(skeleton, list):
        for i, item in enumerate(skeleton):
            yield from _numbers(item, _join(path, str(i)))


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share storage, which the file format refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result


def _strip(value: Any, path: str, tensors: dict[str, Tensor], *, packed: bool = False) -> Any:
    """The JSON skeleton of `value`; its tensors go into `tensors` under their paths."""
    if packed and isinstance(value, Packed):
        value = value.vector
    if isinstance(value, Tensor):
        if path in tensors:
            raise TypeError(f"{path}: two tensors of a record have this path")
        tensors[path] = value
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        children = {str(key): item for key, item in value.items()}
    elif isinstance(value, tuple):
        return [
            _strip(item, _join(path, str(i)), tensors, packed=packed)
            for i, item in enumerate(value)
        ]
    else:
        raise TypeError(f"{path or 'record'}: a {type(value).__name__} cannot be part of a record")
    return {
        key: _strip(item, _join(path, key), tensors, packed=packed)
        for key, item in children.items()
    }


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@cache
def _field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, skeleton: Any, path: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value of type `hint` at `path`, from its skeleton and the tensors below that path."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    inner = path.partition(".")[2]  # tensors are named without the class name that leads the path
    if origin in (typing.Union, types.UnionType):
        if skeleton is None and type(None) in arguments and inner not in tensors:
            return None
        (hint,) = (a for a in arguments if a is not type(None))
        return _build(hint, skeleton, path, tensors)
    if hint is Tensor:
        _fits(inner in tensors, path, "a tensor")
        return tensors[inner]
    if origin is tuple:
        _fits(isinstance(skeleton, list), path, "a list")
        kinds = arguments
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            kinds = (arguments[0],) * len(skeleton)
        _fits(len(kinds) == len(skeleton), path, f"a list of {len(kinds)}")
        return tuple(
            _build(kind, item, f"{path}.{i}", tensors)
            for i, (kind, item) in enumerate(zip(kinds, skeleton, strict=True))
        )
    if origin is typing.Literal:
        _fits(skeleton in arguments, path, f"one of {', '.join(map(repr, arguments))}")
        return skeleton
    if origin is not None and issubclass(origin, Mapping):
        _fits(isinstance(skeleton, dict), path, "a table")
        return {
            _key(arguments[0], key, path): _build(arguments[1], item, f"{path}.{key}", tensors)
            for key, item in skeleton.items()
        }
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        _fits(isinstance(skeleton, dict), path, "a table")
        names = {f.name for f in dataclasses.fields(hint)}
        _fits(set(skeleton) == names, path, f"the fields {', '.join(sorted(names))}")
        kinds_of = _field_types(hint)
        return hint(
            **{n: _build(kinds_of[n], skeleton[n], f"{path}.{n}", tensors) for n in skeleton}
        )
    if hint is float:
        _fits(type(skeleton) in (int, float), path, "a number")
        return _number(float, skeleton, path, "a number that fits 64 bits")
    _fits(type(skeleton) is hint, path, f"of type {getattr(hint, '__name__', hint)}")
    return skeleton


def _key(kind: Any, key: str, path: str) -> Any:
    return key if kind is str else _number(kind, key, path, "a table by numbers")


def _number(kind: type[T], text: Any, path: str, expected: str) -> T:
    try:
        return kind(text)  # type: ignore[call-arg]
    except (ValueError, OverflowError):
        raise FedsieveError(f"{path} is not {expected}.") from None


def _fits(ok: bool, path: str, expected: str) -> None:
    if not ok:
        raise FedsieveError(f"{path} is not {expected}.")
