"""The scale benchmark: equal work for every number of clients, and honest memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.bench import scale
from fedsieve.bench.scale import (
    Measured,
    ScaleReport,
    ScaleWork,
    measure_one,
    measure_scale,
    peak_memory,
)
from fedsieve.errors import FedsieveError

TINY = ScaleWork(per_round=4, samples=6, side=10, test_images=20, last=1, proxies=2000)


def test_report_of_two_federations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_in_new_process", measure_one)  # importing torch anew is slow
    report = measure_scale([4, 8], 3, tmp_path / "out", TINY)
    assert [m.clients for m in report.measured] == [4, 8]
    assert report.rounds == 3
    for measured in report.measured:
        assert measured.peak_mb >= measured.ready_mb > 50, "Python and torch alone take more"
        assert measured.round_seconds >= sum(measured.phases.values()) > 0
        assert measured.cpu_seconds > 0
    # In the two rounds of the warm-up all four or eight clients took part, so all have a state.
    small, large = (m.states_mb for m in report.measured)
    assert large == pytest.approx(2 * small, rel=0.02)
    assert report.mixture_seconds > 0
    content = json.loads((tmp_path / "out" / "scale.json").read_bytes())
    assert [m["peak_mb"] for m in content["measured"]] == [m.peak_mb for m in report.measured]
    page = (tmp_path / "out" / "scale.md").read_text(encoding="utf-8")
    assert page.startswith("# Scale: many clients on one machine\n")
    with Image.open(tmp_path / "out" / "scale.png") as picture:
        assert min(picture.size) > 300


@pytest.mark.slow
def test_a_federation_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    result = scale._in_new_process(TINY, 4, 4, 1, tmp_path / "run")
    assert result.clients == 4
    assert result.peak_mb >= result.ready_mb > 50


def test_rounds_let_every_client_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_in_new_process", lambda *_: measured(1.0))
    assert measure_scale([4, 9], work=TINY).rounds == 3 + TINY.last


def test_images_take_equally_much_memory_whatever_the_number_of_clients(tmp_path: Path) -> None:
    for clients in (4, 8):
        TINY.save_data(clients, tmp_path / "data.npz")
        with np.load(tmp_path / "data.npz") as arrays:
            held = arrays["x"].nbytes + arrays["y"].nbytes
        assert held + (8 - clients) * TINY.bytes_per_client == 8 * 6 * (10 * 10 + 8)


def test_unequal_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ScaleWork.save_data
    monkeypatch.setattr(ScaleWork, "save_data", lambda self, k, file: save(self, 2 * k, file))
    with pytest.raises(AssertionError, match="equal work"):
        measure_one(TINY, 4, 4, 1, tmp_path / "run")


def test_a_bright_square_tells_the_class(tmp_path: Path) -> None:
    ScaleWork().save_data(5, tmp_path / "data.npz")
    with np.load(tmp_path / "data.npz") as arrays:
        images, labels = arrays["x"], arrays["y"]
    # A square is 2×2 pixels: classes 0–4 side by side from row 0, classes 5–9 from row 4.
    rows, columns = 4 * (labels // 5), 2 * (labels % 5)
    for image, row, column in zip(images, rows, columns, strict=True):
        assert image[row : row + 2, column : column + 2].min() >= 100


def measured(peak: float) -> Measured:
    phases = {"train": 0.5, "merge": 0.1, "evaluate": 0.1, "diagnose": 0.1}
    return Measured(
        clients=100,
        peak_mb=peak,
        ready_mb=1,
        states_mb=2,
        round_seconds=1,
        cpu_seconds=1,
        phases=phases,
    )


@pytest.mark.parametrize(("peaks", "verdict"), [((100, 110), "reached"), ((111, 100), "MISSED")])
def test_memory_bar(peaks: tuple[float, float], verdict: str) -> None:
    report = ScaleReport(
        measured=tuple(map(measured, peaks)),
        work=TINY,
        rounds=1,
        mixture_seconds=2.5,
        machine={},
    )
    assert report.memory_ratio == pytest.approx(max(peaks) / 100)
    assert f"≤ 1.1: {verdict}" in report.notes()[1]
    assert "2.50 s (bar ≤ 2: MISSED)" in report.notes()[2]


def test_peak_memory_sees_an_array_that_is_gone() -> None:
    before = peak_memory()
    gone = np.ones(before, dtype=np.uint8)  # as much as there ever was, besides what is there
    del gone
    assert peak_memory() > before + 50 * scale.MEGABYTE


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr(scale.sys, "platform", "linux")
    in_kilobytes = peak_memory()
    monkeypatch.setattr(scale.sys, "platform", "darwin")
    assert in_kilobytes == 1024 * peak_memory()


@pytest.mark.parametrize(
    ("counts", "rounds", "sentence"),
    [
        ([], 1, "at least one number"),
        ([3], 1, "at least 4, the clients of a round"),
        ([4], 0, "at least 1 round"),
    ],
)
def test_bad_requests(counts: list[int], rounds: int, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        measure_scale(counts, rounds, work=TINY)
