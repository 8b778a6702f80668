"""Records through Flower's: every bit comes back, and what does not fit is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from contract_stage import federate, stage_of
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedsieve.errors import FedsieveError
from fedsieve.flower.records import (
    Packer,
    content_bytes,
    from_content,
    metrics_of,
    read,
    to_content,
)
from fedsieve.methods import METHODS
from fedsieve.serial import take_apart
from helpers import same_bits


@dataclass(frozen=True)
class Inner:
    count: int
    values: Tensor | None


@dataclass(frozen=True)
class Sample:
    weights: Mapping[str, Tensor]
    inner: Inner
    share: float
    parts: tuple[Tensor, ...]


def sample(value: float = 0.1) -> Sample:
    weights = {"a.b": torch.tensor([[value, -0.0]]), "c": torch.tensor(True)}
    return Sample(weights, Inner(7, None), 0.1 + 0.2, (torch.arange(3), torch.zeros(0, 4)))


def assert_same(one: object, other: object) -> None:
    (skeleton, tensors), (other_skeleton, other_tensors) = take_apart(one), take_apart(other)
    assert skeleton == other_skeleton
    assert set(tensors) == set(other_tensors)
    assert all(same_bits(tensors[path], other_tensors[path]) for path in tensors)


def on_the_wire(content: RecordDict) -> RecordDict:
    """As another process gets it: from bytes alone."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    objects = {name: part.deflate() for name, part in get_all_nested_objects(content).items()}
    received = inflate_object_from_contents(content.object_id, objects)
    assert isinstance(received, RecordDict)
    return received


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_every_method_sends_survives_the_wire(name: str) -> None:
    stage = stage_of(METHODS[name])
    progress = federate(stage, rounds=2)
    down = stage.method.send(stage.recipe.method, progress.server, 2, 0)
    up = next(iter(progress.results.values())).up
    content = on_the_wire(to_content({"loss": 0.1}, down=down, up=up))
    records = from_content(content, {"down": stage.method.down, "up": stage.method.up})
    assert_same(records["down"], down)
    assert_same(records["up"], up)
    assert metrics_of(content) == {"loss": 0.1}


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**31),
)
def test_any_tensor_survives(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    raw = np.random.default_rng(seed).bytes(math.prod(shape) * dtype.itemsize)
    tensor = torch.empty(shape, dtype=dtype)  # NaN with any payload may be among the values
    tensor.view(-1).untyped_storage().copy_(
        torch.tensor(list(raw), dtype=torch.uint8).untyped_storage()
    )
    record = Inner(1, tensor)
    assert_same(read(on_the_wire(to_content(record=record)), "record", Inner), record)


def test_a_tensor_in_another_memory_order_keeps_its_shape() -> None:
    record = Inner(1, torch.arange(6.0).reshape(2, 3).T)
    assert_same(read(to_content(record=record), "record", Inner), record)


def test_a_tensor_that_many_messages_share_is_copied_once() -> None:
    shared, packer = torch.zeros(3), Packer()
    contents = [packer.content(record=Inner(k, shared)) for k in range(2)]
    first, second = (content.array_records["record.tensors"]["values"] for content in contents)
    assert first is second
    assert [read(content, "record", Inner).count for content in contents] == [0, 1]


def test_bfloat16_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match=r"values: NumPy has no bfloat16"):
        to_content(record=Inner(1, torch.zeros(2, dtype=torch.bfloat16)))


def test_the_size_is_known_without_decoding() -> None:
    content = RecordDict(
        {"up.tensors": ArrayRecord({"a": Array("float32", (1,), "?", bytes(999))})}
    )
    assert 999 <= content_bytes(content) < 1100


def broken(path: str, data: bytes) -> RecordDict:
    content = to_content(record=sample())
    content.array_records["record.tensors"][path] = Array("float32", (1,), "numpy.ndarray", data)
    return content


def npy(header: str) -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "parts.0 is not an array"),
        (b"\x80\x04\x95 a pickle", "parts.0 is not an array"),
        (b"\x93NUMPY\x03\x00" + bytes(20), "unknown version"),
        (npy("nonsense"), "parts.0 is not an array"),
        (npy("(" * 500), "parts.0 is not an array"),
        (
            npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"),
            "must be a plain array of numbers",
        ),
        (
            npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 1), }") + bytes(8),
            "must be a plain array of numbers",
        ),
        (
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }"),
            r"said to be \(10000000000000,\), but has 0 bytes",
        ),
        (
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }") + bytes(5),
            "but has 5 bytes",
        ),
        *(
            (
                npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}")
                + bytes(size),
                "which is no shape of an array",
            )
            for shape, size in (
                ("(-1, -4)", 16),
                (f"({2**63}, 0)", 0),
                ("(True,)", 4),
                (f"({'1, ' * 70})", 4),
            )
        ),
    ],
)
def test_an_array_that_lies_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        read(broken("parts.0", data), "record", Sample)


def test_nothing_more_than_the_record_may_come() -> None:
    with pytest.raises(FedsieveError, match=r"A Sample has no images\."):
        read(broken("images", to_content(r=Inner(1, torch.zeros(1)))["r.tensors"]["values"].data),
             "record", Sample)  # fmt: skip
    content = to_content(record=sample())
    content["extra"] = ConfigRecord({"labels": [1, 2, 3]})
    with pytest.raises(FedsieveError, match=r"holds extra, which nobody asked for"):
        from_content(content, {"record": Sample})
    content = to_content(record=sample())
    content.config_records["record"]["labels"] = [1, 2, 3]
    with pytest.raises(FedsieveError, match=r"record of the message has no skeleton of its own"):
        read(content, "record", Sample)


@pytest.mark.parametrize("skeleton", ["", "{", "[" * 100_000, "3", b"{}", '{"count": 1}'])
def test_a_skeleton_that_does_not_fit_is_refused(skeleton: str | bytes) -> None:
    content = RecordDict({"record": ConfigRecord({"skeleton": skeleton})})
    with pytest.raises(FedsieveError):
        read(content, "record", Sample)


def test_a_missing_record_is_named() -> None:
    with pytest.raises(FedsieveError, match=r"The message holds no down\."):
        read(to_content(up=sample()), "down", Sample)


def test_metrics_are_single_numbers() -> None:
    assert metrics_of(RecordDict()) == {}
    assert metrics_of(to_content({"a": 1})) == {"a": 1.0}
    with pytest.raises(FedsieveError, match=r"'losses' of a message must be one number"):
        metrics_of(RecordDict({"metrics": MetricRecord({"losses": [0.1, 0.2]})}))
    with pytest.raises(FedsieveError, match="must be a table of numbers"):
        metrics_of(RecordDict({"metrics": ConfigRecord({"a": 1})}))
