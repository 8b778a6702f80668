"""The unpickler that admits tables of arrays and nothing else."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.data.sources.unpickle import _ADMITTED, read_pickled_table
from fedsieve.errors import FedsieveError


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<f4", "?"])
def test_what_numpy_pickles_comes_back(protocol: int, dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    table = {
        "rows": array,
        "columns": np.asfortranarray(array),
        "names": ["a", ("b", 2.5)],
        "one": array[1, 2],
        "raw": b"\xff\x00",
    }
    read = read_pickled_table(pickle.dumps(table, protocol=protocol), "file")
    for key in ("rows", "columns"):
        got = read[key]
        assert isinstance(got, np.ndarray)
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
    assert read["names"] == ["a", ("b", 2.5)]
    assert read["one"] == array[1, 2].item()
    assert read["raw"] == b"\xff\x00"


def python2_pickle(pixels: bytes, rows: int, columns: int) -> bytes:
    """A {'data': uint8 array} as Python 2 with numpy 1 wrote it, opcode by opcode (protocol 2)."""
    return (
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b"
        b"\x87R(K\x01K" + bytes([rows]) + b"K" + bytes([columns]) + b"\x86cnumpy\ndtype\n"
        b"U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tbs."
    )


def test_a_python_2_pickle_with_the_old_module_names_is_read() -> None:
    read = read_pickled_table(python2_pickle(bytes([1, 2, 3, 250, 251, 252]), 2, 3), "file")
    assert np.array_equal(read["data"], [[1, 2, 3], [250, 251, 252]])  # type: ignore[arg-type]


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_does_nothing_and_is_named(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "created"
    attacks = {
        r"\w+\.system": Calls(os.system, f"touch {mark}"),
        r"\w+\.eval": Calls(eval, f"open({str(mark)!r}, 'w')"),
        r"\w+\.open": Calls(open, str(mark), "w"),
        r"\w+\.getattr": Calls(getattr, "text", "upper"),
        r"numpy.*\.load": Calls(np.load, str(mark)),
    }
    for name, attack in attacks.items():
        raw = pickle.dumps({"data": [attack]}, protocol=protocol)
        with pytest.raises(FedsieveError, match=f"bad.file asks for {name}"):
            read_pickled_table(raw, "bad.file")
    assert not mark.exists()


def test_the_attack_would_have_worked_on_the_plain_unpickler(tmp_path: Path) -> None:
    mark = tmp_path / "created"
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(mark))))  # noqa: S301
    assert mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        b"cnumpy\nfromfile\n.",
        b"cnumpy.core.multiarray\nfrombuffer\n.",
        b"cnumpy.f2py\ndiagnose\n.",
        b"cfedsieve.data.sources.unpickle\n_ADMITTED\n.",
    ],
)
def test_names_near_the_admitted_ones_are_refused(raw: bytes) -> None:
    with pytest.raises(FedsieveError, match="asks for"):
        read_pickled_table(raw, "file")


def test_a_pickle_cannot_change_the_functions_it_may_call() -> None:
    state = b"N}U\x09_functionU\x04evils\x86b."
    for module, name in _ADMITTED:
        before = _ADMITTED[module, name]._function
        with pytest.raises(FedsieveError, match="no state to set"):
            read_pickled_table(f"c{module}\n{name}\n".encode() + state, "file")
        assert _ADMITTED[module, name]._function is before


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "damaged or no pickle"),
        (b"not a pickle", "damaged or no pickle"),
        (pickle.dumps({"data": np.zeros(4)})[:-20], "damaged or no pickle"),
        (pickle.dumps([1, 2]), "holds a list where a dict was expected"),
        (pickle.dumps({"data": np.array([{}, None])}), "'O8' are not admitted"),
        (pickle.dumps({"data": np.array(["text"])}), "'U4' are not admitted"),
        (pickle.dumps({"d": np.zeros(2, [("a", "u1")])}), "'V1' are not admitted"),
        (b"}U\x01dcnumpy\nndarray\nK\x01\x85Rs.", "named but not called"),
        (b"}U\x01dcnumpy.core.multiarray\n_reconstruct\n)Rs.", "an array without content"),
        (
            b"}U\x01dc_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86Rs.",
            "'rot13' is not admitted",
        ),
        (b"}U\x01dcnumpy.core.multiarray\nscalar\nK\x01K\x02\x86Rs.", "a plain dtype and bytes"),
        (python2_pickle(b"123456", 2, 4), "cannot reshape"),
        (b"(lp0\ng0\na.", "holds a list"),
        (b"\x80\x04\x8e" + struct.pack("<q", 2**60) + b"x.", "damaged or no pickle"),
        (b"P1\n.", "damaged or no pickle"),
        (b"}r\xff\xff\xff\x7f.", "memo number 2147483647 is out of place"),
        (b"}p-1\n.", "memo number -1 is out of place"),
    ],
)
def test_a_damaged_pickle_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(FedsieveError, match=words):
        read_pickled_table(raw, "file")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_scrambled_pickle_is_read_or_refused_but_never_breaks(data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"data": np.arange(6), "labels": [1, 2]}, protocol=2))
    for _ in range(3):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = read_pickled_table(bytes(whole), "file")
    except FedsieveError:
        return
    assert all(isinstance(key, str) for key in read)
