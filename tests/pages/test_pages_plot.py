"""Plots: numbers in the right places, names that can be read, nothing that escapes."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages_samples import Outline

from fedsieve.pages import plot
from fedsieve.pages.plot import Series
from fedsieve.sieve.gmm import Mixture
from fedsieve.simulate.findings import Findings, Histogram, Mistaken, Site


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert plot.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert plot.ticks(1, 60, 7) == [10, 20, 30, 40, 50, 60]
    assert plot.ticks(0.13, 0.94) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert plot.ticks(3, 3) == [3]
    assert plot.ticks(1, 4, 7) == [1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert plot.ticks(1, 4, 7, least_step=1) == [1, 2, 3, 4]


@settings(max_examples=25, deadline=None)
@given(low=st.floats(-1e9, 1e9), span=st.floats(1e-3, 1e9))
def test_ticks_are_a_handful(low: float, span: float) -> None:
    places = plot.ticks(low, low + span)
    assert 2 <= len(places) <= 7
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in places)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (56_274, "56.3 kB"), (999_600, "1 MB"), (2.5e15, "2,500 TB")],
)
def test_bytes_for_the_eye(value: float, text: str) -> None:
    assert plot.size(value) == text


def test_numbers_without_digits_that_say_nothing() -> None:
    assert [plot.number(v) for v in (0, 20.0, 0.30000000000000004, 12_345, 2e-6)] == [
        "0",
        "20",
        "0.3",
        "12,345",
        "2.0e-06",
    ]


def line_paths(svg: str) -> list[list[tuple[float, float]]]:
    paths = re.findall(r'<path class="line [^"]*" d="M([^"]+)"', svg)
    return [[tuple(map(float, p.split())) for p in path.split("L")] for path in paths]  # type: ignore[misc]


def test_a_line_goes_through_its_points() -> None:
    svg = plot.line_plot(
        "t",
        [Series("a", [(1, 0), (2, 50), (3, 100)])],
        x_title="round",
        y_title="%",
        y_range=(0, 100),
        width=plot.HALF,
    )
    (path,) = line_paths(svg)
    (x0, y0), (x1, y1), (x2, y2) = path
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.11)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.11)
    assert y0 > y2, "more is higher"
    ticks = dict(re.findall(r'y="([\d.]+)">(\d+)</text>', svg))
    heights = {label: float(y) - 5 for y, label in ticks.items()}
    assert heights["0"] == pytest.approx(y0, abs=0.11)
    assert heights["100"] == pytest.approx(y2, abs=0.11)
    assert "1.5" not in re.findall(r">([\d.]+)</text>", svg), "there is no half round"


def test_a_whole_plot_comes_with_a_narrow_one() -> None:
    drawn = plot.line_plot("t", [Series("a", [(1, 2)])], x_title="x", y_title="y")
    boxes = [tag["viewbox"] for tag in Outline(drawn).all("svg")]
    assert [str(box).split()[2] for box in boxes] == [str(plot.WHOLE), str(plot.HALF)]


def test_lines_can_be_told_apart_without_colour_and_their_names_do_not_overlap() -> None:
    series = [Series(f"run {k}", [(1, 50), (2, 50)]) for k in range(24)]
    svg = plot.line_plot("t", series, x_title="x", y_title="y", width=plot.HALF)
    looks = re.findall(r'class="line (s\d)"', svg)
    assert looks == [f"s{k % plot.STYLES}" for k in range(24)]
    markers = re.findall(r'class="marker s\d" d="M[\d.]+ [\d.]+([^"]+)"', svg)
    assert len(set(markers)) == plot.STYLES
    heights = sorted(float(y) for y in re.findall(r'class="name s\d" x="[\d.]+" y="([\d.]+)"', svg))
    assert len(heights) == 24
    assert min(b - a for a, b in itertools.pairwise(heights)) >= plot.LINE - 0.2
    (box,) = Outline(svg).all("svg")
    assert heights[0] > 0
    assert heights[-1] < float(str(box["height"])) - 20


def test_names_are_escaped_and_long_ones_shortened() -> None:
    hostile = "<script>alert(1)</script>"
    svg = plot.line_plot(
        hostile, [Series(hostile * 3, [(1, 1)])], x_title=hostile, y_title=hostile, width=plot.HALF
    )
    svg += plot.site_plot(hostile, [Site(name=hostile, samples=1, estimated=0.5, true=0.5)])
    svg += plot.scatter_plot(hostile, [Site(name=hostile, samples=1, estimated=0.5, true=0.5)])
    classes = (hostile, "x")
    pairs = (Mistaken(given=0, likely=1, suspects=3),)
    svg += plot.confusion_plot(hostile, findings(classes=classes, mistaken=pairs))
    outline = Outline(svg)
    assert outline.all("script") == []
    assert any("…" in text for text in outline.text("text"))
    assert all(not {"style", "onload"} & attributes.keys() for _, attributes in outline.tags)


@pytest.mark.parametrize("width", [plot.WHOLE, plot.HALF])
@pytest.mark.parametrize(
    "names",
    [
        [f"fedcorr, symmetric noise, high=0.9, low=0.{k}" for k in (3, 5)],
        ["x" * 60 + "1", "x" * 60 + "2", "x" * 60],
        ["a" * 40 + " 1, the first", "a" * 40 + " 1, the second", "a" * 40 + " 2"],
    ],
)
def test_names_that_differ_in_their_ends_only_stay_different(names: list[str], width: int) -> None:
    series = [Series(name, [(1, k)]) for k, name in enumerate(names)]
    svg = plot.line_plot("t", series, x_title="x", y_title="y", width=width)
    drawn = re.findall(r'class="name s\d"[^>]*>([^<]+)<', svg)
    per_plot = len(names)  # a whole plot comes with a narrow one
    for start in range(0, len(drawn), per_plot):
        shown = drawn[start : start + per_plot]
        assert len(set(shown)) == per_plot
        assert all(short[:5] == name[:5] for short, name in zip(shown, names, strict=True))
        assert all(len(short) <= plot.MOST_LETTERS for short in shown)


def test_classes_that_differ_in_their_ends_only_stay_different() -> None:
    found = findings(classes=("adenocarcinoma stage 1", "adenocarcinoma stage 2"), mistaken=())
    outline = Outline(plot.confusion_plot("t", found))
    assert [name for name in outline.text("text") if "ade" in name] == [
        place for stage in (1, 2) for place in 2 * [f"adeno…{stage}"]
    ]


def findings(classes: tuple[str, ...], mistaken: tuple[Mistaken, ...]) -> Findings:
    return Findings(classes=classes, samples=9, suspects=3, sites=(), mistaken=mistaken)


def test_sites_stand_at_their_estimated_and_true_share() -> None:
    sites = [
        Site(name="A", samples=10, estimated=0.0, true=1.0),
        Site(name="B", samples=10, estimated=0.5),
        Site(name="C", samples=10, estimated=1.7),  # some methods estimate by a formula
    ]
    svg = plot.site_plot("t", sites, plot.HALF)
    zero, half, one = (float(x) for x in re.findall(r'class="estimated" cx="([\d.]+)"', svg))
    assert half == pytest.approx((zero + one) / 2, abs=0.11)
    (true,) = re.findall(r'class="true" d="M([\d.]+)', svg)
    assert float(true) + 7 == pytest.approx(one, abs=0.11)
    assert Outline(svg).text("title")[0] == "A: estimated 0 %, true 100 %"
    assert "B: estimated 50 %" in Outline(svg).text("title")


def test_the_scatter_shows_sites_whose_truth_is_known() -> None:
    sites = [
        Site(name="A", samples=1, estimated=0.2, true=0.2),
        Site(name="B", samples=1, estimated=0.2),
    ]
    svg = plot.scatter_plot("t", sites)
    assert svg.count('class="dot"') == 1


def bars(svg: str, look: str) -> list[float]:
    return [float(h) for h in re.findall(rf'class="{look}"[^>]* height="([\d.]+)"', svg)]


def test_bars_are_as_high_as_their_counts() -> None:
    losses = Histogram(edges=(0.0, 1.0, 2.0), labels=(4, 2), wrong=(1, 2))
    svg = plot.histogram_plot("t", losses, None, plot.HALF)
    (right,), wrong = bars(svg, "right-label"), bars(svg, "wrong-label")
    assert right == pytest.approx(3 * wrong[0], abs=0.2)
    assert wrong[1] == pytest.approx(2 * wrong[0], abs=0.2)
    assert 'class="mixture' not in svg
    plain = plot.histogram_plot("t", Histogram(edges=(0.0, 1.0), labels=(0,)), None, plot.HALF)
    assert bars(plain, "right-label") == []


def test_the_mixture_is_drawn_in_labels_per_bin() -> None:
    """At the mean of a component the curve is n·w·share/√(2πσ²): here 100·1·½/√(2π·0.16)."""
    mixture = Mixture(
        means=(2.0, 8.0), variances=(0.16, 0.16), shares=(0.5, 0.5), converged=True, iterations=1
    )
    losses = Histogram(
        edges=tuple(map(float, range(11))), labels=(0, 25, 25) + (0,) * 4 + (25, 25, 0)
    )
    svg = plot.histogram_plot("t", losses, mixture, plot.HALF)
    peak = 100 * 0.5 / (2 * 3.141592653589793 * 0.16) ** 0.5
    bar = bars(svg, "right-label")[0]
    curve = re.findall(r'class="mixture m0" d="M([^"]+)"', svg)[0]
    heights = [float(point.split()[1]) for point in curve.split("L")]
    assert (max(heights) - min(heights)) / bar == pytest.approx(peak / 25, rel=0.02)
    assert Outline(svg).text("text")[-2:] == ["clean part", "noisy part"]


def test_the_matrix_counts_suspects() -> None:
    pairs = (Mistaken(given=0, likely=1, suspects=12), Mistaken(given=1, likely=0, suspects=1))
    svg = plot.confusion_plot("t", findings(("ant", "bee"), pairs))
    assert "12 given ant, look like bee" in Outline(svg).text("title")
    assert svg.count('class="cell same"') == 2
    assert 'class="cell level6"' in svg, "the most frequent pair"
    assert 'class="cell level1"' in svg
    empty = plot.confusion_plot("t", findings(("ant", "bee"), ()))
    assert 'class="cell level0"' in empty
