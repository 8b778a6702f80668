"""The one door of a server to the network.

It passes on what sites send to the SuperLink's Fleet interface, and only with the key of an
admitted site; the SuperLink itself checks that the sender owns the key. Nothing else of the
SuperLink can be reached: neither the interface that starts programs nor the one that hands out
their tasks. A second path, `/fedsieve/knock`, tells a site whether it may come in.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs

import httpx
import uvicorn

from fedsieve import __version__
from fedsieve.deploy.address import Address
from fedsieve.deploy.keys import PublicKey
from fedsieve.deploy.knock import KNOCK
from fedsieve.errors import FedsieveError

FLEET = re.compile(r"/v1/fleet/[a-z-]+")
"""What sites may ask of the SuperLink. Without dots, so no `..` leads elsewhere."""
KEY_HEADER = "flwr-public-key"
"""Where Flower puts the base64 of a site's public key (PEM)."""

_OF_ONE_HOP = ("host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade")
"""Headers that mean the connection, not the message; what names a proxy goes the same way."""

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


@dataclass
class GuestList:
    """Who may come in, and when each was last heard of."""

    everybody: bool = False
    """Whether keys do not matter (without encryption, on one machine)."""
    is_complete: bool = False
    """Whether the server is up and knows its sites; before that the gate asks for patience."""
    seen: dict[str, float] = field(default_factory=dict)
    """Name of a site → time of its last request."""
    _by_header: Mapping[str, str] = field(default_factory=dict)
    _fingerprints: frozenset[str] = frozenset()

    def admit(self, keys: tuple[PublicKey, ...]) -> None:
        """Let in exactly the sites with these keys."""
        self._by_header = {base64.b64encode(key.pem).decode(): key.name for key in keys}
        self._fingerprints = frozenset(key.fingerprint for key in keys)
        self.is_complete = True

    def welcomes(self, fingerprint: str) -> bool:
        return self.everybody or fingerprint in self._fingerprints

    def lets_in(self, header: str, now: float) -> bool:
        """Whether a request with this key may pass; notes that its site is there."""
        name = self._by_header.get(header)
        if name is not None:
            self.seen[name] = now
        return self.everybody or name is not None


class Gate:
    """An ASGI application that stands between the network and a SuperLink."""

    def __init__(self, superlink: httpx.AsyncClient, guests: GuestList) -> None:
        self._superlink = superlink
        self._guests = guests

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        if not self._guests.is_complete:
            await _answer(send, 503, {"error": "The server is starting."})
        elif path == KNOCK:
            asked = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])
            await _answer(send, 200, self._knocked(asked[0]))
        elif scope["method"] != "POST" or FLEET.fullmatch(path) is None:
            await _answer(send, 404, {"error": "There is nothing here."})
        elif not self._guests.lets_in(headers.get(KEY_HEADER, ""), time.time()):
            await _answer(send, 401, {"error": "This key is not admitted."})
        else:
            await self._pass_on(path, headers, receive, send)

    def _knocked(self, fingerprint: str) -> dict[str, Any]:
        return {
            "admitted": self._guests.welcomes(fingerprint),
            "fedsieve": __version__,
            "flwr": version("flwr"),
            "time": time.time(),
        }

    async def _pass_on(
        self, path: str, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> None:
        request = self._superlink.build_request(
            "POST", path, headers=dict(_passed_on(headers)), content=_body(receive)
        )
        try:
            response = await self._superlink.send(request, stream=True)
        except httpx.TransportError:
            # A SuperNode takes this for a reason to try again.
            await _answer(send, 503, {"error": "The SuperLink does not answer."})
            return
        try:
            kept = [
                (name.encode("latin-1"), text.encode("latin-1"))
                for name, text in _passed_on(response.headers)
            ]
            await send(
                {"type": "http.response.start", "status": response.status_code, "headers": kept}
            )
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


@contextlib.contextmanager
def open_gate(
    listen: Address,
    superlink: Address,
    guests: GuestList,
    *,
    certificate: Path | None,
    key: Path | None,
    authority: str,
) -> Iterator[None]:
    """A gate on `listen` in a thread of this process, until the block ends.

    `certificate` and `key` are the server's; without them neither side is encrypted.
    """
    scheme = "http" if certificate is None else "https"
    trust = ssl.create_default_context(cadata=authority) if authority else False
    # No proxy and no limit of time: a SuperLink may well ponder over a large model.
    client = httpx.AsyncClient(
        base_url=f"{scheme}://{superlink}", verify=trust, trust_env=False, timeout=None
    )
    config = uvicorn.Config(
        Gate(client, guests),
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    with _listening(listen) as door:
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [door]}, name="gate", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            # Sites that hold their connections are cut off, which uvicorn would call an error.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    is_v6 = ":" in address.host
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((address.host, address.port))
        except OSError as error:
            raise FedsieveError(
                f"Nothing can listen on {address} here ({error.strerror}); stop what uses the "
                "port, or found the federation with another one."
            ) from None
        yield door


def _passed_on(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in headers.items():
        if name not in _OF_ONE_HOP and not name.startswith("proxy-"):
            yield name, text


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _answer(send: Send, status: int, record: Mapping[str, Any]) -> None:
    body = json.dumps(record).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
