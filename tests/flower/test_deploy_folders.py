"""Founding, joining, admitting: the commands around a federation, without its processes."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from fedsieve.cli import main
from fedsieve.deploy.folders import Invitation, ServerFolder, SiteFolder, read_invitation
from fedsieve.errors import FedsieveError


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str


Deploy = Callable[..., Answer]


@pytest.fixture
def deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Deploy:
    """`fedsieve deploy …` within this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        capfd.readouterr()
        status = main(["deploy", *words])
        return Answer(status, *capfd.readouterr())

    return call


def mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_from_nothing_to_an_admitted_site(deploy: Deploy) -> None:
    before = os.umask(0o022)
    try:
        founded = deploy("init", "server", "--address", "fl.example.org")
        joined = deploy("join", "a", "--invitation", "server/federation.toml", "--name", "site-a")
    finally:
        os.umask(before)
    assert (founded.status, joined.status) == (0, 0)
    shown = ServerFolder(Path("server")).invitation().fingerprint.split()
    for answer in (founded, joined):
        assert " ".join(shown[:8]) in answer.out
        assert " ".join(shown[8:]) in answer.out
    assert "fedsieve deploy admit server NAME.pub" in founded.out
    assert "fedsieve deploy site a --data" in joined.out

    assert mode("server") == mode("a") == 0o700
    assert mode("server/ca.key") == mode("a/site.key") == 0o600
    secrets = [Path("server/ca.key").read_text(), Path("a/site.key").read_text()]
    for text in (founded.out, joined.out, Path("server/federation.toml").read_text()):
        assert "PRIVATE" not in text
        assert not any(line in text for secret in secrets for line in secret.splitlines()[1:-1])

    admitted = deploy("admit", "server", "a/site-a.pub")
    key = SiteFolder(Path("a")).public_key()
    assert (admitted.status, key.fingerprint in admitted.out) == (0, True)
    assert deploy("admit", "server", "a/site-a.pub").status == 0  # twice does no harm
    listed = deploy("sites", "server").out
    assert "site-a" in listed
    assert key.fingerprint in listed

    assert deploy("remove", "server", "site-a").status == 0
    assert ServerFolder(Path("server")).admitted() == ()
    assert deploy("remove", "server", "site-a").err == (
        "fedsieve: No site is admitted as site-a; admitted: none.\n"
    )


def test_the_invitation_says_where_and_whom_to_believe(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "10.1.2.3:9000")
    told = tomllib.loads(Path("server/federation.toml").read_text())
    assert told["address"] == "10.1.2.3:9000"
    assert told["authority"].startswith("-----BEGIN CERTIFICATE-----")
    assert told["insecure"] is False


@pytest.mark.parametrize("address", ["fl.example.org", "10.0.0.7", "0.0.0.0", "[2001:db8::1]:80"])
def test_no_encryption_only_on_this_machine(deploy: Deploy, address: str) -> None:
    refused = deploy("init", "server", "--address", address, "--insecure", "true")
    assert refused.status == 2
    assert "leave --insecure out" in refused.err
    assert not Path("server").exists()


def test_a_site_refuses_an_invitation_without_encryption_from_elsewhere(deploy: Deploy) -> None:
    Path("federation.toml").write_text('address = "fl.example.org:8000"\ninsecure = true\n')
    refused = deploy("join", "a", "--invitation", "federation.toml", "--name", "site-a")
    assert refused.status == 2
    assert "may only be on this machine" in refused.err
    assert not Path("a").exists()


def test_on_this_machine_it_may_be_left_out(deploy: Deploy) -> None:
    founded = deploy("init", "server", "--address", "127.0.0.1", "--insecure", "true")
    joined = deploy("join", "a", "--invitation", "server/federation.toml", "--name", "site-a")
    assert (founded.status, joined.status) == (0, 0)
    assert not Path("server/ca.key").exists()
    assert "ingerprint" not in founded.out + joined.out
    assert "founded without keys" in deploy("admit", "server", "a/site-a.pub").err


def test_what_is_there_is_never_overwritten(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "fl.example.org")
    deploy("join", "a", "--invitation", "server/federation.toml", "--name", "site-a")
    files = [Path("server/ca.key"), Path("server/federation.toml"), Path("a/site.key")]
    before = [path.read_bytes() for path in files]
    assert "already is a federation's" in deploy("init", "server", "--address", "x").err
    again = deploy("join", "a", "--invitation", "server/federation.toml", "--name", "site-a")
    assert "already is a site's" in again.err
    assert [path.read_bytes() for path in files] == before


def test_a_name_and_a_key_belong_to_one_site(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "fl.example.org")
    for folder in ("a", "b"):
        deploy("join", folder, "--invitation", "server/federation.toml", "--name", "site-a")
    assert deploy("admit", "server", "a/site-a.pub").status == 0
    assert "Another key is admitted as site-a" in deploy("admit", "server", "b/site-a.pub").err
    line = Path("a/site-a.pub").read_text()
    Path("other.pub").write_text(line.replace("site-a", "site-b"))
    assert "already admitted, as site-a" in deploy("admit", "server", "other.pub").err
    assert "is a private key" in deploy("admit", "server", "a/site.key").err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["init", "server"], "Please set address."),
        (["init", "--address", "x"], "Please set folder."),
        (["init", "server", "--address", "https://x"], "is not an address"),
        (["join", "a", "--invitation", "missing", "--name", "a"], "There is no missing;"),
        (["join", "a", "--invitation", "broken", "--name", "a"], "broken is damaged"),
        (["join", "a", "--invitation", "empty", "--name", "a"], "Please set address."),
        (["join", "a", "--invitation", "bare", "--name", "a"], "holds no certificate"),
        (["admit", "nowhere", "key"], "There is no key key;"),
        (["sites", "nowhere"], "There is no nowhere/federation.toml"),
        (["remove", "nowhere", "../x"], "cannot be the name of a site"),
        (["server"], "Give the server's folder first"),
        (["site", "nowhere"], "--data FOLDER"),
        (["site", "nowhere", "--data", "missing"], "There is no missing;"),
        (["site", "nowhere", "--client", "0"], "There is no nowhere/site.toml"),
        (["fly"], "There is no action 'fly'"),
    ],
)
def test_mistakes_are_told_in_one_sentence(deploy: Deploy, words: list[str], sentence: str) -> None:
    Path("broken").write_text("address = ")
    Path("empty").write_text("")
    Path("bare").write_text('address = "fl.example.org"\n')
    answer = deploy(*words)
    assert answer.status == 2
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
    assert not Path("a").exists()


def test_a_server_needs_one_run_and_someone_to_come(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "127.0.0.1")
    Path("one.toml").write_text("rounds = 1\n")
    assert "No site is admitted yet" in deploy("server", "server", "one.toml").err
    Path("grid.toml").write_text("rounds = 1\n[sweep]\nseed = [1, 2]\n")
    assert "a grid of 2 runs" in deploy("server", "server", "grid.toml").err


def test_another_run_is_refused_before_anybody_is_waited_for(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(*_: object) -> None:
        raise AssertionError("sites would be waited for")

    monkeypatch.setattr("fedsieve.deploy.server.serve", serve)
    deploy("init", "server", "--address", "127.0.0.1")
    Path("server/run").mkdir()
    Path("server/run/config.toml").write_text("rounds = 1\n")
    Path("two.toml").write_text('name = "run"\nrounds = 2\n')
    answer = deploy("server", "server", "two.toml", "--sites", "1")
    assert answer.status == 2
    assert "server/run already holds a run with rounds = 1 (not 2); give another" in answer.err
    assert answer.err.count("\n") == 1


def test_help_names_every_action(deploy: Deploy) -> None:
    shown = deploy()
    assert shown == deploy("--help")
    for action in ("init", "join", "admit", "remove", "sites", "server", "site"):
        assert f"  {action} " in shown.out
        told = deploy(action, "--help")
        assert (told.status, f"fedsieve deploy {action}" in told.out) == (0, True)


def test_without_flower_it_says_what_to_install(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'fedsieve[flower]'" in deploy("init", "x", "--address", "y").err


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    folder = ServerFolder(tmp_path)
    with folder.lock(), pytest.raises(FedsieveError, match="Another `fedsieve deploy`"):  # noqa: SIM117
        with ServerFolder(tmp_path).lock():
            pass
    with folder.lock():
        pass


def test_keys_that_others_can_read_are_refused(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "fl.example.org")
    deploy("join", "a", "--invitation", "server/federation.toml", "--name", "site-a")
    Path("server/ca.key").chmod(0o644)
    Path("a/site.key").chmod(0o644)
    with pytest.raises(FedsieveError, match="chmod 600"):
        ServerFolder(Path("server")).authority()
    assert "chmod 600 a/site.key" in deploy("site", "a", "--client", "0").err


def test_an_invitation_is_read_as_it_was_written(deploy: Deploy) -> None:
    deploy("init", "server", "--address", "fl.example.org")
    read = read_invitation(Path("server/federation.toml"))
    assert read == ServerFolder(Path("server")).invitation()
    assert Invitation(address="::1", insecure=True).fingerprint == ""
