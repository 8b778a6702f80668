"""What lies where: the folder of a server and the folder of a site.

    server/                          site/
      federation.toml  invitation      site.toml   name, address, authority's certificate
      ca.key           secret          site.key    secret
      sites/NAME.pub   who may come    NAME.pub    for the server
      run/             results         state/      what the site remembers between rounds
      flower/  logs/                   flower/  logs/

`flower/` holds what Flower's processes need, and can be made anew at any time.
"""

from __future__ import annotations

import contextlib
import datetime
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tomli_w
from cryptography.hazmat.primitives import serialization

from fedsieve.config import from_table, to_table
from fedsieve.deploy.address import Address, parse_address
from fedsieve.deploy.certificates import (
    Authority,
    fingerprint,
    make_authority,
    private_pem,
    read_authority,
    read_certificate,
)
from fedsieve.deploy.keys import (
    PublicKey,
    check_name,
    check_private,
    make_key,
    private_folder,
    public_half,
    read_public_key,
    write_private,
)
from fedsieve.errors import FedsieveError, check
from fedsieve.files import locked, write_atomically

T = TypeVar("T")

INVITATION = "federation.toml"


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What a site must know of a server. Nothing in it is secret; nobody may change it, though."""

    address: str
    """HOST:PORT under which sites reach the server."""
    authority: str = ""
    """Certificate (PEM) of the federation's authority."""
    insecure: bool = False
    """No encryption and no keys, for trying things on one machine."""

    def __post_init__(self) -> None:
        check(
            self.server.is_loopback or not self.insecure,
            f"Without encryption and keys a server may only be on this machine, not at "
            f"{self.address}; leave --insecure out.",
        )
        if not self.insecure:
            read_certificate(self.authority, "the invitation")

    @property
    def server(self) -> Address:
        return parse_address(self.address)

    @property
    def fingerprint(self) -> str:
        """Of the authority's certificate, for people to compare; empty without one."""
        return "" if self.insecure else fingerprint(read_certificate(self.authority, "it"))


@dataclass(frozen=True, kw_only=True)
class SiteConfig(Invitation):
    """An invitation that a site has accepted."""

    name: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.name)


@dataclass(frozen=True)
class Folder:
    """What the folders of server and site have in common."""

    path: Path

    @property
    def flower(self) -> Path:
        return self.path / "flower"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder; a second process on it is refused. The lock dies with its process."""
        busy = f"Another `fedsieve deploy` is running in {self.path}; stop it first."
        with locked(private_folder(self.flower), busy):
            yield


@dataclass(frozen=True)
class ServerFolder(Folder):
    """The folder of a server."""

    @staticmethod
    def create(
        path: Path, address: Address, *, insecure: bool, now: datetime.datetime
    ) -> ServerFolder:
        """Found a federation: an authority, and an invitation that carries its certificate."""
        check(
            not (path / INVITATION).exists(),
            f"{path} already is a federation's folder; give another one, or delete it.",
        )
        folder = ServerFolder(path)
        if insecure:
            invitation = Invitation(address=str(address), insecure=True)
            private_folder(path)
        else:
            authority = make_authority(address, now)
            pem = authority.certificate.public_bytes(serialization.Encoding.PEM).decode()
            invitation = Invitation(address=str(address), authority=pem)
            private_folder(path)
            write_private(folder._authority_key, private_pem(authority.key))
        _write_toml(folder.invitation_file, invitation)
        return folder

    @property
    def invitation_file(self) -> Path:
        return self.path / INVITATION

    @property
    def _authority_key(self) -> Path:
        return self.path / "ca.key"

    @property
    def _sites(self) -> Path:
        return self.path / "sites"

    @property
    def results(self) -> Path:
        return self.path / "run"

    def invitation(self) -> Invitation:
        hint = f"make it a federation's with `fedsieve deploy init {self.path} --address HOST`."
        return _read_toml(Invitation, self.invitation_file, hint)

    def authority(self) -> Authority:
        check_private(self._authority_key)
        certificate = read_certificate(self.invitation().authority, str(self.invitation_file))
        where = str(self._authority_key)
        return read_authority(self._authority_key.read_bytes(), certificate, where)

    def admit(self, key: PublicKey) -> None:
        """Let the site with this key in, from now on."""
        check(
            not self.invitation().insecure,
            f"{self.path} was founded without keys, so every site of this machine may come in.",
        )
        for other in self.admitted():
            check(
                other.name != key.name or other.key == key.key,
                f"Another key is admitted as {key.name}; if the site has made a new one, first "
                f"give `fedsieve deploy remove {self.path} {key.name}`.",
            )
            check(
                other.key != key.key or other.name == key.name,
                f"This key is already admitted, as {other.name}; every site needs its own.",
            )
        write_atomically(self.key_file(key.name), f"{key.line}\n".encode())

    def remove(self, name: str) -> None:
        """Let the site in no more."""
        path = self.key_file(check_name(name))
        names = ", ".join(other.stem for other in self._key_files()) or "none"
        check(path.exists(), f"No site is admitted as {name}; admitted: {names}.")
        path.unlink()

    def admitted(self) -> tuple[PublicKey, ...]:
        """The keys that may come in, in order of their names."""
        keys, damage = self.readable_keys()
        if damage is not None:
            raise damage
        return keys

    def readable_keys(self) -> tuple[tuple[PublicKey, ...], FedsieveError | None]:
        """Those that can be read, and what is wrong with the first that cannot."""
        keys: list[PublicKey] = []
        damage = None
        for path in self._key_files():
            try:
                keys.append(read_public_key(path, path.stem))
            except FedsieveError as error:
                damage = damage or error
        return tuple(keys), damage

    def _key_files(self) -> list[Path]:
        return sorted(self._sites.glob("*.pub"))

    def key_file(self, name: str) -> Path:
        return self._sites / f"{name}.pub"


@dataclass(frozen=True)
class SiteFolder(Folder):
    """The folder of a site."""

    @staticmethod
    def create(path: Path, invitation: Invitation, name: str) -> SiteFolder:
        """Accept an invitation: make a key here."""
        check(
            not (path / "site.toml").exists(),
            f"{path} already is a site's folder; give another one, or delete it.",
        )
        private, public = make_key(name)
        config = SiteConfig(**to_table(invitation), name=name)
        folder = SiteFolder(private_folder(path))
        write_private(folder.key_file, private)
        write_atomically(folder.public_key_file(name), f"{public.line}\n".encode())
        _write_toml(path / "site.toml", config)
        return folder

    @property
    def key_file(self) -> Path:
        return self.path / "site.key"

    @property
    def state(self) -> Path:
        return self.path / "state"

    def public_key_file(self, name: str) -> Path:
        return self.path / f"{name}.pub"

    def config(self) -> SiteConfig:
        hint = f"make it a site's with `fedsieve deploy join {self.path} --invitation FILE`."
        return _read_toml(SiteConfig, self.path / "site.toml", hint)

    def public_key(self) -> PublicKey:
        """The public half of the key that lies here."""
        check_private(self.key_file)
        return public_half(self.key_file, self.config().name)


def read_invitation(path: Path) -> Invitation:
    """The invitation in a file that a server's operator sent."""
    return _read_toml(Invitation, path, f"give the file {INVITATION} that the server made.")


def _write_toml(path: Path, record: Invitation) -> None:
    write_atomically(path, tomli_w.dumps(to_table(record), multiline_strings=True).encode())


def _read_toml(kind: type[T], path: Path, hint: str) -> T:
    try:
        return from_table(kind, tomllib.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        raise FedsieveError(f"There is no {path}; {hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedsieveError(f"{path} is damaged ({error}); {hint}") from None
