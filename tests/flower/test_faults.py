"""Whatever a site sends or fails to send: it is refused by name, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_stage import (
    CLIENTS,
    FIRST_NODE,
    SpoiledGrid,
    Stage,
    from_client,
    small_recipe,
    untouched,
)
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from spoiled import (
    a_gigabyte,
    disguised,
    fewer_classes,
    foreign,
    one_dimension_more,
    one_value,
    up_in,
    with_up,
)

from fedsieve.errors import FedsieveError
from fedsieve.flower import client, founding, roster, server, site
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.messages import HELLO, ROUND, Hello, Order
from fedsieve.flower.records import from_content, read, to_content
from fedsieve.flower.settings import Settings
from fedsieve.methods import METHODS, fedavg, fedcoteaching, fednoro, rofl
from fedsieve.serial import decode
from fedsieve.simulate import run as run_module
from fedsieve.simulate.directory import Checkpoint, Model, read_lines
from fedsieve.simulate.run import run
from helpers import Cut, few_digits, final_bytes, register_remembering, timeless_lines

NAME = "client-2"


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(site, "load", lambda name, path: few_digits())
    monkeypatch.setattr(founding, "load_data", lambda recipe: few_digits())
    monkeypatch.setattr(run_module, "load_data", lambda recipe: few_digits())
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)
    register_remembering()
    site._scene.cache_clear()
    yield
    site._scene.cache_clear()
    del METHODS["remembering"]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def extra(record: Any) -> Callable[[Message, Message], Message]:
    def spoil(message: Message, reply: Message) -> Message:
        reply.content["metrics" if isinstance(record, MetricRecord) else "images"] = record
        return reply

    return spoil


def an_error(code: int, reason: str) -> Callable[[Message, Message], Message]:
    return lambda message, reply: Message(Error(code, reason), reply_to=message)


SPOILED: Mapping[str, tuple[Callable[[Message, Message], Message | None], str]] = {
    "nan": (with_up(one_value(float("nan"))), "is not finite"),
    "infinity": (with_up(one_value(float("inf"))), "is not finite"),
    "no such class": (with_up(fewer_classes), "does not fit the global model"),
    "another shape": (
        with_up(one_dimension_more),
        "does not fit the global model",
    ),
    "another dtype": (
        with_up(lambda up: replace(up, weights={n: t.double() for n, t in up.weights.items()})),
        "does not fit the global model",
    ),
    "no weights": (with_up(lambda up: replace(up, weights={})), "does not fit the global model"),
    "too many samples": (
        with_up(lambda up: replace(up, samples=10**9)),
        "said to be of 1000000000",
    ),
    "more than there are numbers for": (
        with_up(lambda up: replace(up, samples=10**400)),
        "samples is not finite",
    ),
    "fewer than none": (with_up(lambda up: replace(up, samples=-1)), "said to be of -1"),
    "a foreign method": (foreign, "fields samples, weights"),
    "a disguised one": (disguised, "answers something else"),
    "a gigabyte": (a_gigabyte, "bytes; at most"),
    "an extra array": (extra(ArrayRecord()), "holds images, which nobody asked for"),
    "many metrics": (extra(MetricRecord({"losses": [0.5, 0.7]})), "must be one number"),
    "nothing": (lambda m, r: Message(RecordDict(), reply_to=m), "holds no receipt"),
    "an exception": (an_error(100, "ValueError"), "It failed with ValueError; its own errors.log"),
    "a long story": (an_error(100, "sample 7 of\nJohn"), "It failed with an error; its own"),
    "a crash": (an_error(8, "gone"), "It failed (Flower's error 8)."),
    "a death": (an_error(5, "gone"), "It is no longer connected."),
    "silence": (lambda m, r: None, "did not answer within 0.2 seconds"),
}


@pytest.mark.parametrize("fault", sorted(SPOILED))
def test_a_bad_reply_is_left_out_by_name(fault: str, stage: Stage) -> None:
    """The round is the one that the other three give."""
    change, sentence = SPOILED[fault]
    grid = SpoiledGrid(stage.nodes(), from_client(2, ROUND, change))
    recipe = small_recipe(rounds=1)
    summary = stage.run(recipe, grid, deadline=0.2)
    (line,) = read_lines(stage.out / "metrics.jsonl")
    assert list(line["refused"]) == [NAME]
    assert sentence in line["refused"][NAME]
    assert any(f"{NAME}: {line['refused'][NAME]}" in said for said in stage.said)
    assert summary["refused_updates"] == 1
    others = [
        up_in(reply)[0]
        for message, reply in grid.seen
        if reply is not None
        and message.metadata.message_type == ROUND
        and message.metadata.dst_node_id != FIRST_NODE + 2
    ]
    assert len(others) == 3
    total = sum(up.samples for up in others)
    model = safetensors_of(stage.out)
    for name, tensor in model.items():
        mean = sum(up.weights[name].double() * (up.samples / total) for up in others)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_sent", [lambda t: t.double(), lambda t: t[None]])
def test_a_second_network_that_does_not_fit_is_left_out_by_name(
    as_sent: Callable[[torch.Tensor], torch.Tensor], stage: Stage
) -> None:
    """Alone it could be merged, with another dtype, and no other update with it."""

    def change(up: fedcoteaching.Up) -> fedcoteaching.Up:
        return replace(up, peer={name: as_sent(tensor) for name, tensor in up.peer.items()})

    spoil = from_client(2, ROUND, with_up(change, fedcoteaching.Up))
    stage.run(small_recipe("fedcoteaching", rounds=1), SpoiledGrid(stage.nodes(), spoil))
    (line,) = read_lines(stage.out / "metrics.jsonl")
    assert list(line["refused"]) == [NAME]
    assert "does not fit the global model" in line["refused"][NAME]


@pytest.mark.parametrize(
    "as_sent", [lambda t: t.double(), lambda t: torch.cat([t, t], dim=1), lambda t: t[:-1]]
)
def test_strange_centroids_do_not_end_a_federation(
    as_sent: Callable[[torch.Tensor], torch.Tensor], stage: Stage
) -> None:
    """Every one of them could be merged alone, in the first round; with the others, or by a client
    that goes on from them, it could not be used."""

    def change(up: rofl.Up) -> rofl.Up:
        return replace(up, centroids=as_sent(up.centroids))

    spoil = from_client(2, ROUND, with_up(change, rofl.Up))
    stage.run(small_recipe("rofl", rounds=2), SpoiledGrid(stage.nodes(), spoil))
    first, second = read_lines(stage.out / "metrics.jsonl")
    assert set(first["refused"]) <= {NAME}
    assert second["refused"] == {NAME: "The update cannot be merged (FedsieveError)."}


def safetensors_of(folder: Path) -> Mapping[str, torch.Tensor]:
    return decode(Model, final_bytes(folder)).weights


def test_what_a_site_sends_cannot_forge_lines_of_a_log(stage: Stage) -> None:
    def forge(message: Message, reply: Message) -> Message:
        reply.content["x\n\x1b[31mRound 9/9" + 5000 * "y"] = ArrayRecord()
        return reply

    stage.run(small_recipe(rounds=1), SpoiledGrid(stage.nodes(), from_client(2, ROUND, forge)))
    (line,) = read_lines(stage.out / "metrics.jsonl")
    assert line["refused"][NAME].startswith("The message holds x??[31mRound 9/9y")
    assert len(line["refused"][NAME]) == 300


def test_the_server_learns_the_kind_of_an_error_and_the_site_all_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("patient-0815.png is broken")

    monkeypatch.setitem(METHODS, "fedavg", replace(fedavg.METHOD, train=fail))
    grid = SpoiledGrid(stage.nodes(), untouched)
    stage.run(small_recipe(rounds=1), grid)
    for message, reply in grid.seen:
        assert reply is not None
        if message.metadata.message_type == ROUND:
            assert (reply.error.code, reply.error.reason) == (100, "ValueError")
    assert "patient-0815.png is broken" in (stage.state(0) / "errors.log").read_text()
    (line,) = read_lines(stage.out / "metrics.jsonl")
    assert len(line["refused"]) == CLIENTS


def test_without_a_usable_reply_the_model_stays_and_the_run_goes_on(stage: Stage) -> None:
    def spoil(message: Message, reply: Message) -> Message | None:
        silent = message.metadata.message_type == ROUND and not rounds_over(grid, 1)
        return None if silent else reply

    def rounds_over(grid: SpoiledGrid, count: int) -> bool:
        asked = [m for m, _ in grid.seen if m.metadata.message_type == ROUND]
        return len(asked) >= count * CLIENTS

    grid = SpoiledGrid(stage.nodes(), spoil)
    stage.run(small_recipe(rounds=2), grid, deadline=0.05)
    first, second = read_lines(stage.out / "metrics.jsonl")
    assert len(first["refused"]) == CLIENTS
    assert first["drift"] is None
    assert second["refused"] == {}
    assert any("no usable reply; the global model stays" in said for said in stage.said)
    rounds = [m for m, _ in grid.seen if m.metadata.message_type == ROUND]
    downs = [from_content(m.content, {"order": Order, "down": fedavg.Down}) for m in rounds]
    for name, tensor in downs[0]["down"].weights.items():
        assert torch.equal(tensor, downs[CLIENTS]["down"].weights[name])


def test_an_update_that_breaks_the_merge_is_found_and_left_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fussy(cfg: Any, state: Any, round: int, ups: Mapping[int, Any]) -> Any:
        if 1 in ups:
            raise RuntimeError("sizes do not match")
        return fedavg.merge(cfg, state, round, ups)

    monkeypatch.setitem(METHODS, "fedavg", replace(fedavg.METHOD, merge=fussy))
    stage.run(small_recipe(rounds=1))
    (line,) = read_lines(stage.out / "metrics.jsonl")
    assert line["refused"] == {"client-1": "The update cannot be merged (RuntimeError)."}


def test_a_report_that_breaks_the_verdict_of_a_later_round_is_found_when_it_comes(
    stage: Stage,
) -> None:
    """Two of four sites report in each of two rounds, and the verdict needs all reports."""

    def change(up: fednoro.Up) -> fednoro.Up:
        return replace(up, class_losses=torch.full((10,), 9))

    spoil = from_client(2, ROUND, with_up(change, fednoro.Up))
    recipe = small_recipe("fednoro", clients_per_round=2, rounds=2)
    stage.run(recipe, SpoiledGrid(stage.nodes(), spoil))
    first, second = read_lines(stage.out / "metrics.jsonl")
    assert first["refused"] == {NAME: "The update cannot be merged (FedsieveError)."}
    assert second["refused"] == {}
    assert "noisy_clients" in second["server"]


def test_a_merge_that_fails_for_no_one_in_particular_ends_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fussy(cfg: Any, state: Any, round: int, ups: Mapping[int, Any]) -> Any:
        if len(ups) > 1:
            raise RuntimeError("a bug")
        return fedavg.merge(cfg, state, round, ups)

    monkeypatch.setitem(METHODS, "fedavg", replace(fedavg.METHOD, merge=fussy))
    with pytest.raises(RuntimeError, match="a bug"):
        stage.run(small_recipe(rounds=1))


# --------------------------------------------------------------------------- sites come and go


def test_too_few_sites_are_waited_for_with_a_word(stage: Stage) -> None:
    nodes = {node: config for node, config in stage.nodes().items() if node != FIRST_NODE}
    with pytest.raises(FedsieveError, match=r"only 3 of 4 sites \(client-1, client-2, client-3\)"):
        stage.run(small_recipe(), InProcessGrid(client.app, nodes), wait=0.1)
    assert stage.said == [
        "Waiting to begin: 3 of 4 sites (client-1, client-2, client-3) are connected."
    ]
    assert not (stage.out / "config.toml").exists()
    stage.run(small_recipe(rounds=1))


def test_a_site_that_comes_late_ends_the_waiting(stage: Stage) -> None:
    late = stage.nodes()
    grid = InProcessGrid(client.app, {node: late.pop(node) for node in sorted(late)[:3]})
    whole = InProcessGrid(client.app, stage.nodes())

    def say(text: str) -> None:
        stage.said.append(text)
        grid.nodes = whole.nodes

    server.federate(grid, Settings(small_recipe(rounds=1), stage.out, 4, 9.0, 9.0), say)
    assert stage.said[0].startswith("Waiting to begin: 3 of 4 sites")


class Coming(InProcessGrid):
    """Nodes that are there in some rounds only; `absent(node, rounds so far)` says when."""

    def __init__(self, stage: Stage, absent: Callable[[int, int], bool]) -> None:
        super().__init__(client.app, stage.nodes())
        self._absent = absent
        self._rounds_over = 0

    def get_node_ids(self) -> list[int]:
        return [node for node in self.nodes if not self._absent(node, self._rounds_over)]

    def deliver(self, message: Message) -> Message | None:
        if message.metadata.message_type == ROUND:
            self._rounds_over = read(message.content, "order", Order).round + 1
        return super().deliver(message)


def test_a_site_that_is_away_is_missed_and_comes_back_with_its_state(stage: Stage) -> None:
    recipe = small_recipe("remembering", rounds=4)
    stage.run(recipe, Coming(stage, lambda node, done: node == FIRST_NODE + 2 and done == 1))
    lines = read_lines(stage.out / "metrics.jsonl")
    away = [line["refused"] for line in lines]
    assert away[0] == {}
    assert away[1] == {NAME: "It was not connected."}
    assert away[-1] == {}
    # Four rounds for three sites and three for the one that was away.
    assert lines[-1]["client"]["visits"] == pytest.approx((3 * 4 + 3) / 4)
    assert "began_anew" not in lines[-1]["client"]


def test_a_site_that_comes_after_the_beginning_is_told_so_once(stage: Stage) -> None:
    grid = Coming(stage, lambda node, done: node == 999 and done == 0)
    late = {"site": "late", "data-source": "digits", "state-path": str(stage.folder / "late")}
    grid.nodes |= InProcessGrid(client.app, {999: late}).nodes
    stage.run(small_recipe(), grid)
    told = [said for said in stage.said if said.startswith("late is not one of the 4 sites")]
    assert len(told) == 1
    assert all(
        line["refused"] == {} and line["clients"] == [0, 1, 2, 3]
        for line in read_lines(stage.out / "metrics.jsonl")
    )


def test_a_site_that_lost_its_folder_begins_anew_and_says_so(stage: Stage) -> None:
    def wipe(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == FIRST_NODE + 2:
            for file in stage.state(2).glob("*/state-1.safetensors"):
                file.unlink()
        return reply

    stage.run(small_recipe("remembering", rounds=3), SpoiledGrid(stage.nodes(), wipe))
    lines = read_lines(stage.out / "metrics.jsonl")
    assert ["began_anew" in line["client"] for line in lines] == [False, False, True]
    assert lines[2]["client"]["visits"] == pytest.approx((3 * 3 + 1) / 4)


def test_nobody_can_take_over_the_part_of_a_site_that_is_there(stage: Stage) -> None:
    nodes = stage.nodes() | {999: {"client": 2, "state-path": str(stage.folder / "thief")}}
    stage.run(small_recipe(rounds=1), InProcessGrid(client.app, nodes))
    assert [s for s in stage.said if "Node 999 says that it is client-2, but so does node 102" in s]
    assert not (stage.folder / "thief").exists()


def test_a_site_that_restarts_under_another_node_id_goes_on_with_its_state(stage: Stage) -> None:
    class Restarted(InProcessGrid):
        rounds = 0

        def deliver(self, message: Message) -> Message | None:
            self.rounds += message.metadata.message_type == ROUND
            if self.rounds > CLIENTS and FIRST_NODE + 2 in self.nodes:  # dies in the second round
                self.nodes[777] = self.nodes.pop(FIRST_NODE + 2)
            if message.metadata.dst_node_id == FIRST_NODE + 2 and 777 in self.nodes:
                return Message(Error(5, "gone"), reply_to=message)
            return super().deliver(message)

    stage.run(small_recipe("remembering", rounds=4), Restarted(client.app, stage.nodes()))
    lines = read_lines(stage.out / "metrics.jsonl")
    assert lines[1]["refused"] == {NAME: "It is no longer connected."}
    assert lines[3]["refused"] == {}
    assert lines[3]["client"]["visits"] == pytest.approx((3 * 4 + 3) / 4)


def test_when_no_selected_site_is_there_the_server_waits_and_then_gives_up(stage: Stage) -> None:
    with pytest.raises(FedsieveError, match=r"only 0 of 1 sites are connected for round 2"):
        stage.run(small_recipe(), Coming(stage, lambda node, done: done >= 1))
    assert "Waiting for round 2: 0 of 1 sites are connected." in stage.said
    stage.run(small_recipe())
    run(small_recipe(), stage.folder / "simulated")
    assert final_bytes(stage.out) == final_bytes(stage.folder / "simulated")


def said_of_itself(**changes: Any) -> Callable[[Message, Message], Message]:
    """A hello with something changed in it."""

    def spoil(message: Message, reply: Message) -> Message:
        said: Hello = from_content(reply.content, {"hello": Hello})["hello"]
        return Message(to_content(hello=replace(said, **changes)), reply_to=message)

    return spoil


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, r: Message(RecordDict(), reply_to=m), "holds no hello"),
        (lambda m, r: a_gigabyte(m, r), "its answer has 1,0"),
        (an_error(100, "FedsieveError"), "it failed with FedsieveError; its own errors.log"),
        (said_of_itself(samples=-1), "its answer makes no sense"),
        (said_of_itself(shape=(0, 8, 8)), "its answer makes no sense"),
    ],
)
def test_a_node_that_is_no_site_is_named_and_not_counted(
    change: Any, sentence: str, stage: Stage
) -> None:
    grid = SpoiledGrid(stage.nodes(), from_client(2, HELLO, change))
    with pytest.raises(FedsieveError, match="only 3 of 4 sites"):
        stage.run(small_recipe(), grid, wait=0.1)
    assert [s for s in stage.said if s.startswith("Node 102 is not a site") and sentence in s]


@pytest.mark.parametrize("name", ["../x", "", "a b", "=cmd()", "x" * 81])
def test_a_site_needs_a_harmless_name(name: str, stage: Stage) -> None:
    grid = SpoiledGrid(stage.nodes(), from_client(2, HELLO, said_of_itself(site=name)))
    with pytest.raises(FedsieveError, match="only 3 of 4 sites"):
        stage.run(small_recipe(), grid, wait=0.05)


def test_a_node_that_failed_is_asked_again_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "ASK_AGAIN_SECONDS", 0.05)
    failed: list[int] = []

    def once(message: Message, reply: Message) -> Message:
        failed.append(1)
        return Message(Error(100, "OSError"), reply_to=message) if len(failed) == 1 else reply

    stage.run(
        small_recipe(rounds=1), SpoiledGrid(stage.nodes(), from_client(2, HELLO, once)), wait=9
    )
    assert len(failed) == 2


# ------------------------------------------------------------------------ the server is cut


class CutGrid(InProcessGrid):
    """Ends the server's process, as it were, at the n-th message of a round, or after it."""

    def __init__(self, stage: Stage, at: int, *, before: bool) -> None:
        super().__init__(client.app, stage.nodes())
        self._left = at
        self._before = before

    def deliver(self, message: Message) -> Message | None:
        if message.metadata.message_type != ROUND:
            return super().deliver(message)
        self._left -= 1
        if self._left < 0 and self._before:
            raise Cut
        reply = super().deliver(message)
        if self._left < 0:
            raise Cut
        return reply


@pytest.mark.parametrize("name", ["remembering", "fedgr"])
def test_a_federation_that_was_cut_anywhere_ends_like_the_simulation(
    name: str, stage: Stage
) -> None:
    """Sites answer a round again from the state before it, however often the server dies."""
    recipe = small_recipe(name)
    for at in (1, 3, 2, 4, 0, 6):
        with pytest.raises(Cut):
            stage.run(recipe, CutGrid(stage, at, before=at % 2 == 0))
    stage.run(recipe)
    run(recipe, stage.folder / "simulated")
    assert final_bytes(stage.out) == final_bytes(stage.folder / "simulated")
    for one, other in zip(
        timeless_lines(stage.out), timeless_lines(stage.folder / "simulated"), strict=True
    ):
        assert one | {"diagnostics": None} == other | {"diagnostics": None}


def test_a_cut_between_the_merge_and_the_commit_repeats_the_round(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe("remembering")
    commit = server.RunDirectory.commit

    def cut(self: Any, checkpoint: Checkpoint) -> None:
        if checkpoint.rounds_done == 2:
            raise Cut
        commit(self, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(server.RunDirectory, "commit", cut)
        with pytest.raises(Cut):
            stage.run(recipe)
    stage.run(recipe)
    run(recipe, stage.folder / "simulated")
    assert final_bytes(stage.out) == final_bytes(stage.folder / "simulated")


def test_a_refused_reply_leaves_no_trace_at_the_site(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a simulation, the site goes on from its state before the refused round."""
    method = METHODS["remembering"]

    def train(cfg: Any, state: Any, down: Any, shard: Any, bench: Any, rng: Any) -> Any:
        after, up, metrics = method.train(cfg, state, down, shard, bench, rng)
        bad = shard.client == 1 and rng.round == 1
        return after, one_value(float("nan"))(up) if bad else up, metrics

    monkeypatch.setitem(METHODS, "remembering", replace(method, train=train))
    recipe = small_recipe("remembering", rounds=4)
    stage.run(recipe)
    run(recipe, stage.folder / "simulated")
    assert [list(line["refused"]) for line in read_lines(stage.out / "metrics.jsonl")] == [
        [], ["client-1"], [], [],
    ]  # fmt: skip
    assert final_bytes(stage.out) == final_bytes(stage.folder / "simulated")


def test_results_that_did_not_arrive_are_handed_over_by_the_same_command(stage: Stage) -> None:
    recipe = small_recipe(rounds=1)
    grid = SpoiledGrid(stage.nodes(), from_client(2, "evaluate.finish", lambda m, r: None))
    assert stage.run(recipe, grid, deadline=0.1)["without_results"] == [NAME]
    grid = SpoiledGrid(stage.nodes(), from_client(2, "evaluate.finish", an_error(100, "OSError")))
    assert stage.run(recipe, grid)["without_results"] == [NAME]
    assert stage.said[-2].startswith(f"{NAME} has no results yet: it failed with OSError")
    assert stage.run(recipe)["without_results"] == []
    said = len(stage.said)
    assert stage.run(recipe, InProcessGrid(client.app, {}))["without_results"] == []
    assert stage.said[said:] == [f"{stage.out} is finished."]
    assert json.loads((stage.out / "summary.json").read_bytes())["rounds"] == 1
