"""The rounds of a run: select, send, train, merge, evaluate, write a line; resume after a cut."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from fedsieve.data.sources import Dataset
from fedsieve.errors import check
from fedsieve.local.bench import Setup, joint_logits
from fedsieve.methods import method
from fedsieve.methods.contract import Federation, Method
from fedsieve.recipe import Recipe
from fedsieve.scenes import fingerprint_of, load_scene, save_scene
from fedsieve.serial import payload_bytes, to_device
from fedsieve.simulate.by_class import scores_of
from fedsieve.simulate.control import Interrupt, Reporter, RunInterruptedError, RunPausedError
from fedsieve.simulate.diagnose import Truth, auroc, beliefs, diagnose, drift, per_client
from fedsieve.simulate.directory import CLIENTS, METRICS, SCENE, RunDirectory, save_model
from fedsieve.simulate.findings import SiteLabels, findings_of, save_findings
from fedsieve.simulate.memorise import memorisation
from fedsieve.simulate.runners import InProcess, Runner, one_thread
from fedsieve.simulate.saving import Saver
from fedsieve.simulate.slots import Slots, fits_graphs
from fedsieve.simulate.store import ClientStore
from fedsieve.simulate.summary import Clock, client_means, summary_of
from fedsieve.simulate.workers import Workers
from fedsieve.simulate.world import (
    Job,
    Result,
    World,
    client_memory,
    first_unusable,
    initial_weights,
    make_setup,
    make_world,
    pick_device,
    scene_of,
)
from fedsieve.types import SERVER, ClientId, Metrics, Streams, Weights, nothing

LONG_RUN_SECONDS = 30.0
"""Training ahead that justifies starting worker processes."""
CHECKPOINT_SECONDS = 60.0
CHECKPOINT_SHARE = 0.05
"""Where a recipe does not say how often: every minute, but at most this share of the time."""


@dataclass(frozen=True, eq=False)
class _Unfinished:
    """A round that is trained and averaged, but not described yet."""

    round: int
    jobs: Sequence[Job]
    results: Sequence[Result]
    refused: Mapping[ClientId, str]
    """Whose update was left out, and which tensor of it was to blame."""
    sent: Sequence[Weights]
    """The networks that the clients started from."""
    server: Any
    """As the round left it."""
    server_metrics: Metrics
    right: Callable[[], Sequence[int]]
    """Of each class how many test images are classified as labelled, when that is known."""
    clock: Clock


@dataclass
class Simulation:
    """The moving parts of a run between two rounds."""

    recipe: Recipe
    directory: RunDirectory
    method: Method
    world: World
    setup: Setup
    truth: Truth | None
    classes: tuple[str, ...]
    site_names: tuple[str, ...]
    runner: Runner
    store: ClientStore
    saver: Saver
    server: Any
    rounds_done: int
    fastest_round: float = float("inf")
    unfinished: _Unfinished | None = None
    caution: str | None = None
    """What someone should know of this run before it trains."""

    @staticmethod
    def open(recipe: Recipe, directory: RunDirectory, data: Dataset) -> Simulation:
        """The simulation as the folder left it, or from its beginning."""
        check(
            not (data.train_labels_are_noisy and recipe.engine.memorisation_every),
            f"engine.memorisation_every needs true labels, and {recipe.data.source} has none; "
            "set it to 0.",
        )
        device = pick_device(recipe.engine.device)
        checkpoint = directory.last_checkpoint()
        scene_file = directory.path / SCENE
        scene = load_scene(scene_file) if checkpoint else scene_of(recipe, data)
        check(
            scene.fingerprint == fingerprint_of(data.train_labels.numpy()),
            f"The data are not those that the run in {directory.path} began with; give it the "
            "same data, or another folder with --out.",
        )
        world = make_world(data, scene, device)
        setup = make_setup(recipe, data)
        chosen = method(recipe.method.name)
        federation = Federation(
            tuple(int(n) for n in scene.sizes),
            recipe.clients_per_round,
            recipe.rounds,
            len(data.classes),
        )
        if checkpoint is None:
            server = chosen.init_server(recipe.method, initial_weights(setup), federation)
        else:
            server = directory.load_server(checkpoint, chosen.server)
        # Only now is the folder taken, so that a recipe that cannot run may be mended.
        directory.claim(recipe)
        if checkpoint is None:
            save_scene(scene, scene_file)
        directory.open_logs(
            (METRICS, CLIENTS) if recipe.engine.client_lines else (METRICS,), checkpoint
        )
        store = ClientStore(
            directory.client_folder,
            chosen.client,
            budget_bytes=client_memory(recipe.engine.client_memory_mb, device),
            device=device,
            committed=checkpoint.clients if checkpoint else {},
        )
        truth = None
        if not data.train_labels_are_noisy:
            truth = Truth.of(scene, data.train_labels.numpy())
        return Simulation(
            recipe=recipe,
            directory=directory,
            method=chosen,
            world=world,
            setup=setup,
            truth=truth,
            classes=data.classes,
            site_names=data.site_names,
            runner=first_runner(recipe, world, setup, directory.path),
            store=store,
            saver=Saver(directory, store, device),
            server=to_device(server, device),
            rounds_done=checkpoint.rounds_done if checkpoint else 0,
            caution=chosen.all_warm_up(recipe.method, federation),
        )

    def go_on(self, reporter: Reporter, interrupt: Interrupt, may_fork_out: bool) -> None:
        """Run the rounds that are left, with a checkpoint when one is due. The last one is still
        being written at the end, in case that what follows fails."""
        started = time.monotonic()
        limit = self.recipe.engine.stop_after_minutes

        def report(*, aside: bool = False) -> None:
            if self.unfinished is not None:
                reporter.finished_round(self.finish_round(aside=aside))

        if self._did_enough() and self.rounds_done < self.recipe.rounds:
            raise self._stopped(interrupt)
        while self.rounds_done < self.recipe.rounds:
            seconds = self.train_round(
                meanwhile=functools.partial(report, aside=True), trained=reporter.trained_clients
            )
            if not self.runner.idle_while_training:
                report()
            if may_fork_out:
                self._speed_up(seconds)
            out_of_time = limit is not None and time.monotonic() - started >= 60 * limit
            stop = interrupt.asked or out_of_time or self._did_enough()
            is_last = self.rounds_done == self.recipe.rounds
            if stop or is_last or self._checkpoint_is_due():
                report()
                self.saver.begin(self.rounds_done, self.server)
            if stop and not is_last:
                self.saver.wait()
                raise self._stopped(interrupt)

    def _did_enough(self) -> bool:
        """Whether the run has come to where it is to stop, before its end."""
        asked = self.recipe.engine.stop_after_rounds
        return asked is not None and self.rounds_done >= asked

    def _stopped(self, interrupt: Interrupt) -> RunInterruptedError:
        without = " without engine.stop_after_rounds" if self._did_enough() else ""
        as_told = self._did_enough() and not interrupt.asked
        return (RunPausedError if as_told else RunInterruptedError)(
            f"Stopped after round {self.rounds_done} of {self.recipe.rounds}; "
            f"the same command{without} goes on from there."
        )

    def next_round(self) -> dict[str, Any]:
        """Run one round; the result is its line in the metrics."""
        self.train_round()
        return self.finish_round()

    def train_round(
        self,
        meanwhile: Callable[[], None] = nothing,
        trained: Callable[[int, int], None] = nothing,
    ) -> float:
        """Train and average; what only describes the round is left for `finish_round`, which may
        be done while the next one trains. `trained` is told how many clients are done, of how many.
        The result are the seconds of training."""
        round, cfg, clock = self.rounds_done, self.recipe.method, Clock()
        with one_thread():  # the order of a sum depends on how many there are
            jobs = [
                Job(k, self.store.get(k), self.method.send(cfg, self.server, round, k))
                for k in self._selected(round)
                if len(self.world.clients[k])
            ]
        sent = self.method.networks(self.server)

        def aside() -> None:
            if round + 1 < self.recipe.rounds:
                self.runner.look_ahead(round + 1, lambda: self._selected(round + 1))
            meanwhile()

        results = self.runner.train(round, jobs, aside, lambda done: trained(done, len(jobs)))
        clock.lap("train")
        refused = {r.client: bad for r in results if (bad := first_unusable(r.up)) is not None}
        usable = [result for result in results if result.client not in refused]
        server_metrics: Mapping[str, float] = {}
        if usable:
            ups = {result.client: result.up for result in usable}
            with one_thread():
                self.server, server_metrics = self.method.merge(cfg, self.server, round, ups)
        for result in usable:
            self.store.put(result.client, result.state, round)
        clock.lap("merge")
        right = self.runner.examine(self.method.networks(self.server))
        clock.lap("evaluate")
        self.rounds_done += 1
        self.unfinished = _Unfinished(
            round, jobs, results, refused, sent, self.server, server_metrics, right, clock
        )
        return clock.laps["train"]

    def _selected(self, round: int) -> list[ClientId]:
        """Who takes part, as far as the server can say now."""
        streams = Streams(self.recipe.seed, round, SERVER)
        return sorted(self.method.select(self.recipe.method, self.server, round, streams))

    def finish_round(self, *, aside: bool = False) -> dict[str, Any]:
        """Evaluate and diagnose the round that was trained last; the result is its line in the
        metrics. What is done `aside`, while the next round trains, takes no time of its own."""
        done = self.unfinished
        assert done is not None
        clock = Clock() if aside else done.clock
        usable = [result for result in done.results if result.client not in done.refused]
        how_far = self._drift(usable, done.sent[0])
        diagnostics: dict[str, float] = {}
        at_clients: Mapping[ClientId, Metrics] = {}
        if self.truth is not None:
            states = {result.client: result.state for result in usable}
            diagnostics = diagnose(self.method, done.server, states, self.truth)
        clock.lap("diagnose")
        scores = scores_of(done.right(), self._tested, self.classes)
        clock.lap("evaluate")
        every = self.recipe.engine.memorisation_every
        if self.truth is not None and every and (done.round + 1) % every == 0:
            overall, at_clients = self._memorisation(done, usable, self.truth)
            diagnostics |= overall
        bytes_down = sum(payload_bytes(job.down) for job in done.jobs)
        bytes_up = sum(payload_bytes(result.up) for result in done.results)
        clock.lap("diagnose")
        line = {
            "round": done.round,
            **scores,
            "drift": how_far,
            "clients": [job.client for job in done.jobs],
            "refused": {
                str(client): f"{tensor} is not finite; the update was left out of the average"
                for client, tensor in done.refused.items()
            },
            "bytes_down": bytes_down,
            "bytes_up": bytes_up,
            "client": client_means([result.metrics for result in usable]),
            "server": done.server_metrics,
            "diagnostics": diagnostics,
            "seconds": {**done.clock.laps, "diagnose": done.clock.laps.get("diagnose", 0.0)},
        }
        self.directory.append(METRICS, line)
        if self.recipe.engine.client_lines:
            self._write_client_lines(done, at_clients)
        self.unfinished = None
        return line

    @functools.cached_property
    def _tested(self) -> tuple[int, ...]:
        """Test images of each class."""
        labels = self.world.test_labels.cpu()
        return tuple(torch.bincount(labels, minlength=self.world.num_classes).tolist())

    @functools.cached_property
    def _trainable(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.setup.make_model().named_parameters())

    def _drift(self, usable: list[Result], sent: Weights) -> float | None:
        local = [self.method.local_weights(result.up) for result in usable]
        with one_thread():
            return drift(local, sent, self._trainable) if local else None

    def _memorisation(
        self, done: _Unfinished, usable: list[Result], truth: Truth
    ) -> tuple[Metrics, Mapping[ClientId, Metrics]]:
        """The new global model on all samples; with client lines, each trained model and the one it
        started from on its client's."""
        at_clients: dict[ClientId, dict[str, Sequence[Weights]]] = {}
        if self.recipe.engine.client_lines:
            at_clients = {
                result.client: {"local": self.method.local_networks(result.up), "global": done.sent}
                for result in usable
            }
        with one_thread():
            return memorisation(
                self.runner.bench,
                self.world,
                truth,
                self.recipe.seed,
                done.round,
                self.method.networks(done.server),
                at_clients,
            )

    def _write_client_lines(self, done: _Unfinished, memorised: Mapping[ClientId, Metrics]) -> None:
        states = {result.client: result.state for result in done.results}
        believed = beliefs(self.method, self.method.sieve(done.server), states)
        for result in done.results:
            line: dict[str, Any] = {"round": done.round, "client": result.client, **result.metrics}
            if self.truth is not None:
                line |= per_client(believed.get(result.client), self.truth, result.client)
            line |= memorised.get(result.client, {})
            self.directory.append(CLIENTS, line)

    def _speed_up(self, seconds: float) -> None:
        """Start worker processes once it is clear that the run is long enough to pay for them."""
        processes = processes_for(self.recipe, self.world.device)
        first_round = self.fastest_round == float(
            "inf"
        )  # slow: everything is used for the first time
        self.fastest_round = min(self.fastest_round, seconds)
        ahead = (self.recipe.rounds - self.rounds_done) * self.fastest_round
        if (
            isinstance(self.runner, InProcess)
            and processes > 1
            and not first_round
            and ahead > LONG_RUN_SECONDS
        ):
            self.runner.close()
            self.runner = Workers(
                self.recipe, self.world, self.setup, processes, self.directory.path
            )

    def _checkpoint_is_due(self) -> bool:
        engine = self.recipe.engine
        if engine.checkpoint_rounds and self.rounds_done % engine.checkpoint_rounds == 0:
            return True
        if self.saver.is_writing():
            return False
        wait = seconds_between_checkpoints(engine.checkpoint_seconds, self.saver.last_took)
        return time.monotonic() - self.saver.saved_at >= wait

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers; the global model is saved beside them."""
        save_model(self.directory, self.method.weights(self.server))
        summary = summary_of(self.recipe, self.directory.lines(), self.classes, self.world.device)
        sites = self._site_labels()
        save_findings(findings_of(self.classes, sites), self.directory.path)
        if self.truth is not None:
            summary["noise"] = float(self.truth.scene.overall_noise(self.truth.labels))
            summary["suspect_auroc"] = auroc(
                np.concatenate([site.p_wrong for site in sites]),
                np.concatenate([site.given != site.true for site in sites]),
            )
        return summary

    def _site_labels(self) -> list[SiteLabels]:
        """How the method and the final global model see every label of every client."""
        sieved = self.method.sieve(self.server)
        bench, networks = self.runner.bench, self.method.networks(self.server)
        sites = []
        for client, held in enumerate(self.world.clients):
            if not len(held):
                continue
            shard = self.world.shard(client)
            state = self.store.get(client)
            if state is None:
                state = self.method.init_client(self.recipe.method, shard)
            down = self.method.send(self.recipe.method, self.server, self.rounds_done, client)
            with one_thread():
                suspicion = self.method.suspect(self.recipe.method, state, down, shard, bench)
                raw = bench.view("raw", shard.images, Streams(0, 0, client)("raw"))
                logits = joint_logits(bench, networks, raw)
                losses = cross_entropy(logits, shard.labels, reduction="none")
            truth = self.truth
            sites.append(
                SiteLabels(
                    name=self.site_names[client] if self.site_names else f"site {client}",
                    given=shard.labels.numpy(force=True),
                    p_wrong=suspicion.p_wrong.numpy(force=True),
                    suggested=suspicion.suggested.numpy(force=True),
                    losses=losses.numpy(force=True),
                    true=None if truth is None else truth.labels[truth.scene.clients[client]],
                    noise_rate=sieved[client].noise_rate if client in sieved else None,
                )
            )
        return sites


def seconds_between_checkpoints(asked: float | None, last_took: float) -> float:
    """As asked for, or else a minute, or longer where a checkpoint takes so long."""
    return max(CHECKPOINT_SECONDS, last_took / CHECKPOINT_SHARE) if asked is None else asked


def processes_for(recipe: Recipe, device: torch.device) -> int:
    """How many train the clients of a long run, once that may start worker processes by itself."""
    if device.type != "cpu" or recipe.engine.workers != 0:
        return 1
    return min(usable_cores(), recipe.clients_per_round)


def usable_cores() -> int:
    """Cores that this process may use; all of the machine where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def first_runner(recipe: Recipe, world: World, setup: Setup, folder: Path) -> Runner:
    """Who trains the first round; a long run on a CPU may get workers after it.

    `folder` is where worker processes find the data.
    """
    if world.device.type == "cpu" and recipe.engine.workers > 1:
        return Workers(recipe, world, setup, recipe.engine.workers, folder)
    if world.device.type == "cuda" and recipe.engine.slots > 0 and fits_graphs(setup):
        slots = min(recipe.engine.slots, recipe.clients_per_round)
        return Slots(recipe, world, setup, slots)
    return InProcess(recipe, world, setup)
