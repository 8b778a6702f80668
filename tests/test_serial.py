"""Records to bytes and back."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.serial import decode, encode, payload_bytes, to_device, values_of
from helpers import same_bits

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class Leaf:
    value: float
    tensor: Tensor | None


@dataclass(frozen=True)
class Tree:
    flag: bool
    count: int
    rate: float
    name: str
    mode: Literal["a", "b"]
    maybe: str | None
    weights: Mapping[str, Tensor]
    by_client: Mapping[int, Leaf]
    nested: Mapping[int, Mapping[str, float]]
    history: tuple[int, ...]
    pair: tuple[float, Tensor]
    leaf: Leaf | None
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class One:
    a: Tensor


@st.composite
def some_tensors(draw: st.DrawFn) -> Tensor:
    """Any bit pattern in any dtype, 0-d and empty tensors and transposed views among them."""
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (2, 0, 1), (1, 2, 2)]))
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape)
    if dtype is torch.bool:
        flags = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        tensor = torch.tensor(flags, dtype=torch.bool).reshape(shape)
    else:
        size = count * dtype.itemsize
        content = bytearray(draw(st.binary(min_size=size, max_size=size)))
        flat = torch.frombuffer(content, dtype=dtype) if size else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
    return tensor.mT if tensor.dim() >= 2 and draw(st.booleans()) else tensor


FLOATS = st.floats(allow_nan=False)
LEAVES = st.builds(Leaf, FLOATS, st.none() | some_tensors())
WORDS = st.text("abc", min_size=1, max_size=3)
NAMES = st.lists(WORDS, min_size=1, max_size=3).map(".".join)
"""Names of parameters have dots in them."""
TREES = st.builds(
    Tree,
    flag=st.booleans(),
    count=st.integers(-(2**80), 2**80),
    rate=FLOATS,
    name=st.text(max_size=5),
    mode=st.sampled_from(["a", "b"]),
    maybe=st.none() | st.text(max_size=3),
    weights=st.dictionaries(NAMES, some_tensors(), max_size=3),
    by_client=st.dictionaries(st.integers(-5, 10**6), LEAVES, max_size=3),
    nested=st.dictionaries(st.integers(), st.dictionaries(NAMES, FLOATS, max_size=2), max_size=2),
    history=st.lists(st.integers(), max_size=3).map(tuple),
    pair=st.tuples(FLOATS, some_tensors()),
    leaf=st.none() | LEAVES,
    leaves=st.lists(LEAVES, max_size=2).map(tuple),
)


def assert_identical(one: Any, other: Any) -> None:
    """Equal in type and in every bit, all the way down."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert same_bits(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_identical(mine, theirs)
    elif isinstance(one, float):
        assert struct.pack("<d", one) == struct.pack("<d", other)
    elif isinstance(one, Tree | Leaf | One):
        assert_identical(vars(one), vars(other))
    else:
        assert one == other


@settings(max_examples=50, deadline=None)
@given(TREES)
def test_what_is_decoded_is_what_was_encoded(tree: Tree) -> None:
    assert_identical(decode(Tree, encode(tree)), tree)


@settings(max_examples=15, deadline=None)
@given(TREES)
def test_equal_records_give_equal_bytes(tree: Tree) -> None:
    assert encode(tree) == encode(decode(Tree, encode(tree)))


def test_nan_and_infinities_survive() -> None:
    record = decode(Leaf, encode(Leaf(math.nan, torch.tensor([math.nan, math.inf]))))
    assert math.isnan(record.value)
    assert decode(Leaf, encode(Leaf(-math.inf, None))).value == -math.inf
    assert record.tensor is not None
    assert same_bits(record.tensor, torch.tensor([math.nan, math.inf]))


@dataclass(frozen=True)
class Shared:
    whole: Tensor
    row: Tensor
    column: Tensor
    again: Tensor


def test_tensors_that_share_storage_are_stored_each_for_itself() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    back = decode(Shared, encode(Shared(whole, whole[1], whole[:, 2], whole)))
    assert same_bits(back.whole, torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert same_bits(back.row, torch.tensor([3.0, 4.0, 5.0]))
    assert same_bits(back.column, torch.tensor([2.0, 5.0]))
    assert same_bits(back.again, back.whole)


def test_a_slice_of_a_large_tensor_takes_only_its_own_bytes() -> None:
    blob = encode(One(torch.zeros(100_000)[500:510]))
    assert len(blob) < 1000


def test_gradients_are_left_behind() -> None:
    back = decode(One, encode(One(torch.ones(2, requires_grad=True))))
    assert not back.a.requires_grad


def test_tensors_are_listed_with_their_paths() -> None:
    tree = {"conv.weight": torch.ones(1), "bias": torch.zeros(2)}
    record = Tree(
        flag=True,
        count=1,
        rate=0.5,
        name="n",
        mode="a",
        maybe=None,
        weights=tree,
        by_client={7: Leaf(0.0, torch.tensor(3.0))},
        nested={},
        history=(),
        pair=(1.0, torch.tensor(4.0)),
        leaf=None,
        leaves=(),
    )
    assert [name for name, _ in values_of(record)[0].items()] == [
        "weights.conv.weight",
        "weights.bias",
        "by_client.7.tensor",
        "pair.1",
    ]


def test_names_that_would_meet_in_one_path_are_refused() -> None:
    @dataclass(frozen=True)
    class Ambiguous:
        models: Mapping[str, Mapping[str, Tensor]]

    record = Ambiguous({"a": {"b.c": torch.zeros(1)}, "a.b": {"c": torch.ones(1)}})
    with pytest.raises(TypeError, match=r"models\.a\.b\.c"):
        encode(record)


def test_what_cannot_be_part_of_a_record_is_not_passed_over() -> None:
    for stranger in ([1.0], np.float32("nan"), {1.0}):
        with pytest.raises(TypeError, match="cannot be part of a record"):
            payload_bytes({"a": stranger})


def test_payload_is_tensors_plus_eight_bytes_a_number_plus_text() -> None:
    """Up with 3 fp32 + 2 int64 + 1 bool = 12 + 16 + 1 bytes, and more by hand below."""
    assert payload_bytes(One(torch.zeros(3))) == 12
    assert payload_bytes(Leaf(0.5, torch.zeros(2, dtype=torch.int64))) == 8 + 16
    record = Tree(
        flag=True,  # 8
        count=10**30,  # 8
        rate=0.5,  # 8
        name="é",  # 2 bytes of UTF-8
        mode="b",  # 1
        maybe=None,  # 0
        weights={"w": torch.zeros(2, 2, dtype=torch.bfloat16)},  # 8
        by_client={4: Leaf(1.0, None)},  # 8
        nested={1: {"x": 1.0, "y": 2.0}},  # 16
        history=(1, 2, 3),  # 24
        pair=(1.0, torch.zeros((), dtype=torch.bool)),  # 8 + 1
        leaf=None,
        leaves=(),
    )
    assert payload_bytes(record) == 8 + 8 + 8 + 2 + 1 + 8 + 8 + 16 + 24 + 9


def test_to_device_moves_every_tensor_and_keeps_the_rest() -> None:
    leaf = Leaf(0.25, torch.ones(2))
    record = Tree(
        flag=False,
        count=2,
        rate=0.5,
        name="n",
        mode="a",
        maybe=None,
        weights={"w": torch.ones(3)},
        by_client={1: leaf},
        nested={0: {"x": 1.0}},
        history=(1,),
        pair=(1.0, torch.ones(1)),
        leaf=leaf,
        leaves=(leaf, Leaf(1.0, None)),
    )
    moved = to_device(record, torch.device("meta"))
    assert isinstance(moved, Tree)
    assert {name: (t.device.type, t.shape) for name, t in values_of(moved)[0].items()} == {
        "weights.w": ("meta", (3,)),
        "by_client.1.tensor": ("meta", (2,)),
        "pair.1": ("meta", (1,)),
        "leaf.tensor": ("meta", (2,)),
        "leaves.0.tensor": ("meta", (2,)),
    }
    assert (moved.count, moved.nested, moved.history) == (2, {0: {"x": 1.0}}, (1,))
    assert moved.leaves[1] == Leaf(1.0, None)
    assert_identical(to_device(record, torch.device("cpu")), record)


# ------------------------------------------------------------------------------------- refusals


def assert_one_sentence(text: str) -> None:
    assert "\n" not in text
    assert text.endswith(".")


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"short",
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 10**12) + b"{}",
        safetensors.torch.save({"a": torch.zeros(2)}),
        safetensors.torch.save({"a": torch.zeros(2)}, {"other": "thing"}),
        safetensors.torch.save({"a": torch.zeros(2)}, {"skeleton": "{not json"}),
        safetensors.torch.save({"a": torch.zeros(2)}, {"skeleton": "[" * 100_000}),
        encode(One(torch.zeros(4)))[:-3],
    ],
    ids=lambda blob: f"{len(blob)} bytes",
)
def test_bytes_that_are_no_record_are_refused_in_one_sentence(blob: bytes) -> None:
    with pytest.raises(FedsieveError) as caught:
        decode(One, blob)
    assert "One" in str(caught.value)
    assert_one_sentence(str(caught.value))


def blob_of(skeleton: Any, **tensors: Tensor) -> bytes:
    """A well-formed file with any skeleton at all."""
    return safetensors.torch.save(tensors, {"skeleton": json.dumps(skeleton)})


@dataclass(frozen=True)
class Fields:
    whole: int = 0
    rate: float = 0.0
    flag: bool = False
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (0, 0)
    many: tuple[int, ...] = ()
    table: Mapping[int, float] | None = None
    inner: One | None = None


GOOD: dict[str, Any] = {
    "whole": 0,
    "rate": 0,
    "flag": False,
    "mode": "a",
    "pair": [0, 0],
    "many": [],
    "table": None,
    "inner": None,
}


def test_the_good_skeleton_of_the_next_test_is_good() -> None:
    assert decode(Fields, blob_of(GOOD)) == Fields()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"whole": 1.0}, "Fields.whole"),
        ({"whole": True}, "Fields.whole"),
        ({"rate": "1"}, "Fields.rate"),
        ({"rate": True}, "Fields.rate"),
        ({"rate": 10**400}, "Fields.rate"),
        ({"flag": 1}, "Fields.flag"),
        ({"mode": "c"}, "Fields.mode"),
        ({"mode": []}, "Fields.mode"),
        ({"pair": [1]}, "Fields.pair"),
        ({"pair": "ab"}, "Fields.pair"),
        ({"many": {"0": 1}}, "Fields.many"),
        ({"many": [1, "2"]}, "Fields.many.1"),
        ({"table": [1]}, "Fields.table"),
        ({"table": {"x": 1.0}}, "Fields.table"),
        ({"table": {"1": None}}, "Fields.table.1"),
        ({"inner": 3}, "Fields.inner"),
        ({"inner": {"a": None}}, "Fields.inner.a"),
        ({"inner": {"b": None}}, "Fields.inner"),
        ({"extra": 1}, "Fields"),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_field_is_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(FedsieveError) as caught:
        decode(Fields, blob_of(GOOD | change))
    assert str(caught.value).startswith(f"{named} is not ")
    assert_one_sentence(str(caught.value))


def test_the_record_of_another_class_is_refused() -> None:
    with pytest.raises(FedsieveError, match="One is not the fields a"):
        decode(One, encode(Leaf(0.0, None)))


@pytest.mark.parametrize("value", [[1], {1}, b"bytes", np.float32(1), One], ids=str)
def test_only_plain_values_can_be_part_of_a_record(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be part of a record"):
        encode(Leaf(value, None))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_damaged_bytes_never_raise_anything_but_the_one_sentence(data: st.DataObject) -> None:
    """A site may send anything: the server must be able to say so."""
    blob = bytearray(encode(Leaf(0.5, torch.arange(3.0))))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = decode(Leaf, bytes(blob))
    except FedsieveError as error:
        assert_one_sentence(str(error))
    else:
        assert isinstance(record.value, float)
