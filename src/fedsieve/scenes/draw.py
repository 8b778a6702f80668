"""A scene for the eye: a summary in plain text, and a picture that needs no colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsieve.errors import check
from fedsieve.scenes.noise import Noise
from fedsieve.scenes.partition import FloatArray, IntArray, Partition
from fedsieve.scenes.scene import Scene

MAX_COLUMNS = 400
"""More clients than this are drawn as groups of neighbours."""
MAX_CLASS_TICKS = 25
_TONES = {"symmetric": "0.35", "asymmetric": "0.75", "matrix": "0.35", "file": "0.35"}


def describe(
    scene: Scene,
    true_labels: npt.ArrayLike,
    class_names: Sequence[str] | None = None,
    *,
    rows: int = 10,
    truth_is_known: bool = True,
) -> str:
    """A summary of the scene in plain text, with a table of its first `rows` clients.

    Where the truth is not known, `true_labels` are those that people gave, and nothing is said
    about wrong ones.
    """
    names = _checked_names(scene, class_names)
    counts = scene.class_counts(true_labels)
    rates = scene.true_rates(true_labels)
    classes = (counts > 0).sum(axis=0)
    sizes = scene.sizes
    used = len(np.unique(np.concatenate(scene.clients)))
    which, wrong, columns, noise = "all classes", "not known", "", [""] * len(scene.clients)
    if truth_is_known:
        which, columns = "true classes", "  noise       level   wrong"
        share = scene.overall_noise(true_labels)
        wrong = f"{share:.2%} of all, {_spread(rates, '{:.2%}')} per client"
        noise = [
            f"  {kind:10}  {level:5.3f}  {rate:6.1%}"
            for kind, level, rate in zip(scene.kinds, scene.levels, rates, strict=True)
        ]
    lines = [
        f"clients       {len(scene.clients):,}",
        f"samples used  {used:,} of {len(scene.given):,}, in {scene.num_classes} classes",
        f"seed          {scene.seed}",
        f"partition     {_options(scene.config.partition)}",
        f"noise         {_options(scene.config.noise)}",
        f"sizes         {_spread(sizes, '{:,.0f}')} samples per client",
        f"{which:12}  {_spread(classes, '{:,.0f}')} per client",
        f"wrong labels  {wrong}",
        "",
        f"client  samples  classes{columns}  most common {'true ' * truth_is_known}class",
    ]
    top = counts.argmax(axis=0)
    lines += [
        f"{k:6d}  {sizes[k]:7,d}  {classes[k]:7d}{noise[k]}"
        f"  {names[top[k]]} ({counts[top[k], k] / sizes[k]:.0%})"
        for k in range(min(rows, len(scene.clients)))
    ]
    if len(scene.clients) > rows:
        lines.append(f"… and {len(scene.clients) - rows:,} more clients")
    return "\n".join(lines)


def picture(
    scene: Scene,
    true_labels: npt.ArrayLike,
    class_names: Sequence[str] | None,
    path: Path | str,
    *,
    truth_is_known: bool = True,
) -> None:
    """Draw who holds which classes, and below it each client's wrong labels, into a PNG file.

    Where the truth is not known, `true_labels` are those that people gave, and the wrong ones are
    not drawn.
    More than 400 clients are drawn as groups of neighbours: their mean, and the range of noise.
    """
    # Imported here because it is slow to load, and only pictures need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    names = _checked_names(scene, class_names)
    num_clients = len(scene.clients)
    starts = np.arange(0, num_clients, -(-num_clients // MAX_COLUMNS))
    widths = np.diff(starts, append=num_clients)
    edges = np.append(starts, num_clients) - 0.5
    shown = np.add.reduceat(scene.class_counts(true_labels), starts, axis=1) / widths
    is_grouped = len(starts) < num_clients

    row_height = 0.25 if scene.num_classes <= MAX_CLASS_TICKS else 0.06
    heat_height = min(max(row_height * scene.num_classes, 1.5), 7.0)
    heights = [heat_height, 2.0] if truth_is_known else [heat_height]
    figure = Figure(figsize=(10, sum(heights) + 1.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    heat, *below = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, squeeze=False
    ).flat

    rows = np.arange(scene.num_classes + 1) - 0.5
    # A square-root scale keeps small holdings visible beside large ones.
    tone = PowerNorm(0.5, vmin=0, vmax=shown.max())
    mesh = heat.pcolormesh(edges, rows, shown, cmap="Greys", norm=tone)
    heat.invert_yaxis()
    ticks = range(0, scene.num_classes, -(-scene.num_classes // MAX_CLASS_TICKS))
    heat.set_yticks(list(ticks), [_shorten(names[c]) for c in ticks])
    heat.set_ylabel("true class" if truth_is_known else "class")
    noise = f"{scene.config.noise.kind} noise, {scene.overall_noise(true_labels):.2%} wrong labels"
    heat.set_title(
        f"{num_clients:,} clients, {scene.config.partition.kind} partition,"
        f" {noise if truth_is_known else 'labels as given'}, seed {scene.seed}",
        fontsize=10,
    )
    figure.colorbar(mesh, ax=heat, label="samples per client", aspect=6 * heat_height)
    lowest_axes = [heat, *below][-1]
    lowest_axes.set_xlim(edges[0], edges[-1])
    lowest_axes.set_xlabel(
        f"client (each column: {widths[0]} neighbouring clients)" if is_grouped else "client"
    )
    if num_clients <= MAX_CLASS_TICKS:
        lowest_axes.set_xticks(range(num_clients))
    for bars in below:
        _draw_wrong_labels(bars, scene, scene.true_rates(true_labels), starts, edges)
    figure.savefig(path, format="png")


def _draw_wrong_labels(
    bars: Any, scene: Scene, rates: FloatArray, starts: IntArray, edges: FloatArray
) -> None:
    """Bars of each client's share of wrong labels, or the mean and range of groups of clients."""
    num_clients = len(rates)
    widths = np.diff(starts, append=num_clients)
    if len(starts) < num_clients:
        means = np.add.reduceat(rates, starts) / widths
        lowest, highest = np.minimum.reduceat(rates, starts), np.maximum.reduceat(rates, starts)
        bars.stairs(
            highest, edges, baseline=lowest, fill=True, color="0.8", label="lowest to highest"
        )
        bars.stairs(means, edges, baseline=None, color="0.0", label="mean")
    else:
        tones = np.array([_TONES.get(kind, "0.35") for kind in scene.kinds])
        for kind in sorted(set(scene.kinds) - {"none"}) or ["none"]:
            mine = np.flatnonzero(np.array(scene.kinds) == kind)
            label = "no noise" if kind == "none" else f"{kind} noise"
            bars.bar(mine, rates[mine], width=0.8, color=tones[mine], label=label)
        dash = min(560 / num_clients, 24.0)
        bars.plot(scene.levels, "_", color="0.0", markersize=dash, label="drawn level")
    bars.set_ylim(0, 1)
    bars.set_ylabel("share of wrong labels")
    bars.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False)


def _checked_names(scene: Scene, class_names: Sequence[str] | None) -> Sequence[str]:
    names = class_names or [f"class {c}" for c in range(scene.num_classes)]
    check(
        len(names) == scene.num_classes,
        f"{len(names)} class names were given for {scene.num_classes} classes.",
    )
    return names


def _shorten(name: str, length: int = 18) -> str:
    short = name if len(name) <= length else name[: length - 1] + "…"
    return short.replace("$", r"\$")  # or Matplotlib would take it for a formula


def _options(config: Partition | Noise) -> str:
    """The kind and every option that was set, as in a recipe."""
    words = [str(config.kind)]
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name == "matrix" and value is not None:
            words.append(f"{len(value)} × {len(value)} matrix")
        elif option.name != "kind" and value != option.default:
            words.append(f"{option.name} = {value}")
    return ", ".join(words)


def _spread(values: npt.NDArray[np.generic], form: str) -> str:
    numbers: FloatArray = values.astype(np.float64)
    low, middle, high = numbers.min(), float(np.median(numbers)), numbers.max()
    return f"{form.format(low)} / {form.format(middle)} / {form.format(high)} (min/median/max)"
