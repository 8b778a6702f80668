"""The command line: `fedsieve COMMAND …`. A person's mistake is one sentence, never a traceback."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from fedsieve import __version__
from fedsieve.errors import FedsieveError

COMMANDS = {
    "run": ("fedsieve.cli.run", "train a recipe (without one: the built-in demonstration)"),
    "audit": ("fedsieve.cli.audit", "find wrong labels in your own images, and train on them"),
    "table": ("fedsieve.cli.table", "gather finished runs into a table: mean ± std over seeds"),
    "curves": (
        "fedsieve.cli.curves",
        "draw accuracy, or whatever runs logged, by round or by client",
    ),
    "report": ("fedsieve.cli.report", "write a page on runs: accuracy, noise, suspects, traffic"),
    "methods": ("fedsieve.cli.methods", "list the methods, or one method's settings"),
    "recipes": ("fedsieve.cli.recipes", "list, show or copy the recipes that come with fedsieve"),
    "scene": ("fedsieve.cli.scene", "describe and draw who holds what, with which labels"),
    "data": ("fedsieve.cli.data", "list, download or describe data sets"),
    "apply": ("fedsieve.cli.apply", "write a corrected copy of your data from verdicts"),
    "deploy": ("fedsieve.cli.deploy", "run a federation on real machines: server and sites"),
    "bench": ("fedsieve.cli.bench", "measure speed and scale on this machine"),
}
"""Command → the module that carries it out (imported only when asked for), and what it does."""

FAILED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line; the result is the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of classes and sites may be in any script
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(arguments)
    except FedsieveError as error:
        return _complain(" ".join([str(error), *getattr(error, "__notes__", ())]))
    except BrokenPipeError:
        # The reader of a pipe has left; nothing may be written when Python flushes at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(sentence_of(error))
    except MemoryError:
        return _complain("There is not enough memory; use fewer clients, or a smaller model.")
    except KeyboardInterrupt:
        _complain("Stopped; what was saved before stays.")
        return INTERRUPTED
    except SystemExit as stop:  # help was printed, or tyro explained a usage error
        return stop.code if isinstance(stop.code, int) else 0


def help_text() -> str:
    """What `fedsieve --help` prints."""
    commands = "\n".join(f"  {name:9}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: fedsieve COMMAND [OPTIONS]\n\n"
        "Federated learning that survives wrong labels and says which labels are wrong.\n\n"
        f"commands:\n{commands}\n\n"
        "`fedsieve COMMAND --help` explains a command; start with `fedsieve run`."
    )


def sentence_of(error: OSError) -> str:
    """What a person should know about an error of the operating system."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk is full{place}; free some space and give the same command again, "
            "it goes on from what was saved."
        )
    if isinstance(error, PermissionError):
        return f"Permission denied{place}; choose a place that you may read and write."
    return f"{error.strerror or error}{place}."


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name, *rest = arguments
    if name in ("--version", "-V"):
        print(f"fedsieve {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}."
        raise FedsieveError(f"There is no command {name!r}; {hint}")
    command = importlib.import_module(COMMANDS[name][0])
    status: int = command.main(rest)
    return status


def _complain(sentence: str) -> int:
    print(f"fedsieve: {sentence}", file=sys.stderr)
    return FAILED
