"""The federation in one process, and what the measurement makes of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_stage import CLIENTS, Stage, small_recipe
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedsieve.bench import federation
from fedsieve.bench.federation import Costs, FederationReport, measure_costs, take_turns
from fedsieve.flower import client
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.messages import HELLO, Question
from fedsieve.flower.records import to_content
from fedsieve.flower.roster import Parcel, exchange
from fedsieve.methods import METHODS
from fedsieve.recipe import Recipe
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from helpers import final_bytes

COSTS = Costs(
    recipe="digits",
    rounds=3,
    sites=5,
    megabytes=0.5,
    simulator=1.0,
    one_process=1.2,
    ratio=1.2,
    supernodes=None,
)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_federation_in_one_process_gives_the_weights_of_the_simulation(
    name: str, tmp_path: Path
) -> None:
    """Of four sites two or three take part in a round, so that states wait for their turn."""
    recipe = small_recipe(name, rounds=4, clients_per_round=2)
    stage = Stage(tmp_path)
    stage.run(recipe)
    run(recipe, tmp_path / "simulated")
    assert final_bytes(stage.out) == final_bytes(tmp_path / "simulated")


def test_every_reply_is_given_once() -> None:
    app = ClientApp()

    @app.query("hello")
    def answer(message: Message, context: Context) -> Message:
        if context.node_config["fails"]:
            raise RuntimeError("no")
        return Message(message.content, reply_to=message)

    grid = InProcessGrid(app, {1: {"fails": False}, 2: {"fails": True}})
    assert list(grid.get_node_ids()) == [1, 2]
    content = to_content(question=Question("x"))
    parcels = {node: Parcel(node, HELLO, content) for node in (1, 2)}
    replies = exchange(grid, parcels, 1.0, lambda: None)
    assert replies[1].content == content
    assert isinstance(replies[2].error, Error)
    assert replies[2].error.code == 2
    (number,) = grid.push_messages([Message(content, 1, HELLO)])
    assert len(list(grid.pull_messages([number, "unknown"]))) == 1
    assert list(grid.pull_messages([number])) == []
    assert len(list(grid.send_and_receive([Message(content, 1, HELLO)]))) == 1


def test_replies_are_waited_for_until_the_deadline_and_no_longer() -> None:
    class Late(InProcessGrid):
        """The reply of node 1 is there when one looks for the third time, that of node 2 never;
        node 3 cannot be reached at all."""

        looks = 0

        def push_messages(self, messages: Iterable[Message]) -> list[Any]:
            numbers = list(super().push_messages(messages))
            return [*numbers[:2], None]

        def deliver(self, message: Message) -> Message | None:
            if message.metadata.dst_node_id == 1:
                return Message(message.content, reply_to=message)
            return None

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            self.looks += 1
            return super().pull_messages(message_ids) if self.looks >= 3 else []

    grid = Late(client.app, {1: {}, 2: {}, 3: {}})
    content = to_content(question=Question("x"))
    parcels = {node: Parcel(node, HELLO, content) for node in (1, 2, 3)}
    meanwhile: list[int] = []
    began = time.monotonic()
    replies = exchange(grid, parcels, 0.5, lambda: meanwhile.append(1))
    assert time.monotonic() - began >= 0.5
    assert list(replies) == [1]
    assert len(meanwhile) == grid.looks - 1 >= 3


def test_what_has_no_meaning_in_one_process_says_so() -> None:
    grid = InProcessGrid(client.app, {})
    with pytest.raises(NotImplementedError):
        grid.create_message()
    with pytest.raises(NotImplementedError):
        grid.set_run(None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        _ = grid.run


def test_simulator_and_federation_take_turns(tmp_path: Path) -> None:
    recipe = small_recipe(rounds=1000)
    simulated, federated = take_turns(recipe, tmp_path, 2)
    assert len(simulated) == len(federated) == 2
    assert min(simulated + federated) > 0
    lines = read_lines(tmp_path / "federation" / "metrics.jsonl")
    assert [line["round"] for line in lines] == [0, 1, 2]  # one to warm up
    for name in ("accuracy", "class_accuracy", "worst_class_accuracy", "worst_class"):
        found = [line[name] for line in read_lines(tmp_path / "simulator" / "metrics.jsonl")]
        assert found == [line[name] for line in lines]


def test_costs_are_medians_and_bytes_are_per_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turns(recipe: object, place: Path, rounds: int) -> tuple[list[float], list[float]]:
        take_turns(small_recipe(rounds=1000), place, 1)
        return [1.0, 2.0, 4.0], [1.5, 2.0, 8.0]

    monkeypatch.setattr(federation, "take_turns", turns)
    costs = measure_costs(small_recipe(), tmp_path, 3, 0)
    assert (costs.simulator, costs.one_process, costs.ratio) == (2.0, 2.0, 1.5)
    lines = read_lines(tmp_path / "federation" / "metrics.jsonl")
    moved = lines[0]["bytes_up"] + lines[0]["bytes_down"]
    assert costs.megabytes == pytest.approx(moved / CLIENTS / 1e6)
    assert costs.supernodes is None


def test_a_round_over_supernodes_is_the_median_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up processes: each round takes its number times ten seconds, 1 + 9 · number."""
    played: list[int] = []

    class MadeUp:
        def __init__(self, folder: Path) -> None:
            folder.mkdir(parents=True)

        def __enter__(self) -> MadeUp:
            return self

        def __exit__(self, *_: object) -> None:
            played.append(-1)

        def play_client(self, client: int) -> None:
            played.append(client)

        def submit(self, recipe: Recipe, out: Path) -> None:
            out.mkdir()
            lines = [
                {"round": r, "seconds": {"wait": r, "train": 9 * r}} for r in range(recipe.rounds)
            ]
            (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (out / "summary.json").write_text("{}")

    monkeypatch.setattr(federation, "Loopback", MadeUp)
    assert federation.over_supernodes(small_recipe(), tmp_path / "real", 3) == 20.0
    assert played == [0, 1, 2, 3, -1]


def test_both_federations_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(recipe: Recipe, place: Path, rounds: int, real_rounds: int) -> Costs:
        asked.append((recipe.name, rounds, real_rounds))
        return COSTS

    monkeypatch.setattr(federation, "measure_costs", measured)
    report = federation.measure_federation(20, 4)
    assert report.costs == (COSTS, COSTS)
    assert asked == [("digits", 20, 0), ("resnet18", 4, 4)]


def test_the_report_judges_its_bar() -> None:
    slow = replace(COSTS, ratio=1.31, supernodes=9.87)
    report = FederationReport(costs=(COSTS, slow), real_rounds=7, machine={})
    first, second = report.cells()
    assert first[4:] == ("1.20 ×", "reached", "–")
    assert second[4:] == ("1.31 ×", "MISSED", "9.9 s")
    assert len(report.header()) == len(first)
    assert "of 3 (digits) and 3 (digits) rounds" in report.notes()[0]
    assert "of 7 over SuperNodes" in report.notes()[0]
