"""A run, from its recipe to its summary, in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsieve.data.sources import Dataset
from fedsieve.labels import Label, save_labels
from fedsieve.local.compiled import import_compiler
from fedsieve.recipe import Recipe
from fedsieve.simulate.control import Interrupt, Reporter, RunInterruptedError, Silent
from fedsieve.simulate.directory import RunDirectory
from fedsieve.simulate.rounds import Simulation
from fedsieve.simulate.slots import compiles_steps
from fedsieve.simulate.world import load_data, pick_device


def run(
    recipe: Recipe,
    out: Path,
    reporter: Reporter | None = None,
    *,
    fork: Path | None = None,
    labels: Sequence[Label] = (),
    may_fork_out: bool = False,
    data: Dataset | None = None,
) -> dict[str, Any]:
    """Carry out `recipe` in the folder `out`, or what is left of it; the result is its summary.

    A new folder may begin as a `fork` of another run: where that one was saved last, to go on with
    other settings of the same method.
    `labels` are what its sweep calls the run; its folder says so from the beginning.
    `data` stand in for those that the recipe names, where they are in memory already.
    `may_fork_out` lets a long run with `engine.workers = 0` start worker processes by itself. They
    import the main module anew, so a script may only allow it under `if __name__ == "__main__"`.
    """
    reporter = reporter or Silent()
    directory = RunDirectory(out)
    with directory.lock():
        directory.refuse_other(recipe)
        if fork is not None:
            directory.check_fork(fork)
        finished = directory.summary()
        if finished is not None:
            directory.tidy_up()  # in case the run was cut before it could
            save_labels(labels, out)
            return finished
        if pick_device(recipe.engine.device).type == "cuda" and compiles_steps(recipe):
            import_compiler()  # while the data are read
        data = data or load_data(recipe)
        if fork is not None and directory.last_checkpoint() is None:
            directory.begin_as_fork(RunDirectory(fork), recipe)
        simulation = Simulation.open(recipe, directory, data)
        try:
            save_labels(labels, out)  # not before: a folder that is refused has its own
            reporter.started(recipe, out, simulation.rounds_done)
            if simulation.caution is not None:
                reporter.cautioned(simulation.caution)
            with Interrupt() as interrupt, simulation.saver as saver:
                simulation.go_on(reporter, interrupt, may_fork_out)
                summary = simulation.summary()
                if recipe.engine.keep_states:
                    saver.wait()
                else:
                    saver.abandon()
                directory.finish(summary)
                directory.tidy_up()
        finally:
            simulation.runner.close()
        if interrupt.asked:
            raise RunInterruptedError(f"Stopped; {out} is finished.")
        return summary
