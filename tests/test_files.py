"""Files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedsieve.files import remove_drafts, write_atomically


class Killed(BaseException):
    """The end of a process, which nothing catches."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_while_writing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fsync(_: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    write_atomically(target, b"first")
    write_atomically(target, b"second")
    assert target.read_bytes() == b"second"
    assert names(tmp_path / "new") == ["file"]


def test_a_failed_write_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "file", b"old")
    fail_while_writing(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_what_a_killed_writer_left_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inner"
    write_atomically(folder / "file", b"old")
    fail_while_writing(monkeypatch, Killed())
    with pytest.raises(Killed):
        write_atomically(folder / "file", b"new")
    assert (folder / "file").read_bytes() == b"old"
    assert len(names(folder)) == 2
    (folder / ".notes.draft").write_bytes(b"somebody's own")
    remove_drafts(tmp_path)
    assert len(names(folder)) == 3, "only the folder itself is tidied"
    remove_drafts(folder)
    assert names(folder) == [".notes.draft", "file"]
