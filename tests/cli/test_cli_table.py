"""`fedsieve table`: what is found, how it is grouped and named, and how it is written."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.cli.table import (
    csv_text,
    escape_csv,
    escape_latex,
    escape_markdown,
    latex,
    markdown,
)
from fedsieve.data.sources import SOURCES
from fedsieve.labels import Label, load_labels, save_labels
from fedsieve.recipe import cells
from fedsieve.simulate.results import (
    TOLD_BY_PATH,
    Outcome,
    arrange,
    flat,
    once_per_seed,
    score_of,
)


def config(method="fedavg", seed=1, noise=None, **top):
    noise = noise or {"kind": "none"}
    return {
        "name": "x",
        "seed": seed,
        "data": {"source": "digits"},
        "scene": {"clients": 4, "partition": {"kind": "iid"}, "noise": noise},
        "method": {"name": method} if isinstance(method, str) else method,
        **top,
    }


def write(folder: str, table, **summary) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "config.toml").write_text(tomli_w.dumps(table))
    Path(folder, "summary.json").write_text(json.dumps(summary))


def arranged(*pairs):
    return arrange([Outcome.of(table, summary) for table, summary in pairs])


def test_seeds_are_averaged(cli):
    """Last 10: (80 + 83 + 86) / 3 = 83, standard deviation √((9 + 0 + 9) / 2) = 3."""
    for seed, value in ((1, 80.0), (2, 83.0), (3, 86.0)):
        write(f"runs/a-seed{seed}", config(seed=seed), last10=value, best=value + 1)
    write("runs/b-seed1", config("fedprox"), last10=90.0, best=91.5)
    answer = cli("table", "runs")
    assert answer.status == 0
    assert answer.out.splitlines() == [
        "| method | digits |",
        "| --- | ---: |",
        "| fedavg | 83.00 ± 3.00 |",
        "| fedprox | 90.00 |",
    ]
    assert answer.err == "Means of fewer than 3 seeds: fedprox, digits (1).\n"
    best = cli("table", "runs/a-seed1", "runs/b-seed1", "--metric", "best")
    assert "| fedprox | 91.50 |" in best.out
    assert best.err == ""


def test_unfinished_and_repeated_runs_are_left_out_and_told(cli):
    write("a", config(), last10=1.0)
    write("b", config(), last10=2.0)
    write("c", config(seed=2), last10=3.0)
    Path("c/summary.json").rename("c/env.json")
    Path("flower").mkdir()  # whose config.toml is another program's
    Path("flower/config.toml").write_text("[superlink]\n")
    answer = cli("table", "a", "b", "c", "a", ".")
    assert "| fedavg | 1.00 |" in answer.out
    assert answer.err == "Left out: 1 unfinished.\nLeft out: 1 that repeat a seed.\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Give the folders of the runs"),
        (["nowhere"], "There is no folder nowhere"),
        (["."], "There is no finished run in . (0 unfinished)"),
        ([".", "--formt", "csv"], "There is no option --formt; did you mean --format?"),
    ],
)
def test_mistakes(argv, words, cli):
    answer = cli("table", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")


def test_any_logged_number_as_it_was_logged_last(cli):
    """Seeds 1 and 2 end with 0.25 and 0.75 (a null and an absent one are passed over): mean 0.5,
    standard deviation 0.5/√2 = 0.35355."""
    for seed, last in ((1, 0.25), (2, 0.75)):
        write(f"runs/a-seed{seed}", config(seed=seed), last10=80.0)
        lines = [{"diagnostics": {"noise_mse": v}} for v in (9.0, last, None)] + [{"accuracy": 1.0}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        Path(f"runs/a-seed{seed}", "metrics.jsonl").write_text(text)
    write("runs/b-seed1", config("fedprox"), last10=90.0)
    answer = cli("table", "runs", "--metric", "noise_mse")
    assert answer.out.splitlines()[2:] == ["| fedavg | 0.5 ± 0.3536 |", "| fedprox | – |"]
    assert cli("table", "runs", "--metric", "diagnostics.noise_mse").out == answer.out
    assert "'lst10'; did you mean 'last10'?" in cli("table", "runs", "--metric", "lst10").err


def test_a_run_without_its_settings_is_named(cli):
    write("runs/a", config(), last10=1.0)
    write("runs/b", {}, last10=2.0)
    answer = cli("table", "runs")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == (
        "fedsieve: The results in runs/b cannot be read (config.toml is empty); "
        "delete or repair that folder.\n"
    )


def test_settings_that_only_some_runs_have_are_no_trouble(cli):
    write("a", config(noise={"kind": "symmetric"}), last10=1.0)
    write("b", {"method": {"name": "fedprox"}}, last10=2.0)
    assert cli("table", "a", "b").out.splitlines()[0] == (
        "| method | digits, 4 clients, iid, symmetric noise | ? |"
    )


@pytest.mark.parametrize("content", ["{", "3", "[1]"])
def test_a_damaged_summary_is_named(content, cli):
    write("runs/a", config(), last10=1.0)
    Path("runs/a/summary.json").write_text(content)
    answer = cli("table", "runs")
    assert answer.status == 2
    assert answer.err.startswith("fedsieve: The results in runs/a cannot be read")


@pytest.mark.parametrize(
    ("name", "value"), [("last10", "about 90"), ("best", [90.0]), ("refused_updates", True)]
)
def test_a_summary_with_something_else_for_a_number_is_named(name, value, cli):
    """By a table, by the run whose command is given again, and on a report's page; curves need no
    summary."""
    assert cli("run", "tiny.toml", "--out", "runs/a").status == 0
    summary = Path("runs/a/summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {name: value}))
    reason = f"(summary.json has {value!r} for the number {name}); delete"
    answer = cli("table", "runs")
    assert (answer.status, answer.err.count("\n")) == (2, 1)
    assert answer.err.startswith(f"fedsieve: The results in runs/a cannot be read {reason}")
    answer = cli("run", "tiny.toml", "--out", "runs/a")
    assert answer.status == 2
    assert f"runs/a/summary.json is damaged {reason}" in answer.err
    assert cli("report", "runs").status == 0
    assert "summary.json is damaged and was left out." in Path("report.html").read_text()
    assert cli("curves", "runs").status == 0


ABLATION = config(method={"name": "fedprox", "mu": 0.3}) | {
    "sweep": {
        "noise": [
            {"label": "light", "scene.noise": {"kind": "symmetric", "rate": 0.6}, "method.mu": 0.9},
            {"label": "heavy", "scene.noise": {"kind": "symmetric", "rate": 0.2}, "method.mu": 0.1},
        ],
        "row": [{"label": "w/o decay", "sgd.lr": 0.9}, {"label": "full", "sgd.lr": 0.1}],
    }
}


def of_sweep(**score_by_name):
    return arrange(
        [
            Outcome.of(cell.table, {"best": score_by_name[cell.name]}, labels=cell.labels)
            for cell in reversed(cells(ABLATION))
        ]
    )


def test_a_sweep_comes_out_as_the_table_that_it_was_made_for():
    """Each noise level has its own mu, which is no method of its own; rows and columns are in the
    order of the sweep, whatever the order of folders."""
    names = ["light-w/o decay", "light-full", "heavy-w/o decay", "heavy-full"]
    table = of_sweep(**{name: float(place) for place, name in enumerate(names)})
    assert table.rows == ("fedprox w/o decay", "fedprox full")
    assert table.columns == ("rate=0.6", "rate=0.2")
    scores = {(r, c): table.score(r, c, "best").mean for r in table.rows for c in table.columns}
    assert list(scores.values()) == [0.0, 2.0, 1.0, 3.0]


def test_a_label_that_stands_for_the_method_is_the_whole_name():
    sweep = {"row": [{"label": "ours", "method.name": "fedprox"}, {"label": "theirs"}]}
    found = [
        Outcome.of(cell.table, {}, labels=cell.labels)
        for cell in cells(config() | {"sweep": sweep})
    ]
    assert arrange(found).rows == ("ours", "theirs")


def test_runs_without_labels_stand_beside_those_with_and_keep_their_names():
    cell = cells(ABLATION)[0]
    plain = [Outcome.of(config(method={"name": "fedprox", "mu": mu}), {}) for mu in (0.1, 0.2)]
    table = arrange([Outcome.of(cell.table, {}, labels=cell.labels), *plain])
    assert table.rows == ("fedprox mu=0.1", "fedprox mu=0.2", "fedprox w/o decay")


def test_two_labels_that_share_a_scene_are_two_methods_there():
    """Else they would be taken for seeds of one entry."""
    sweep = {
        "scene": [
            {"label": "one", "scene.noise": {"kind": "none"}, "method.mu": 0.1},
            {"label": "two", "scene.noise": {"kind": "none"}, "method.mu": 0.2},
        ]
    }
    base = config(method={"name": "fedprox"}) | {"sweep": sweep}
    table = arrange([Outcome.of(c.table, {"best": 1.0}, labels=c.labels) for c in cells(base)])
    assert table.columns == ("digits",)
    assert table.rows == ("fedprox mu=0.1", "fedprox mu=0.2")


def labelled(table, **summary):
    return [Outcome.of(cell.table, summary, labels=cell.labels) for cell in cells(table)]


def test_one_label_with_other_settings_is_another_row():
    """The recipe was edited, or its runs were given an option: no mean over both."""
    rows = [{"label": "w/o decay", "sgd.lr": 0.7}]
    edited = ABLATION | {"sweep": ABLATION["sweep"] | {"row": rows}}
    table = arrange([*labelled(ABLATION, best=1.0), *labelled(edited, best=1.0)])
    assert set(table.rows) == {
        "fedprox w/o decay lr=0.9",
        "fedprox w/o decay lr=0.7",
        "fedprox full",
    }
    assert {len(entry) for entry in table.entries.values()} == {1}
    longer = arrange([*labelled(ABLATION), *labelled(ABLATION | {"rounds": 7})])
    assert set(longer.rows) >= {"fedprox full", "fedprox full rounds=7"}


def test_another_choice_for_a_scene_is_another_row_too():
    """Then not even the labels of the scenes explain their hyper-parameters."""
    noise = [dict(point, **{"method.mu": 0.5}) for point in ABLATION["sweep"]["noise"]]
    edited = ABLATION | {"sweep": ABLATION["sweep"] | {"noise": noise}}
    table = arrange([*labelled(ABLATION, best=1.0), *labelled(edited, best=1.0)])
    assert {len(entry) for entry in table.entries.values()} == {1}
    assert "fedprox full mu=0.5" in table.rows


def test_runs_with_and_without_labels_share_the_columns_of_their_scenes():
    swept = [Outcome.of(c.table, {"best": 1.0}, labels=c.labels) for c in cells(ABLATION)]
    scene = ABLATION["sweep"]["noise"][1]["scene.noise"]
    plain = Outcome.of(config("fedavg", noise=scene), {"best": 2.0})
    table = arrange([plain, *swept])
    assert table.columns == ("rate=0.6", "rate=0.2")
    assert table.score("fedavg", "rate=0.2", "best").mean == 2.0


def test_latex_of_negative_numbers(cli):
    for seed, value in ((1, -0.1), (2, -0.3)):
        write(f"runs/a-seed{seed}", config(seed=seed), last10=value)
    assert r"fedavg & $-0.20 \pm 0.14$ \\" in cli("table", "runs", "--format", "latex").out


def test_labels_survive_the_run(cli):
    with Path("tiny.toml").open("a") as recipe:
        recipe.write(
            '[sweep]\nrow = [{ label = "slow <b>", "sgd.lr" = 0.01 }, { label = "fast" }]\n'
        )
    answer = cli("run", "tiny.toml", "--out", "runs")
    assert answer.status == 0
    assert "fedavg slow <b>" in answer.out
    rows = cli("table", "runs").out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [r"| fedavg slow \<b\>", "| fedavg fast"]


@pytest.mark.parametrize("content", ["{", "3", '[{"axis": 1}]', "[7]"])
def test_damaged_labels_are_named(content, cli):
    write("runs/a", config(), last10=1.0)
    Path("runs/a/labels.json").write_text(content)
    answer = cli("table", "runs")
    assert answer.status == 2
    assert answer.err.startswith("fedsieve: runs/a/labels.json cannot be read")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers(0, 9)), max_size=3))
def test_labels_read_back_as_they_were(tmp_path_factory, labels):
    folder = tmp_path_factory.mktemp("labels")
    made = tuple(Label(axis=a, text=t, place=p, settings=(a, t)) for a, t, p in labels)
    save_labels(made, folder)
    assert load_labels(folder) == made
    assert (folder / "labels.json").exists() == bool(made)


def test_columns_are_named_by_what_differs():
    noisy = {"kind": "symmetric", "low": 0.5, "high": 0.9}
    result = arranged((config(noise=noisy), {}), (config(), {}))
    assert result.columns == ("symmetric noise, low=0.5, high=0.9", "no noise")
    clean = {"kind": "none", "high": 1.0}  # as a run writes it, which leaves out what is not set
    result = arranged((config(noise=clean), {}), (config(noise=noisy), {}))
    assert result.columns == ("no noise", "symmetric noise, low=0.5, high=0.9")
    result = arranged((config(noise=noisy), {}), (config(noise=noisy | {"low": 0.2}), {}))
    assert result.columns == ("low=0.5", "low=0.2")
    two = config() | {"data": {"source": "mnist", "path": "/a"}}
    assert arranged((config(), {}), (two, {})).columns == ("digits", "mnist")
    big = config()
    big["scene"] |= {"clients": 9, "partition": {"kind": "dirichlet", "alpha": 0.3}}
    assert arranged((config(), {}), (big, {})).columns == (
        "4 clients, iid",
        "9 clients, dirichlet, alpha=0.3",
    )


def test_rows_are_named_by_what_differs():
    result = arranged(
        (config({"name": "fedprox", "mu": 0.1}), {}),
        (config({"name": "fedprox", "mu": 1.0}), {}),
        (config(), {}),
    )
    assert result.rows == ("fedprox mu=0.1", "fedprox mu=1.0", "fedavg")
    result = arranged((config(rounds=3), {}), (config(rounds=4), {}))
    assert result.rows == ("fedavg rounds=3", "fedavg rounds=4")


def test_runs_differ_neither_by_engine_nor_by_name_nor_by_place():
    other = config(seed=2, engine={"device": "cuda"}) | {"name": "y"}
    other["data"] = {"source": "digits", "path": "/elsewhere"}
    result = arranged((config(), {}), (other, {}))
    assert (len(result.rows), len(result.columns)) == (1, 1)


def test_a_long_value_does_not_fill_the_table():
    first, second = (config({"name": "m", "of": [0.25] * 20 + [last]}) for last in (0.5, 0.75))
    short = "m of=[0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.…"
    assert arranged((first, {}), (second, {})).rows == (short, f"{short}*")


def test_different_rows_never_share_a_name():
    first = config({"name": "m"}, model={"x": "1 x=2"}, sgd={"y": 1})
    second = config({"name": "m"}, model={"x": "1"}, sgd={"x": "2", "y": 1})
    assert len(set(arranged((first, {}), (second, {})).rows)) == 2


def test_a_missing_metric_is_a_dash():
    result = arranged((config(), {"suspect_auroc": None}), (config("fedprox"), {}))
    assert "| fedavg | – |" in markdown(result, "suspect_auroc")
    assert "fedprox & -- \\\\" in latex(result, "suspect_auroc")
    assert csv_text(result, "suspect_auroc").splitlines()[1] == "fedavg,,"


def test_latex_has_rules_and_escapes():
    table = config({"name": "a_b%"}, rounds=3)
    text = latex(
        arranged((table, {"last10": 50.0}), (table | {"seed": 2}, {"last10": 52.0})), "last10"
    )
    assert text.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"method & digits \\",
        r"\midrule",
        r"a\_b\% & $51.00 \pm 1.41$ \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_csv_of_two_seeds_is_numbers():
    pairs = [(config(seed=s), {"last10": v}) for s, v in ((1, 50.0), (2, 52.0))]
    rows = list(csv.reader(io.StringIO(csv_text(arranged(*pairs), "last10"))))
    assert rows[0] == ["method", "digits", "digits std"]
    assert [rows[1][0], *map(float, rows[1][1:])] == ["fedavg", 51.0, pytest.approx(2**0.5, 1e-5)]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\r\n-", "＝", "＠", "'"])
def test_csv_cells_are_no_formulas(start):
    assert escape_csv(f"{start}1+1") == f"'{start[-1]}1+1"
    text = csv_text(arranged((config({"name": f"{start}cmd|' /C calc'!A0"}), {})), "last10")
    assert list(csv.reader(io.StringIO(text)))[1][0] == f"'{start[-1]}cmd|' /C calc'!A0"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=20))
def test_escaped_text_keeps_its_cell(text):
    shown = escape_markdown(text)
    assert "\n" not in shown
    assert shown.replace("\\\\", "").replace("\\|", "").count("|") == 0
    bare = escape_latex(text)
    for sign in "&%$#_":
        assert bare.count(sign) == bare.count(f"\\{sign}") == text.count(sign)


def test_markdown_escapes():
    assert escape_markdown("a|b *c* <d> [e] `f`") == r"a\|b \*c\* \<d\> \[e\] \`f\`"
    assert escape_markdown("clients_per_round _x_") == r"clients_per_round \_x\_"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_scores(values):
    outcomes = [Outcome.of(config(seed=s), {"best": v}) for s, v in enumerate(values)]
    score = score_of(outcomes, "best")
    assert score is not None
    assert score.mean == pytest.approx(sum(values) / len(values))
    assert score.seeds == len(values)
    if len(values) == 1:
        assert score.std is None
    else:
        assert score.std == pytest.approx(statistics.stdev(values))


def test_helpers():
    assert flat({"a": {"b": {"c": 1}}, "d": [2]}) == {"a.b.c": 1, "d": [2]}
    same = Outcome.of(config(), {})
    assert once_per_seed([same, same]) == [same]
    assert score_of([Outcome.of(config(), {"best": float("nan")})], "best") is None


def test_runs_on_different_data_of_ones_own_are_no_seeds_of_one_entry():
    """The path tells the data apart; that of a public data set says only where it lies."""

    def found(source):
        paths = ("north/ward", "south/clinic")
        tables = [
            config(seed=seed, data={"source": source, "path": path})
            for seed, path in enumerate(paths)
        ]
        return arranged(*((table, {"last10": 50.0}) for table in tables))

    assert {name for name, source in SOURCES.items() if source.is_own} <= set(TOLD_BY_PATH)
    assert found("sites").columns == ("ward", "clinic")
    assert found("npz").columns == ("ward", "clinic")
    public = found("cifar10")
    assert public.columns == ("cifar10",)
    assert public.score("fedavg", "cifar10", "last10").seeds == 2
