"""The review page as text: what it holds, and what it must never hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages_samples import CLASSES, Outline, item, page_of, png

from fedsieve.errors import FedsieveError
from fedsieve.pages.html import well_formed


def data_of(html: str) -> dict[str, Any]:
    """What the page's script will read."""
    (text,) = (
        text for tag, text in Outline(html).texts if tag == "script" and text.startswith("{")
    )
    return dict(json.loads(text))


def test_the_data_of_every_label_stand_in_the_page_in_the_order_given() -> None:
    data = data_of(page_of([item(2), item(1)], key="week 7"))
    picture = base64.b64encode(png()).decode()
    assert data["key"] == "fedsieve-review:week 7"
    assert data["classes"] == list(CLASSES)
    assert data["items"] == [
        ["img/0002.png", "A", "fox", "wolf", 0.98, 2, "large loss", picture],
        ["img/0001.png", "B", "dog", "fox", 0.99, 1, "large loss", picture],
    ]


def test_the_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else() -> None:
    outline = Outline(page_of([item(1)]))
    (policy,) = (
        meta["content"]
        for meta in outline.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    texts = {
        "script-src": [t for tag, t in outline.texts if tag == "script" and "use strict" in t],
        "style-src": [t for tag, t in outline.texts if tag == "style"],
    }
    for rule, found in texts.items():
        (text,) = found
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert "unsafe" not in policy


def test_the_page_loads_nothing_and_has_no_inline_handlers() -> None:
    for _, attributes in Outline(page_of([item(1)])).tags:
        assert not any(name.startswith("on") or name == "style" for name in attributes)
        assert "src" not in attributes
        assert attributes.get("href", "#list") == "#list"


def test_the_script_never_writes_html() -> None:
    html = page_of([item(1)])
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in html


def test_every_control_has_a_name() -> None:
    html = page_of([item(1)])
    outline = Outline(html)
    labelled = re.findall(r"<label[^>]*>(?:(?!</label>).)*id=\"([^\"]+)\"", html, re.DOTALL)
    for control in [*outline.all("select"), *outline.all("input")]:
        assert control["id"] in labelled or {"aria-label", "aria-labelledby"} & control.keys()
    for listbox in (a for _, a in outline.tags if a.get("role") == "listbox"):
        assert {"aria-label", "aria-labelledby"} & listbox.keys()
    assert outline.all("html") == [{"lang": "en"}]


HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.hacked = 1'>",
    "\"'`${window.hacked = 1}",
    "=cmd|' /C calc'!A0",
    "two\nlines\r\nand a\ttab",
    "lone \udc80 surrogate",
    "\u2028\u2029\x00",
    "{{ 7 * 7 }}",
    "‮abc",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_through_as_text_and_adds_no_tag(text: str) -> None:
    plain = Outline(page_of([item(1)]))
    classes = (text, "dog")
    hostile = item(1, id=text, site=text, given=text, suggested="dog", reason=text)
    html = page_of([hostile], classes=classes, title=text, key=text)
    html.encode()  # a file can hold it
    outline = Outline(html)
    assert [tag for tag, _ in outline.tags] == [tag for tag, _ in plain.tags]
    row = data_of(html)["items"][0]
    assert row[:3] == [text] * 3
    assert row[6] == text
    assert "49" not in outline.text("h1")


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_categories=()), min_size=1))
def test_any_id_survives(text: str) -> None:
    html = page_of([item(1, id=text)])
    assert data_of(html)["items"][0][0] == text
    html.encode()


def test_lone_surrogates_become_replacement_characters_and_pairs_stay() -> None:
    assert well_formed("a\ud800b\udc80c😀\ud83d\ude00") == "a\ufffdb\ufffdc😀😀"


def test_wrong_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(FedsieveError, match="no class 'lynx'"):
        page_of([item(1, suggested="lynx")])
    with pytest.raises(FedsieveError, match="between 0 and 1, not nan"):
        page_of([item(1, p_wrong=float("nan"))])
    with pytest.raises(FedsieveError, match="listed twice"):
        page_of([item(1), item(1)])
    with pytest.raises(FedsieveError, match="same name"):
        page_of([], classes=("cat", "cat"))
    assert data_of(page_of([item(1, site="A"), item(1, site="B")]))["items"]


def test_an_empty_list_is_a_page_too() -> None:
    assert data_of(page_of([]))["items"] == []
