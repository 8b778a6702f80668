"""Numbers in logs: their names, and where a line has none."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.simulate.logged import at_clients, full_name, names_in, points, rounds_in

LINES = [
    {"round": 0, "accuracy": 10.0, "drift": None, "server": {"share": 0.5}, "clients": [1, 2]},
    {"round": 1, "accuracy": 30, "drift": 2.5, "server": {}, "refused": {"3": "not finite"}},
    {"round": 2, "accuracy": True, "server": {"share": math.inf}, "client": {"share": 0.25}},
]


def test_points_are_rounds_with_a_finite_number() -> None:
    """Rounds count from 1; null, truth values, infinities and absent names are no numbers."""
    assert points(LINES, "accuracy") == [(1, 10.0), (2, 30.0)]
    assert points(LINES, "drift") == [(2, 2.5)]
    assert points(LINES, "server.share") == [(1, 0.5)]
    assert points(LINES, "server") == points(LINES, "accuracy.x") == points(LINES, "") == []


def test_a_run_has_as_many_rounds_as_its_last_line_says() -> None:
    """A fork logs from the round on in which it left its warm-up; a round may log no number."""
    assert rounds_in(LINES) == 3
    assert rounds_in([{"round": 6}, {"round": 7, "accuracy": None}]) == 8
    assert rounds_in([{}, {}]) == 2, "lines that do not say count as they stand"
    assert rounds_in([]) == 0


def test_names_are_paths_to_numbers() -> None:
    """The round says where a line belongs; lists and texts are nothing to draw."""
    assert set(names_in(LINES)) == {"accuracy", "drift", "server.share", "client.share"}


def test_a_client_keeps_its_last_number() -> None:
    """Client 4 in rounds 1, 2 and 4, the last time without the number; client 7 in round 3."""
    lines = [
        {"round": 0, "client": 4, "f1": 0.1},
        {"round": 1, "client": 4, "f1": 0.2},
        {"round": 2, "client": 7, "f1": 0.9},
        {"round": 3, "client": 4, "f1": None},
    ]
    assert at_clients(lines, "f1") == {4: 0.2, 7: 0.9}
    assert at_clients(lines, "f1", after=2) == {4: 0.2}
    assert at_clients(lines, "f1", after=1) == {4: 0.1}
    assert at_clients(lines, "f1", after=0) == at_clients(lines, "auroc") == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 3), st.one_of(st.none(), st.floats())),
        max_size=30,
    ),
    st.integers(0, 10),
)
def test_looking_back_is_the_same_as_having_stopped_there(log, after: int) -> None:
    """What was known after so many rounds does not depend on later ones."""
    lines = [{"round": t, "client": k, "x": v} for t, k, v in sorted(log, key=lambda e: e[0])]
    until_then = [line for line in lines if line["round"] < after]
    assert at_clients(lines, "x", after) == at_clients(until_then, "x")


KNOWN = ("accuracy", "server.share", "client.share", "diagnostics.noise_mse")


def test_the_last_part_of_a_name_will_do_where_it_is_clear() -> None:
    assert full_name("noise_mse", KNOWN) == "diagnostics.noise_mse"
    assert full_name("client.share", KNOWN) == "client.share"
    assert full_name("share", (*KNOWN, "share")) == "share", "a full name comes first"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("share", "'share' may be client.share or server.share; say which."),
        ("noise_msd", "did you mean 'noise_mse'?"),
        ("zzz", "choose one of accuracy, client.share, diagnostics.noise_mse, server.share."),
    ],
)
def test_a_name_that_is_not_clear_is_answered_with_those_that_are(asked: str, words: str) -> None:
    with pytest.raises(FedsieveError) as error:
        full_name(asked, KNOWN)
    assert words in str(error.value)
