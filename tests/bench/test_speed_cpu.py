"""The CPU speed benchmark: it compares equal work, and says so when it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedsieve.bench import others, speed_cpu
from fedsieve.bench.others import LIBRARIES, Library, Outcome, bare_loop, check_outcome
from fedsieve.bench.report import Bar, write_json
from fedsieve.bench.speed_cpu import (
    BARE,
    IN_PROCESS,
    IN_WORKERS,
    Row,
    SpeedReport,
    measure_speed_cpu,
)
from fedsieve.bench.workload import Workload, opened
from fedsieve.errors import FedsieveError
from fedsieve.simulate.runners import one_thread
from helpers import assert_same_weights

TINY = Workload(clients=4, per_round=2, samples=40, side=12, test_images=260)


@pytest.fixture(scope="module")
def report() -> SpeedReport:
    missing = Library("a library", ("no_such_package_anywhere",), others.run_pfl)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed_cpu, "VIEW_IMAGES", 64)
        return measure_speed_cpu(rounds=2, workload=TINY, libraries=[missing])


def test_all_ways_are_measured_and_compared_with_the_bare_loop(report: SpeedReport) -> None:
    for name in (BARE, IN_PROCESS, IN_WORKERS):
        row = report.row(name)
        assert row.unit == "ms/round"
        assert row.value is not None
        assert row.value > 0
        assert row.ratio is not None
        assert row.ratio > 0
    assert report.row(BARE).ratio == 1
    assert report.row(IN_PROCESS).bar == Bar(1.10, at_most=True)


def test_views_are_measured_with_one_and_two_threads(report: SpeedReport) -> None:
    views = [row for row in report.rows if row.unit == "images/s"]
    assert [row.bar for row in views] == [None, Bar(20_000, at_most=False)]
    assert all(row.value is not None and row.value > 0 and row.ratio is None for row in views)
    assert views[1].passes is (views[1].value is not None and views[1].value >= 20_000)


def test_a_library_that_is_not_installed_has_a_visible_line(report: SpeedReport) -> None:
    row = report.row("a library")
    assert row.value is None
    assert row.passes is None
    cells = {cells[0]: cells for cells in report.cells()}
    assert cells["a library"][1:] == (
        "–",
        "ms/round",
        "–",
        "",
        "not installed: pip install 'fedsieve[bench]'",
    )


def test_the_thread_count_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_cpu, "VIEW_IMAGES", 64)
    before = torch.get_num_threads()
    speed_cpu._view_rate(before + 1)
    assert torch.get_num_threads() == before


def test_json_holds_every_number(report: SpeedReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "speed.json")
    content = json.loads((tmp_path / "speed.json").read_bytes())
    assert [row["value"] for row in content["rows"]] == [row.value for row in report.rows]
    assert content["rounds"] == 2
    assert {"commit", "torch", "python", "cpus", "command", "processor"} <= set(content["machine"])


@pytest.mark.parametrize(
    ("value", "ratio", "bar", "passes"),
    [
        (5.0, 1.1, Bar(1.1, at_most=True), True),
        (5.0, 1.11, Bar(1.1, at_most=True), False),
        (5.0, None, Bar(5.0, at_most=False), True),
        (4.9, None, Bar(5.0, at_most=False), False),
        (5.0, 1.0, None, None),
        (None, None, Bar(5.0, at_most=False), None),
    ],
)
def test_a_bar_is_for_the_ratio_if_there_is_one(
    value: float | None, ratio: float | None, bar: Bar | None, passes: bool | None
) -> None:
    assert Row(name="x", value=value, unit="s", ratio=ratio, bar=bar).passes is passes


def test_a_missed_bar_is_shouted() -> None:
    rows = (Row(name="x", value=3.0, unit="s", bar=Bar(2, at_most=True)),)
    (cells,) = SpeedReport(rows=rows, rounds=1, machine={}).cells()
    assert cells == ("x", "3", "s", "–", "≤ 2", "MISSED")


def test_no_rounds_are_refused() -> None:
    with pytest.raises(FedsieveError, match="at least 1 round"):
        measure_speed_cpu(rounds=0)


# ------------------------------------------------------------------------------- equal arithmetic


def test_bare_loop_and_simulation_end_with_the_same_bits() -> None:
    loop = bare_loop(TINY)
    with one_thread(), opened(TINY.recipe(), TINY.data()) as simulation:
        assert_same_weights(simulation.server.weights, loop.weights)
        for round in range(3):
            line = simulation.next_round()
            assert line["clients"] == [client for client, _ in TINY.plan_of(round)]
            assert loop.round(TINY.plan_of(round)) == line["accuracy"]
        assert_same_weights(simulation.server.weights, loop.weights)


def test_a_round_of_the_bare_loop_is_federated_averaging() -> None:
    """w = Σ n_k w_k / Σ n_k, with w_k by gradient steps that are written out here."""
    loop, data = bare_loop(TINY), TINY.data()
    start = {name: tensor.clone() for name, tensor in loop.weights.items()}
    clients = [loop.shards[client] for client in TINY.clients_of(0)]
    trained = []
    for (images, labels), (_, batches) in zip(clients, TINY.plan_of(0), strict=True):
        loop.model.load_state_dict(start, strict=False)
        loop.model.train()
        for rows in batches:
            pixels = (images[rows].double() / 255 - data.mean[0]) / data.std[0]
            logits = loop.model(pixels.float()).logits
            log_p = logits - logits.logsumexp(dim=1, keepdim=True)
            loss = -log_p[torch.arange(len(rows)), labels[rows]].mean()
            parameters = list(loop.model.parameters())
            with torch.no_grad():
                for p, gradient in zip(
                    parameters, torch.autograd.grad(loss, parameters), strict=True
                ):
                    p -= TINY.sgd.lr * gradient
        trained.append({name: t.detach().clone() for name, t in loop.model.state_dict().items()})
    loop.round(TINY.plan_of(0))
    for name, tensor in loop.weights.items():
        expected = torch.stack([weights[name] for weights in trained]).mean(dim=0)
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(tensor, start[name]), f"{name} did not move"


def test_every_sample_is_in_one_batch_of_an_epoch() -> None:
    batches = TINY.batches(3, 1)
    assert [len(rows) for rows in batches] == [32, 8]
    assert sorted(torch.cat(batches).tolist()) == list(range(40))


def test_different_weights_are_not_compared() -> None:
    weights = bare_loop(TINY).weights
    other = {name: tensor + 1e-6 for name, tensor in weights.items()}
    with pytest.raises(AssertionError, match=r"different conv1\.weight"):
        speed_cpu._check_equal("fedsieve", other, weights)


# -------------------------------------------------------------------------------- other libraries


def first_round(scale: float = 1.0) -> Outcome:
    """The bare loop posing as a library whose step is `scale` times too long."""
    loop = bare_loop(TINY)
    start = loop.weights
    loop.round(TINY.plan_of(0))
    moved = {n: start[n] + scale * (t - start[n]) for n, t in loop.weights.items()}
    return Outcome((1.0,), moved)


def test_a_library_may_differ_by_rounding_only() -> None:
    check_outcome(first_round(), TINY)
    check_outcome(first_round(1 + 1e-4), TINY)
    with pytest.raises(AssertionError, match="moved by"):
        check_outcome(first_round(1.01), TINY)


def test_a_library_is_compared_with_the_bare_loop_around_it() -> None:
    seconds = (9.0,) * speed_cpu.WARM_UP + (2.0, 3.0, 4.0)
    library = Library("posing", ("torch",), lambda *_: replace(first_round(), seconds=seconds))
    row = speed_cpu._library(library, TINY, 3)
    assert row.value == 3000.0
    assert row.ratio is not None
    assert row.ratio > 1, "three seconds are more than such a round takes"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.packages[0])
def test_installed_libraries_do_the_same_work(library: Library) -> None:
    if not library.installed:
        pytest.skip(f"{' and '.join(library.packages)} are not installed: the extra [bench]")
    outcome = library.run(TINY, 2)
    assert len(outcome.seconds) == 2
    check_outcome(outcome, TINY)


def test_rows_of_the_loss_are_the_batch_mean() -> None:
    loop = bare_loop(TINY)
    images, labels = loop.shards[0]
    loop.model.eval()
    each = [loop.loss(images[i : i + 1], labels[i : i + 1]).item() for i in range(5)]
    assert loop.loss(images[:5], labels[:5]).item() == pytest.approx(np.mean(each), rel=1e-5)
    assert F.cross_entropy(torch.zeros(1, 10), labels[:1]).item() == pytest.approx(np.log(10))
