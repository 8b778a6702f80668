"""`fedsieve bench`: how fast, and how far it scales, measured on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from fedsieve.bench.report import Report, print_report, write_json, write_markdown
from fedsieve.cli.options import POSITIONAL, parse
from fedsieve.errors import check


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure fedsieve: `speed` of a round against a bare PyTorch loop, or `scale` in clients."""

    what: Literal["speed", "scale"] = field(default="speed", metadata=POSITIONAL)
    """What to measure."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure speed."""
    rounds: int | None = None
    """Rounds to measure; left out: 40 on a CPU, 20 on a GPU, for scale one turn of all clients."""
    clients: tuple[int, ...] = (100, 1000, 10_000)
    """Numbers of clients to measure scale with."""
    out: Path | None = None
    """Folder for the numbers (JSON), the page (Markdown) and the picture."""


def main(argv: Sequence[str]) -> int:
    options = parse(BenchOptions, "fedsieve bench", argv)
    check(
        options.what == "speed" or options.device == "cpu",
        "Scale is measured on a CPU; leave --device out.",
    )
    report = measure(options)
    print_report(report, Console(file=sys.stdout))
    if options.out is not None:
        name = options.what if options.what == "scale" else f"speed-{options.device}"
        write_json(report, options.out / f"{name}.json")
        write_markdown(report, options.out / f"{name}.md")
        print(f"Written to {options.out}")
    return 0


def measure(options: BenchOptions) -> Report:
    # Each measurement imports what it needs: a GPU's compiler, or other libraries.
    if options.what == "scale":
        from fedsieve.bench.scale import measure_scale

        return measure_scale(options.clients, options.rounds, options.out)
    if options.device == "cuda":
        from fedsieve.bench.speed_gpu import measure_speed_gpu

        return measure_speed_gpu(options.rounds or 20)
    from fedsieve.bench.speed_cpu import measure_speed_cpu

    return measure_speed_cpu(options.rounds or 40)
