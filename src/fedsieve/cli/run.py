"""`fedsieve run`: carry out a recipe, or the grid of runs that it describes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedsieve.cli import INTERRUPTED
from fedsieve.cli.grid import PlannedRun, read_command
from fedsieve.cli.options import POSITIONAL
from fedsieve.cli.output import print_table
from fedsieve.cli.progress import watcher
from fedsieve.cli.table import score_text
from fedsieve.data.own.layout import refuse_inside
from fedsieve.errors import FedsieveError, check
from fedsieve.recipe import recipe_table
from fedsieve.simulate.by_class import lost_in_words
from fedsieve.simulate.control import RunInterruptedError, RunPausedError
from fedsieve.simulate.directory import CONFIG, SUMMARY, RunDirectory
from fedsieve.simulate.results import Arranged, Outcome, arrange, score_of
from fedsieve.simulate.run import run
from fedsieve.simulate.summary import LAST_ROUNDS

FOR_A_GPU = (
    "This recipe is meant for a GPU: run it where there is one (--engine.device cuda), or with a "
    "smaller network (--model.name small); `fedsieve run demo` is quick on a CPU."
)
FILES = {
    "summary.json": "the result in a few numbers",
    "metrics.jsonl": "one line per round: accuracy, losses, diagnostics, seconds, bytes",
    "clients.jsonl": "one line per client and round",
    "model.safetensors": "the global model after the last round",
    "findings.json": "what the run found out about its labels",
    "scene.safetensors": "who held what, with which labels",
    "config.toml": "every setting; `fedsieve run` takes it as a recipe",
    "env.json": "versions, hardware and command",
    "labels.json": "what the recipe's sweep calls this run",
}
"""What a run leaves in its folder."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Train a recipe. The same command again goes on where it was stopped, and skips what is
    finished."""

    recipe: str | None = field(default=None, metadata=POSITIONAL)
    """A TOML file, or a name from `fedsieve recipes`; without it: the built-in demonstration."""
    out: Path | None = None
    """Folder of the run, or of all runs of a grid. Left out: runs/ and the recipe's name, with six
    hexadecimal digits that stand for the settings given here."""
    seeds: tuple[int, ...] = ()
    """Run everything once with each of these seeds."""
    only: tuple[str, ...] = ()
    """Of a grid, only the runs with these labels: with any of those that belong to one axis."""
    fork: Path | None = None
    """Folder of a run to fork from: begin where it was saved last (see --engine.stop_after_rounds),
    and go on with other settings of the same method. Of a folder that holds several runs, each run
    takes the one with its seed and its settings outside the method."""


def main(argv: Sequence[str]) -> int:
    options, grid = read_command(RunOptions, "fedsieve run", argv)
    for note in grid.notes:
        print(f"fedsieve: {note}", file=sys.stderr)
    check(bool(options.only) or "--only" not in argv, "--only needs a label of the recipe's sweep.")
    grid = grid.only(options.only)
    origins = [
        origin_of(planned, options.fork, grid.folder_of(planned, options.out))
        for planned in grid.runs
    ]
    for planned in grid.runs:
        data = planned.recipe.data
        if data.path is not None and data.source in ("folder", "sites"):
            refuse_inside(data.path, grid.folder_of(planned, options.out))
    outcomes = []
    watching = watcher(advice=FOR_A_GPU)
    try:
        with watching.shown():
            for planned, origin in zip(grid.runs, origins, strict=True):
                folder = grid.folder_of(planned, options.out)
                was_finished = (folder / SUMMARY).exists()
                try:
                    summary = run(
                        planned.recipe,
                        folder,
                        watching,
                        fork=origin,
                        labels=planned.labels,
                        may_fork_out=True,
                    )
                except RunInterruptedError as stop:
                    if not isinstance(stop, RunPausedError):
                        raise
                    print(f"{planned.name}: {stop}", file=sys.stderr)
                    continue
                if was_finished:
                    watching.skipped(folder)
                table = recipe_table(planned.recipe)
                outcomes.append(Outcome.of(table, summary, folder, planned.labels))
    except RunInterruptedError as stop:
        print(f"fedsieve: {stop}", file=sys.stderr)
        return INTERRUPTED
    except torch.OutOfMemoryError:
        raise FedsieveError(
            "The GPU has not enough memory; try a smaller --engine.slots or --sgd.batch_size."
        ) from None
    if outcomes:
        header, rows = result_rows(arrange(outcomes))
        print_table(header, rows, title=_TITLE, caption=_caption(outcomes))
    if len(grid.runs) == 1:
        folder = grid.folder_of(grid.runs[0], options.out)
        print(f"Results in {folder}")
        for name, meaning in FILES.items():
            if (folder / name).exists():
                print(f"  {name:18} {meaning}")
    else:
        print(f"Results in {options.out or grid.default_folder}")
    return 0


def origin_of(planned: PlannedRun, fork: Path | None, folder: Path) -> Path | None:
    """The run that this one, in `folder`, is to fork from: `fork` itself, or the one below it that
    fits; of a fork that was begun, the one that it began from, which may have gone on since."""
    if fork is None or (fork / CONFIG).exists():
        return fork
    check(fork.is_dir(), f"There is no folder {fork}; give that of a run to fork from.")
    begun = RunDirectory(folder).origin()
    if begun is not None and begun.is_relative_to(fork.resolve()):
        return begun
    held = [RunDirectory(config.parent) for config in sorted(fork.rglob(CONFIG))]
    stopped = [run for run in held if run.last_checkpoint() is not None]
    check(
        bool(stopped),
        f"No run below {fork} has a checkpoint to fork from; let runs stop where forks are to "
        "begin (engine.stop_after_rounds).",
    )
    namesakes = [run for run in stopped if run.path.name == planned.name]
    fitting = [run for run in stopped if run.obstacle_to_forking(planned.recipe) is None]
    if not fitting:
        nearest = (namesakes or stopped)[0]
        raise FedsieveError(
            f"{planned.name} cannot fork from any run below {fork}: {nearest.path}, for one, has "
            f"{nearest.obstacle_to_forking(planned.recipe)}, and a fork may differ in settings of "
            "the method only."
        )
    named = [run for run in namesakes if run in fitting]
    chosen = named if len(named) == 1 else fitting
    check(
        len(chosen) == 1,
        f"{planned.name} could fork from {' or '.join(str(run.path) for run in chosen[:2])}; give "
        "the folder of the one to fork from.",
    )
    return chosen[0].path


_TITLE = f"Accuracy on the test set in %: mean of the last {LAST_ROUNDS} rounds (and best round)"


def result_rows(arranged: Arranged) -> tuple[list[str], list[list[str]]]:
    """The closing table: per scene the accuracy, and the AUROC where suspects can be judged."""
    judged = [
        column
        for column in arranged.columns
        if score_of(arranged.in_column(column), "suspect_auroc") is not None
    ]
    header = ["method"]
    for column in arranged.columns:
        header.append(f"{column}\n{_wrong_share(arranged.in_column(column))}".strip())
        if column in judged:
            header.append("suspects'\nAUROC")
    rows = []
    for name in arranged.rows:
        row = [name]
        for column in arranged.columns:
            last = score_text(arranged.score(name, column, "last10"), ".1f", **_PLAIN)
            best = score_text(arranged.score(name, column, "best"), ".1f", **_PLAIN)
            row.append(f"{last} ({best})" if (name, column) in arranged.entries else "–")
            if column in judged:
                auroc = arranged.score(name, column, "suspect_auroc")
                row.append(score_text(auroc, ".3f", **_PLAIN))
        rows.append(row)
    return header, rows


_PLAIN: dict[str, Any] = {"missing": "–", "between": " ± "}


def _wrong_share(outcomes: Sequence[Outcome]) -> str:
    """How many labels are wrong in a scene, in words; empty where the true ones are not known."""
    noise = score_of(outcomes, "noise")
    if noise is None:
        return ""
    return f"{noise.mean:.0%} of labels wrong" if noise.mean > 0 else "all labels right"


def _caption(outcomes: Sequence[Outcome]) -> str | None:
    lines = []
    if score_of(outcomes, "suspect_auroc") is not None:
        lines.append(
            "suspects' AUROC: how well the method's suspicion tells wrong labels from right ones "
            "(0.5 is guessing, 1 is perfect)"
        )
    refused = sum(int(outcome.summary.get("refused_updates", 0)) for outcome in outcomes)
    if refused:
        lines.append(
            f"{refused} updates were not finite and were left out; a smaller --sgd.lr may help "
            "(metrics.jsonl says whose)"
        )
    lost = [(o, words) for o in outcomes if (words := lost_in_words(o.summary))]
    if lost:
        first, words = lost[0]
        whose = "The final model"
        if len(outcomes) > 1 and first.folder is not None:
            share = f"{len(lost)} of {len(outcomes)} runs"
            whose = f"{share} have lost a class; the final model of {first.folder.name}"
        lines.append(f"{whose} no longer recognises any test image of {words}")
    return "\n".join(lines) or None
