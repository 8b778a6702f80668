"""`fedsieve bench` measures, prints and writes; the measuring itself has its own tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsieve.bench.speed_gpu import GpuSpeedReport, RoundTimes
from fedsieve.cli import bench, main

MACHINE = {
    "command": "fedsieve bench",
    "commit": "abc1234",
    "processor": "a processor",
    "cpus": 2,
    "python": "3.11",
    "torch": "2",
    "started": "2026-01-02T03:04:05+00:00",
    "load": 0.0,
}


def a_report() -> GpuSpeedReport:
    return GpuSpeedReport(
        gpu="a GPU",
        eager_images_per_s=5_000.0,
        fused_norms=False,
        engine_images_per_s=60_000.0,
        big_batch_images_per_s=90_000.0,
        kinds={
            "warm-up": RoundTimes(seconds=1.0, phases={"train": 0.9, "merge": 0.1}),
            "refining": RoundTimes.of(
                [
                    {"train": 1.1, "merge": 0.1},
                    {"train": 5.0, "merge": 9.0},
                    {"train": 0, "merge": 0},
                ]
            ),
        },
        steps_seconds=0.9,
        warm_up_seconds=30.0,
        rounds=5,
        machine=MACHINE,
    )


def test_the_gpu_report_judges_its_bars() -> None:
    """60,000/5,000 = 12 × (bar 8); 60,000 (bar 50,000); of the rounds that refine, the median of
    three is 1.2 s (bar 1), of which 1 − .9/1.2 = .25 (bar .2) are not training."""
    rows = [(row[0].strip(), (row[1], row[3])) for row in a_report().cells()]
    verdicts = dict(rows)
    assert verdicts["engine over plain loop"] == ("12.0 ×", "reached")
    assert verdicts["engine, training steps alone, bf16"] == ("60,000 images/s", "reached")
    assert verdicts["a round, all in: warm-up"] == ("1.000 s", "reached")
    assert verdicts["a round, all in: refining"] == ("1.200 s", "MISSED")
    assert [value for name, value in rows if name == "share that is not training"] == [
        ("0.10", "reached"),
        ("0.25", "MISSED"),
    ]
    assert verdicts["phase: merge"] == ("0.100 s", "")


def test_numbers_page_and_screen_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda options: a_report())
    assert main(["bench", "speed", "--device", "cuda", "--out", str(tmp_path)]) == 0
    assert "60,000 images/s" in capsys.readouterr().out
    assert json.loads((tmp_path / "speed-cuda.json").read_text())["steps_seconds"] == 0.9
    page = (tmp_path / "speed-cuda.md").read_text()
    assert "| engine over plain loop | 12.0 × |" in page
    assert "engine.fused_norms = false" in page


def test_scale_has_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scale", "--device", "cuda"]) == 2
    assert "leave --device out" in capsys.readouterr().err


@pytest.mark.parametrize("what", [["scale"], ["speed"], ["audit", "--device", "cuda"]])
def test_only_a_gpu_s_speed_has_fused_norms(
    what: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *what, "--fused-norms", "false"]) == 2
    assert "--fused-norms is for the speed of a GPU" in capsys.readouterr().err
