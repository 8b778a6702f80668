"""What is shown while a run goes on."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from fedsieve.cli import output, progress
from fedsieve.cli.progress import Bars, Lines, duration, watcher
from fedsieve.recipe import Recipe

RECIPE = replace(Recipe(), rounds=100)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(seconds_per_round: float, rounds: int = 100, start: int = 0) -> list[str]:
    lines: list[str] = []
    clock = Clock()
    reporter = Lines(lines.append, clock)
    reporter.started(replace(RECIPE, rounds=rounds), Path("runs/me"), start)
    for round in range(start, rounds):
        clock.now += seconds_per_round
        reporter.finished_round({"round": round, "accuracy": round / 2})
    return lines


def test_a_quick_run_is_told_at_its_start_and_end():
    assert told(0.01) == [
        "me: 100 rounds of fedavg",
        "me: round 100/100, accuracy 49.50 %",
    ]


def test_a_usual_run_is_told_every_tenth():
    lines = told(1.0)
    assert len(lines) == 1 + 10
    assert lines[1] == "me: round 10/100, accuracy 4.50 %, 90 s left"
    assert lines[2] == "me: round 20/100, accuracy 9.50 %, 80 s left"


def test_a_slow_run_is_told_every_five_minutes():
    lines = told(100.0)
    assert len(lines) == 1 + 34  # every third round, and the last one
    assert lines[1].startswith("me: round 3/100")
    assert lines[1].endswith("2.7 h left")  # 97 rounds of 100 s


def test_a_resumed_run_counts_its_own_rounds_only():
    lines = told(3.0, start=80)
    assert lines[0] == "me: 100 rounds of fedavg, going on after round 80"
    assert lines[1] == "me: round 90/100, accuracy 44.50 %, 30 s left"


CPU = replace(RECIPE.engine, device="cpu")


def told_of_clients(
    seconds: float, rounds: int, *, workers: int = 1, until: float = 1.0, start: int = 0
) -> list[str]:
    """The lines on a run with four clients a round, without that on its start."""
    recipe = replace(
        RECIPE, rounds=rounds, clients_per_round=4, engine=replace(CPU, workers=workers)
    )
    lines: list[str] = []
    clock = Clock()
    reporter = Lines(lines.append, clock, advice="Take a GPU.")
    reporter.started(recipe, Path("runs/me"), start)
    for place in range(int(4 * until)):
        clock.now += seconds
        reporter.trained_clients(place % 4 + 1, 4)
        if place % 4 == 3:
            reporter.finished_round({"round": start + place // 4, "accuracy": 50.0})
    return lines[1:]


def test_the_clients_of_a_slow_round_are_told():
    """20 s a client: of 10 rounds of 80 s, 780 s are left after the first of 40 clients."""
    lines = told_of_clients(20.0, 10)
    assert lines == [
        "me: 1 of 4 clients of round 1, about 13 min left",
        "me: round 1/10, accuracy 50.00 %, 12 min left",
    ]
    assert told_of_clients(2.4, 10) == ["me: round 1/10, accuracy 50.00 %, 86 s left"]
    # 100 s a client: the next ones after 300 s, the round's line among them.
    assert told_of_clients(100.0, 10, until=1.75) == [
        "me: 1 of 4 clients of round 1, about 65 min left",
        "me: round 1/10, accuracy 50.00 %, 60 min left",
        "me: 3 of 4 clients of round 2, about 55 min left",
    ]


def test_a_run_of_many_hours_on_a_cpu_is_advised_once():
    """200 s a client, 80 rounds of 4: 319 · 200 s are left after the first."""
    lines = told_of_clients(200.0, 80, until=2.0)
    assert lines[:2] == ["me: 1 of 4 clients of round 1, about 17.7 h left", "Take a GPU."]
    assert lines.count("Take a GPU.") == 1


def test_a_forecast_counts_on_the_processes_that_a_long_run_starts(monkeypatch):
    """Two from the third round on: of 80 clients, 100 s each, 7 + 72 / 2 are left."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    lines = told_of_clients(100.0, 20, workers=0, until=2.75)
    assert lines[0] == "me: 1 of 4 clients of round 1, about 72 min left"
    assert lines[-1] == "me: 2 of 4 clients of round 3, about 1.9 h left", "measured with them"
    assert told_of_clients(100.0, 20)[0] == "me: 1 of 4 clients of round 1, about 2.2 h left"
    going_on = told_of_clients(100.0, 40, start=20)
    assert going_on[0] == "me: 1 of 4 clients of round 21, about 2.2 h left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (99.4, "99 s"), (120, "2 min"), (7200, "2.0 h")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_terminal(monkeypatch) -> Terminal:
    """One that standard error goes to, and that notes what stands there."""
    shown = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr("sys.stderr", shown)
    return shown


def test_a_terminal_gets_bars_and_everything_else_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(watcher(), Lines)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert isinstance(watcher(), Bars)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(watcher(), Lines)


def test_a_bar_shows_round_and_accuracy(monkeypatch):
    terminal = a_terminal(monkeypatch)
    bars = Bars()
    with bars.shown():
        bars.skipped(Path("runs/old"))
        bars.started(RECIPE, Path("runs/me"), 40)
        bars.finished_round({"round": 41, "accuracy": 12.345})
    text = terminal.getvalue()
    assert "old: already finished" in text
    last = [line for line in text.splitlines() if "round" in line][-1]
    assert "me" in last
    assert "round 42/100" in last
    assert "accuracy 12.35 %" in last or "accuracy 12.34 %" in last


def test_a_bar_shows_the_clients_of_a_slow_round(monkeypatch):
    terminal = a_terminal(monkeypatch)
    clock = Clock()
    bars = Bars(clock=clock, advice="Take a GPU.")
    with bars.shown():
        bars.started(replace(RECIPE, engine=replace(CPU, workers=1)), Path("runs/me"), 0)
        clock.now = 1000.0
        bars.trained_clients(1, 4)
        bars.trained_clients(1, 4)
    text = terminal.getvalue()
    assert text.count("Take a GPU.") == 1
    assert "1 of 4 clients of round 1, about 110.8 h left" in text  # 399 · 1000 s


def test_lines_go_to_standard_error(capsys):
    with Lines().shown():
        progress.Lines().skipped(Path("runs/old"))
    assert capsys.readouterr().err == "old: already finished\n"


def test_tables_are_plain_in_a_pipe_even_where_colour_is_forced(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    output.print_table(["a", "b"], [["[red]x[/red]", ":smile:"]], title="t", caption="c")
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "t"
    assert text.splitlines()[-1] == "c"
    assert "[red]x[/red]" in text
    assert ":smile:" in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
