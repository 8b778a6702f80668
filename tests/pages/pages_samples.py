"""Labels to review and folders of runs, written by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from PIL import Image

from fedsieve.pages import ReviewItem, review_page

CLASSES = ("cat", "dog", "fox", "wolf")


def png(colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def item(rank: int, **changes: Any) -> ReviewItem:
    """The label of rank `rank`: given goes round the classes, the next one is suggested."""
    given = CLASSES[rank % 4]
    values: dict[str, Any] = {
        "id": f"img/{rank:04d}.png",
        "site": "AB"[rank % 2],
        "given": given,
        "suggested": CLASSES[(rank + 1) % 4],
        "p_wrong": max(0.0, 1 - rank / 100),
        "rank": rank,
        "reason": "large loss",
        "thumbnail": png(),
    }
    return ReviewItem(**(values | changes))


def page_of(items: Sequence[ReviewItem], key: str = "test", **changes: Any) -> str:
    values: dict[str, Any] = {"title": "Labels to check", "classes": CLASSES}
    return review_page(items=items, key=key, **(values | changes))


class Outline(HTMLParser):
    """What a parser sees in a page: its tags with their attributes, and the text of each tag."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def text(self, *tags: str) -> list[str]:
        return [text.strip() for tag, text in self.texts if tag in tags and text.strip()]

    @property
    def words(self) -> str:
        """All that a person can read."""
        shown = (text for tag, text in self.texts if tag not in ("script", "style"))
        return " ".join(" ".join(shown).split())


def line(round: int, accuracy: float | None) -> dict[str, Any]:
    """A line of metrics as a run writes it."""
    return {
        "round": round,
        "accuracy": accuracy,
        "clients": [0, 1],
        "bytes_up": 3000,
        "bytes_down": 4000,
        "seconds": {"train": 5.0, "merge": 1.0},
    }


def write_run(
    folder: Path,
    accuracy: Sequence[float | None],
    *,
    method: str = "fedavg",
    rounds: int | None = None,
    finished: bool = True,
    config: str = "",
    lines: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """The folder of a run with these accuracies; `lines` changes some rounds' lines."""
    folder.mkdir(parents=True)
    planned = len(accuracy) if rounds is None else rounds
    (folder / "config.toml").write_text(
        f'name = "hand"\nseed = 1\nrounds = {planned}\n{config}\n[method]\nname = "{method}"\n'
    )
    changes = lines or {}
    written = [{**line(t, a), **changes.get(t, {})} for t, a in enumerate(accuracy)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in written))
    (folder / "env.json").write_text(
        json.dumps({"fedsieve": "9.9", "command": "fedsieve run hand", "gpu": None})
    )
    if finished:
        (folder / "summary.json").write_text(json.dumps({"name": "hand", "suspect_auroc": 0.875}))
    return folder
