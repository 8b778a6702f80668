"""Ask a server whether a site may come in; if not, say why in one sentence.

Flower's own answer to a wrong key, a wrong authority or a slow clock is a page of log. So a site
asks the gate before it starts anything.
"""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedsieve import __version__
from fedsieve.deploy.folders import SiteConfig
from fedsieve.deploy.keys import PublicKey
from fedsieve.errors import FedsieveError

KNOCK = "/fedsieve/knock"
"""Path at the gate."""
TIMEOUT = 10.0
FAST, SLOW = 5.0, 300.0
"""Seconds that Flower lets a site's clock be before and behind the server's."""

_NOT_VALID_NOW, _WRONG_HOST = (9, 10), (62, 64)
"""OpenSSL's numbers for what can be wrong with a certificate, besides who signed it."""


@dataclass(frozen=True)
class Answer:
    """What a server says to a site at its door."""

    welcome: bool
    sentence: str = ""
    """Why not, where it is worth asking again."""


def knock(config: SiteConfig, key: PublicKey, clock: Callable[[], float]) -> Answer:
    """The server's answer; a `FedsieveError` where asking again cannot help."""
    scheme = "http" if config.insecure else "https"
    asked = urllib.parse.urlencode({"key": key.fingerprint})
    # `urllib` goes through the proxy that the environment names, as a SuperNode does.
    opener = urllib.request.build_opener(
        *([] if config.insecure else [urllib.request.HTTPSHandler(context=_trust(config))])
    )
    try:
        with opener.open(f"{scheme}://{config.server}{KNOCK}?{asked}", timeout=TIMEOUT) as reply:
            record = json.loads(reply.read(65536))
    except urllib.error.HTTPError as error:
        if error.code in (502, 503, 504):
            return Answer(False, f"The server at {config.server} is starting; this site waits.")
        raise _stranger(config) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            raise _not_trusted(config, error.reason) from None
        return Answer(False, _away(config, _reason(error.reason)))
    except ssl.SSLError as error:
        raise _not_trusted(config, error) from None
    except OSError as error:
        return Answer(False, _away(config, _reason(error)))
    except ValueError:
        raise _stranger(config) from None
    if not isinstance(record, dict) or not record.keys() >= {"admitted", "fedsieve", "time"}:
        raise _stranger(config)
    return _judge(record, config, key, clock())


def _judge(record: Mapping[str, Any], config: SiteConfig, key: PublicKey, now: float) -> Answer:
    if record["fedsieve"] != __version__:
        raise FedsieveError(
            f"The server runs fedsieve {record['fedsieve']} and this site {__version__}; install "
            "the same version on both."
        )
    if not record["admitted"]:
        return Answer(
            False,
            f"The server does not know this site's key yet; send {config.name}.pub to whoever runs "
            f"it, who admits it with `fedsieve deploy admit` (fingerprint {key.fingerprint}).",
        )
    ahead = now - float(record["time"])
    if not config.insecure and not -SLOW < ahead < FAST:
        return Answer(
            False,
            f"This machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
            "the server's, and signatures carry the time; set both clocks, best with NTP.",
        )
    return Answer(True)


def _trust(config: SiteConfig) -> ssl.SSLContext:
    """Believe this federation's authority and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=config.authority)
    return context


def _not_trusted(config: SiteConfig, error: ssl.SSLError) -> FedsieveError:
    code = error.verify_code if isinstance(error, ssl.SSLCertVerificationError) else None
    if code is None:
        return FedsieveError(
            f"What answers at {config.server} does not speak TLS as a fedsieve server does; check "
            "the address and what stands between."
        )
    if code in _WRONG_HOST:
        return FedsieveError(
            f"The server's certificate is not for {config.server.host}; use the address that the "
            "invitation names, or ask for a new invitation."
        )
    if code in _NOT_VALID_NOW:
        return FedsieveError(
            "The server's certificate is not valid at this machine's time; set the clock, or "
            "restart the server, which then makes a new certificate."
        )
    return FedsieveError(
        f"The server at {config.server} has a certificate of another authority than this site's "
        "invitation, so it may be someone else; ask whoever runs it for the invitation of today "
        "and compare the fingerprints."
    )


def _stranger(config: SiteConfig) -> FedsieveError:
    return FedsieveError(
        f"What answers at {config.server} is not a fedsieve server; check the address in the "
        "invitation."
    )


def _away(config: SiteConfig, reason: str) -> str:
    return (
        f"The server at {config.server} does not answer ({reason}); this site keeps trying. "
        "Check the network and that the server runs."
    )


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no reply in time"
    if isinstance(error, socket.gaierror):
        return "no such name"
    return str(getattr(error, "strerror", None) or error)
