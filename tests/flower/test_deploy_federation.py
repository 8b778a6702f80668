"""A federation with encryption and keys, as people start it: real processes, cut in every way.

One story, because Flower takes a minute to notice that a site is gone; each test looks at one part.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")
if not Path("/proc/self/environ").exists():
    pytest.skip("these tests find processes through /proc", allow_module_level=True)

from fedsieve.deploy.children import belonging_to
from fedsieve.deploy.folders import Folder
from fedsieve.ports import free_port
from fedsieve.simulate.directory import read_lines

pytestmark = pytest.mark.processes

PATIENCE = 300.0
"""Seconds that anything here may take, on a machine that others use, too."""
ROUNDS = 3
RECIPE = f"""\
name = "two-sites"
rounds = {ROUNDS}
clients_per_round = 2

[scene]
clients = 2

[engine]
device = "cpu"
"""


class Program:
    """`fedsieve …` as a process of its own."""

    def __init__(self, folder: Path, log: str, *words: str) -> None:
        self.log = folder / log
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fedsieve", *words],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, sentence: str, times: int = 1) -> None:
        wait_until(
            lambda: self.text().count(sentence) >= times,
            lambda: f"{sentence!r} in {self.log.name}:\n{self.text()}",
        )

    def ends(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name} does not end:\n{self.text()}") from None

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.ends()


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what()}"
        time.sleep(0.2)


def kill(folder: Path, program: str) -> None:
    """kill -9 one of Flower's processes of a folder."""
    (pid,) = [
        pid
        for pid in belonging_to(Folder(folder))
        if program in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(pid, signal.SIGKILL)


@dataclass
class Story:
    folder: Path
    port: int = field(default_factory=free_port)
    programs: dict[str, Program] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    left_behind: dict[str, list[int]] = field(default_factory=dict)
    rounds_at: dict[str, int] = field(default_factory=dict)
    replies: dict[str, int] = field(default_factory=dict)

    def do(self, *words: str) -> str:
        """A short command, to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "fedsieve", "deploy", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def start(self, name: str, *words: str) -> Program:
        self.programs[name] = Program(self.folder, f"{name}.log", "deploy", *words)
        return self.programs[name]

    def start_server(self, name: str) -> Program:
        return self.start(name, "server", "server", "recipe.toml")

    def ended(self, name: str, status: int, place: str) -> None:
        self.status[name] = status
        self.left_behind[name] = belonging_to(Folder(self.folder / place))
        self.rounds_at[name] = self.rounds()

    def rounds(self) -> int:
        return len(read_lines(self.folder / "server" / "run" / "metrics.jsonl"))

    def reaches(self, rounds: int, server: Program) -> None:
        """Wait until so many rounds are done."""

        def done() -> bool:
            enough = self.rounds() >= rounds
            assert enough or server.process.poll() is None, server.text()
            return enough

        wait_until(done, lambda: f"round {rounds}:\n{server.text()}")

    def knock_at(self, path: str) -> int:
        """The status that the public port gives to a request from the network."""
        context = ssl.create_default_context(cafile=self.folder / "server" / "flower" / "ca.crt")
        line = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=30)
        line.request("POST", path, b"")
        return line.getresponse().status


def tell(story: Story) -> None:
    (story.folder / "recipe.toml").write_text(RECIPE)
    address = f"127.0.0.1:{story.port}"
    story.do("init", "server", "--address", address)
    story.do("init", "other", "--address", address)
    for name, inviter in {"a": "server", "b": "server", "c": "server", "d": "other"}.items():
        invitation = f"{inviter}/federation.toml"
        story.do("join", name, "--invitation", invitation, "--name", f"site-{name}")
    for name in ("a", "b"):
        story.do("admit", "server", f"{name}/site-{name}.pub")

    a = story.start("a", "site", "a", "--client", "0")
    story.start("b", "site", "b", "--client", "1")
    unknown = story.start("c", "site", "c", "--client", "0")
    first = story.start_server("first")
    first.says("is ready for sites")
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/get-run"):
        story.replies[path] = story.knock_at(path)
    impostor = story.start("d", "site", "d", "--client", "0")
    story.ended("d", impostor.ends(), "d")
    unknown.says("does not know this site's key")
    story.reaches(1, first)

    kill(story.folder / "a", "flower-supernode")
    kill(story.folder / "server", "flower-superlink")
    story.ended("first", first.ends(), "server")

    second = story.start_server("second")
    second.says("is ready for sites")
    story.programs["b"].stop(signal.SIGKILL)  # its SuperNode lives on
    b = story.start("b again", "site", "b", "--client", "1")
    a.says("still takes this site's last connection for alive")
    a.says("SuperNode ID", times=2)
    b.says("SuperNode ID")
    story.reaches(story.rounds_at["first"] + 1, second)
    story.ended("second", second.stop(), "server")

    third = story.start_server("third")
    story.ended("third", third.ends(), "server")
    for site in (a, b):
        site.says("Finished; suspects")
        site.says("The server does not answer (it has stopped")
    story.ended("a", a.stop(), "a")
    story.ended("b", b.stop(), "b")
    story.ended("c", unknown.stop(signal.SIGTERM), "c")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    story = Story(tmp_path_factory.mktemp("federation"))
    try:
        tell(story)
        yield story
    finally:
        for program in story.programs.values():
            if program.process.poll() is None:
                program.stop()


def test_the_run_is_finished_over_two_cuts(story: Story) -> None:
    assert story.status["third"] == 0
    assert story.rounds() == ROUNDS
    summary = json.loads((story.folder / "server" / "run" / "summary.json").read_bytes())
    assert summary["rounds"] == ROUNDS
    lines = read_lines(story.folder / "server" / "run" / "metrics.jsonl")
    assert [line["round"] for line in lines] == list(range(ROUNDS))
    assert 1 <= story.rounds_at["first"] < story.rounds_at["second"]


def test_the_record_has_the_command_that_was_typed_and_no_token(story: Story) -> None:
    record = json.loads((story.folder / "server" / "run" / "env.json").read_bytes())
    assert record["command"] == "python -m fedsieve deploy server server recipe.toml"
    for path in (story.folder / "server" / "run").rglob("*.json*"):
        assert "--token" not in path.read_text(), path


def test_sites_say_once_that_they_have_finished_and_where(story: Story) -> None:
    for name, place in {"a": "a", "b again": "b"}.items():
        (page,) = (story.folder / place / "state").glob("*/review.html")
        where = page.parent.relative_to(story.folder)
        told = story.programs[name].text()
        assert told.count("Finished;") == 1
        assert f"Finished; suspects and the review page are in {where}." in told
        assert "Connection attempt failed" not in told


def test_a_killed_superlink_is_said_and_one_command_goes_on(story: Story) -> None:
    assert story.status["first"] == 2
    assert "The SuperLink has ended" in story.programs["first"].text()
    assert "give the same command again" in story.programs["first"].text()


def test_a_killed_supernode_comes_back_by_itself_with_the_same_key(story: Story) -> None:
    told = story.programs["a"].text()
    killed = told.index("The SuperNode ended (killed by signal 9)")
    refused = told.index("still takes this site's last connection for alive")
    back = told.index("SuperNode ID", killed)
    assert told.index("SuperNode ID") < killed < refused < back
    assert "site-a is here" in story.programs["second"].text()


def test_a_killed_supervisor_is_followed_by_another(story: Story) -> None:
    told = story.programs["b again"].text()
    assert "processes that an earlier run had left behind" in told
    assert "site-b is here" in story.programs["third"].text()


def test_ctrl_c_ends_the_server_and_says_how_to_go_on(story: Story) -> None:
    assert story.status["second"] == 130
    assert "the same command goes on from there" in story.programs["second"].text()


def test_sites_end_on_request(story: Story) -> None:
    assert [story.status[name] for name in "abc"] == [0, 0, 0]
    assert "Stopped; the same command takes part again." in story.programs["a"].text()


def test_nobody_leaves_a_process_behind(story: Story) -> None:
    assert story.left_behind == {name: [] for name in story.left_behind}
    assert story.left_behind.keys() == {"a", "b", "c", "d", "first", "second", "third"}


def test_a_site_with_another_authority_stays_outside_and_knows_why(story: Story) -> None:
    assert story.status["d"] == 2
    (sentence,) = story.programs["d"].text().splitlines()
    assert "has a certificate of another authority" in sentence
    assert "site-d" not in story.programs["first"].text()


def test_a_site_that_is_not_admitted_stays_outside_and_knows_why(story: Story) -> None:
    told = story.programs["c"].text()
    assert "send site-c.pub to whoever runs it" in told
    assert "SuperNode ID" not in told
    for name in ("first", "second", "third"):
        assert "site-c" not in story.programs[name].text()


def test_from_the_network_only_sites_can_ask_and_only_as_sites(story: Story) -> None:
    assert story.replies == {
        "/v1/control/start-run": 404,
        "/v1/runtime/acquire-task": 404,
        "/v1/fleet/get-run": 401,
    }


def test_no_secret_is_in_a_log(story: Story) -> None:
    keys = [*story.folder.glob("*/*.key"), *story.folder.glob("*/flower/*.key")]
    assert len(keys) == 2 + 4 + 1
    lines = {line for key in keys for line in key.read_text().splitlines()[1:-1]}
    logs = [*story.folder.glob("*.log"), *story.folder.glob("*/logs/*.log")]
    assert len(logs) >= 7
    for log in logs:
        text = log.read_text(errors="replace")
        assert not any(line in text for line in lines), log
    for key in keys:
        assert key.stat().st_mode & 0o077 == 0, key
