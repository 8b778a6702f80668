"""Read a pickled table of numpy arrays, lists, text and numbers, and nothing else.

A pickle is a program: it names functions and calls them. Here each name a numpy pickle may use
stands for a small function of this module, every other name is refused, and numpy's own loading
code (which trusts its input) is never reached.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import FedsieveError, check


def read_pickled_table(raw: bytes, source: str) -> dict[str, object]:
    """The dict pickled in `raw`, by text key; its arrays are numpy arrays that own their memory.

    `source` names the file in messages. Bytes of Python 2 stay bytes, except in keys.
    """
    try:
        _check_memo(raw)
        table = _PlainUnpickler(io.BytesIO(raw), source).load()
    except FedsieveError:
        raise
    except Exception as error:  # what a malformed pickle raises is not specified
        raise FedsieveError(
            f"{source} is damaged or no pickle ({type(error).__name__}: {error}): get it again."
        ) from error
    if not isinstance(table, dict):
        raise FedsieveError(f"{source} holds a {type(table).__name__} where a dict was expected.")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): (
            value.array(source) if isinstance(value, _Array) else value
        )
        for key, value in table.items()
    }


def _check_memo(raw: bytes) -> None:
    """Refuse a memo number that no writer reaches: the unpickler makes room up to it at once."""
    for seen, (opcode, number, _) in enumerate(pickletools.genops(raw)):
        if opcode.name.endswith("PUT") and number not in range(seen + 1):
            raise pickle.UnpicklingError(f"memo number {number} is out of place")


class _Dtype:
    """Stands for a numpy dtype while its pickle is read."""

    def __init__(self, code: str | bytes, align: object = None, copy: object = None) -> None:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if re.fullmatch(r"[iu][1248]|f[248]|b1", name) is None:
            raise pickle.UnpicklingError(f"arrays of type {name!r} are not admitted")
        self.numpy = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in (">", b">"):
            self.numpy = self.numpy.newbyteorder(">")


class _Array:
    """Stands for a numpy array while its pickle is read."""

    def __init__(self) -> None:
        self._content: NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, dtype, is_fortran, raw = state
        self._content = _filled(raw, dtype, shape, "F" if is_fortran else "C")

    def array(self, source: str) -> NDArray[Any]:
        if self._content is None:
            raise FedsieveError(f"{source} is damaged: it holds an array without content.")
        return self._content


def _filled(raw: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not (isinstance(dtype, _Dtype) and isinstance(raw, bytes | bytearray)):
        raise pickle.UnpicklingError("an array must be made of a plain dtype and bytes")
    values = np.frombuffer(bytearray(raw), dtype=dtype.numpy)
    return values.reshape(shape, order="F" if order == "F" else "C")


def _new_array(*_class_shape_and_type: object) -> _Array:
    return _Array()


def _array_from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _scalar(dtype: Any, raw: Any) -> object:
    return _filled(raw, dtype, (), "C").item()


def _latin1_bytes(text: str, encoding: str) -> bytes:
    if encoding not in {"latin1", "latin-1"}:
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not admitted")
    return text.encode("latin1")


def _not_callable(*_arguments: object) -> None:
    raise pickle.UnpicklingError("ndarray may be named but not called")


class _StandIn:
    """A function a pickle may call; a pickle's attempt to set attributes on it fails."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function has no state to set")


_ADMITTED = {
    ("numpy", "ndarray"): _StandIn(_not_callable),
    ("numpy", "dtype"): _StandIn(_Dtype),
    ("_codecs", "encode"): _StandIn(_latin1_bytes),
} | {
    # numpy 2 renamed numpy.core to numpy._core
    (f"numpy.{core}.{module}", name): _StandIn(function)
    for core in ("core", "_core")
    for module, name, function in (
        ("multiarray", "_reconstruct", _new_array),
        ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _array_from_buffer),
    )
}


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, source: str) -> None:
        super().__init__(stream, encoding="bytes")
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        check(
            (module, name) in _ADMITTED,
            f"{self._source} asks for {module}.{name}, which a file of arrays has no need of: "
            "do not trust it, and get the official file.",
        )
        return _ADMITTED[module, name]
