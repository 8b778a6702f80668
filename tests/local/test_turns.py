"""Who may try kernels side by side, and who must be alone."""

from __future__ import annotations

import threading
import time

from fedsieve.local.turns import Turns


def test_whoever_is_alone_has_nobody_beside_and_all_get_their_turn() -> None:
    turns, lock = Turns(), threading.Lock()
    inside: list[str] = []
    most = {"side by side": 0, "alone": 0}

    def work(kind: str) -> None:
        with turns.alone() if kind == "alone" else turns.side_by_side():
            with lock:
                inside.append(kind)
                assert kind == "side by side" or inside == ["alone"]
                assert kind == "alone" or "alone" not in inside
                most[kind] = max(most[kind], len(inside))
            time.sleep(0.005)
            with lock:
                inside.remove(kind)

    failures: list[BaseException] = []

    def guarded(kind: str) -> None:
        try:
            work(kind)
        except BaseException as error:
            failures.append(error)

    kinds = ["side by side", "alone", "side by side", "side by side"] * 5
    threads = [threading.Thread(target=guarded, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert most["alone"] == 1
    assert most["side by side"] > 1


def test_a_failure_ends_the_turn() -> None:
    turns = Turns()
    for turn in (turns.alone, turns.side_by_side, turns.alone):
        try:
            with turn():
                raise RuntimeError
        except RuntimeError:
            pass
    with turns.alone():
        pass
