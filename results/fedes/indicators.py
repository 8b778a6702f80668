"""What each of FedES's indicators says of every client, round by round of stage 1, from one run.

    python results/fedes/indicators.py FOLDER NAME.csv fedes/table1 --method.indicator cosine …

is `fedsieve run … --out FOLDER` with these options, for one run in which all clients take part in
every round of stage 1; it writes NAME.csv: every indicator's ρ of every client, and how near they
are to the truth. The indicator of the run must be the cosine, for which the server keeps whole
updates: the others are made of them, too.
"""

import contextlib
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
from scipy.stats import spearmanr

from fedsieve.cli.grid import read_command
from fedsieve.cli.progress import watcher
from fedsieve.cli.run import RunOptions
from fedsieve.errors import FedsieveError, check
from fedsieve.methods import fedes
from fedsieve.scenes import load_scene
from fedsieve.simulate.control import RunPausedError
from fedsieve.simulate.diagnose import Truth
from fedsieve.simulate.directory import SCENE, RunDirectory
from fedsieve.simulate.run import run
from fedsieve.simulate.world import load_data
from fedsieve.types import Metrics

LOG = "indicators.jsonl"
INDICATORS = [name for name in get_args(fedes.Indicator) if name != "oracle"]


def watch(log: Path) -> None:
    """Have each estimation write down what every indicator makes of it."""
    conclude = fedes.concluded

    def concluded(cfg: fedes.Config, server: fedes.Server) -> tuple[fedes.Server, Metrics]:
        if server.estimation is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(qualities(server.estimation, server)) + "\n")
        return conclude(cfg, server)

    fedes.concluded = concluded


def qualities(estimation: fedes.Estimation, server: fedes.Server) -> dict[str, dict[int, float]]:
    """ρ of every client by every indicator."""
    start = fedes.flat(server.weights, estimation.trainable)
    profiles = {
        client: fedes.profile(fedes.criticality(update, start))
        for client, update in estimation.traces.items()
    }
    said = {}
    for indicator in INDICATORS:
        traces = estimation.traces if indicator == "cosine" else profiles
        found = fedes.distances(indicator, replace(estimation, traces=traces), start)
        said[indicator] = dict(zip(found, fedes.data_quality([*found.values()]), strict=True))
    return said


def write(folder: Path, log: Path, table: Path) -> None:
    recipe = RunDirectory(folder).recipe()
    labels = load_data(recipe).train_labels.numpy()
    truth = np.array(Truth.of(load_scene(folder / SCENE), labels).qualities)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        clients = [f"client {k}" for k in range(len(truth))]
        writer.writerow(("pretrain_rounds", "indicator", "spearman", "mse", *clients))
        writer.writerow(("", "truth", "", "", *(f"{q:.4f}" for q in truth)))
        for done, line in enumerate(log.read_text(encoding="utf-8").splitlines(), start=1):
            for indicator, rho in json.loads(line).items():
                values = np.array([rho[str(k)] for k in range(len(truth))])
                rank = spearmanr(values, truth).statistic
                error = np.square(values - truth).mean()
                numbers = (rank, error, *values)
                writer.writerow((done, indicator, *(f"{number:.4f}" for number in numbers)))


def main(folder: str, table: str, *options: str) -> None:
    asked, grid = read_command(RunOptions, "fedsieve run", options)
    planned = grid.only(asked.only).runs
    check(len(planned) == 1, f"These options ask for {len(planned)} runs; ask for one, by --only.")
    (recipe,) = (one.recipe for one in planned)
    check(recipe.method.indicator == "cosine", "Add --method.indicator cosine.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    watch(path / LOG)
    watching = watcher()
    with watching.shown(), contextlib.suppress(RunPausedError):
        run(recipe, path, watching)
    write(path, path / LOG, Path(table))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FedsieveError as error:
        sys.exit(str(error))
