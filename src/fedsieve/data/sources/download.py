"""Fetch the official files of a source: over https, resumable, checked before they count."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fedsieve.data.sources.clothing1m import LAYOUT
from fedsieve.data.sources.dataset import Progress
from fedsieve.errors import FedsieveError, check

CHUNK = 2**18
TIMEOUT_SECONDS = 60.0


class Opener(Protocol):
    """What `download` asks of the network; `urllib.request.OpenerDirector` is one."""

    def open(
        self, fullurl: urllib.request.Request, data: None = None, timeout: float = ...
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch; the checksum is the one its publisher gives."""

    name: str
    md5: str


@dataclass(frozen=True, slots=True)
class Remote:
    """The files of one source, all below one address, and the folder that they belong in."""

    address: str
    folder: str
    files: tuple[RemoteFile, ...]


REMOTES: dict[str, Remote] = {
    "mnist": Remote(
        address="https://ossci-datasets.s3.amazonaws.com/mnist/",
        folder="MNIST/raw",
        files=(
            RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
            RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
            RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
    ),
    "fashion-mnist": Remote(
        # The authors' bucket answers http only; their repository holds the same files.
        address="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        folder="FashionMNIST/raw",
        files=(
            RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "cifar10": Remote(
        address="https://www.cs.toronto.edu/~kriz/",
        folder=".",
        files=(RemoteFile("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
    ),
    "cifar100": Remote(
        address="https://www.cs.toronto.edu/~kriz/",
        folder=".",
        files=(RemoteFile("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
    ),
}

WHY_NOT = {
    "digits": "digits needs no download: it comes with scikit-learn.",
    "npz": "npz cannot be downloaded: it is your own file, made with numpy.savez(x=..., y=...).",
    "clothing1m": (
        "clothing1m cannot be downloaded, because its authors give it on request only (see "
        "https://github.com/Cysu/noisy_label): ask them, then put "
        f"{', '.join(LAYOUT)} into one folder and give that folder."
    ),
} | {
    kind: f"{kind} cannot be downloaded: it is your own images; give their place with --data.path."
    for kind in ("folder", "table", "sites")
}


def https_opener() -> urllib.request.OpenerDirector:
    """An opener that knows https alone: a redirection to http, ftp or a file finds no handler."""
    proxies = urllib.request.getproxies()
    https_proxies = {scheme: proxies[scheme] for scheme in ("https",) if scheme in proxies}
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(https_proxies),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def download(
    name: str, path: Path, progress: Progress | None = None, *, opener: Opener | None = None
) -> tuple[Path, ...]:
    """Fetch the official files of source `name` below `path`, where `load(name, path)` finds them.

    A file that is there with the right checksum is left alone, and one that was cut off before
    goes on where it stopped. `progress` hears of the bytes of one file after the other.
    """
    check(name not in WHY_NOT, WHY_NOT.get(name, ""))
    check(
        name in REMOTES,
        f"There is no source {name!r} to download: choose one of {', '.join(REMOTES)}.",
    )
    remote = REMOTES[name]
    folder = path / remote.folder
    opener = opener or https_opener()
    targets = tuple(folder / file.name for file in remote.files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, target in zip(remote.files, targets, strict=True):
            if not (target.is_file() and _md5(target) == file.md5):
                fetch(remote.address + file.name, target, file.md5, progress, opener)
    except NetworkError as error:
        names = ", ".join(file.name for file in remote.files)
        raise FedsieveError(
            f"{name} could not be downloaded ({error}): run the same command again to go on, or "
            f"put {names} from {remote.address} into the folder {folder} yourself."
        ) from error
    except OSError as error:
        raise FedsieveError(
            f"{name} cannot be written to {folder} ({error.strerror}): give another folder."
        ) from error
    return targets


class NetworkError(Exception):
    """The other side could not be reached, or broke off."""


def fetch(url: str, target: Path, md5: str, progress: Progress | None, opener: Opener) -> None:
    """Fetch one file into `target`, by way of `target`.part, which stays when the line breaks."""
    part = target.with_name(target.name + ".part")
    start = part.stat().st_size if part.is_file() else 0
    if not (start and _md5(part) == md5):
        with _open(url, start, opener) as response:
            _receive(response, part, start, progress)
    if _md5(part) != md5:
        part.unlink()
        raise FedsieveError(
            f"{url} arrived with the wrong checksum and was deleted: run the same command again, "
            f"and if that does not help put {target.name} into {target.parent} yourself."
        )
    part.replace(target)


def _open(url: str, start: int, opener: Opener) -> Any:
    """Ask for the bytes from `start` on, or for all of them where the other side has no such."""
    headers = {"User-Agent": "fedsieve"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        return opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0, opener)
        raise NetworkError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(f"{url}: {_reason(error)}") from error


def _receive(response: Any, part: Path, start: int, progress: Progress | None) -> None:
    resumed = (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-")
    done = start if response.status == http.client.PARTIAL_CONTENT and resumed else 0
    length = response.headers.get("Content-Length")
    total = done + int(length) if length is not None and length.isdigit() else None
    with part.open("r+b" if done else "wb") as stream:
        stream.seek(done)
        while chunk := _read(response):
            stream.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    if total is not None and done < total:
        raise NetworkError(f"the connection broke off after {done} of {total} bytes")


def _read(response: IO[bytes]) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise NetworkError(f"the connection broke off: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner) or type(inner).__name__


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
