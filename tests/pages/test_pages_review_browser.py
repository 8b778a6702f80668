"""The review page in a real browser, by mouse and by keyboard."""

from __future__ import annotations

import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from pages_samples import CLASSES, item, page_of
from pages_window import Window

from fedsieve.data.own import read_verdicts
from fedsieve.data.own.tables import read_rows, write_rows

pytestmark = pytest.mark.browser

ITEMS = [item(rank) for rank in range(1, 61)]
"""Three pages; given dog, fox, wolf, cat, dog, …"""
COLUMNS = ("id", "site", "given", "verdict", "new_label")


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def says(page: Any, place: str, words: str) -> None:
    """Wait until these words are there."""
    page.locator(place, has_text=words).wait_for()


def exported(page: Any, folder: Path) -> Path:
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "verdicts.csv"
    path = folder / "verdicts.csv"
    download.value.save_as(path)
    return path


def chosen(page: Any) -> str:
    """The id of the label that the panel shows."""
    return str(page.inner_text("#panel-id"))


def cards(page: Any) -> list[str]:
    return [str(card.get_attribute("aria-label")) for card in page.query_selector_all(".card")]


def test_keys_judge_and_go_on_and_the_export_says_so(window: Window, tmp_path: Path) -> None:
    page = window.show(page_of(ITEMS))
    press(page, "k", "r", "d", "s", "c")
    page.fill("#choose-text", "fo")
    press(page, "Enter")
    assert chosen(page) == "img/0006.png"
    assert page.inner_text("#counts") == (
        "4 checked (1 kept, 2 relabelled, 1 dropped) · 1 skipped · 55 left"
    )
    header, rows = read_rows(exported(page, tmp_path))
    assert header == COLUMNS
    assert rows == [
        ("img/0001.png", "B", "dog", "keep", ""),
        ("img/0002.png", "A", "fox", "relabel", "wolf"),
        ("img/0003.png", "B", "wolf", "drop", ""),
        ("img/0004.png", "A", "cat", "skip", ""),
        ("img/0005.png", "B", "dog", "relabel", "fox"),
    ]
    assert [astuple(verdict) for verdict in read_verdicts(tmp_path / "verdicts.csv")] == rows
    assert window.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in window.requests)


def test_the_mouse_does_the_same(window: Window, tmp_path: Path) -> None:
    page = window.show(page_of(ITEMS))
    page.click("#label-7")
    assert chosen(page) == "img/0008.png"
    page.click("[data-act=relabel]")
    page.click("[data-act=choose]")
    page.click("#choose-list li:has-text('wolf')")
    page.click("#next")
    page.click("[data-act=drop]")
    page.click("#undo")
    page.click("[data-act=keep]")
    _, rows = read_rows(exported(page, tmp_path))
    assert [(row[0], *row[3:]) for row in rows] == [
        ("img/0008.png", "relabel", "dog"),
        ("img/0009.png", "relabel", "wolf"),
        ("img/0025.png", "keep", ""),
    ]


def test_a_reload_keeps_the_progress_and_begins_at_the_first_open_label(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    press(page, "k", "d", "r")
    page.select_option("#filter-state", "done")
    page.reload()
    assert page.inner_text("#counts").startswith("3 checked (1 kept, 1 relabelled, 1 dropped)")
    assert chosen(page) == "img/0004.png"
    assert page.input_value("#filter-state") == "all"
    assert cards(page)[0] == "given dog, suggested fox, 99 % likely wrong, kept"
    assert page.locator("#undo").is_disabled(), "what to undo is not kept"


def test_another_list_has_verdicts_of_its_own_and_a_new_edition_keeps_the_old_ones(
    window: Window, tmp_path: Path
) -> None:
    page = window.show(page_of(ITEMS))
    press(page, "k", "d")
    says(page, "#counts", "2 checked")
    page = window.show(page_of(ITEMS, key="other"))
    assert page.inner_text("#counts") == "0 checked · 60 left"
    page = window.show(page_of(ITEMS[1:3]))  # without the first label, but under the same key
    assert page.inner_text("#counts").startswith("1 checked (0 kept, 0 relabelled, 1 dropped)")
    press(page, "k")
    assert len(read_rows(exported(page, tmp_path))[1]) == 2
    page = window.show(page_of(ITEMS))
    assert page.inner_text("#counts").startswith("3 checked (2 kept, 0 relabelled, 1 dropped)")


def test_undo_takes_back_step_by_step_and_goes_there(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    press(page, "k", "d", "ArrowLeft", "r")  # the second label is first dropped, then relabelled
    assert "suggested wolf, 98 % likely wrong, relabelled to wolf" in cards(page)[1]
    press(page, "u")
    assert cards(page)[1].endswith("dropped")
    assert chosen(page) == "img/0002.png"
    press(page, "u", "u", "u")
    assert page.inner_text("#counts") == "0 checked · 60 left"
    assert chosen(page) == "img/0001.png"


def test_filters_show_what_fits_and_nothing_else(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    page.select_option("#filter-given", label="cat (15)")
    assert page.inner_text("#place") == "Page 1 of 1: 1–15 of 15 labels"
    assert all(text.startswith("given cat, suggested dog") for text in cards(page))
    page.select_option("#filter-suggested", label="fox (15)")
    assert page.inner_text("#empty") == "No label fits these filters."
    assert page.locator("#panel").is_hidden()
    press(page, "k")  # nothing to judge
    page.click("#no-filters")
    assert page.inner_text("#place") == "Page 1 of 3: 1–24 of 60 labels"
    page.select_option("#filter-site", label="B (30)")
    page.fill("#filter-least", "90")  # p = 1 − rank/100: ranks 1 to 10, the odd ones at B
    assert [text.split(", ")[2] for text in cards(page)] == [
        f"{100 - rank} % likely wrong" for rank in (1, 3, 5, 7, 9)
    ]
    page.click("#no-filters")
    page.fill("#filter-id", "0033")
    assert chosen(page) == "img/0033.png"
    page.click("#no-filters")
    assert chosen(page) == "img/0033.png", "the chosen label stays chosen"
    press(page, "p", "k", "s")
    for state, ids in {
        "done": "img/0001.png",
        "skip": "img/0002.png",
        "open": "img/0003.png",
    }.items():
        page.select_option("#filter-state", state)
        assert chosen(page) == ids


def test_a_judged_label_stays_on_its_page_until_the_filters_change(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    page.select_option("#filter-state", "open")
    page.focus("#label-0")
    press(page, "k")
    assert len(cards(page)) == 24
    assert cards(page)[0].endswith("kept")
    assert chosen(page) == "img/0002.png"


def test_arrows_pages_and_the_focus(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    row = page.evaluate(
        "() => { const c = [...document.querySelectorAll('.card')];"
        " return c.filter((n) => n.offsetTop === c[0].offsetTop).length; }"
    )
    press(page, "ArrowRight", "ArrowDown")
    assert chosen(page) == f"img/{2 + row:04d}.png"
    assert page.evaluate("document.activeElement.id") == f"label-{1 + row}"
    press(page, "ArrowUp", "ArrowLeft", "ArrowLeft")
    assert chosen(page) == "img/0001.png", "there is nothing before the first"
    press(page, "End", "ArrowRight")
    assert chosen(page) == "img/0025.png", "after the last card comes the next page"
    press(page, "n")
    assert page.inner_text("#place") == "Page 3 of 3: 49–60 of 60 labels"
    press(page, "n", "PageUp", "p", "p")
    assert page.inner_text("#place").startswith("Page 1 of 3")
    assert page.locator(".card[tabindex='0']").count() == 1
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"


def test_everything_can_be_reached_with_tab(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    reached = set()
    for _ in range(40):
        press(page, "Tab")
        reached.add(
            page.evaluate("document.activeElement.id || document.activeElement.dataset.act")
        )
    wanted = {
        "import",
        "open-help",
        "no-filters",
        "filter-given",
        "filter-suggested",
        "filter-site",
    }
    wanted |= {"filter-state", "filter-least", "filter-id", "next", "label-0"}
    wanted |= {"keep", "relabel", "choose", "drop", "skip"}
    assert wanted <= reached
    page.focus("[data-act=keep]")
    press(page, "Enter")
    assert chosen(page) == "img/0002.png"
    assert page.evaluate("document.activeElement.dataset.act") == "keep", "the focus stays"


def test_letters_belong_to_fields_and_dialogs_and_can_be_switched_off(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    page.focus("#filter-id")
    page.keyboard.type("kd")
    assert page.input_value("#filter-id") == "kd"
    page.fill("#filter-id", "")
    page.focus("#label-0")
    press(page, "?")
    assert page.locator("#help").is_visible()
    press(page, "k")
    assert page.inner_text("#counts") == "0 checked · 60 left"
    page.uncheck("#shortcuts")
    press(page, "Escape")
    page.focus("#label-0")
    press(page, "k", "Control+d", "ArrowRight")
    assert page.inner_text("#counts") == "0 checked · 60 left"
    assert chosen(page) == "img/0002.png"
    page.click("#open-help")
    page.check("#shortcuts")
    page.click("#help [data-close]")
    page.focus("#label-1")
    press(page, "k")
    assert page.inner_text("#counts").startswith("1 checked")


def test_choosing_a_class_by_typing(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    press(page, "c")
    assert page.locator("#choose-list li").count() == len(CLASSES)
    page.keyboard.type("O")
    names = [
        node.inner_text() for node in page.query_selector_all("#choose-list li span:first-child")
    ]
    assert names == ["dog", "fox", "wolf"]
    press(page, "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp")
    active = page.get_attribute("#choose-text", "aria-activedescendant")
    assert page.inner_text(f"#{active} span:first-child") == "wolf"
    page.fill("#choose-text", "zebra")
    assert page.inner_text("#choose-none") == "No class has such a name."
    press(page, "Enter")
    assert page.locator("#choose").is_visible()
    page.fill("#choose-text", "dog")  # the given label
    press(page, "Enter")
    assert cards(page)[0].endswith("kept"), "the given label as a choice means to keep it"
    press(page, "c", "Escape")
    assert page.locator("#choose").is_hidden()
    assert page.inner_text("#counts").startswith("1 checked")


def test_a_suggestion_that_is_the_given_label_cannot_be_taken(window: Window) -> None:
    page = window.show(page_of([item(1, suggested="dog"), item(2)]))
    assert page.locator("[data-act=relabel]").is_disabled()
    press(page, "r")
    assert page.inner_text("#counts") == "0 checked · 2 left"
    assert "press C" in page.inner_text("#status")


def test_the_end_of_the_list_is_told(window: Window) -> None:
    page = window.show(page_of(ITEMS[:2]))
    press(page, "k", "k")
    assert page.inner_text("#status") == "Kept fox. Every label has a verdict; export verdicts.csv."
    assert page.get_attribute("#progress", "aria-valuenow") == "2"


def test_verdicts_of_another_machine_are_taken_up(window: Window, tmp_path: Path) -> None:
    rows = [
        ("img/0001.png", "B", "dog", "drop", ""),
        ("img/0002.png", "A", "fox", "relabel", "cat"),
        ("img/0003.png", "A", "wolf", "keep", ""),  # the site is B
        ("img/0004.png", "A", "dog", "keep", ""),  # the given label is cat
        ("img/0006.png", "A", "fox", "relabel", "lynx"),
        ("img/0007.png", "B", "wolf", "perhaps", ""),
        ("img/0008.png", "A", "cat", " skip ", "ignored"),
    ]
    write_rows(tmp_path / "theirs.csv", COLUMNS, rows)
    page = window.show(page_of(ITEMS))
    press(page, "k")
    page.set_input_files("#file", tmp_path / "theirs.csv")
    says(page, "#status", "imported")
    assert page.inner_text("#status") == (
        "3 verdicts imported from theirs.csv. 4 rows did not fit this list and were left out."
    )
    assert page.inner_text("#counts") == (
        "2 checked (0 kept, 1 relabelled, 1 dropped) · 1 skipped · 57 left"
    )
    assert page.inner_text("#panel-id") == "img/0003.png", "the first that is still to check"
    press(page, "u")
    assert page.inner_text("#counts").startswith("1 checked (1 kept"), "one step takes it back"


def test_a_table_that_a_spreadsheet_saved_with_semicolons_is_read(
    window: Window, tmp_path: Path
) -> None:
    (tmp_path / "excel.csv").write_text(
        "\ufeffsite;id;verdict;new_label;given;note\r\n"
        'B;img/0001.png;relabel;cat;dog;"a ""quoted""; note\nin two lines"\r\n\r\n',
        encoding="utf-8",
    )
    (tmp_path / "other.csv").write_text("name,price\nx,1\n")
    page = window.show(page_of(ITEMS))
    page.set_input_files("#file", tmp_path / "excel.csv")
    says(page, "#status", "imported")
    assert page.inner_text("#status") == "1 verdict imported from excel.csv."
    assert cards(page)[0].endswith("relabelled to cat")
    page.set_input_files("#file", tmp_path / "other.csv")
    says(page, "#status", "other.csv")
    assert "needs the columns id, site, given, verdict, new_label" in page.inner_text("#status")


HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    '"><svg onload=alert(1)>',
    "=cmd|' /C calc'!A0",
    "'=1+1",
    "@sum(\"a\", 'b')",
    "two\nlines, \r\nand a\ttab",
    "\tstarts with a tab",
    "＝full width",
    "javascript:alert(1)",
)


def test_hostile_names_neither_run_nor_break_the_page_and_come_back_as_they_were(
    window: Window, tmp_path: Path
) -> None:
    items = [
        item(rank, id=f"{name}", site=name, given=name, suggested=HOSTILE[rank % 10], reason=name)
        for rank, name in enumerate(HOSTILE, start=1)
    ]
    html = page_of(items, classes=HOSTILE, title=HOSTILE[0], key=HOSTILE[0])
    page = window.show(html)
    assert page.inner_text("h1") == HOSTILE[0]
    assert page.text_content("#panel-id") == HOSTILE[0]
    press(page, *"rk" * 5)
    path = exported(page, tmp_path)
    _, rows = read_rows(path)
    assert rows == [
        (
            name,
            name,
            name,
            "relabel" if place % 2 == 0 else "keep",
            HOSTILE[place + 1] if place % 2 == 0 else "",
        )
        for place, name in enumerate(HOSTILE)
    ]
    starts = [line[1] for line in path.read_text().splitlines() if line.startswith('"')]
    assert not set(starts) & set("=+-@\t"), "no cell of a first column is a formula"
    page.evaluate("localStorage.clear()")
    page.reload()
    page.set_input_files("#file", path)
    says(page, "#status", "imported")
    assert page.inner_text("#counts").startswith("10 checked (5 kept, 5 relabelled")
    press(page, "c")
    page.click("#choose-list li >> nth=1")
    assert page.evaluate("window.hacked") is None
    assert window.dialogs == []
    assert window.complaints == [], "not even a script that the policy had to stop"


def test_lone_surrogates_can_be_judged_exported_and_imported(
    window: Window, tmp_path: Path
) -> None:
    page = window.show(page_of([item(1, id="caf\udce9.png"), item(2)]))
    press(page, "d")
    path = exported(page, tmp_path)
    assert read_rows(path)[1] == [("caf\ufffd.png", "B", "dog", "drop", "")]
    page.reload()
    assert page.inner_text("#counts").startswith("1 checked")
    page.evaluate("localStorage.clear()")
    page.reload()
    page.set_input_files("#file", path)
    says(page, "#status", "imported")
    assert page.inner_text("#counts").startswith("1 checked")


def test_the_policy_stops_a_script_that_someone_smuggles_in(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); const i = document.createElement('img');"
        " i.src = 'http://127.0.0.1:9/x.png'; document.body.append(i); }"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in complaint for complaint in window.complaints)


def test_opening_a_page_saves_nothing(window: Window) -> None:
    """Another window may have saved the list since this one read it."""
    page = window.show(page_of(ITEMS))
    assert page.evaluate("localStorage.length") == 0


NO_STORAGE = "Object.defineProperty(window, 'localStorage', { get() { throw new Error('off'); } })"


def test_without_storage_the_page_warns_and_works(window: Window, tmp_path: Path) -> None:
    window.context.add_init_script(NO_STORAGE)
    page = window.show(page_of(ITEMS))
    assert "export verdicts.csv before you close" in page.inner_text("#warning")
    press(page, "k", "d")
    assert len(read_rows(exported(page, tmp_path))[1]) == 2


def test_a_full_storage_is_told_and_noticed_when_it_is_over(window: Window) -> None:
    page = window.show(page_of(ITEMS))
    page.evaluate(
        "() => { window.real = Storage.prototype.setItem;"
        " Storage.prototype.setItem = () => { throw new Error('full'); }; }"
    )
    press(page, "k")
    assert page.locator("#warning").is_visible()
    page.evaluate("() => { Storage.prototype.setItem = window.real; }")
    press(page, "k")
    assert page.locator("#warning").is_hidden()
    page.reload()
    assert page.inner_text("#counts").startswith("2 checked")


@pytest.mark.parametrize("rubbish", ["{", "null", '{"a": 1}', '[1, ["a"], ["a", 1, 2, 3, 4]]'])
def test_damaged_storage_is_an_empty_one(window: Window, rubbish: str) -> None:
    page = window.show(page_of(ITEMS))
    page.evaluate("text => localStorage.setItem('fedsieve-review:test', text)", rubbish)
    page.reload()
    assert page.inner_text("#counts") == "0 checked · 60 left"
    assert window.complaints == []


def test_two_windows_on_one_list_know_of_each_other(window: Window) -> None:
    first = window.show(page_of(ITEMS))
    second = window.another()
    second.goto(first.url)
    press(first, "k", "d")
    says(second, "#counts", "2 checked")
    second.bring_to_front()
    second.focus("#label-2")
    press(second, "r")
    says(first, "#counts", "3 checked")


def test_pictures_that_are_missing_or_broken_leave_a_word(window: Window) -> None:
    page = window.show(page_of([item(1, thumbnail=b""), item(2, thumbnail=b"no png"), item(3)]))
    page.locator(".card .no-picture >> nth=1").wait_for()
    words = [node.inner_text() for node in page.query_selector_all(".card .no-picture")]
    assert words == ["no picture", "picture cannot be shown"]
    assert page.evaluate("document.querySelector('#label-2 img').naturalWidth") == 8


def test_five_thousand_labels_are_no_burden(window: Window) -> None:
    page = window.show(page_of([item(rank) for rank in range(1, 5001)]))
    assert page.locator(".card").count() == 24
    started = time.monotonic()
    press(page, *"krds" * 10)
    page.select_option("#filter-given", label="cat (1250)")
    assert page.inner_text("#place") == "Page 1 of 53: 1–24 of 1250 labels"
    assert time.monotonic() - started < 10, "keys lag"
    spent = page.evaluate(
        "() => { const t = performance.now();"
        " document.dispatchEvent(new KeyboardEvent('keydown', { key: 'x' }));"
        " document.querySelector('[data-act=keep]').click(); return performance.now() - t; }"
    )
    assert spent < 250, f"a verdict took {spent:.0f} ms"


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_texts_have_contrast_and_nothing_sticks_out(
    chromium: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    window = Window(
        chromium, tmp_path, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    long = "a-class-with-a-very-long-name-" * 4
    items = [*ITEMS[:10], item(11, id="x" * 300, given=long, suggested="cat", reason="word " * 80)]
    page = window.show(page_of(items, classes=(*CLASSES, long)))
    press(page, "k", "r", "d", "s")
    page.click("#label-10")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    poor = page.evaluate(CONTRAST)
    window.context.close()
    assert poor == []


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .03928 * 255 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const c = rgb(getComputedStyle(n).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim());
    if (!own || !node.checkVisibility() || node.closest(":disabled, option, script")) continue;
    const lights = [light(rgb(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(...lights) + .05) / (Math.min(...lights) + .05);
    if (ratio < 4.5) poor.push(`${node.className || node.tagName}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""
"""Texts whose contrast with the ground behind them is below WCAG's AA."""
