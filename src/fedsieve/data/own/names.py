"""Names as text: sample ids that any file can hold, and class names that mean the same everywhere.

A path is bytes, and need not be UTF-8. Its id is the path itself as long as it is valid text
without a backslash; otherwise every backslash is doubled and every strange byte is written \\xNN.
So an id is always valid UTF-8, two files never share one, and the path can be had back from it.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable
from pathlib import Path

from fedsieve.errors import FedsieveError, check

CLASSES_FILE = "classes.txt"


def id_of(path: str) -> str:
    """The id of a path below the root, as Python writes it (strange bytes as lone surrogates)."""
    return _without_strange_bytes(path.replace("\\", "\\\\"))


def path_of(sample_id: str) -> str:
    """The path below the root that `id_of` made the id of."""
    return re.sub(
        r"\\(?:\\|x([0-9a-f]{2}))",
        lambda found: chr(0xDC00 + int(found[1], 16)) if found[1] else "\\",
        sample_id,
    )


def class_name(text: str) -> str:
    """A class name as it is compared: valid text, in one Unicode form, without blanks around it.

    A name of this kind is its own such name, so names may be passed on and compared again.
    Some file systems hand out é as e and an accent, so that a folder and a line of classes.txt
    would otherwise differ.
    """
    return unicodedata.normalize("NFC", _without_strange_bytes(text)).strip()


def _without_strange_bytes(text: str) -> str:
    return re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)


def read_classes(file: Path) -> tuple[str, ...]:
    """The class names of classes.txt, one in each line; their order is that of the labels."""
    try:
        lines = file.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise FedsieveError(f"{file} is not a text file in UTF-8; save it as such.") from None
    names = tuple(name for line in lines if (name := class_name(line)))
    check(
        len(set(names)) == len(names) >= 2,
        f"{file} must name at least two classes, each in one line and only once.",
    )
    return names


def candidates(name: str, known: Collection[str]) -> str:
    """What an unknown name may have been meant to be, as the end of a sentence."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"possible are {some(known)}."


def some(names: Iterable[str], shown: int = 10) -> str:
    """The first few of the names, quoted, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more
