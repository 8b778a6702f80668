"""Plots as SVG inside a page: no colour is needed to read them, and they follow its colours.

Every text goes through `Markup.format`, which escapes it. Looks are classes of report.css, since
the page's policy forbids styles on elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from fedsieve.sieve.gmm import Mixture
from fedsieve.simulate.findings import Findings, Histogram, Site

WHOLE = 760
"""Width of a plot that has a row of the page for itself."""
HALF = 430
"""Width of a plot that stands beside another."""
HEIGHT = {WHOLE: 340, HALF: 270}
STYLES = 8
"""dash patterns, markers and colours that report.css tells apart"""
LETTER = 7.2
"""Width of an average letter at the size of the plots' text."""
BOLD_LETTER = 9.0
"""The same for the names of lines."""
LINE = 16.0
"""Height of a line of text."""
MOST_LETTERS = 30


def fitting(draw: Callable[[int], Markup], width: int = WHOLE) -> Markup:
    """The plot that `draw` makes for a width; a whole one also for narrow windows."""
    if width == HALF:
        return draw(HALF)
    return Markup('<div class="wide">{}</div><div class="slim">{}</div>').format(
        draw(WHOLE), draw(HALF)
    )


@dataclass(frozen=True)
class Series:
    """A line of a plot."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5, least_step: float = 0.0) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    raw = max(span / about, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's or a cell's number, without digits that say nothing."""
    return f"{value:,.6g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def size(value: float) -> str:
    """Bytes for the eye, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.0f} TB"


def line_plot(
    title: str,
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    y_range: tuple[float, float] | None = None,
    y_text: Callable[[float], str] = number,
    width: int = WHOLE,
) -> Markup:
    """Lines over counts, such as rounds, with dashes, markers and their names at their ends."""
    return fitting(
        lambda pixels: _line_plot(title, series, x_title, y_title, y_range, y_text, pixels), width
    )


def _line_plot(
    title: str,
    series: Sequence[Series],
    x_title: str,
    y_title: str,
    y_range: tuple[float, float] | None,
    y_text: Callable[[float], str],
    width: int,
) -> Markup:
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    low, high = y_range or _padded(min(ys), max(ys))
    y_ticks = ticks(low, high)
    most = MOST_LETTERS if width == WHOLE else MOST_LETTERS // 2
    names = _shortened([line.name for line in drawn], most)
    left = 38 + LETTER * max(len(y_text(tick)) for tick in y_ticks)
    right = width - 26 - BOLD_LETTER * max(map(len, names))
    height = max(HEIGHT[width], int(LINE * len(drawn)) + 80)
    x_axis = Axis(min(xs), max(xs), left, right)
    y_axis = Axis(low, high, height - 48, 14)
    x_ticks = ticks(x_axis.low, x_axis.high, 7, least_step=1)
    parts = [_frame(x_axis, y_axis, x_ticks, y_ticks, x_title, y_title, y_text)]
    ends = _apart([y_axis(line.points[-1][1]) for line in drawn], 14, height - 48)
    for place, (line, name, end) in enumerate(zip(drawn, names, ends, strict=True)):
        parts.append(_line(line, place, x_axis, y_axis))
        last_x, last_y = x_axis(line.points[-1][0]), y_axis(line.points[-1][1])
        parts.append(
            Markup('<path class="leader s{}" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(
                place % STYLES, last_x + 5, last_y, right + 14, end
            )
        )
        parts.append(_text(right + 18, end + 5, name, f"name s{place % STYLES}"))
    return _svg(title, width, height, parts)


def site_plot(title: str, sites: Sequence[Site], width: int = WHOLE) -> Markup:
    """A row per site: ● estimated and ◇ true share of wrong labels, joined by their difference."""
    return fitting(lambda pixels: _site_plot(title, sites, pixels), width)


def _site_plot(title: str, sites: Sequence[Site], width: int) -> Markup:
    names = _shortened([site.name for site in sites])
    left = 20 + LETTER * max(map(len, names))
    height = int(26 * len(sites)) + 66
    axis = Axis(0, 1, left, width - 30)
    bottom = height - 44
    parts = [_grid_x(axis, [k / 5 for k in range(6)], 10, bottom, percent)]
    middle = (axis.start + axis.end) / 2
    parts.append(_text(middle, height - 6, "share of wrong labels", "axis-title mid"))
    for row, (site, name) in enumerate(zip(sites, names, strict=True)):
        y = 10 + 26 * (row + 0.5)
        parts.append(_text(left - 10, y + 5, name, "tick end"))
        x = axis(min(max(site.estimated, 0), 1))
        words = f"{site.name}: estimated {percent(site.estimated)}"
        marks = [Markup('<circle class="estimated" cx="{:.1f}" cy="{:.1f}" r="5"/>').format(x, y)]
        if site.true is not None:
            true = axis(site.true)
            words += f", true {percent(site.true)}"
            marks = [
                Markup('<path class="gap" d="M{:.1f} {:.1f}H{:.1f}"/>').format(x, y, true),
                *marks,
                Markup('<path class="true" d="M{:.1f} {:.1f}l7 7 7 -7 -7 -7z"/>').format(
                    true - 7, y
                ),
            ]
        parts.append(Markup("<g><title>{}</title>{}</g>").format(words, Markup("").join(marks)))
    return _svg(title, width, height, parts)


def scatter_plot(title: str, sites: Sequence[Site]) -> Markup:
    """Estimated against true share of wrong labels; sites on the diagonal are estimated right."""
    height = HEIGHT[HALF]
    x_axis, y_axis = Axis(0, 1, 76, HALF - 24), Axis(0, 1, height - 48, 14)
    shares = [k / 5 for k in range(6)]
    parts = [
        _frame(x_axis, y_axis, shares, shares, "true share", "estimated share", percent, percent)
    ]
    parts.append(
        Markup('<path class="diagonal" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(
            x_axis(0), y_axis(0), x_axis(1), y_axis(1)
        )
    )
    parts += [
        Markup(
            '<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="4.5"><title>{}</title></circle>'
        ).format(
            x_axis(site.true),
            y_axis(min(max(site.estimated, 0), 1)),
            f"{site.name}: estimated {percent(site.estimated)}, true {percent(site.true)}",
        )
        for site in sites
        if site.true is not None
    ]
    return _svg(title, HALF, height, parts)


def histogram_plot(
    title: str, losses: Histogram, mixture: Mixture | None, width: int = WHOLE
) -> Markup:
    """Bars of all labels, the wrong ones hatched where known, and the two parts of the mixture."""
    return fitting(lambda pixels: _histogram_plot(title, losses, mixture, pixels), width)


def _histogram_plot(title: str, losses: Histogram, mixture: Mixture | None, width: int) -> Markup:
    edges = losses.edges
    total = sum(losses.labels) or 1
    height = HEIGHT[width]
    curves = [] if mixture is None else _mixture_curves(mixture, edges, total)
    top = max([*losses.labels, *(y for _, points in curves for _, y in points)]) or 1
    y_ticks = ticks(0, top * 1.08)
    left = 38 + LETTER * max(len(number(tick)) for tick in y_ticks)
    x_axis = Axis(edges[0], edges[-1], left, width - 16)
    y_axis = Axis(0, top * 1.08, height - 48, 14)
    x_ticks = ticks(x_axis.low, x_axis.high, 7)
    parts = [_frame(x_axis, y_axis, x_ticks, y_ticks, "loss of the given label", "labels", number)]
    wrong = losses.wrong or (0,) * len(losses.labels)
    for place, (count, bad) in enumerate(zip(losses.labels, wrong, strict=True)):
        x0, x1 = x_axis(edges[place]) + 0.5, x_axis(edges[place + 1]) - 0.5
        right_top, whole_top = y_axis(count - bad), y_axis(count)
        parts.append(_bar("right-label", x0, right_top, x1, y_axis(0)))
        parts.append(_bar("wrong-label", x0, whole_top, x1, right_top))
    for place, (name, points) in enumerate(curves):
        parts.append(_curve(f"mixture m{place}", points, x_axis, y_axis))
        peak_x, peak_y = max(points, key=lambda point: point[1])
        x = min(max(x_axis(peak_x), left + 40), width - 56)
        parts.append(_text(x, max(y_axis(peak_y) - 8, 12), name, "halo mid"))
    return _svg(title, width, height, parts)


def _mixture_curves(
    mixture: Mixture, edges: Sequence[float], labels: int
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Each component's expected number of labels per bin, over the loss."""
    grid = np.linspace(edges[0], edges[-1], 160)
    curves = []
    for name, mean, variance, share in zip(
        ("clean part", "noisy part"), mixture.means, mixture.variances, mixture.shares, strict=True
    ):
        density = np.exp(-((grid - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
        heights = labels * (edges[1] - edges[0]) * share * density
        curves.append((name, list(zip(grid.tolist(), heights.tolist(), strict=True))))
    return curves


def confusion_plot(title: str, findings: Findings) -> Markup:
    """Given labels in rows, what they look like in columns; the darker, the more suspects."""
    classes = _shortened(findings.classes, 16)
    counts = {(pair.given, pair.likely): pair.suspects for pair in findings.mistaken}
    most = max(counts.values(), default=0) or 1
    cell = 34
    left = 44 + LETTER * max(map(len, classes))
    top = 30 + 0.72 * LETTER * max(map(len, classes))
    parts = [_text(left, 14, "looks like", "axis-title")]
    parts.append(_text(left - 8, top - 6, "given", "axis-title end"))
    for place, name in enumerate(classes):
        x, y = left + cell * (place + 0.5), top + cell * (place + 0.5)
        parts.append(_text(left - 8, y + 5, name, "tick end"))
        parts.append(
            Markup(
                '<text class="tick" transform="translate({:.1f} {:.1f}) rotate(-40)">{}</text>'
            ).format(x - 3, top - 6, name)
        )
    for given in range(len(classes)):
        for likely in range(len(classes)):
            count = counts.get((given, likely), 0)
            level = 0 if count == 0 else max(1, math.ceil(6 * count / most))
            x, y = left + cell * likely, top + cell * given
            words = f"{count} given {findings.classes[given]}, look like {findings.classes[likely]}"
            parts.append(
                Markup(
                    '<g><title>{}</title><rect class="cell {}" x="{:.1f}" y="{:.1f}" width="{}" '
                    'height="{}"/>{}</g>'
                ).format(
                    words,
                    "same" if given == likely else f"level{level}",
                    x + 1,
                    y + 1,
                    cell - 2,
                    cell - 2,
                    _text(x + cell / 2, y + cell / 2 + 5, str(count), f"count mid on{level}")
                    if count
                    else "",
                )
            )
    side = cell * len(classes)
    return _svg(title, int(max(left + side + 60, 320)), int(top + side + 12), parts)


# ---------------------------------------------------------------------------------------- parts


def _svg(title: str, width: int, height: int, parts: Iterable[Markup]) -> Markup:
    look = {WHOLE: "whole", HALF: "half"}.get(width, "fixed")
    return Markup(
        '<svg class="plot {}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}">{}</svg>'
    ).format(look, width, height, width, height, title, Markup("").join(parts))


def _frame(
    x_axis: Axis,
    y_axis: Axis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_title: str,
    y_title: str,
    y_text: Callable[[float], str],
    x_text: Callable[[float], str] = number,
) -> Markup:
    """The grid, the numbers at both axes, and their titles."""
    parts = [_grid_x(x_axis, x_ticks, y_axis.end, y_axis.start, x_text)]
    for tick in y_ticks:
        y = y_axis(tick)
        parts.append(
            Markup('<path class="grid" d="M{:.1f} {:.1f}H{:.1f}"/>').format(
                x_axis.start, y, x_axis.end
            )
        )
        parts.append(_text(x_axis.start - 8, y + 5, y_text(tick), "tick end"))
    middle = (x_axis.start + x_axis.end) / 2
    parts.append(_text(middle, y_axis.start + 42, x_title, "axis-title mid"))
    parts.append(
        Markup(
            '<text class="axis-title mid" transform="translate(14 {:.1f}) rotate(-90)">{}</text>'
        ).format((y_axis.start + y_axis.end) / 2, y_title)
    )
    return Markup("").join(parts)


def _grid_x(
    axis: Axis, places: Sequence[float], top: float, bottom: float, shown: Callable[[float], str]
) -> Markup:
    parts = []
    for place in places:
        x = axis(place)
        parts.append(
            Markup('<path class="grid" d="M{:.1f} {:.1f}V{:.1f}"/>').format(x, top, bottom)
        )
        parts.append(_text(x, bottom + 19, shown(place), "tick mid"))
    return Markup("").join(parts)


def _line(line: Series, place: int, x_axis: Axis, y_axis: Axis) -> Markup:
    """A dashed line with at most ten markers; the pattern depends on its place alone."""
    style = place % STYLES
    every = max(1, math.ceil(len(line.points) / 10))
    marked = [*line.points[place % every :: every], line.points[-1]]
    marks = [_marker(style, x_axis(x), y_axis(y)) for x, y in marked]
    return Markup("<g><title>{}</title>{}{}</g>").format(
        line.name, _curve(f"line s{style}", line.points, x_axis, y_axis), Markup("").join(marks)
    )


def _curve(look: str, points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> Markup:
    path = "L".join(f"{x_axis(x):.1f} {y_axis(y):.1f}" for x, y in points)
    return Markup('<path class="{}" d="M{}"/>').format(look, path)


_MARKERS = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "m-4 -4h8v8h-8z",
    "m0 -5l5 9h-10z",
    "m0 -5.5l5.5 5.5 -5.5 5.5 -5.5 -5.5z",
    "m0 5l5 -9h-10z",
    "m-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "m-4 -4l8 8m0 -8l-8 8",
    "m0 -5v10m-5 -5h10",
)


def _marker(style: int, x: float, y: float) -> Markup:
    return Markup('<path class="marker s{}" d="M{:.1f} {:.1f}{}"/>').format(
        style, x, y, _MARKERS[style]
    )


def _bar(look: str, x0: float, y0: float, x1: float, y1: float) -> Markup:
    if y1 - y0 < 0.05:
        return Markup("")
    return Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
        look, x0, y0, max(x1 - x0, 0.5), y1 - y0
    )


def _text(x: float, y: float, words: str, look: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(look, x, y, words)


def _shortened(names: Sequence[str], most: int = MOST_LETTERS) -> list[str]:
    """The names in at most so many letters. Those that would look alike without their ends lose
    what stands between their first letters and the word in which they begin to differ."""
    whole = [" ".join(name.split()) for name in names]
    alike: dict[str, set[str]] = {}
    for name in whole:
        alike.setdefault(_cut(name, most), set()).add(name)
    return [_told_from(alike[_cut(name, most)], name, most) for name in whole]


def _told_from(alike: Collection[str], name: str, most: int) -> str:
    """One of the names that would look alike if cut; the only one is just cut."""
    if len(alike) == 1:
        return _cut(name, most)
    letters = enumerate(zip(*alike, strict=False))
    shared = next((k for k, kth in letters if len(set(kth)) > 1), min(map(len, alike)))
    head = most // 3
    room = most - head - 6  # for an ellipsis, and five letters behind what is shared
    word = max(head, name.rfind(" ", 0, shared) + 1, shared - room)
    return _cut(f"{name[:head]}…{name[word:]}", most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.06 * (high - low) or max(abs(high) * 0.05, 1e-6)
    return low - pad, high + pad


def _apart(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Heights near the wanted ones, in their order, a line of text apart, within the plot."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = [0.0] * len(wanted)
    lowest = top
    for index in order:
        placed[index] = max(wanted[index], lowest)
        lowest = placed[index] + LINE
    highest = bottom
    for index in reversed(order):
        placed[index] = min(placed[index], highest)
        highest = placed[index] - LINE
    return placed
