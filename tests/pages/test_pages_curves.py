"""Lines over rounds and over clients: which points, in which order, under which names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fedsieve.errors import FedsieveError
from fedsieve.labels import Label, save_labels
from fedsieve.pages.curves import Curve, Logs, OverClients, OverRounds, find_logs, passes
from fedsieve.scenes import save_scene
from helpers import hand_made_scene


def logs(
    name: str, *accuracy: float, identity: object = None, seed: int = 1, clients=(), folder="."
) -> Logs:
    rounds = [{"round": t, "accuracy": a} for t, a in enumerate(accuracy)]
    return Logs(name, name if identity is None else identity, seed, rounds, clients, Path(folder))


def at(client: int, round: int = 0, **numbers: float) -> dict[str, float]:
    return {"round": round, "client": client, **numbers}


def log(folder: Path, accuracy: list[float], config: dict[str, object] | None = None) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"round": t, "accuracy": a}) + "\n" for t, a in enumerate(accuracy)]
    # A run that was killed in the middle of a line is still drawn up to there.
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"round": 9, "acc')
    if config is not None:
        (folder / "config.toml").write_text(tomli_w.dumps(config))


def test_every_run_below_the_folder_is_found_by_its_path(tmp_path: Path) -> None:
    log(tmp_path / "a" / "fedavg-seed1", [10.0, 20.0])
    log(tmp_path / "b", [30.0])
    log(tmp_path / "empty", [])
    assert [run.name for run in find_logs([tmp_path])] == ["a/fedavg-seed1", "b"]
    assert [run.name for run in find_logs([tmp_path / "b"])] == ["b"]
    both = find_logs([tmp_path / "a", tmp_path / "b"])
    assert [run.name for run in both] == ["a/fedavg-seed1", "b"]
    assert [line["accuracy"] for line in both[0].rounds] == [10.0, 20.0]
    again = find_logs([tmp_path, tmp_path / "a"])
    assert len(again) == 2, "a run that is found twice is one run"


def test_runs_are_called_below_the_folder_that_all_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log(tmp_path / "runs" / "one-1a2b" / "cell-seed1", [1.0])
    log(tmp_path / "runs" / "two" / "cell-seed1", [1.0])
    monkeypatch.chdir(tmp_path / "runs" / "two")
    assert [run.name for run in find_logs([Path()])] == ["cell-seed1"]
    assert [run.name for run in find_logs([Path("cell-seed1"), Path("../one-1a2b")])] == [
        "two/cell-seed1",
        "one-1a2b/cell-seed1",
    ]
    log(tmp_path / "runs" / "two" / "cell-seed1" / "inner", [1.0])
    assert {run.name for run in find_logs([Path()])} == {"cell-seed1", "cell-seed1/inner"}


def test_a_folder_that_is_not_there_is_refused_beside_others(tmp_path: Path) -> None:
    log(tmp_path / "a", [1.0])
    with pytest.raises(FedsieveError, match=r"There is no folder .*b; give the folder"):
        find_logs([tmp_path / "a", tmp_path / "b"])


def test_runs_that_differ_in_their_seed_only_have_one_identity(tmp_path: Path) -> None:
    config = {"name": "x", "seed": 1, "method": {"name": "fedavg"}, "engine": {"workers": 1}}
    log(tmp_path / "a-seed1", [1.0], config)
    log(tmp_path / "a-seed2", [1.0], config | {"seed": 2, "engine": {"workers": 2}})
    log(tmp_path / "b-seed1", [1.0], config | {"method": {"name": "fedprox"}})
    log(tmp_path / "unknown", [1.0])
    first, second, other, unknown = (run.identity for run in find_logs([tmp_path]))
    assert first == second
    assert [run.seed for run in find_logs([tmp_path])] == [1, 2, 1, None]
    assert len({first, other, unknown}) == 3


def log_sweep(top: Path, seeds: tuple[int, ...]) -> None:
    """Two variants that a sweep has in another order than the alphabet."""
    for place, (folder, text, mu) in enumerate((("w_o_CE", "w/o CE", 0.5), ("all", "all", 0.1))):
        for seed in seeds:
            config = {"name": "x", "seed": seed, "method": {"name": "fedprox", "mu": mu}}
            log(top / f"{folder}-seed{seed}", [mu * seed, mu], config)
            label = Label(axis="variant", text=text, place=place, settings=("method.mu",))
            save_labels([label], top / f"{folder}-seed{seed}")


def test_a_sweep_names_and_orders_its_lines(tmp_path: Path) -> None:
    log_sweep(tmp_path, (1,))
    runs = find_logs([tmp_path])
    assert [run.name for run in runs] == ["fedprox w/o CE", "fedprox all"]
    assert [line["accuracy"] for line in runs[0].rounds] == [0.5, 0.5], "under its own name"
    log(tmp_path / "by-itself", [1.0])
    names = [run.name for run in find_logs([tmp_path])]
    assert names == ["all-seed1", "by-itself", "w_o_CE-seed1"]


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 2)])
def test_a_sweep_names_the_means_of_its_seeds(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    """A seed that lies in two folders counts once."""
    log_sweep(tmp_path / "a", (1, 2))
    if len(seeds) > 2:
        log_sweep(tmp_path / "b", (2,))
    runs = find_logs([tmp_path])
    again = [" #1", " #2"] if len(seeds) > 2 else [""]
    assert [run.name for run in runs] == [
        f"fedprox {text}, seed {end}"
        for text in ("w/o CE", "all")
        for end in ("1", *(f"2{number}" for number in again))
    ]
    (curves,) = OverRounds.of(runs, ["accuracy"], mean=True).panels.values()
    assert [(curve.run, curve.means) for curve in curves] == [
        ("fedprox w/o CE", pytest.approx([0.75, 0.5])),
        ("fedprox all", pytest.approx([0.15, 0.1])),
    ]


def test_a_line_per_run() -> None:
    chart = OverRounds.of([logs("one", 1.0, 2.0, 4.0), logs("two", 3.0)], ["accuracy"], mean=False)
    (axes,) = chart.draw().axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 2.0, 4.0], [3.0]]
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == 2, "the lines cannot be told apart without colour"
    assert axes.get_ylabel() == "test accuracy, %"


def test_seeds_become_their_mean_in_a_band() -> None:
    """Rounds that all seeds have: (10 + 40)/2 = 25 and (20 + 30)/2 = 25, within 10–40 and 20–30."""
    runs = [
        logs("runs/a-seed1", 10.0, 20.0, 99.0, identity="a"),
        logs("runs/a-seed2", 40.0, 30.0, identity="a", seed=2),
        logs("other/a-seed2", 77.0, 77.0, identity="a", seed=2),  # the same again
        logs("runs/b-seed1", 5.0),
    ]
    chart = OverRounds.of(runs, ["accuracy"], mean=True)
    assert chart.panels["accuracy"] == [
        Curve("runs/a", [1, 2], [[10.0, 20.0], [40.0, 30.0]], longest=3),
        Curve("runs/b-seed1", [1], [[5.0]], longest=1),
    ]
    assert chart.notes == [
        "runs/a ends after 2 rounds of 3: not all of its 2 seeds have accuracy beyond."
    ]
    assert list(chart.rows()) == [
        ("number", "run", "seeds", "round", "passes", "mean", "least", "most"),
        ("accuracy", "runs/a", 2, 1, None, 25.0, 10.0, 40.0),
        ("accuracy", "runs/a", 2, 2, None, 25.0, 20.0, 30.0),
        ("accuracy", "runs/b-seed1", 1, 1, None, 5.0, 5.0, 5.0),
    ]
    (axes,) = chart.draw().axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[25.0, 25.0], [5.0]]
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().extents.tolist() == [1.0, 10.0, 2.0, 40.0]


def test_groups_of_seeds_with_one_name_are_numbered() -> None:
    runs = [logs(f"a-seed{s}", 1.0, identity=which, seed=s) for which in "xy" for s in (1, 2)]
    assert OverRounds.of(runs, ["accuracy"], mean=True).lines == ["a #1", "a #2"]


def test_seeds_without_a_common_round_are_no_line_but_a_note() -> None:
    runs = [logs("a-seed1", 1.0, identity="a"), logs("a-seed2", 2.0, identity="a", seed=2)]
    runs[1].rounds[0]["round"] = 4
    chart = OverRounds.of(runs, ["accuracy"], mean=True)
    assert (chart.lines, chart.notes) == (
        [],
        ["a has no mean of accuracy: its 2 seeds share no round."],
    )
    assert OverRounds.of(runs, ["accuracy"], mean=False).notes == []


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["s1/FedGR", "s2/FedGR", "s3/FedGR"], "FedGR"),
        (["a-seed1", "a-seed2"], "a"),
        (["x/seed1", "x/seed2"], "x"),
        (["one-1a2b/iid-fast-seed1", "one-3c4d/iid-slow-seed2"], "one/iid"),
        (["fedgr-a-b", "fedgr-a-b-again"], "fedgr-a-b"),
        (["s1", "s2", "s3"], "s1 and 2 more"),
    ],
)
def test_seeds_are_called_by_what_their_names_have_in_common(names: list[str], title: str) -> None:
    runs = [logs(name, 1.0, identity="x", seed=seed) for seed, name in enumerate(names)]
    assert OverRounds.of(runs, ["accuracy"], mean=True).lines == [title]


def test_there_is_no_half_round() -> None:
    """Where there is room for 1.5, too."""
    for count in (1, 2, 3, 7, 230):
        chart = OverRounds.of([logs("a", *[1.0] * count)], ["accuracy"], mean=False)
        (axes,) = chart.draw().axes
        assert all(tick == round(tick) for tick in axes.get_xticks())


def drawn(names: list[str], numbers: list[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """Height of each panel and of the figure in inches, and the legend's columns."""
    runs = [logs(name, 1.0, 2.0) for name in names]
    for run in runs:
        run.rounds[0]["drift"] = 0.5
    figure = OverRounds.of(runs, numbers, mean=False).draw()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert min(box.x0, box.y0) >= 0, "the legend is cut off"
    assert box.x1 <= figure.bbox.width
    assert box.y1 <= figure.bbox.height
    panels = [axes.get_window_extent() for axes in figure.axes]
    assert not any(box.overlaps(panel) for panel in panels)
    assert [text.get_text().replace("\n", "") for text in legend.get_texts()] == names
    columns = len({round(text.get_window_extent().x0) for text in legend.get_texts()})
    sizes = np.array([[panel.width, panel.height] for panel in panels]) / figure.dpi
    return sizes, figure.get_size_inches(), columns


@pytest.mark.parametrize("numbers", [["accuracy"], ["accuracy", "drift"]])
@pytest.mark.parametrize(
    ("letters", "count", "columns"),
    [(25, 1, 1), (25, 2, 2), (30, 12, 2), (60, 12, 1), (200, 2, 1), (10, 40, 5)],
)
def test_a_legend_that_takes_much_room_gets_its_own(
    numbers: list[str], letters: int, count: int, columns: int
) -> None:
    """A letter x is 8.33 · 0.59 points wide (0.068 inch) and what stands around a name 0.5 inch, so
    that the 7.5 inches hold two columns of 30 letters (5.1) and 5 of 10 (5.9), not 6 (7.1 and the
    space around them). The panels may differ in height by the legend's margin, 0.1 inch."""
    beside, small, _ = drawn(["short"], numbers)
    names = [f"{i:02}".ljust(letters, "x") for i in range(count)]
    below, large, found = drawn(names, numbers)
    assert found == columns
    assert large[0] == small[0]
    assert large[1] > small[1]
    assert below[:, 1] == pytest.approx(beside[:, 1], abs=0.1)
    assert (below[:, 0] > beside[:, 0]).all()


def test_names_that_mean_something_to_matplotlib_are_shown() -> None:
    """It hides what is called _…, and reads $ as mathematics, here with a syntax error."""
    chart = OverRounds.of([logs("_a_", 1.0), logs("x$^{$y", 2.0)], ["accuracy"], mean=False)
    figure = chart.draw()
    figure.canvas.draw()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [" _a_", r"x\$^{\$y"]


def test_a_panel_per_number_and_no_line_for_what_was_never_logged() -> None:
    runs = [logs("a", 1.0, 2.0), logs("b", 3.0)]
    runs[0].rounds[1]["server"] = {"share": 0.5}
    chart = OverRounds.of(runs, ["server.share", "accuracy"], mean=False)
    above, below = chart.draw().axes
    assert [line.get_label() for line in above.lines] == ["a"]
    assert above.lines[0].get_xydata().tolist() == [[2.0, 0.5]]
    assert [line.get_label() for line in below.lines] == ["a", "b"]
    same = {
        line.get_linestyle() + str(line.get_color()) for line in (above.lines[0], below.lines[0])
    }
    assert len(same) == 1, "a run looks different in two panels"


def test_a_round_stands_where_its_passes_through_the_data_end(tmp_path: Path) -> None:
    """Four clients with n = 1, 2, 3, 4 and two epochs a round. Clients 0 and 3 pass 2·5/10 = 1 of
    the data, client 1 then 2·2/10 = 0.4 of it; in the other seed client 2 makes 0.6, then 0.6."""
    held = tuple(np.split(np.arange(10), [1, 3, 6]))
    labels = np.zeros(10, dtype=np.int64)
    runs = []
    for seed, clients in enumerate(([[0, 3], [1]], [[2], [2]])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        save_scene(hand_made_scene(held, labels, labels), folder / "scene.safetensors")
        (folder / "config.toml").write_text("[sgd]\nepochs = 2\n")
        run = logs("a", 10.0, 20.0, identity="a", seed=seed, folder=folder)
        for line, chosen in zip(run.rounds, clients, strict=True):
            line["clients"] = chosen
        runs.append(run)
    assert passes(runs[0]) == pytest.approx({1: 1.0, 2: 1.4})
    chart = OverRounds.of(runs, ["accuracy"], mean=True, by_passes=True)
    assert chart.panels["accuracy"][0].passes == pytest.approx([0.8, 1.3])
    (axes,) = chart.draw().axes
    assert axes.lines[0].get_xdata() == pytest.approx([0.8, 1.3])
    assert axes.get_xlabel() == "passes through the data"
    del runs[0].rounds[0]["clients"]
    with pytest.raises(FedsieveError, match="does not say who trained on how much"):
        passes(runs[0])


CLIENTS = [at(0, f1=0.4, true_rate=0.6), at(1, f1=0.5, true_rate=0.1), at(2, f1=0.9, true_rate=0.3)]


def test_clients_stand_in_the_order_of_their_noise() -> None:
    """Noise .6, .1, .3 of clients 0, 1, 2 puts them in the order 1, 2, 0."""
    chart = OverClients.of([logs("a", 1.0, clients=CLIENTS)], ["f1"], ())
    assert chart.clients == [1, 2, 0]
    (axes,) = chart.draw().axes
    values, noise = axes.lines
    assert values.get_xydata().tolist() == [[0, 0.5], [1, 0.9], [2, 0.4]]
    assert noise.get_ydata().tolist() == [0.1, 0.3, 0.6]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "0"]
    assert list(chart.rows())[1:] == [
        ("f1", "a", None, 1, 0.1, 0.5),
        ("f1", "a", None, 2, 0.3, 0.9),
        ("f1", "a", None, 0, 0.6, 0.4),
    ]


def test_clients_without_known_noise_stand_by_number() -> None:
    lines = [at(3, loss=1.0), at(1, loss=2.0)]
    chart = OverClients.of([logs("a", 1.0, clients=lines)], ["loss"], ())
    assert chart.clients == [1, 3]
    (axes,) = chart.draw().axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2.0, 1.0]]


def test_a_panel_for_each_moment() -> None:
    lines = [at(0, 0, f1=0.2), at(0, 4, f1=0.8)]
    chart = OverClients.of([logs("a", *[1.0] * 5, clients=lines)], ["f1"], (1, 5))
    early, late = chart.draw().axes
    assert (early.get_title(), late.get_title()) == ("after 1 round", "after 5 rounds")
    assert [axes.lines[0].get_ydata().tolist() for axes in (early, late)] == [[0.2], [0.8]]
    assert [row[2] for row in chart.rows()][1:] == [1, 5]


@pytest.mark.parametrize(
    ("runs", "numbers", "titles"),
    [
        (["a"], ["f1"], ["a"]),
        (["a", "b"], ["f1"], ["a", "b"]),
        (["a"], ["f1", "loss"], ["f1", "loss"]),
        (["a", "b"], ["f1", "loss"], ["a: f1", "a: loss", "b: f1", "b: loss"]),
    ],
)
def test_a_line_is_called_by_what_tells_it_apart(runs, numbers, titles) -> None:
    found = [logs(name, 1.0, clients=[at(0, f1=0.1, loss=2.0)]) for name in runs]
    assert OverClients.of(found, numbers, ()).lines == titles


def test_many_clients_are_not_named_one_by_one() -> None:
    lines = [at(k, f1=0.5) for k in range(40)]
    (axes,) = OverClients.of([logs("a", 1.0, clients=lines)], ["f1"], ()).draw().axes
    assert len(axes.get_xticks()) < 26


def test_runs_of_different_scenes_are_not_drawn_over_one_order() -> None:
    other = [at(1, f1=0.5, true_rate=0.2)]
    with pytest.raises(FedsieveError, match="Client 1 has other wrong labels in b"):
        OverClients.of([logs("a", 1.0, clients=CLIENTS), logs("b", 1.0, clients=other)], ["f1"], ())


def test_before_the_first_number_there_is_nothing_to_draw() -> None:
    with pytest.raises(FedsieveError, match="No client had logged that after 2 rounds"):
        OverClients.of([logs("a", *[1.0] * 7, clients=[at(0, 6, f1=0.1)])], ["f1"], (2,))


def test_no_run_is_drawn_at_a_round_that_it_has_not_reached() -> None:
    """Run a has 2 rounds, b has 1, and c, that has 1 too, has never logged the number."""
    runs = [
        logs("a", 1.0, 2.0, clients=[at(0, f1=0.1)]),
        logs("b", 1.0, clients=[at(0, f1=0.2)]),
        logs("c", 1.0, clients=[at(0, loss=0.2)]),
    ]
    chart = OverClients.of(runs, ["f1"], (1, 2))
    drawn = {after: [line.run for line in lines] for after, lines in chart.panels.items()}
    assert drawn == {1: ["a", "b"], 2: ["a"]}
    assert chart.notes == ["b is left out after 2 rounds: it ends after 1 round."]
    assert OverClients.of(runs, ["f1"], ()).notes == []
    with pytest.raises(FedsieveError, match="No run has logged 3 rounds; the longest ends after 2"):
        OverClients.of(runs, ["f1"], (1, 3))
