"""Packed weights are weights: the same numbers come out, with fewer calls."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.aggregate import weighted_mean
from fedsieve.errors import FedsieveError
from fedsieve.packed import Layout, Packed, alike, in_step, like
from fedsieve.serial import decode, encode, payload_bytes, to_device, values_of
from fedsieve.simulate.world import first_unusable
from fedsieve.types import Weights

shapes = st.lists(
    st.sampled_from([(), (3,), (0,), (2, 3), (2, 3, 1, 2), (4, 1, 3, 3)]), min_size=1, max_size=5
)


def layout_of(some: list[tuple[int, ...]]) -> Layout:
    return Layout(tuple((f"t{i}", torch.Size(shape)) for i, shape in enumerate(some)))


def packed(layout: Layout, first: float = 0.0) -> Packed:
    return Packed(torch.arange(sum(layout.sizes)) * 1.25 + first, layout)


def plain(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


@given(shapes)
def test_every_number_of_the_vector_is_in_exactly_one_piece(some: list[tuple[int, ...]]) -> None:
    layout = layout_of(some)
    weights = packed(layout)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == dict(
        zip(weights, some, strict=True)
    )
    found = torch.cat([tensor.flatten() for tensor in weights.values()])
    assert sorted(found.tolist()) == weights.vector.tolist()


def test_four_dimensions_lie_channels_last() -> None:
    weights = packed(layout_of([(2, 3, 2, 2)]))
    assert weights["t0"].is_contiguous(memory_format=torch.channels_last)
    # Kernel 1, row 0, column 1, channel 2: the 12 + (0·2 + 1)·3 + 2 = 17th number.
    assert weights["t0"][1, 2, 0, 1] == 17 * 1.25


@given(shapes, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_the_mean_of_packed_weights_is_that_of_plain_ones(
    some: list[tuple[int, ...]], by: list[int]
) -> None:
    layout = layout_of(some)
    clients = [packed(layout, first=k**2) for k in range(len(by))]
    mean, expected = weighted_mean(clients, by), weighted_mean([plain(c) for c in clients], by)
    assert isinstance(mean, Packed)
    assert list(mean) == list(expected)
    assert all(torch.equal(mean[name], expected[name]) for name in mean)
    assert torch.equal(clients[0].vector, packed(layout).vector)  # the clients' stay as they are


def test_packed_and_plain_weights_mix() -> None:
    one, other = packed(layout_of([(2, 3), (3,)])), packed(layout_of([(2, 3), (3,)]), first=2)
    mean = weighted_mean([one, plain(other)], [1, 3])
    assert torch.equal(mean["t1"], one["t1"] + 1.5)
    assert alike([one, plain(other)]) is None


def test_other_layouts_do_not_pass_for_the_same() -> None:
    one, other = packed(layout_of([(2, 3), (3,)])), packed(layout_of([(3, 2), (3,)]))
    assert alike([one, other]) is None
    with pytest.raises(FedsieveError, match=r"'t0' is \(2, 3\).* but \(3, 2\)"):
        weighted_mean([one, other], [1, 1])


@given(shapes)
def test_in_step_and_back(some: list[tuple[int, ...]]) -> None:
    weights = packed(layout_of(some))
    for one in (weights, plain(weights)):
        (tensors,) = in_step([one])
        back = like(one, [2 * tensor for tensor in tensors])
        assert all(torch.equal(back[name], 2 * one[name]) for name in one)
        assert isinstance(back, Packed) == isinstance(one, Packed)


@dataclasses.dataclass(frozen=True)
class Record:
    weights: Weights
    samples: int


def test_a_record_with_packed_weights_is_written_and_counted_as_with_plain_ones() -> None:
    weights = packed(layout_of([(2, 3, 1, 2), (3,), ()]))
    record, twin = Record(weights, 7), Record(plain(weights), 7)
    assert encode(record) == encode(twin)
    back = decode(Record, encode(record))
    assert all(torch.equal(back.weights[name], weights[name]) for name in weights)
    assert payload_bytes(record) == payload_bytes(twin) == 4 * (12 + 3 + 1) + 8
    moved = to_device(record, torch.device("cpu"))
    assert isinstance(moved.weights, Packed)
    assert list(values_of(record, packed=True)[0]) == ["weights"]
    assert list(values_of(record)[0]) == ["weights.t0", "weights.t1", "weights.t2"]


def test_the_piece_that_is_not_finite_is_named() -> None:
    weights = packed(layout_of([(2, 3), (3,)]))
    assert first_unusable(Record(weights, 1)) is None
    weights.vector[7] = torch.inf
    assert first_unusable(Record(weights, 1)) == "weights.t1"
