"""Downloads against a server on this machine."""

from __future__ import annotations

import email
import hashlib
import http.server
import io
import re
import socket
import threading
import urllib.error
import urllib.request
import urllib.response
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedsieve.data.sources import SOURCES
from fedsieve.data.sources.download import (
    REMOTES,
    WHY_NOT,
    Remote,
    RemoteFile,
    download,
    https_opener,
)
from fedsieve.errors import FedsieveError

CONTENT = bytes(range(256)) * 4000
OTHER = b"labels" * 100


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@dataclass
class Server:
    """What the server does, and which ranges it was asked for."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None
    knows_ranges: bool = True
    tells_length: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[1]
            wanted = self.headers.get("Range")
            state.asked.append((name, wanted))
            if name not in state.files:
                self.send_error(404)
                return
            content, start = state.files[name], 0
            if wanted and state.knows_ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            if state.tells_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : state.cut_after])

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        state.port = httpd.server_address[1]
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()


@dataclass
class LocalOpener:
    """Sends each request to the server on this machine, whatever its address says."""

    port: int

    def open(self, fullurl: urllib.request.Request, data: None = None, timeout: float = 5) -> Any:
        url = re.sub(r"^https://[^/]+", f"http://127.0.0.1:{self.port}", fullurl.full_url)
        request = urllib.request.Request(url, headers=dict(fullurl.header_items()))
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return direct.open(request, timeout=timeout)


@pytest.fixture
def remote(server: Server, monkeypatch: pytest.MonkeyPatch) -> LocalOpener:
    server.files = {"images.gz": CONTENT, "labels.gz": OTHER}
    files = (RemoteFile("images.gz", md5(CONTENT)), RemoteFile("labels.gz", md5(OTHER)))
    monkeypatch.setitem(REMOTES, "mnist", Remote("https://example.org/mnist/", "MNIST/raw", files))
    return LocalOpener(server.port)


def test_files_arrive_whole_and_progress_is_told(remote: LocalOpener, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    paths = download("mnist", tmp_path, lambda *call: calls.append(call), opener=remote)
    assert paths == tuple(tmp_path / "MNIST/raw" / n for n in ("images.gz", "labels.gz"))
    assert [path.read_bytes() for path in paths] == [CONTENT, OTHER]
    assert calls[-1] == (len(OTHER), len(OTHER))
    assert (len(CONTENT), len(CONTENT)) in calls
    assert not list(tmp_path.rglob("*.part"))


def test_a_file_that_is_there_is_not_fetched_again(
    remote: LocalOpener, server: Server, tmp_path: Path
) -> None:
    images, _ = download("mnist", tmp_path, opener=remote)
    images.write_bytes(b"spoilt")
    server.asked.clear()
    download("mnist", tmp_path, opener=remote)
    assert server.asked == [("images.gz", None)]
    assert images.read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_no_file(
    remote: LocalOpener, server: Server, tmp_path: Path
) -> None:
    server.files["images.gz"] = CONTENT[:-1] + b"!"
    with pytest.raises(FedsieveError, match="wrong checksum and was deleted"):
        download("mnist", tmp_path, opener=remote)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_cut_connection_is_reported_and_then_resumed(
    remote: LocalOpener, server: Server, tmp_path: Path, knows_ranges: bool
) -> None:
    server.cut_after, server.knows_ranges = 700_000, knows_ranges
    with pytest.raises(FedsieveError, match=r"broke off.*run the same command again to go on"):
        download("mnist", tmp_path, opener=remote)
    part = tmp_path / "MNIST/raw/images.gz.part"
    assert part.read_bytes() == CONTENT[:700_000]
    server.cut_after = None
    calls: list[tuple[int, int | None]] = []
    images, _ = download("mnist", tmp_path, lambda *call: calls.append(call), opener=remote)
    assert images.read_bytes() == CONTENT
    assert server.asked[1] == ("images.gz", "bytes=700000-")
    assert calls[0][1] == len(CONTENT)
    assert (calls[0][0] > 700_000) == knows_ranges


def test_a_whole_part_needs_no_request_and_one_too_long_is_fetched_anew(
    remote: LocalOpener, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "MNIST/raw"
    folder.mkdir(parents=True)
    (folder / "images.gz.part").write_bytes(CONTENT)
    (folder / "labels.gz.part").write_bytes(OTHER + b"more")
    images, labels = download("mnist", tmp_path, opener=remote)
    assert (images.read_bytes(), labels.read_bytes()) == (CONTENT, OTHER)
    assert server.asked == [("labels.gz", "bytes=604-"), ("labels.gz", None)]


def test_an_unknown_length_is_told_as_none(
    remote: LocalOpener, server: Server, tmp_path: Path
) -> None:
    server.tells_length = False
    calls: list[tuple[int, int | None]] = []
    download("mnist", tmp_path, lambda *call: calls.append(call), opener=remote)
    assert calls[-1] == (len(OTHER), None)


def test_without_a_network_one_sentence_says_which_files_to_put_where(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    for name, remote in REMOTES.items():
        with pytest.raises(FedsieveError, match=r"could not be downloaded .*refused") as caught:
            download(name, tmp_path, opener=LocalOpener(port))
        sentence = str(caught.value)
        assert all(file.name in sentence for file in remote.files)
        assert str(tmp_path / remote.folder) in sentence
        assert remote.address in sentence
        assert "\n" not in sentence


def test_an_answer_of_not_found_is_reported(
    remote: LocalOpener, server: Server, tmp_path: Path
) -> None:
    del server.files["labels.gz"]
    with pytest.raises(FedsieveError, match=r"labels\.gz answered 404 Not Found"):
        download("mnist", tmp_path, opener=remote)
    assert (tmp_path / "MNIST/raw/images.gz").read_bytes() == CONTENT


class BrokenResponse:
    """A response whose connection is reset in the middle."""

    status = 200

    def __init__(self) -> None:
        self.headers = {"Content-Length": "10"}
        self.chunks = [b"12345"]

    def read(self, _: int) -> bytes:
        if self.chunks:
            return self.chunks.pop()
        raise ConnectionResetError

    def __enter__(self) -> BrokenResponse:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_reset_connection_keeps_what_arrived(remote: LocalOpener, tmp_path: Path) -> None:
    class Resets:
        def open(self, *_: object, **__: object) -> BrokenResponse:
            return BrokenResponse()

    with pytest.raises(FedsieveError, match="broke off: ConnectionResetError"):
        download("mnist", tmp_path, opener=Resets())
    assert (tmp_path / "MNIST/raw/images.gz.part").read_bytes() == b"12345"


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/images.gz", "file:///etc/hostname"])
def test_the_usual_opener_knows_https_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("http_proxy", f"https://127.0.0.1:{server.port}")
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        https_opener().open(urllib.request.Request(url.format(port=server.port)), timeout=5)
    assert server.asked == []


def test_the_usual_opener_is_used_when_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote("http://127.0.0.1:9/", ".", (RemoteFile("images.gz", md5(CONTENT)),))
    monkeypatch.setitem(REMOTES, "mnist", remote)
    with pytest.raises(FedsieveError, match="unknown url type: http"):
        download("mnist", tmp_path)


def test_a_redirection_to_http_is_not_followed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = email.message_from_string(f"Location: http://127.0.0.1:{server.port}/images.gz\n\n")

    def answer(_: object, request: urllib.request.Request) -> urllib.response.addinfourl:
        response = urllib.response.addinfourl(io.BytesIO(), headers, request.full_url, 302)
        response.msg = "Found"  # type: ignore[attr-defined]
        return response

    monkeypatch.setattr(urllib.request.HTTPSHandler, "https_open", answer)
    with pytest.raises(urllib.error.URLError, match="unknown url type: http"):
        https_opener().open("https://example.org/images.gz", timeout=5)
    assert server.asked == []


@pytest.mark.parametrize("name", sorted(WHY_NOT))
def test_what_cannot_be_downloaded_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(FedsieveError, match=re.escape(WHY_NOT[name])):
        download(name, tmp_path)


def test_clothing1m_tells_of_the_permission_and_the_layout(tmp_path: Path) -> None:
    with pytest.raises(FedsieveError, match="on request") as caught:
        download("clothing1m", tmp_path)
    for piece in ("images/", "noisy_train_key_list.txt", "clean_label_kv.txt", "category_names"):
        assert piece in str(caught.value)


def test_each_source_is_fetched_or_says_why_not(tmp_path: Path) -> None:
    assert set(REMOTES) | set(WHY_NOT) == set(SOURCES)
    assert not set(REMOTES) & set(WHY_NOT)
    for remote in REMOTES.values():
        assert remote.address.startswith("https://")
        assert remote.address.endswith("/")
        assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in remote.files)
    with pytest.raises(FedsieveError, match="no source 'svhn' to download"):
        download("svhn", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(remote: LocalOpener, tmp_path: Path) -> None:
    (tmp_path / "MNIST").write_text("a file in the way")
    with pytest.raises(FedsieveError, match=r"cannot be written to .*give another folder"):
        download("mnist", tmp_path, opener=remote)
