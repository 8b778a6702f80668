"""When a site tries again, by a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from fedsieve.deploy.knock import Answer
from fedsieve.deploy.server import Attendance
from fedsieve.deploy.supervise import Backoff, Ending, RealClock, keep_connected
from fedsieve.errors import FedsieveError

WELCOME = Answer(True)
TAKEN = Ending(1, "ERROR : Exit Code: 305\nFailed to initialize the connection.\nFor more, visit")
KILLED = Ending(-9, "INFO : SuperNode ID: 1\n")


class Over(Exception):  # noqa: N818
    """The test has seen enough."""


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def told_while(
    answers: Iterable[Answer], endings: Iterable[tuple[float, Ending]]
) -> tuple[list[tuple[float, str]], FakeClock, int]:
    """Run the loop; what it said and when, the clock, and how many SuperNodes there were.

    Each ending comes with the seconds that its SuperNode ran.
    """
    clock, told, nodes = FakeClock(), [], 0
    door, ends = iter(answers), iter(endings)

    def ask() -> Answer:
        answer = next(door, None)
        if answer is None:
            raise Over
        return answer

    def run_node() -> Ending:
        nonlocal nodes
        nodes += 1
        seconds, ending = next(ends)
        clock.time += seconds
        return ending

    with pytest.raises(Over):
        keep_connected(ask, run_node, lambda text: told.append((clock.time, text)), clock)
    return told, clock, nodes


def test_no_supernode_before_the_server_welcomes_the_site() -> None:
    away = Answer(False, "away")
    told, clock, nodes = told_while([away] * 6, [])
    assert (nodes, told) == (0, [(0.0, "away")])
    assert clock.slept == [1, 2, 4, 8, 10, 10]


def test_a_new_reason_is_said_and_an_old_one_now_and_then() -> None:
    away, unknown = Answer(False, "away"), Answer(False, "unknown")
    told, _, _ = told_while([away, unknown, unknown, away] + [away] * 70, [])
    assert [text for _, text in told] == ["away", "unknown", "away", "away"]
    assert 600 <= told[3][0] - told[2][0] < 620


def test_waiting_begins_anew_after_a_welcome() -> None:
    away = Answer(False, "away")
    _, clock, _ = told_while([away, away, WELCOME, away], [(500.0, KILLED)])
    assert clock.slept == [1, 2, 2, 1]


def test_a_killed_supernode_comes_back_after_flowers_minute() -> None:
    told, clock, nodes = told_while(
        [WELCOME] * 8, [(300.0, KILLED), *[(1.0, TAKEN)] * 6, (100.0, KILLED)]
    )
    assert nodes == 8
    assert [text.split(";")[0] for _, text in told] == [
        "The SuperNode ended (killed by signal 9)",
        "The server still takes this site's last connection for alive",
        "The SuperNode ended (killed by signal 9)",
    ]
    assert clock.slept[:7] == [2, 10, 10, 10, 10, 10, 10]


def test_a_key_in_use_elsewhere_is_said() -> None:
    told, _, _ = told_while([WELCOME] * 13, [(1.0, TAKEN)] * 13)
    assert len(told) == 2
    assert "in use elsewhere" in told[1][1]
    assert 120 <= told[1][0] < 135


def test_crashes_are_given_more_and_more_time() -> None:
    crash = Ending(1, "Traceback\nValueError: no\n")
    told, clock, _ = told_while([WELCOME] * 8, [(1.0, crash)] * 7 + [(120.0, crash)])
    assert clock.slept == [2, 4, 8, 16, 32, 60, 60, 2]
    assert told[0][1] == "The SuperNode ended (ValueError: no); starting it again in 2 s."


@pytest.mark.parametrize("code", [302, 303, 606])
def test_what_cannot_help_is_not_tried_again(code: int) -> None:
    ending = Ending(1, f"ERROR : Exit Code: {code}\nthe reason\n")
    clock = FakeClock()
    with pytest.raises(FedsieveError):
        keep_connected(lambda: WELCOME, lambda: ending, lambda _: None, clock)
    assert clock.slept == []


def test_an_impostor_at_the_door_ends_it() -> None:
    def ask() -> Answer:
        raise FedsieveError("another authority")

    with pytest.raises(FedsieveError, match="another authority"):
        keep_connected(ask, lambda: KILLED, lambda _: None, FakeClock())


def test_the_reason_is_what_says_most() -> None:
    assert TAKEN.flower_code == 305
    assert TAKEN.why == "Failed to initialize the connection."
    assert KILLED.why == "killed by signal 9"
    assert Ending(1, "a\n\nb\n").why == "b"
    assert Ending(1, "a\nExit Code: 7").why == "Exit Code: 7"
    assert Ending(1, "").why == "no output"
    assert Ending(0, "a").why == "it was sent away"
    assert Ending(0, "").flower_code is None


@settings(max_examples=25, deadline=None)
@given(first=st.floats(0.1, 10), most=st.floats(0.1, 100), failures=st.integers(0, 10_000))
def test_waits_grow_up_to_a_limit(first: float, most: float, failures: int) -> None:
    backoff = Backoff(first, most)
    assert backoff(failures) <= backoff(failures + 1) <= most
    assert backoff(0) == min(first, most)


def test_the_real_clock_goes_on() -> None:
    clock = RealClock()
    before = clock.now()
    clock.sleep(0.01)
    assert clock.now() - before >= 0.009


def test_who_comes_and_goes_is_said_once() -> None:
    attendance = Attendance()
    tell: Callable[[dict[str, float], float], list[str]] = attendance.changes
    assert tell({}, 0) == []
    assert tell({"b": 1, "a": 2}, 3) == ["a is here.", "b is here."]
    assert tell({"b": 1, "a": 30}, 31) == []
    assert tell({"b": 1, "a": 60}, 61) == ["b has been silent for 60 s."]
    assert tell({"b": 70, "a": 70}, 71) == ["b is back."]
