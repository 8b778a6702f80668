"""The front door: help, version, and errors as one sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

import fedsieve
from fedsieve import cli as front
from fedsieve.cli import COMMANDS, main, sentence_of
from fedsieve.errors import FedsieveError


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(argv, cli):
    answer = cli(*argv)
    assert answer.status == 0
    assert all(f"  {name}" in answer.out for name in COMMANDS)


def test_version(cli):
    assert cli("--version").out == f"fedsieve {fedsieve.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"), [("runn", "did you mean 'run'?"), ("xyzzy", "choose one of run, audit")]
)
def test_unknown_command(word, hint, cli):
    answer = cli(word)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: There is no command {word!r}; {hint}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, cli):
    answer = cli(command, "--help")
    assert answer.status == 0
    assert f"usage: fedsieve {command}" in answer.out


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), ["disk is full (a/b)", "same"]),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), ["disk is full;"]),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), ["Permission denied (/x)"]),
        (FileNotFoundError(errno.ENOENT, "No such file", "y"), ["No such file (y)."]),
        (OSError("odd"), ["odd."]),
    ],
)
def test_operating_system_errors_are_sentences(error, words):
    sentence = sentence_of(error)
    assert all(word in sentence for word in words)
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (FedsieveError("Do this."), 2, "fedsieve: Do this.\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "fedsieve: The disk is full"),
        (MemoryError(), 2, "fedsieve: There is not enough memory"),
        (KeyboardInterrupt(), 130, "fedsieve: Stopped"),
        (SystemExit(2), 2, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_no_error_becomes_a_traceback(error, status, words, monkeypatch, cli):
    def fail(arguments):
        raise error

    monkeypatch.setattr(front, "_dispatch", fail)
    answer = cli("run")
    assert answer.status == status
    assert answer.err.startswith(words)
    assert len(answer.err.splitlines()) <= 1


def test_arguments_come_from_the_process_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fedsieve", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("fedsieve ")


def fedsieve_process(*argv: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedsieve", *argv], text=True, capture_output=True, **options
    )


def test_help_version_and_table_do_not_load_torch():
    for argv in (["--help"], ["--version"], ["table", "--help"]):
        program = (
            "import sys; from fedsieve.cli import main; "
            f"status = main({argv!r}); assert 'torch' not in sys.modules; sys.exit(status)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_an_error_of_a_real_process_is_one_sentence_and_status_2():
    done = fedsieve_process("run", "tiny.toml", "--sgd.lrr", "0.1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fedsieve: There is no option --sgd.lrr; did you mean --sgd.lr?\n"


def test_a_reader_that_leaves_is_no_error():
    """Like `fedsieve --help | true`, where the reader is gone before anything is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "fedsieve", "--help"], stdout=write_end, stderr=subprocess.PIPE
    )
    os.close(write_end)
    assert done.stderr == b""
    assert done.returncode == 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_need_not_know_every_character(encoding: str) -> None:
    """FedGR's settings have Greek names, and classes and sites may have any."""
    done = fedsieve_process(
        "methods", "fedgr", env={**os.environ, "PYTHONIOENCODING": encoding}, encoding=encoding
    )
    assert done.returncode == 0
    assert "\\u03b1" in done.stdout
    assert "Traceback" not in done.stderr
