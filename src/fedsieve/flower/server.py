"""The ServerApp: rounds of a method over real sites, with the folder of a run at the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsieve.data.sources import Dataset
from fedsieve.errors import FedsieveError, check
from fedsieve.flower.founding import Founded, data_of_server, found, to_send
from fedsieve.flower.messages import (
    FINISH,
    NOTHING_YET,
    ROUND,
    Hello,
    Order,
    Question,
    Receipt,
)
from fedsieve.flower.records import Packer, content_bytes, from_content, metrics_of, to_content
from fedsieve.flower.roster import (
    NODE_UNAVAILABLE,
    Parcel,
    Roster,
    Say,
    exchange,
    harmless,
    problem_of,
)
from fedsieve.flower.settings import Settings
from fedsieve.flower.site import make_bench, recipe_of
from fedsieve.local.bench import EagerBench
from fedsieve.methods import method
from fedsieve.methods.contract import Federation, Method
from fedsieve.recipe import Recipe
from fedsieve.serial import payload_bytes
from fedsieve.simulate.by_class import lost_in_words, scores_of
from fedsieve.simulate.diagnose import drift
from fedsieve.simulate.directory import METRICS, Model, RunDirectory, save_model
from fedsieve.simulate.runners import one_thread
from fedsieve.simulate.summary import Clock, client_means, summary_of
from fedsieve.simulate.world import (
    first_unusable,
    initial_weights,
    right_by_class,
    setup_for,
)
from fedsieve.types import SERVER, ClientId, Metrics, Streams, Weights

REMIND_SECONDS = 10.0
"""How often the server says whom it is waiting for."""
LOOK_SECONDS = 0.5

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator, unused-ignore]
def main(grid: Grid, context: Context) -> None:
    """Start the federation, or go on with it."""
    federate(grid, Settings.of(context.run_config), logging.getLogger("flwr").info)


def federate(grid: Grid, settings: Settings, say: Say) -> dict[str, Any]:
    """Carry out the recipe over the grid's sites, or what is left of it; the result is its summary.

    Everything is in the folder `settings.out`, in the form of a simulated run. A finished run whose
    results did not reach every site is taken up once more, to hand them over.
    """
    directory = RunDirectory(settings.out)
    with directory.lock():
        directory.refuse_other(settings.recipe)
        finished = directory.summary()
        if finished is not None and not finished.get("without_results"):
            say(f"{settings.out} is finished.")
            return finished
        engine = Engine.open(grid, settings, directory, say)
        while engine.rounds_done < settings.recipe.rounds:
            line = engine.next_round()
            say(describe(line, settings.recipe.rounds))
        summary = engine.finish()
        directory.finish(summary)
        if noise := noise_in_words(summary):
            say(noise)
        say(f"Finished; {settings.out} holds the model and the metrics.")
        if lost := lost_in_words(summary):
            say(f"The final model no longer recognises any test image of {lost}.")
        return summary


def describe(line: Mapping[str, Any], rounds: int) -> str:
    """A line of metrics as a sentence."""
    accuracy = f", accuracy {line['accuracy']:.2f} %" if "accuracy" in line else ""
    left_out = "".join(f"\n  {site}: {reason}" for site, reason in line["refused"].items())
    return (
        f"Round {line['round'] + 1}/{rounds}{accuracy}, "
        f"{len(line['clients']) - len(line['refused'])} of {len(line['clients'])} sites{left_out}"
    )


def noise_in_words(summary: Mapping[str, Any]) -> str | None:
    """The sites' estimated noise, the noisiest first; None where the server has no opinion."""
    noise: Mapping[str, float] = summary.get("site_noise", {})
    if not noise:
        return None
    width = max(map(len, noise))
    rows = [
        f"\n  {site:{width}} {100 * noise[site]:5.1f} %"
        for site in sorted(noise, key=lambda site: -noise[site])
    ]
    return "Share of each site's labels that the method takes for wrong:" + "".join(rows)


@dataclass(frozen=True)
class Examination:
    """A test set at the server and the workbench to try models on it."""

    bench: EagerBench
    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]
    sizes: tuple[int, ...]
    """Images of each class."""

    @staticmethod
    def of(data: Dataset, bench: EagerBench) -> Examination:
        images, labels = data.test_images.to(bench.device), data.test_labels.to(bench.device)
        sizes = torch.bincount(data.test_labels, minlength=len(data.classes)).tolist()
        return Examination(bench, images, labels, data.classes, tuple(sizes))

    def scores(self, networks: Sequence[Weights]) -> dict[str, Any]:
        """Of the networks together, by name."""
        with one_thread():
            right = right_by_class(self.bench, networks, self.images, self.labels, len(self.sizes))
        return scores_of(right, self.sizes, self.classes)


@dataclass
class Engine:
    """The moving parts of a federation between two rounds."""

    settings: Settings
    directory: RunDirectory
    grid: Grid
    roster: Roster
    say: Say
    method: Method
    founded: Founded
    test: Examination | None
    trainable: tuple[str, ...]
    server: Any
    merged: dict[ClientId, int]
    """Client → last round in which its reply was used, and so whose state it goes on from."""
    rounds_done: int
    strangers: set[str] = field(default_factory=set)
    """Sites that came too late, and were told so."""

    @staticmethod
    def open(grid: Grid, settings: Settings, directory: RunDirectory, say: Say) -> Engine:
        """The federation as the folder left it, or from its beginning, when the sites are there."""
        recipe = settings.recipe
        data = data_of_server(recipe)
        checkpoint = directory.last_checkpoint()
        founded = Founded.load(directory.path)
        roster = Roster(grid, to_content(question=Question(to_send(recipe))), say)
        if founded is None:
            hellos = wait_for(
                roster, settings, say, settings.sites, lambda sites: list(sites), "to begin"
            )
            founded = found(recipe, data, [hello for _, hello in hellos.values()])
        else:
            members = [member.site for member in founded.members]
            need = min(settings.sites, len(members))
            wait_for(
                roster, settings, say, need, lambda s: [m for m in members if m in s], "to go on"
            )
        charter, chosen = founded.charter, method(recipe.method.name)
        whole = _with_charter(recipe, founded)
        setup = setup_for(whole, charter.shape, len(charter.classes))
        federation = Federation(
            founded.sizes, recipe.clients_per_round, recipe.rounds, len(charter.classes)
        )
        caution = chosen.all_warm_up(recipe.method, federation)
        if caution is not None:
            say(caution)
        if checkpoint is None:
            server = chosen.init_server(recipe.method, initial_weights(setup), federation)
        else:
            server = directory.load_server(checkpoint, chosen.server)
        # Only now is the folder taken, so that a recipe that cannot run may be mended.
        # Flower's command for this process holds a token, so it is never the one on record.
        directory.claim(recipe, settings.command)
        founded.save(directory.path)
        directory.open_logs((METRICS,), checkpoint)
        bench = make_bench(setup, recipe.engine.device)
        return Engine(
            settings=settings,
            directory=directory,
            grid=grid,
            roster=roster,
            say=say,
            method=chosen,
            founded=founded,
            test=None if data is None else Examination.of(data, bench),
            trainable=bench.trainable,
            server=server,
            merged=dict(checkpoint.clients) if checkpoint else {},
            rounds_done=checkpoint.rounds_done if checkpoint else 0,
        )

    def next_round(self) -> dict[str, Any]:
        """Run one round and commit it; the result is its line in the metrics."""
        round, recipe, clock = self.rounds_done, self.settings.recipe, Clock()
        cfg = recipe.method
        streams = Streams(recipe.seed, round, SERVER)
        selected = [
            k
            for k in sorted(self.method.select(cfg, self.server, round, streams))
            if self.founded.sizes[k]
        ]
        nodes = self._connected(selected)
        clock.lap("wait")
        with one_thread():
            downs = {k: self.method.send(cfg, self.server, round, k) for k in nodes}
        answers, refused = self._ask(round, nodes, downs)
        clock.lap("train")
        sent = self.method.weights(self.server)
        ups = {k: answer.up for k, answer in answers.items()}
        server_metrics = self._merge(round, ups, refused)
        clock.lap("merge")
        line: dict[str, Any] = {"round": round}
        if self.test is not None:
            line |= self.test.scores(self.method.networks(self.server))
        clock.lap("evaluate")
        for client in selected:
            if client not in nodes:
                refused[client] = "It was not connected."
        line |= {
            "drift": self._drift(ups, sent),
            "clients": selected,
            "refused": {self.site(k): refused[k] for k in sorted(refused)},
            "bytes_down": sum(payload_bytes(down) for down in downs.values()),
            "bytes_up": sum(payload_bytes(answer.up) for answer in answers.values()),
            "client": client_means([answers[k].metrics for k in ups]),
            "server": server_metrics,
            "diagnostics": {},
            "seconds": clock.laps,
        }
        self.directory.append(METRICS, line)
        self.merged |= dict.fromkeys(ups, round)
        self.rounds_done += 1
        self.directory.save_server(self.rounds_done, self.server)
        self.directory.commit(self.directory.checkpoint(self.rounds_done, self.merged))
        return line

    def site(self, client: ClientId) -> str:
        return self.founded.members[client].site

    def _connected(self, clients: list[ClientId]) -> dict[ClientId, int]:
        """Client → node of those that are connected; waits while none of them is."""
        names = {self.site(client): client for client in clients}
        for site in self.roster.sites():
            if self.founded.client_of(site) is None and site not in self.strangers:
                self.strangers.add(site)
                self.say(
                    f"{site} is not one of the {len(self.founded.members)} sites that this "
                    "federation began with; it can take part in the next one."
                )
        found = wait_for(
            self.roster,
            self.settings,
            self.say,
            1 if clients else 0,
            lambda sites: [site for site in names if site in sites],
            f"for round {self.rounds_done + 1}",
        )
        return {client: found[site][0] for site, client in names.items() if site in found}

    def _exchange(self, parcels: Mapping[ClientId, Parcel]) -> dict[ClientId, Message]:
        """Replies by client; sites that come meanwhile are ready for the next round."""
        return exchange(self.grid, parcels, self.settings.deadline, self.roster.look)

    def _order(self, round: int, client: ClientId) -> Order:
        after = self.merged.get(client, NOTHING_YET)
        return Order(self.founded.charter, client, round, after)

    def _ask(
        self, round: int, nodes: Mapping[ClientId, int], downs: Mapping[ClientId, Any]
    ) -> tuple[dict[ClientId, Answer], dict[ClientId, str]]:
        """Have the sites do their part; client → answer that may be merged, client → why not."""
        packer = Packer()
        parcels = {
            k: Parcel(node, ROUND, packer.content(order=self._order(round, k), down=downs[k]))
            for k, node in nodes.items()
        }
        replies = self._exchange(parcels)
        answers: dict[ClientId, Answer] = {}
        refused: dict[ClientId, str] = {}
        for k, node in nodes.items():
            if k not in replies:
                refused[k] = f"It did not answer within {self.settings.deadline:g} seconds."
                continue
            if replies[k].has_error():
                refused[k] = _sentence(problem_of(replies[k]))
                if replies[k].error.code == NODE_UNAVAILABLE:
                    self.roster.lose(node)
                continue
            try:
                answers[k] = self._examined(replies[k], round, k)
            except FedsieveError as error:
                refused[k] = harmless(str(error))
        return answers, refused

    def _examined(self, reply: Message, round: int, client: ClientId) -> Answer:
        """The answer in a reply, refused with a sentence if it cannot be part of the average."""
        content, samples = reply.content, self.founded.sizes[client]
        weights = self.method.weights(self.server)
        limit = most_bytes(weights, samples)
        size = content_bytes(content)
        check(size <= limit, f"The reply has {size:,} bytes; at most {limit:,} make sense.")
        records = from_content(content, {"receipt": Receipt, "up": self.method.up})
        expected = Receipt(self.method.name, client, round)
        check(records["receipt"] == expected, "The reply answers something else.")
        up = records["up"]
        bad = first_unusable(up)
        check(bad is None, f"{bad} is not finite; the update was left out of the average.")
        networks = zip(
            self.method.local_networks(up), self.method.networks(self.server), strict=True
        )
        for own, joint in networks:
            mismatch = first_mismatch(own, joint)
            check(mismatch is None, f"The reply's {mismatch} does not fit the global model.")
        count = getattr(up, "samples", samples)
        check(
            0 <= count <= samples,
            f"The reply is said to be of {count} samples, but the site holds {samples}.",
        )
        return Answer(up, metrics_of(content))

    def _merge(self, round: int, ups: dict[ClientId, Any], refused: dict[ClientId, str]) -> Metrics:
        """Merge the updates into the server's state; without any it stays as it is.

        An update that passed every check and still cannot be merged is looked for by merging each
        one alone; such ones move from `ups` to `refused`.
        """
        try:
            return self._merged(round, ups)
        except Exception:
            broken = {k: error for k in ups if (error := self._merge_error(round, k, ups[k]))}
            if not broken:
                raise
        for client, error in broken.items():
            refused[client] = f"The update cannot be merged ({error})."
            del ups[client]
        return self._merged(round, ups)

    def _merge_error(self, round: int, client: ClientId, up: Any) -> str | None:
        """The kind of error that this update causes all alone, or None."""
        try:
            self.method.merge(self.settings.recipe.method, self.server, round, {client: up})
        except Exception as error:
            return type(error).__name__
        return None

    def _merged(self, round: int, ups: Mapping[ClientId, Any]) -> Metrics:
        if not ups:
            self.say(f"Round {round + 1}: no usable reply; the global model stays as it is.")
            return {}
        cfg = self.settings.recipe.method
        with one_thread():  # as a simulation merges, whatever the number of cores
            self.server, metrics = self.method.merge(cfg, self.server, round, ups)
        return metrics

    def _drift(self, ups: Mapping[ClientId, Any], sent: Weights) -> float | None:
        local = [self.method.local_weights(up) for up in ups.values()]
        with one_thread():
            return drift(local, sent, self.trainable) if local else None

    def finish(self) -> dict[str, Any]:
        """Save the model, let every site write down its own results, and sum up."""
        save_model(self.directory, self.method.weights(self.server))
        without_results = self._hand_over()
        device = torch.device("cpu") if self.test is None else self.test.bench.device
        classes = () if self.test is None else self.test.classes
        summary = summary_of(self.settings.recipe, self.directory.lines(), classes, device)
        summary |= {"sites": len(self.founded.members), "without_results": without_results}
        if noise := self._site_noise():
            summary["site_noise"] = noise
        return summary

    def _site_noise(self) -> dict[str, float]:
        """The share of wrong labels of each site of which the server has an opinion."""
        sieved = self.method.sieve(self.server)
        return {self.site(k): float(sieved[k].noise_rate) for k in sorted(sieved)}

    def _hand_over(self) -> list[str]:
        """Send every site what it needs for its own results; those that have none yet."""
        cfg, packer = self.settings.recipe.method, Packer()
        model = Model(self.method.weights(self.server))
        self.roster.look()
        connected = self.roster.sites()
        holders = {k: self.site(k) for k, samples in enumerate(self.founded.sizes) if samples}
        parcels = {}
        for client, site in holders.items():
            if site in connected:
                order = self._order(self.rounds_done, client)
                down = self.method.send(cfg, self.server, self.rounds_done, client)
                content = packer.content(order=order, down=down, model=model)
                parcels[client] = Parcel(connected[site][0], FINISH, content)
        replies = self._exchange(parcels)
        without = {}
        for client, site in holders.items():
            if client not in parcels:
                without[site] = "it is not connected."
            elif client not in replies:
                without[site] = "it did not answer."
            elif replies[client].has_error():
                without[site] = problem_of(replies[client])
        for site, reason in without.items():
            self.say(f"{site} has no results yet: {reason}")
        return list(without)


@dataclass(frozen=True)
class Answer:
    """What a site sent for a round."""

    up: Any
    metrics: Metrics


def wait_for(
    roster: Roster,
    settings: Settings,
    say: Say,
    count: int,
    useful: Callable[[Mapping[str, Any]], list[str]],
    purpose: str,
) -> dict[str, tuple[int, Hello]]:
    """The connected sites that are useful, once there are `count` of them.

    Says whom it has while it waits, and gives up after `settings.wait` seconds.
    """
    began = said = time.monotonic()
    first = True
    while True:
        roster.look()
        sites = roster.sites()
        here = useful(sites)
        if len(here) >= count:
            return {site: sites[site] for site in here}
        now = time.monotonic()
        names = f" ({', '.join(sorted(here))})" if here else ""
        have = f"{len(here)} of {count} sites{names}"
        if settings.wait and now - began >= settings.wait:
            raise FedsieveError(
                f"After {settings.wait:g} seconds only {have} are connected {purpose}; start the "
                "others, then the same command again."
            )
        if first or now - said >= REMIND_SECONDS:
            say(f"Waiting {purpose}: {have} are connected.")
            first, said = False, now
        time.sleep(LOOK_SECONDS)


def most_bytes(weights: Weights, samples: int) -> int:
    """The largest reply that makes sense: a few models, a kilobyte per sample, and a megabyte."""
    model = sum(t.numel() * t.element_size() for t in weights.values())
    return 4 * model + 1024 * samples + 2**20


def first_mismatch(weights: Weights, expected: Weights) -> str | None:
    """The first tensor in which two models differ by name, shape or dtype, or None."""
    for name in sorted(set(weights) | set(expected)):
        one, other = weights.get(name), expected.get(name)
        if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return name
    return None


def _with_charter(recipe: Recipe, founded: Founded) -> Recipe:
    """The server's own recipe with the views and the normalisation of the charter."""
    agreed = recipe_of(founded.charter.recipe).data
    data = replace(recipe.data, views=agreed.views, mean=agreed.mean, std=agreed.std)
    return replace(recipe, data=data)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
