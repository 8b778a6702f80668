"""The gate between network and SuperLink, and what a site learns at its door."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import http.server
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from cryptography.hazmat.primitives import serialization

from fedsieve import __version__
from fedsieve.deploy import knock as knock_module
from fedsieve.deploy.address import Address
from fedsieve.deploy.certificates import Authority, make_authority, make_server_certificate
from fedsieve.deploy.folders import SiteConfig
from fedsieve.deploy.gate import KEY_HEADER, GuestList, open_gate
from fedsieve.deploy.keys import make_key, write_private
from fedsieve.deploy.knock import KNOCK, knock
from fedsieve.errors import FedsieveError
from fedsieve.ports import free_port

HERE = Address("127.0.0.1")
NOW = datetime.datetime.now(datetime.UTC)
_, KEY = make_key("site-a")
_, STRANGER = make_key("site-x")


def pem_of(authority: Authority) -> str:
    return authority.certificate.public_bytes(serialization.Encoding.PEM).decode()


@dataclass
class SuperLink:
    """Something that answers where the SuperLink would, and remembers what it was asked."""

    port: int
    asked: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def superlink() -> Iterator[SuperLink]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            headers = {name.lower(): text for name, text in self.headers.items()}
            link.asked.append((self.path, self.rfile.read(length), headers))
            body = b"answer" * 100_000
            self.send_response(209)
            self.send_header("content-length", str(len(body)))
            self.send_header("flwr-told", "so")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        link = SuperLink(server.server_address[1])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield link
        server.shutdown()


@dataclass
class Door:
    port: int
    guests: GuestList
    link: SuperLink

    def ask(
        self,
        path: str,
        *,
        method: str = "POST",
        body: bytes = b"",
        header: str | None = base64.b64encode(KEY.pem).decode(),
    ) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"flwr-signature": "s", "connection": "keep-alive"}
        if header is not None:
            headers[KEY_HEADER] = header
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read(), dict(reply.getheaders())


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with superlink() as link:
        guests = GuestList()
        address = Address("127.0.0.1", free_port())
        inner = Address("127.0.0.1", link.port)
        with open_gate(address, inner, guests, certificate=None, key=None, authority=""):
            _wait_for(address.port)
            yield Door(address.port, guests, link)


@pytest.fixture(autouse=True)
def _admit_one(request: pytest.FixtureRequest) -> None:
    if "door" in request.fixturenames:
        door: Door = request.getfixturevalue("door")
        door.guests.admit((KEY,))
        door.guests.everybody = False
        door.link.asked.clear()


def _wait_for(port: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise AssertionError("nothing listens")


class TestGate:
    def test_what_a_site_sends_arrives_whole(self, door: Door) -> None:
        body = bytes(range(256)) * 40_000
        status, answer, headers = door.ask("/v1/fleet/push-object", body=body)
        assert (status, answer) == (209, b"answer" * 100_000)
        assert headers["flwr-told"] == "so"
        ((path, received, sent),) = door.link.asked
        assert (path, received) == ("/v1/fleet/push-object", body)
        assert sent["flwr-signature"] == "s"
        assert sent["host"] == f"127.0.0.1:{door.link.port}"
        assert door.guests.seen["site-a"] == pytest.approx(time.time(), abs=60)

    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/docs",
            "/health",
            "/openapi.json",
            "/v1/control/start-run",
            "/v1/control/register-node",
            "/v1/runtime/acquire-task",
            "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run",
            "/v1/fleet/..%2fcontrol/start-run",
            "/v1/fleet/x/../../control/start-run",
            "//v1/fleet/get-run",
            "/v1/fleet/",
            "/v1/fleet",
            "/V1/fleet/get-run",
            "/v1/fleet/get-run/x",
        ],
    )
    def test_nothing_else_of_the_superlink_can_be_reached(self, door: Door, path: str) -> None:
        status, _, _ = door.ask(path)
        assert (status, door.link.asked) == (404, [])

    def test_other_methods_lead_nowhere(self, door: Door) -> None:
        status, _, _ = door.ask("/v1/fleet/get-run", method="GET")
        assert (status, door.link.asked) == (404, [])

    @pytest.mark.parametrize("header", [None, "", "x", base64.b64encode(STRANGER.pem).decode()])
    def test_a_stranger_stays_outside(self, door: Door, header: str | None) -> None:
        status, _, _ = door.ask("/v1/fleet/get-run", body=b"x", header=header)
        assert (status, door.link.asked) == (401, [])

    def test_who_is_removed_stays_outside_at_once(self, door: Door) -> None:
        assert door.ask("/v1/fleet/get-run")[0] == 209
        door.guests.admit(())
        assert door.ask("/v1/fleet/get-run")[0] == 401

    def test_without_keys_everybody_may_come(self, door: Door) -> None:
        door.guests.everybody = True
        assert door.ask("/v1/fleet/get-run", header="anything")[0] == 209

    def test_while_the_server_starts_all_are_asked_to_wait(self, door: Door) -> None:
        door.guests.is_complete = False
        assert door.ask("/v1/fleet/get-run")[0] == 503
        assert door.ask(KNOCK, method="GET")[0] == 503
        assert door.link.asked == []

    def test_a_superlink_that_is_gone_is_a_reason_to_try_again(self) -> None:
        guests = GuestList()
        guests.admit((KEY,))
        address, nobody = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
        with open_gate(address, nobody, guests, certificate=None, key=None, authority=""):
            _wait_for(address.port)
            door = Door(address.port, guests, SuperLink(nobody.port))
            assert door.ask("/v1/fleet/get-run", body=b"x")[0] == 503

    def test_sites_that_are_cut_off_at_the_end_are_no_error(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        guests = GuestList()
        guests.admit(())
        guests.everybody = True
        address = Address("127.0.0.1", free_port())
        with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as site:
            inner = Address("127.0.0.1", silent.getsockname()[1])
            with open_gate(address, inner, guests, certificate=None, key=None, authority=""):
                _wait_for(address.port)
                line = site.enter_context(socket.create_connection(("127.0.0.1", address.port)))
                line.sendall(
                    b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
                )
                passed_on, _ = silent.accept()
                site.enter_context(passed_on)
        assert "ERROR" not in capfd.readouterr().err

    def test_a_port_in_use_is_said(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = Address("127.0.0.1", taken.getsockname()[1])
            gate = open_gate(address, HERE, GuestList(), certificate=None, key=None, authority="")
            with pytest.raises(FedsieveError, match="Nothing can listen on"), gate:
                pass


@contextlib.contextmanager
def secure_gate(
    folder: Path, authority: Authority, at: datetime.datetime, names: list[Address]
) -> Iterator[int]:
    """A gate with a certificate made at `at` for `names`, that admits KEY."""
    pem, private = make_server_certificate(authority, names, at)
    (folder / "crt").write_bytes(pem)
    write_private(folder / "key", private)
    guests = GuestList()
    guests.admit((KEY,))
    address = Address("127.0.0.1", free_port())
    with open_gate(
        address,
        HERE,
        guests,
        certificate=folder / "crt",
        key=folder / "key",
        authority=pem_of(authority),
    ):
        _wait_for(address.port)
        yield address.port


AUTHORITY = make_authority(HERE, NOW)


def config_for(port: int, authority: Authority = AUTHORITY) -> SiteConfig:
    return SiteConfig(address=f"127.0.0.1:{port}", authority=pem_of(authority), name="site-a")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with secure_gate(tmp_path_factory.mktemp("gate"), AUTHORITY, NOW, [HERE]) as port:
        yield port


class TestKnock:
    def test_an_admitted_site_is_welcome(self, port: int) -> None:
        assert knock(config_for(port), KEY, time.time).welcome

    def test_only_modern_encryption_is_spoken(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=pem_of(AUTHORITY))
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
        ):
            assert line.version() == "TLSv1.3"

    def test_an_unknown_key_is_told_what_to_send_to_whom(self, port: int) -> None:
        answer = knock(config_for(port), STRANGER, time.time)
        assert not answer.welcome
        assert "send site-a.pub" in answer.sentence
        assert STRANGER.fingerprint in answer.sentence

    def test_another_authority_is_not_believed(self, port: int) -> None:
        with pytest.raises(FedsieveError, match="a certificate of another authority"):
            knock(config_for(port, make_authority(HERE, NOW)), KEY, time.time)

    def test_another_name_is_not_believed(self, tmp_path: Path) -> None:
        names = [Address("fl.example.org")]
        with (
            secure_gate(tmp_path, AUTHORITY, NOW, names) as port,
            pytest.raises(FedsieveError, match=r"certificate is not for 127\.0\.0\.1"),
        ):
            knock(config_for(port), KEY, time.time)

    @pytest.mark.parametrize("days", [-400, 2])
    def test_a_certificate_of_another_time_is_not_believed(self, tmp_path: Path, days: int) -> None:
        at = NOW + datetime.timedelta(days=days)
        authority = make_authority(HERE, NOW - datetime.timedelta(days=500))
        with (
            secure_gate(tmp_path, authority, at, [HERE]) as port,
            pytest.raises(FedsieveError, match="not valid at this machine's time"),
        ):
            knock(config_for(port, authority), KEY, time.time)

    @pytest.mark.parametrize(
        ("ahead", "sentence"),
        [(7, "s ahead of"), (-400, "s behind"), (0, ""), (-290, "")],
    )
    def test_a_wrong_clock_is_said(self, port: int, ahead: int, sentence: str) -> None:
        answer = knock(config_for(port), KEY, lambda: time.time() + ahead)
        assert answer.welcome == (sentence == "")
        assert sentence in answer.sentence

    def test_other_versions_do_not_mix(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(knock_module, "__version__", "0.0.0")
        with pytest.raises(FedsieveError, match=f"fedsieve {__version__} and this site 0.0.0"):
            knock(config_for(port), KEY, time.time)

    def test_nobody_there(self) -> None:
        answer = knock(config_for(free_port()), KEY, time.time)
        assert not answer.welcome
        assert "does not answer (Connection refused)" in answer.sentence

    def test_a_name_that_does_not_exist(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        config = replace(config_for(1), address="nowhere.invalid:1")
        assert "(no such name)" in knock(config, KEY, time.time).sentence

    def test_a_server_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(knock_module, "TIMEOUT", 0.2)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            answer = knock(config_for(silent.getsockname()[1]), KEY, time.time)
            assert "(no reply in time)" in answer.sentence
            insecure = SiteConfig(
                address=f"127.0.0.1:{silent.getsockname()[1]}", insecure=True, name="site-a"
            )
            assert "(no reply in time)" in knock(insecure, KEY, time.time).sentence

    def test_a_server_without_encryption(self) -> None:
        with (
            superlink() as link,
            pytest.raises(FedsieveError, match="does not speak TLS as a fedsieve server does"),
        ):
            knock(config_for(link.port), KEY, time.time)

    @pytest.mark.parametrize(
        ("status", "body", "sentence"),
        [
            (404, b"", "is not a fedsieve server"),
            (200, b"<html>", "is not a fedsieve server"),
            (200, b"[]", "is not a fedsieve server"),
            (200, json.dumps({"admitted": True}).encode(), "is not a fedsieve server"),
        ],
    )
    def test_something_else_answers(self, status: int, body: bytes, sentence: str) -> None:
        with answering(status, body) as port, pytest.raises(FedsieveError, match=sentence):
            knock(insecure_config(port), KEY, time.time)

    def test_a_server_that_is_starting(self) -> None:
        with answering(503, b"") as port:
            assert (
                "is starting; this site waits"
                in knock(insecure_config(port), KEY, time.time).sentence
            )


def insecure_config(port: int) -> SiteConfig:
    return SiteConfig(address=f"127.0.0.1:{port}", insecure=True, name="site-a")


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[int]:
    """Something that gives everybody one answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
