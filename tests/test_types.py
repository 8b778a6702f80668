"""The vocabulary: shards and random streams."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.types import SERVER, Shard, Streams, rng_for

ARGUMENTS = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(0, 10_000), st.integers(-1, 10_000), st.text(max_size=8)
)


@settings(max_examples=40, deadline=None)
@given(ARGUMENTS)
def test_a_stream_is_philox_keyed_by_the_hash_of_its_four_arguments(
    arguments: tuple[int, int, int, str],
) -> None:
    """The key is blake2b-128 of "seed/round/client/purpose", read as two little-endian words."""
    digest = hashlib.blake2b("/".join(map(str, arguments)).encode(), digest_size=16).digest()
    low, high = (int.from_bytes(part, "little") for part in (digest[:8], digest[8:]))
    expected = np.random.Generator(np.random.Philox(key=low + (high << 64)))
    assert rng_for(*arguments).integers(2**63, size=4).tolist() == (
        expected.integers(2**63, size=4).tolist()
    )


@settings(max_examples=40, deadline=None)
@given(ARGUMENTS, ARGUMENTS)
def test_a_stream_differs_when_any_argument_does(
    one: tuple[int, int, int, str], other: tuple[int, int, int, str]
) -> None:
    base = rng_for(*one).integers(2**63, size=2).tolist()
    for position in range(4):
        if one[position] == other[position]:
            continue
        changed = list(one)
        changed[position] = other[position]
        assert rng_for(*changed).integers(2**63, size=2).tolist() != base  # type: ignore[arg-type]


def test_a_stream_is_the_same_in_another_process() -> None:
    program = (
        "from fedsieve.types import rng_for; print(rng_for(7, 3, 11, 'views').integers(2**63))"
    )
    # Another seed of Python's own string hash must not matter.
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"},
    )
    assert int(finished.stdout) == rng_for(7, 3, 11, "views").integers(2**63)


def test_streams_open_the_stream_of_their_participant() -> None:
    streams = Streams(5, 2, SERVER)
    assert streams("select").random() == rng_for(5, 2, -1, "select").random()
    assert streams("select").random() == streams("select").random()
    assert streams("select").random() != streams("views").random()


def test_the_parts_of_a_round_draw_from_streams_of_their_own() -> None:
    streams = Streams(5, 2, 0)
    inner = streams.within("epoch 1").within("peer")
    assert inner("views").random() == rng_for(5, 2, 0, "epoch 1/peer/views").random()
    assert inner != streams.within("peer")
    assert streams == Streams(5, 2, 0)


def test_a_shard_is_as_long_as_its_labels_and_cannot_be_changed() -> None:
    shard = Shard(0, torch.zeros(3, 1, 2, 2), torch.arange(3), torch.arange(3), 10)
    assert len(shard) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.client = 1  # type: ignore[misc]
    assert {field.name for field in dataclasses.fields(Shard)} == {
        "client",
        "images",
        "labels",
        "ids",
        "num_classes",
    }, "a shard must not hold anything that a site does not know, true labels above all"
