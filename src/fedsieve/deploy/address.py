"""Where a server is: HOST:PORT."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias

from fedsieve.errors import FedsieveError, check

DEFAULT_PORT = 8000

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")


@dataclass(frozen=True)
class Address:
    """A host by name or number, and a port."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def ip(self) -> IpAddress | None:
        """The host as a number; None where it is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine can reach it."""
        return self.ip.is_loopback if self.ip is not None else self.host == "localhost"

    @property
    def listen_host(self) -> str:
        """Where a server of this address listens: on all networks, or on this machine only."""
        ip = self.ip
        if self.is_loopback:
            return self.host if ip is not None else "127.0.0.1"
        return "::" if ip is not None and ip.version == 6 else "0.0.0.0"


def parse_address(text: str) -> Address:
    """The address that a person wrote: HOST, HOST:PORT, or [IPV6]:PORT."""
    match = re.fullmatch(r"\[([^\]]*)\](?::(\d+))?|([^:\[\]]*)(?::(\d+))?", text.strip())
    try:
        host, digits = str(ipaddress.ip_address(text.strip())), None
    except ValueError:
        if match is None:
            raise _wrong(text) from None
        host, digits = match[1] or match[3] or "", match[2] or match[4]
    address = Address(host, DEFAULT_PORT if digits is None else int(digits))
    check(1 <= address.port <= 65535, f"The port in {text!r} must lie between 1 and 65535.")
    if address.ip is None and _HOST_NAME.fullmatch(host) is None:
        raise _wrong(text)
    return address


def _wrong(text: str) -> FedsieveError:
    return FedsieveError(
        f"{text!r} is not an address; write HOST or HOST:PORT, such as fl.example.org:8000, "
        "without http://."
    )
