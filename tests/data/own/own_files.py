"""Image files for the tests of own data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def picture(value: int = 0, *, size: tuple[int, int] = (8, 8), mode: str = "L") -> Image.Image:
    """A picture (height, width) whose last row is `value` and whose first one is another.

    Different values give different pictures, and no picture is of one colour.
    """
    pixels = np.full(size, value, np.uint8)
    pixels[: size[0] // 2] = 255 - value // 2
    return Image.fromarray(pixels).convert(mode)


def save(file: Path, value: int = 0, **how: object) -> Path:
    """A picture in a file of any kind that its ending names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    picture(value, **how).save(file)  # type: ignore[arg-type]
    return file


def class_folders(root: Path, classes: dict[str, int], *, start: int = 0, **how: object) -> Path:
    """root/<class>/<number>.png, as many as asked for, each with pixels of its own."""
    value = start
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            save(root / name / f"{number}.png", value % 256, **how)
            value += 1
    return root


def close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder refuse to be opened, as permissions do to all but root."""
    scandir, listdir, stat = os.scandir, os.listdir, os.stat

    def refuse(is_asked: bool) -> None:
        if is_asked:
            raise PermissionError(13, "Permission denied", str(folder))

    def scan(place: Any) -> Any:
        refuse(Path(place) == folder)
        return scandir(place)

    def names(place: Any) -> list[str]:
        refuse(Path(place) == folder)
        return listdir(place)

    def look(place: Any, **how: Any) -> os.stat_result:
        refuse(not isinstance(place, int) and Path(os.fsdecode(place)).parent == folder)
        return stat(place, **how)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(os, "listdir", names)
    monkeypatch.setattr(os, "stat", look)
