"""The report: what a run's folder holds, and what it lacks, in numbers computed here anew."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages_samples import Outline, line, write_run
from pages_window import Window

from fedsieve.errors import FedsieveError
from fedsieve.labels import Label, save_labels
from fedsieve.methods import METHODS
from fedsieve.pages import ReportExtras, report_page
from fedsieve.pages.runs import labels_of, read_run
from fedsieve.simulate.findings import Findings, SiteLabels, findings_of, save_findings


def found(
    sites: int = 2, classes: tuple[str, ...] = ("ant", "bee"), truth: bool = True
) -> Findings:
    """Sites of ten labels each, one more of them wrong from site to site."""
    labels = []
    for k in range(sites):
        true = np.zeros(10, np.int64)
        given = (np.arange(10) <= k % 10).astype(np.int64)
        labels.append(
            SiteLabels(
                name=f"site {k}",
                given=given,
                true=true if truth else None,
                p_wrong=np.where(given == 1, 0.9, 0.2),
                suggested=true,
                losses=np.where(given == 1, 4.0, 0.1) + np.arange(10) / 100,
            )
        )
    return findings_of(classes, labels)


def headings(html: str) -> list[str]:
    return Outline(html).text("h2")


def rows_of(html: str, first: str) -> list[str]:
    """The cells of the first table row whose head is `first`."""
    row = html.split(f">{first}</th>", 1)[1].split("</tr>", 1)[0]
    return Outline(row).text("td")


def test_the_numbers_of_a_run(tmp_path: Path) -> None:
    accuracy = [10.0 + t for t in range(12)]
    html = report_page([write_run(tmp_path / "a", accuracy)], command="fedsieve report a")
    last10 = sum(accuracy[-10:]) / 10
    assert rows_of(html, "fedavg") == [
        f"{last10:.2f}",
        "21.00 in round 12",
        "0.875",
        "36 kB",  # 12 rounds of 3000 bytes
        "48 kB",
        f"{12 * 6 / 60:.2f}",
        "12",
        str(tmp_path / "a"),
    ]
    words = Outline(html).words
    assert "16.5 % best 21.0 % in round 12" in words
    assert "1.5 kB" in words, "what left a site in a round: 3000 bytes of two sites"
    assert "fedsieve report a" in words
    assert "fedsieve run hand" in words
    assert "9.9" in words
    assert Outline(html).all("script") == []


def test_what_a_folder_does_not_hold_is_named(tmp_path: Path) -> None:
    html = report_page([write_run(tmp_path / "a", [50.0])])
    assert "Noise per site" not in headings(html)
    assert headings(html)[-1] == "Not in this report"
    assert "Noise per site; Losses and their mixture" in Outline(html).words


def test_an_unfinished_run_says_so_and_counts_what_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [10.0, 30.0], rounds=60, finished=False)
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"round": 2, "accu')  # killed in the middle of a line
    words = Outline(report_page([run])).words
    assert "fedavg is unfinished: 2 of 60 rounds" in words
    assert rows_of(report_page([run]), "fedavg")[0] == "20.00"


def test_a_run_killed_before_its_first_round(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [], rounds=5, finished=False)
    html = report_page([run])
    assert "unfinished: 0 of 5 rounds" in Outline(html).words
    assert rows_of(html, "fedavg")[:6] == ["–"] * 6


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "env.json", "summary.json", "findings.json"]
)
@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"[1, 2]\n", b"{{{\n"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, content: bytes
) -> None:
    run = write_run(tmp_path / "a", [10.0, 30.0])
    (run / name).write_bytes(content)
    html = report_page([run])
    assert f"{name} is damaged and was left out." in Outline(html).words
    if name != "metrics.jsonl":
        assert "20.00" in html


def test_lines_of_old_or_broken_runs_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    changes: dict[int, dict[str, Any]] = {
        0: {"accuracy": None, "seconds": None, "clients": []},
        1: {"accuracy": True, "bytes_up": "many", "round": None, "server": 3},
        2: {"server": {"mixture_mean_clean": 1.5}, "diagnostics": {"noise_error": 0.25}},
    }
    run = read_run(write_run(tmp_path / "a", [1.0, 2.0, 3.0], lines=changes))
    assert run.accuracy == [(3, 3.0)]
    assert run.points("server", "mixture_mean_clean") == [(3, 1.5)]
    assert run.bytes_per_site() == [(3, 1500.0)]
    assert run.minutes == pytest.approx(12 / 60)
    words = Outline(report_page([run.folder])).words
    assert "The sieve, round by round" in words


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedsieveError, match="does not hold a run"):
        report_page([tmp_path])
    with pytest.raises(FedsieveError, match="no folder"):
        report_page([tmp_path / "nowhere"])
    with pytest.raises(FedsieveError, match="at least one folder"):
        report_page([])
    with pytest.raises(FedsieveError, match="25 runs are too many"):
        report_page([tmp_path] * 25)


def test_only_a_log_is_enough(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(0, 5.0)) + "\n")
    assert rows_of(report_page([tmp_path]), tmp_path.name)[0] == "5.00"


@pytest.mark.parametrize("config", [None, "", '[method]\nname = "fedavg"\n'])
def test_runs_with_few_or_no_settings_stand_beside_others(
    tmp_path: Path, config: str | None
) -> None:
    scene = '[data]\nsource = "digits"\n[scene]\nclients = 4\n[scene.noise]\nkind = "symmetric"'
    whole, part = (write_run(tmp_path / name, [7.0], config=scene) for name in ("whole", "part"))
    if config is None:
        (part / "config.toml").unlink()
    else:
        (part / "config.toml").write_text(config)
    names = labels_of([read_run(whole), read_run(part)])
    if config:
        assert names == ["fedavg rounds=1, digits, 4 clients, symmetric noise", "fedavg, ?"]
    else:
        assert names == ["fedavg", "part"]
    assert rows_of(report_page([whole, part]), names[1])[0] == "7.00"


def test_runs_of_a_sweep_have_the_names_of_their_labels(tmp_path: Path) -> None:
    folders = []
    for place, text in enumerate(("w/o R_k", "full")):
        folder = write_run(tmp_path / str(place), [1.0], config=f"[sgd]\nlr = 0.{place + 1}\n")
        label = Label(axis="row", text=text, place=place, settings=("sgd.lr",))
        save_labels([label], folder)
        folders.append(folder)
    assert labels_of([read_run(folder) for folder in folders]) == ["fedavg w/o R_k", "fedavg full"]
    (folders[1] / "labels.json").write_text("{")
    assert "labels.json is damaged and was left out." in report_page(folders)


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    def run(name: str, **settings: Any) -> Path:
        return write_run(tmp_path / name, [1.0], **settings)

    def names(*folders: Path) -> list[str]:
        return labels_of([read_run(folder) for folder in folders])

    clean, noisy = '[scene.noise]\nkind = "none"', '[scene.noise]\nkind = "symmetric"'
    a, b = run("a", config=clean), run("b", method="fedgr", config=clean)
    assert names(a) == ["fedavg"]
    assert names(a, b) == ["fedavg", "fedgr"]
    assert names(a, run("c", config=noisy)) == ["fedavg, no noise", "fedavg, symmetric noise"]
    assert names(a, a) == ["fedavg, seed 1 (a #1)", "fedavg, seed 1 (a #2)"]
    other = run("d", config=clean)
    (other / "config.toml").write_text(
        (a / "config.toml").read_text().replace("seed = 1", "seed = 2")
    )
    assert names(a, other) == ["fedavg, seed 1", "fedavg, seed 2"]


@pytest.mark.parametrize(
    ("known", "noticed"), [({"lost_classes": {"<b>": 3}}, True), ({"lost_classes": 3}, False)]
)
def test_a_run_that_lost_a_class_says_so(
    tmp_path: Path, known: dict[str, object], noticed: bool
) -> None:
    folder = write_run(tmp_path / "a", [50.0, 60.0])
    (folder / "summary.json").write_text(json.dumps(known))
    html = report_page([folder])
    assert ("any test image of &#39;&lt;b&gt;&#39; (since round 3)." in html) is noticed
    assert "<b>" not in html


def test_the_best_of_a_column_is_marked_within_one_scene_only(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [50.0, 60.0])
    b = write_run(tmp_path / "b", [70.0, 70.0], method="fedgr")
    html = report_page([a, b])
    assert rows_of(html, "fedavg")[:2] == ["55.00", "60.00 in round 2"]
    assert rows_of(html, "fedgr")[:2] == ["70.00 ★", "70.00 ★ in round 1"]
    c = write_run(tmp_path / "c", [70.0], config='[scene.noise]\nkind = "symmetric"')
    assert "★" not in report_page([a, c])
    d = write_run(tmp_path / "d", [], method="fedprox", finished=False)
    assert "★" not in Outline(report_page([a, d])).text("td")


def test_settings_that_differ_stand_apart(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0], config="[sgd]\nlr = 0.1")
    b = write_run(tmp_path / "b", [1.0], config="[sgd]\nlr = 0.5")
    html = report_page([a, b])
    apart = html.split("settings in which the runs differ</caption>")[1].split("</table>")[0]
    assert Outline(apart).text("tbody", "th", "td") == [
        "setting",
        "fedavg lr=0.1",
        "fedavg lr=0.5",
        "sgd.lr",
        "0.1",
        "0.5",
    ]


def test_findings_become_plots_with_their_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [50.0])
    save_findings(found(), run)
    html = report_page([run])
    assert headings(html)[2:6] == [
        "Noise per site",
        "Losses and their mixture",
        "Which label is mistaken for which",
        "What checking the suspects would find",
    ]
    assert rows_of(html, "site 1") == ["10", f"{(2 * 0.9 + 8 * 0.2) / 10:.1%}", "20.0%"]
    assert rows_of(html, "bee") == ["ant", "3", "3"]
    words = Outline(html).words
    assert "Suspects (p ≥ ½): 3, of which 3 are wrong: precision 100.0%, recall 100.0%." in words
    assert "truly 15 %" in words


def test_the_share_of_wrong_labels_is_that_of_the_sites(tmp_path: Path) -> None:
    """A method's own estimates count at the top of the page as they do for each site."""
    labels = np.zeros(10, np.int64)
    sites = [
        SiteLabels(
            name=name,
            given=labels[:count],
            p_wrong=np.full(count, 0.9),
            suggested=labels[:count],
            noise_rate=rate,
        )
        for name, count, rate in [("a", 10, 0.1), ("b", 5, 0.4)]
    ]
    run = write_run(tmp_path / "a", [50.0])
    save_findings(findings_of(("ant", "bee"), sites), run)
    assert "Labels estimated wrong 20 %" in Outline(report_page([run])).words  # 1 + 2 of 15


def test_without_truth_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [50.0])
    save_findings(found(truth=False), run)
    html = report_page([run])
    assert "What checking the suspects would find" not in headings(html)
    assert rows_of(html, "site 1") == ["10", "34.0%"]
    assert rows_of(html, "bee") == ["ant", "3"]
    assert "right labels" not in Outline(html).words


def test_many_sites_become_dots_and_many_classes_a_list(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [50.0])
    classes = tuple(f"class {k}" for k in range(21))
    save_findings(found(sites=40, classes=classes), run)
    html = report_page([run])
    assert html.count('class="dot"') == 40
    assert "The 30 noisiest of 40 sites." in Outline(html).words
    assert 'class="cell' not in html
    assert rows_of(html, "class 1")[0] == "class 0"


def test_labels_without_mistakes_have_no_recall(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [50.0])
    clean = np.zeros(4, np.int64)
    site = SiteLabels(
        name="A", given=clean, true=clean, p_wrong=np.zeros(4), suggested=clean, losses=np.ones(4)
    )
    save_findings(findings_of(("ant", "bee"), [site]), run)
    words = Outline(report_page([run])).words
    assert "precision –, recall –" in words
    assert "there is no mixture" in words


def test_extras_of_an_audit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [50.0])
    extras = ReportExtras(
        title="Audit of <b>mine</b>",
        lead="Two sites.",
        findings=found(truth=False),
        links={"Check the worst labels": "review.html", "odd": "javascript:alert(1)"},
    )
    html = report_page([run], extras=extras)
    outline = Outline(html)
    assert outline.text("h1") == ["Audit of <b>mine</b>"]
    assert [link["href"] for link in outline.all("a")] == [
        "review.html",
        "javascript%3Aalert%281%29",
    ]
    assert "Two sites." in outline.words
    assert "Noise per site" in headings(html)
    with pytest.raises(FedsieveError, match="one run only"):
        report_page([run, run], extras=extras)


def test_the_fields_of_up_are_those_of_the_method(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [50.0], method="fedgr")
    b = write_run(tmp_path / "b", [50.0], method="mine")
    html = report_page([a, b])
    assert "what a site sends under fedgr" in html
    assert "what a site sends under mine" not in html
    assert rows_of(html, "weights") == ["the trained model"]
    assert rows_of(html, "losses")[0].startswith("(n,) float32")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_leaves_a_site_without_an_explanation(method: str, tmp_path: Path) -> None:
    html = report_page([write_run(tmp_path / "a", [50.0], method=method)])
    for field in fields(METHODS[method].up):
        (meaning,) = rows_of(html, field.name)
        assert len(meaning) > 10


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    run = write_run(tmp_path / "a", [50.0], method=hostile)
    save_findings(found(classes=(hostile, "bee\udc80")), run)
    html = report_page([run], command=hostile)
    html.encode()
    outline = Outline(html)
    assert outline.all("script") == []
    assert hostile in outline.words
    assert all(not any(n.startswith("on") or n == "style" for n in a) for _, a in outline.tags)


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_a_browser_shows_it_without_a_complaint(
    chromium: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    a, b = (
        write_run(tmp_path / name, [20.0, 60.0, 70.0], method=name, lines={1: SIEVED})
        for name in ("fedavg", "fedgr")
    )
    save_findings(found(), a)
    save_findings(found(), b)
    window = Window(
        chromium, tmp_path, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    page = window.show(report_page([a, b]))
    # accuracy and traffic together; noise, losses, pairs, suspects and two of the sieve for each
    assert page.locator("svg.plot:visible").count() == 2 + 2 * 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    clipped = page.evaluate(CLIPPED)
    complaints, requests = window.complaints, window.requests
    window.context.close()
    assert clipped == []
    assert complaints == []
    assert len(requests) == 1


@pytest.mark.browser
def test_folders_of_a_grid_can_be_read_without_scrolling(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise = '[scene.noise]\nkind = "{}"\nlow = 0.{}\nhigh = 0.9'
    traffic = {0: {"bytes_up": 16_600_000, "bytes_down": 16_600_000}}
    folders = [
        write_run(Path(f"runs/losses/w_o_CE-{kind}-seed1"), [20.0], config=config, lines=traffic)
        for kind, config in (
            ("symmetric", noise.format("symmetric", 5)),
            ("clean", noise.format("none", 3)),
        )
    ]
    window = Window(chromium, tmp_path, viewport={"width": 1280, "height": 800})
    page = window.show(report_page(folders))
    hidden = page.locator(".scroll").first.evaluate("box => box.scrollWidth - box.clientWidth")
    window.context.close()
    assert hidden == 0


SIEVED = {
    "diagnostics": {"sieve_precision": 0.5, "sieve_recall": 0.75, "noise_error": 0.25},
    "server": {"mixture_mean_clean": 0.5, "mixture_mean_noisy": 2.5},
}
CLIPPED = """() => [...document.querySelectorAll("svg.plot text")].filter((node) => {
  if (!node.checkVisibility()) return false;
  const own = node.getBoundingClientRect(), all = node.ownerSVGElement.getBoundingClientRect();
  return own.left < all.left - 1 || own.right > all.right + 1
    || own.top < all.top - 2 || own.bottom > all.bottom + 2;
}).map((node) => node.textContent)"""
"""Texts that stick out of their plot."""
