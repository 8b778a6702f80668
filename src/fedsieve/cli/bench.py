"""`fedsieve bench`: how fast, and how far it scales, measured on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedsieve.bench.report import Report, print_report, write_json, write_markdown
from fedsieve.cli.options import POSITIONAL, like, parse_given
from fedsieve.config import from_table
from fedsieve.errors import check
from fedsieve.recipe import with_setting


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """What wrong labels are put into."""

    source: str = "fashion-mnist"
    """Name of a data source with true labels."""
    path: Path = Path("data")
    """Folder of the source."""
    images: int | None = None
    """Images to take, at random; left out: all."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Measure fedsieve: `speed` of a round against a bare PyTorch loop, `scale` in clients, how
    well an `audit` finds wrong labels, against cleanlab on pooled data, or what `flower` costs."""

    what: Literal["speed", "scale", "audit", "flower"] = field(default="speed", metadata=POSITIONAL)
    """What to measure."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to measure speed or to audit."""
    fused_norms: bool = True
    """Measure speed on a GPU with `engine.fused_norms`, as runs have it, or without."""
    rounds: int | None = None
    """Rounds to measure; left out: 40 on a CPU, 20 on a GPU and on Flower, for scale one turn of
    all clients, for an audit 20 in each fold."""
    data: BenchData = field(default_factory=BenchData)
    methods: tuple[str, ...] = ("fedavg",)
    """Methods whose models judge the labels in an audit."""
    seed: int = 1
    """What the scene and the training of an audit descend from."""
    clients: tuple[int, ...] = (100, 1000, 10_000)
    """Numbers of clients to measure scale with."""
    out: Path | None = None
    """Folder for the numbers (JSON), the page (Markdown) and the picture."""


def main(argv: Sequence[str]) -> int:
    options = read_options(argv)
    check(
        options.what in ("speed", "audit") or options.device == "cpu",
        f"{options.what.capitalize()} is measured on a CPU; leave --device out.",
    )
    check(
        options.fused_norms or (options.what == "speed" and options.device == "cuda"),
        "--fused-norms is for the speed of a GPU; add `speed --device cuda`, or leave it out.",
    )
    report = measure(options)
    print_report(report, Console(file=sys.stdout))
    if options.out is not None:
        name = f"speed-{options.device}" if options.what == "speed" else options.what
        write_json(report, options.out / f"{name}.json")
        write_markdown(report, options.out / f"{name}.md")
        print(f"Written to {options.out}")
    return 0


def read_options(argv: Sequence[str]) -> BenchOptions:
    table: dict[str, Any] = {}
    for path, value in parse_given(like([BenchOptions], {}), "fedsieve bench", argv).items():
        table = with_setting(table, path, value)
    return from_table(BenchOptions, table)


def measure(options: BenchOptions) -> Report:
    # Each measurement imports what it needs: a GPU's compiler, or other libraries.
    if options.what == "scale":
        from fedsieve.bench.scale import measure_scale

        return measure_scale(options.clients, options.rounds, options.out)
    if options.what == "audit":
        from fedsieve.bench.audit import AuditWork, measure_audit

        work = AuditWork(
            source=options.data.source,
            images=options.data.images,
            methods=options.methods,
            rounds=options.rounds or 20,
            seed=options.seed,
            device=options.device,
        )
        return measure_audit(work, options.data.path, options.out, may_fork_out=True)
    if options.what == "flower":
        check(
            find_spec("flwr") is not None,
            "This needs Flower; install it with `pip install 'fedsieve[flower]'`.",
        )
        from fedsieve.bench.federation import measure_federation

        return measure_federation(options.rounds or 20)
    if options.device == "cuda":
        from fedsieve.bench.speed_gpu import measure_speed_gpu

        return measure_speed_gpu(options.rounds or 20, fused_norms=options.fused_norms)
    from fedsieve.bench.speed_cpu import measure_speed_cpu

    return measure_speed_cpu(options.rounds or 40)
