"""A site's key: made at the site, never sent. Only its public half goes to the server."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically

NAME_RULE = "1 to 64 letters, digits, dots, dashes or underscores, beginning with a letter or digit"


def check_name(name: str) -> str:
    """`name`, if a site may be called so; it becomes the name of a file."""
    check(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is not None,
        f"{name!r} cannot be the name of a site; use {NAME_RULE}.",
    )
    return name


@dataclass(frozen=True)
class PublicKey:
    """The public half of a site's key."""

    name: str
    """Of the site; the comment of the key in OpenSSH's format."""
    key: ec.EllipticCurvePublicKey

    @property
    def line(self) -> str:
        """One line in OpenSSH's format, as Flower reads it."""
        encoded = self.key.public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        return f"{encoded.decode()} {self.name}"

    @property
    def pem(self) -> bytes:
        """As Flower sends it with every request."""
        encoded: bytes = self.key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return encoded

    @property
    def fingerprint(self) -> str:
        """What `ssh-keygen -l` shows for it."""
        blob = base64.b64decode(self.line.split()[1])
        return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def make_key(name: str) -> tuple[bytes, PublicKey]:
    """A new P-384 key for a site: the private half in OpenSSH's format, and the public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    return private, PublicKey(check_name(name), key.public_key())


def read_public_key(path: Path, name: str | None = None) -> PublicKey:
    """The public key in a file; it is called `name`, or as its comment says."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise FedsieveError(
            f"There is no key {path}; give the .pub file that the site sent."
        ) from None
    check(
        b"PRIVATE KEY" not in text,
        f"{path} is a private key, which must stay at its site; ask for the .pub file instead.",
    )
    try:
        key = serialization.load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise FedsieveError(
            f"{path} is not a site's public key; ask for the .pub file that `fedsieve deploy join` "
            "made."
        )
    words = text.split(maxsplit=2)
    comment = words[2].decode(errors="replace").strip() if len(words) > 2 else path.stem
    return PublicKey(check_name(comment if name is None else name), key)


def public_half(path: Path, name: str) -> PublicKey:
    """The public half of the private key in a file."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedsieveError(
            f"{path} is not a site's private key; make a new folder with `fedsieve deploy join`."
        )
    return PublicKey(name, key.public_key())


def private_folder(path: Path) -> Path:
    """`path` as a folder that only its owner may enter."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody but its owner can read, at no moment."""
    before = os.umask(0o077)
    try:
        write_atomically(path, content)
    finally:
        os.umask(before)


def check_private(path: Path) -> None:
    """Refuse a private key that others on this machine can read."""
    check(path.is_file(), f"There is no key {path}; make one with `fedsieve deploy join`.")
    check(
        path.stat().st_mode & 0o077 == 0,
        f"Others on this machine may read {path}; protect it with `chmod 600 {path}`, and make a "
        "new one with `fedsieve deploy join` if someone may have.",
    )
