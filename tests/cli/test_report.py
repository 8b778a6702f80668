"""`fedsieve report` writes a page on the runs that it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedsieve.cli.report import find_runs


def test_a_run_becomes_a_page(cli: Any) -> None:
    assert cli("run", "tiny.toml", "--out", "runs/a").status == 0
    answer = cli("report", "runs/a", "--out", "pages/a.html")
    assert (answer.status, answer.out) == (0, "Wrote pages/a.html\n")
    page = Path("pages/a.html").read_text(encoding="utf-8")
    summary = json.loads(Path("runs/a/summary.json").read_bytes())
    assert f"{summary['last10']:.2f}" in page
    assert "fedsieve report runs/a --out pages/a.html" in page
    assert not list(Path("pages").glob(".*")), "no draft is left"


def test_every_run_below_the_folders_is_taken_once(tmp_path: Path, cli: Any) -> None:
    for name in ("grid/one", "grid/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text('[method]\nname = "fedavg"\n')
        (tmp_path / name / "env.json").write_text("{}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"round": 0, "accuracy": 7.0}\n')
    folders = [Path("grid"), Path("grid/two"), Path("old")]
    assert find_runs(folders) == [Path("grid/one"), Path("grid/two"), Path("old")]
    answer = cli("report", *folders)
    assert (answer.status, answer.out) == (0, "3 runs reported in report.html\n")
    assert "7.00" in Path("report.html").read_text(encoding="utf-8")


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "empty").mkdir()
    for words, sentence in {
        (): "Give the folders of the runs, such as: fedsieve report runs/demo",
        ("nowhere",): "There is no folder nowhere; give the folder that a run was written to.",
        ("empty",): "There is no run in empty; start one with `fedsieve run`.",
        ("empty", "--out", "a.pdf"): "--out must end in .html, not a.pdf.",
    }.items():
        answer = cli("report", *words)
        assert (answer.status, answer.err) == (2, f"fedsieve: {sentence}\n")
