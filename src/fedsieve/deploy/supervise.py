"""When to try again: the loop that keeps a site connected, without processes or a real clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedsieve.deploy.knock import Answer
from fedsieve.errors import FedsieveError

ALIVE_FOR = 60.0
"""Seconds that Flower takes a site for alive after its last sign."""
STEADY = 120.0
"""A SuperNode that ran for so many seconds was not at fault from its start."""
REMIND = 600.0
"""Seconds after which an unchanged sentence is said again."""


class Clock(Protocol):
    """Time, for the supervisor."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The clock on the wall."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True)
class Backoff:
    """Waiting times that double from `first` up to `most` seconds."""

    first: float
    most: float

    def __call__(self, failures: int) -> float:
        return min(self.most, self.first * 2.0 ** min(failures, 64))


KNOCKING = Backoff(1.0, 10.0)
"""Between two questions at the door, which cost next to nothing."""
CRASHED = Backoff(2.0, 60.0)
"""Between two SuperNodes."""


@dataclass(frozen=True)
class Ending:
    """How a SuperNode ended."""

    status: int
    """Exit status; negative: the signal that killed it."""
    output: str

    @property
    def flower_code(self) -> int | None:
        """The number of Flower's reason, such as 305; None where it gave none."""
        found = re.findall(r"Exit Code: (\d+)", self.output)
        return int(found[-1]) if found else None

    @property
    def why(self) -> str:
        """What says most about the end: a signal, the line after Flower's number, or the last."""
        if self.status <= 0:
            return f"killed by signal {-self.status}" if self.status else "it was sent away"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        numbered = [i for i, line in enumerate(lines) if "Exit Code:" in line]
        if numbered and numbered[-1] + 1 < len(lines):
            return lines[numbered[-1] + 1]
        return lines[-1] if lines else "no output"


NOT_ACTIVATED = 305
HOPELESS = {
    302: "Flower cannot read site.key; make a new folder with `fedsieve deploy join`.",
    303: "Flower refuses a key without TLS; ask the server for a new invitation.",
    606: "The server runs another version of Flower; install the same one on both.",
}
"""Flower's reasons that trying again does not mend."""


@dataclass
class Voice:
    """Says a sentence when it is news, and again after a while."""

    say: Callable[[str], None]
    clock: Clock
    _last: str = ""
    _at: float = float("-inf")

    def __call__(self, sentence: str) -> None:
        now = self.clock.now()
        if sentence != self._last or now - self._at >= REMIND:
            self.say(sentence)
            self._last, self._at = sentence, now


def keep_connected(
    ask: Callable[[], Answer],
    run_node: Callable[[], Ending],
    say: Callable[[str], None],
    clock: Clock,
) -> None:
    """Keep a SuperNode running for ever; a `FedsieveError` ends it where trying cannot help.

    Each time the server is asked first; only where it welcomes the site is a SuperNode started.
    """
    voice = Voice(say, clock)
    unwelcome = crashes = 0
    taken_since: float | None = None
    while True:
        answer = ask()
        if not answer.welcome:
            voice(answer.sentence)
            clock.sleep(KNOCKING(unwelcome))
            unwelcome += 1
            continue
        unwelcome = 0
        began = clock.now()
        ending = run_node()
        if ending.flower_code in HOPELESS:
            raise FedsieveError(HOPELESS[ending.flower_code])
        if ending.flower_code == NOT_ACTIVATED:
            # The gate knows this key, so the SuperLink does too: it takes us for here already.
            taken_since = began if taken_since is None else taken_since
            voice(_TAKEN if clock.now() - taken_since < 2 * ALIVE_FOR else _TAKEN_LONG)
            clock.sleep(ALIVE_FOR / 6)
            continue
        taken_since = None
        crashes = 0 if clock.now() - began >= STEADY else crashes
        wait = CRASHED(crashes)
        say(f"The SuperNode ended ({ending.why}); starting it again in {wait:.0f} s.")
        clock.sleep(wait)
        crashes += 1


_TAKEN = (
    "The server still takes this site's last connection for alive; trying again, which may last "
    f"{ALIVE_FOR:.0f} s."
)
_TAKEN_LONG = (
    "The server goes on taking this site for connected, so its key seems to be in use elsewhere; "
    "stop the other one, or give this machine a key of its own with `fedsieve deploy join`."
)
