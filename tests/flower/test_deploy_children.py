"""Processes, their logs and their end, with small programs in place of Flower's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from deploy_programs import Scripts, programs_in

from fedsieve.deploy import children, server
from fedsieve.deploy.children import (
    MARK,
    Child,
    belonging_to,
    call,
    end_all,
    environment,
    program,
    stopping_on_signals,
)
from fedsieve.deploy.folders import Folder, ServerFolder
from fedsieve.deploy.gate import GuestList
from fedsieve.deploy.keys import make_key
from fedsieve.deploy.server import Registry, flwr
from fedsieve.errors import FedsieveError

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = ServerFolder(tmp_path / "place")
    folder.flower.mkdir(parents=True)
    yield folder
    end_all(folder, grace=1)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    return programs_in(tmp_path / "bin", monkeypatch)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_flower_is_told_to_keep_to_itself(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("NO_PROXY", "inside.example.org")
    seen = environment(folder)
    assert seen["FLWR_TELEMETRY_ENABLED"] == "0"
    assert seen["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert seen["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert seen["FLWR_HOME"] == str(folder.flower)
    assert seen["NO_PROXY"] == "inside.example.org,127.0.0.1,localhost"
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    assert environment(folder)["no_proxy"] == "127.0.0.1,localhost"


def test_output_goes_to_a_log_and_can_be_followed(folder: Folder, scripts: Scripts) -> None:
    scripts("talk", "print('\\x1b[92mINFO\\x1b[0m one', flush=True)\nprint('two')\nsys.exit(3)")
    for _ in range(2):  # a second one writes behind the first
        child = Child(folder, "talk", ["talk"])
        wait_for(lambda child=child: child.poll() is not None)  # type: ignore[misc]
        assert child.poll() == 3
        assert child.news() == ["INFO one", "two"]
        assert child.news() == []
        assert child.output() == "INFO one\ntwo\n"
        child.stop()
    assert child.log.read_text().count("two") == 2


def test_a_large_log_is_put_aside_while_it_is_written(
    folder: Folder, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LARGE_LOG", 10)
    scripts(
        "talk",
        "print('much ' * 5, flush=True)\nsys.stdin = open('go')\nprint('more', flush=True)",
    )
    go = folder.path / "go"
    os.mkfifo(go)
    monkeypatch.chdir(folder.path)
    child = Child(folder, "talk", ["talk"])
    wait_for(lambda: child.log.stat().st_size > 10)
    assert child.news() == ["much " * 5]
    go.write_text("")
    wait_for(lambda: child.poll() is not None)
    assert child.news() == ["more"]
    assert child.log.read_text() == child.output() == "more\n"
    assert child.log.with_suffix(".old.log").read_text() == "much " * 5 + "\n"


def test_one_that_does_not_end_is_ended(
    folder: Folder, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "GRACE", 0.3)
    scripts(
        "stubborn",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)",
    )
    child = Child(folder, "stubborn", ["stubborn"])
    wait_for(lambda: child.output() == "up\n")
    child.stop()
    assert child.poll() == -signal.SIGKILL


@needs_proc
def test_nobody_stays_behind_not_even_one_in_another_session(
    folder: Folder, scripts: Scripts
) -> None:
    scripts("deep", "print('deep', flush=True)\ntime.sleep(60)")
    scripts(
        "parent",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([os.path.join(os.path.dirname(__file__), 'deep')],"
        " start_new_session=True)\ntime.sleep(60)",
    )
    child = Child(folder, "parent", ["parent"])
    wait_for(lambda: child.output() == "deep\n")
    assert len(belonging_to(folder)) == 2
    assert belonging_to(Folder(folder.path / "other")) == []
    # It is our child, so it stays a zombie until it is asked for; a zombie holds nothing.
    assert end_all(folder, grace=0.5) == 2
    assert belonging_to(folder) == []
    assert child.poll() == -signal.SIGKILL
    assert end_all(folder) == 0


def test_a_missing_program_is_said(folder: Folder, scripts: Scripts) -> None:
    with pytest.raises(FedsieveError, match="flower-superlink is missing"):
        program("flower-superlink")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_taken_for_ctrl_c(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopping_on_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for impatient in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(impatient)  # cleaning up is not cut short
    assert signal.getsignal(number) is before


class TestFlwr:
    """Commands of Flower's, played by a program that answers as it is told."""

    def test_its_answer_is_a_record(self, folder: ServerFolder, scripts: Scripts) -> None:
        scripts("flwr", "print('Loading …')\nprint('{\"success\": true, \"words\": 7}')")
        assert flwr(folder, ["list"], "hint") == {"success": True, "words": 7}
        done = call(folder, ["flwr", "x"])
        assert (done.returncode, done.stdout[:7]) == (0, "Loading")

    @pytest.mark.parametrize(
        ("code", "reason"),
        [
            (
                """print('{"success": false, "error-message": "it is so."}'); sys.exit(1)""",
                "it is so",
            ),
            ("""print('{"success": false}'); print("why", file=sys.stderr)""", "why"),
            ("print('nonsense'); sys.exit(1)", "nonsense"),
            ("""print('{"success": true}'); print("late", file=sys.stderr); sys.exit(1)""", "late"),
        ],
    )
    def test_its_failure_is_one_sentence(
        self, folder: ServerFolder, scripts: Scripts, code: str, reason: str
    ) -> None:
        scripts("flwr", code)
        with pytest.raises(FedsieveError) as told:
            flwr(folder, ["supernode", "register", "x"], "do that")
        assert str(told.value) == f"`flwr supernode register` failed ({reason}); do that."


class TestRegistry:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The sites that Flower was asked to register, each of which it takes once."""
        asked: list[str] = []

        def answer(folder: ServerFolder, words: list[str], hint: str) -> dict[str, Any]:
            assert words[:2] == ["supernode", "register"]
            asked.append(Path(words[2]).stem)
            if asked.count(asked[-1]) > 1:
                raise FedsieveError(f"[code: 23] Public key already in use; {hint}.")
            if asked[-1] == "bad":
                raise FedsieveError("no")
            return {"success": True}

        monkeypatch.setattr(server, "flwr", answer)
        return asked

    @pytest.fixture
    def place(self, tmp_path: Path) -> ServerFolder:
        import datetime

        from fedsieve.deploy.address import Address

        place = ServerFolder.create(
            tmp_path / "s",
            Address("127.0.0.1"),
            insecure=False,
            now=datetime.datetime.now(datetime.UTC),
        )
        place.flower.mkdir()
        (place.flower / "superlink.db").touch()
        return place

    def test_superlink_and_gate_follow_the_admitted_keys(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        keys = {name: make_key(name)[1] for name in ("a", "b", "c")}
        for name in ("a", "b"):
            place.admit(keys[name])
        guests, registry = GuestList(), Registry(place)
        assert registry.update(guests) == ["a", "b"]
        assert registry.update(guests) == []
        assert guests.welcomes(keys["a"].fingerprint)
        assert not guests.welcomes(keys["c"].fingerprint)

        place.remove("a")
        place.admit(keys["c"])
        assert registry.update(guests) == ["c"]
        assert not guests.welcomes(keys["a"].fingerprint)
        assert guests.welcomes(keys["c"].fingerprint)

        place.admit(keys["a"])
        assert registry.update(guests) == []
        assert guests.welcomes(keys["a"].fingerprint)
        assert asked == ["a", "b", "c"]

    def test_who_is_removed_need_not_wait_for_who_cannot_be_registered(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        key = make_key("a")[1]
        place.admit(key)
        guests, registry = GuestList(), Registry(place)
        registry.update(guests)
        place.remove("a")
        place.admit(make_key("bad")[1])
        with pytest.raises(FedsieveError, match="no"):
            registry.update(guests)
        assert not guests.welcomes(key.fingerprint)

    def test_a_damaged_key_keeps_nobody_in_and_nobody_else_out(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        keys = {name: make_key(name)[1] for name in "abc"}
        for key in keys.values():
            place.admit(key)
        guests, registry = GuestList(), Registry(place)
        registry.update(guests)
        place.key_file("c").write_bytes(b"half of a k")
        place.remove("a")
        with pytest.raises(FedsieveError, match=r"c\.pub is not a site's public key"):
            registry.update(guests)
        assert {n: guests.welcomes(key.fingerprint) for n, key in keys.items()} == {
            "a": False,
            "b": True,
            "c": False,
        }
        with pytest.raises(FedsieveError, match="No site is admitted as a; admitted: b, c"):
            place.remove("a")

    def test_what_the_superlink_knows_is_remembered(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        place.admit(make_key("a")[1])
        Registry(place).update(GuestList())
        guests = GuestList()
        assert Registry(place).update(guests) == []
        assert guests.is_complete
        assert asked == ["a"]

    def test_a_key_that_the_superlink_knows_already_is_no_error(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        place.admit(make_key("a")[1])
        Registry(place).update(GuestList())
        (place.flower / "registered.json").unlink()
        assert Registry(place).update(GuestList()) == ["a"]
        assert Registry(place).update(GuestList()) == []

    def test_another_key_of_the_same_name_takes_its_place(
        self, place: ServerFolder, asked: list[str]
    ) -> None:
        old, new = make_key("a")[1], make_key("a")[1]
        place.admit(old)
        guests, registry = GuestList(), Registry(place)
        registry.update(guests)
        place.remove("a")
        place.admit(new)
        assert registry.update(guests) == ["a"]
        assert (guests.welcomes(old.fingerprint), guests.welcomes(new.fingerprint)) == (False, True)


def test_no_secret_on_a_command_line_or_in_the_environment(folder: Folder) -> None:
    names = environment(folder).keys() - os.environ.keys()
    assert names <= {
        MARK,
        "FLWR_HOME",
        "FLWR_TELEMETRY_ENABLED",
        "FLWR_DISABLE_UPDATE_CHECK",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION",
        "NO_PROXY",
        "no_proxy",
        "PATH",
        "PYTHONUNBUFFERED",
    }
