"""The benchmark of audits: what it measures, and what it says without cleanlab."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.bench import audit
from fedsieve.bench.audit import POOLED, AuditReport, AuditWork, Judged, measure_audit
from fedsieve.bench.report import write_json, write_markdown
from fedsieve.cli import main
from fedsieve.cli.bench import BenchOptions, read_options

MACHINE = {
    "command": "fedsieve bench audit",
    "commit": "abc1234",
    "processor": "a processor",
    "cpus": 2,
    "python": "3.11",
    "torch": "2",
    "started": "2026-01-02T03:04:05+00:00",
    "load": 0.0,
}


def test_calibration_error_by_hand() -> None:
    """Two bins: mean .25 against 1 of 2 wrong, mean .9 against 2 of 2: (2·.25 + 2·.1)/4."""
    p = np.array([0.2, 0.3, 0.85, 0.95])
    wrong = np.array([False, True, True, True])
    assert audit.calibration_error(p, wrong, bins=2) == pytest.approx((0.5 + 0.2) / 4)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=50))
@settings(max_examples=25, deadline=None)
def test_calibration_error_lies_between_the_overall_gap_and_one(
    labels: list[tuple[float, bool]],
) -> None:
    p, wrong = np.array([p for p, _ in labels]), np.array([w for _, w in labels])
    error = audit.calibration_error(p, wrong)
    assert abs((p - wrong).mean()) - 1e-9 <= error <= 1 + 1e-9


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> AuditReport:
    """Digits at three sites, judged in a round or two: a measurement, not a good one."""
    work = AuditWork(
        source="digits", images=200, sites=3, alpha=5.0, kinds=("symmetric",), folds=2, rounds=2
    )
    return measure_audit(work, Path(), tmp_path_factory.mktemp("results"))


def test_both_ways_are_judged_by_the_same_truth(report: AuditReport) -> None:
    ways = {judged.way: judged for judged in report.judged}
    assert list(ways) == ["fedsieve audit, fedavg", POOLED]
    ours = ways["fedsieve audit, fedavg"]
    assert 36 <= ours.wrong <= 40  # 20 % of 200, rounded down at each of three sites
    assert 0 <= ours.flagged_wrong <= min(ours.flagged, ours.wrong)
    assert 0 <= ours.auroc <= 1
    if ways[POOLED].was_tried:
        assert ways[POOLED].wrong == ours.wrong


def judged(way: str, auroc: float, precision: float, error: float) -> Judged:
    return Judged(
        noise="symmetric",
        way=way,
        auroc=auroc,
        average_precision=precision,
        calibration_error=error,
        flagged=20,
        flagged_wrong=15,
        wrong=30,
        seconds=2.0,
    )


def made(*rows: Judged) -> AuditReport:
    work = AuditWork(kinds=("symmetric",))
    return AuditReport(judged=rows, work=work, samples=150, machine=MACHINE)


def test_the_bars_are_judged() -> None:
    good = made(judged("ours", 0.9, 0.8, 0.05), judged(POOLED, 0.9, 0.8, 0.3))
    assert (
        "≤ 0.05: reached; AUROC and average precision at least cleanlab's: reached."
        in (good.notes()[-1])
    )
    bad = made(judged("ours", 0.95, 0.7, 0.06), judged(POOLED, 0.9, 0.8, 0.3))
    assert (
        "≤ 0.05: MISSED; AUROC and average precision at least cleanlab's: MISSED."
        in (bad.notes()[-1])
    )
    assert good.cells()[0] == [
        "symmetric", "ours", "0.9000", "0.8000", "0.0500", "20", "75.0%", "2"
    ]  # fmt: skip


def test_without_cleanlab_its_row_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = Judged(noise="symmetric", way=POOLED)
    report = made(judged("ours", 0.9, 0.8, 0.01), missing)
    assert "pip install" in report.cells()[1][2]
    assert report.notes()[-1].endswith("reached.")
    assert "cleanlab's" not in report.notes()[-1]
    report.write_csv(tmp_path / "audit.csv")
    with (tmp_path / "audit.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert (rows[0]["auroc"], rows[1]["auroc"]) == ("0.900000", "")
    write_markdown(report, tmp_path / "audit.md")
    write_json(report, tmp_path / "audit.json")
    assert json.loads((tmp_path / "audit.json").read_text())["judged"][1]["auroc"] is None
    assert math.isnan(missing.auroc)

    monkeypatch.setattr(audit, "find_spec", lambda name: None)
    work = AuditWork(
        source="digits", images=100, sites=2, alpha=9.0, kinds=("symmetric",), folds=2, rounds=1
    )
    assert [row.was_tried for row in measure_audit(work, Path()).judged] == [True, False]


def test_with_cleanlab_pooled_data_are_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with cleanlab's two functions, as it documents them."""

    def quality(labels: np.ndarray, probabilities: np.ndarray, method: str) -> np.ndarray:
        assert method == "self_confidence"
        np.testing.assert_allclose(probabilities.sum(axis=1), 1)
        return probabilities[np.arange(len(labels)), labels]

    def issues(labels: np.ndarray, probabilities: np.ndarray, n_jobs: int) -> np.ndarray:
        return probabilities.argmax(axis=1) != labels

    monkeypatch.setattr(audit, "find_spec", lambda name: name == "cleanlab")
    for name, part in {
        "cleanlab": {},
        "cleanlab.filter": {"find_label_issues": issues},
        "cleanlab.rank": {"get_label_quality_scores": quality},
    }.items():
        module = ModuleType(name)
        vars(module).update(part)
        monkeypatch.setitem(sys.modules, name, module)
    work = AuditWork(
        source="digits", images=100, sites=2, alpha=9.0, kinds=("asymmetric",), folds=2, rounds=1
    )
    ours, pooled = measure_audit(work, Path()).judged
    assert (pooled.noise, pooled.way, pooled.was_tried) == ("asymmetric", POOLED, True)
    assert pooled.wrong == ours.wrong


def test_the_command_measures_and_writes_every_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(
        work: AuditWork, path: Path, out: Path | None, *, may_fork_out: bool
    ) -> AuditReport:
        assert may_fork_out
        assert (work.images, work.rounds, work.methods, path) == (500, 20, ("fedgr",), Path("d"))
        return made(judged("ours", 0.9, 0.8, 0.01), judged(POOLED, 0.8, 0.7, 0.3))

    monkeypatch.setattr(audit, "measure_audit", measured)
    words = ["--data.path", "d", "--data.images", "500", "--methods", "fedgr"]
    assert main(["bench", "audit", *words, "--out", str(tmp_path)]) == 0
    assert "0.9000" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["audit.json", "audit.md"]


def test_its_data_are_given_with_dots() -> None:
    options = read_options(["audit", "--data.path", "somewhere", "--data.images", "500"])
    assert (options.what, options.data.path, options.data.images) == (
        "audit",
        Path("somewhere"),
        500,
    )
    assert read_options([]) == BenchOptions()
