"""The recipes of FedLSR's tables and of FedLSR in FedGR's: one for each, and what each must say.

`EXPECTED` is built here from the structure of the paper's tables and its sections 4.1 and 4.6; the
files are compared with it run by run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.cli.grid import expand
from fedsieve.cli.recipes import first_comment
from fedsieve.local.plan import Sgd
from fedsieve.methods import fedavg, fedcoteaching, fedlsr, fedsce, rofl
from fedsieve.models import ModelConfig
from fedsieve.recipe import (
    DataConfig,
    Recipe,
    cells,
    read_recipe,
    recipe_from_table,
    shipped_recipes,
)
from fedsieve.scenes import Noise, Partition, SceneConfig, build_scene

FILES = {
    name.removeprefix("fedlsr/"): text
    for name, text in shipped_recipes().items()
    if name.startswith("fedlsr/")
}
PAPER = Path(__file__).resolve().parents[2] / "shared" / "papers" / "fedlsr.txt"

# ------------------------------------------------------------------- the paper's settings

SYMMETRIC = (0.3, 0.4, 0.5, 0.6, 0.7)
PAIRWISE = (0.2, 0.3, 0.4)
NOISES = {f"symmetric{e}": Noise(kind="symmetric", clients="global", rate=e) for e in SYMMETRIC} | {
    f"pairwise{e}": Noise(kind="asymmetric", clients="global", rate=e, flip_to="previous")
    for e in PAIRWISE
}
TABLE_2 = {
    "mnist": (0.15, 0.20, 0.25, 0.30, 0.80, 0.40, 0.60, 1.00),
    "fashion-mnist": (0.15, 0.20, 0.25, 0.30, 0.60, 0.40, 0.60, 1.00),
    "cifar10": (0.10, 0.20, 0.25, 0.30, 0.60, 0.30, 0.60, 0.80),
}
"""γ by data set and column of Table 3."""
WARM_UP = {"mnist": 10, "fashion-mnist": 20, "cifar10": 40}
IID = Partition(kind="iid", stratified=True, overlap=True)
FIVE_CLASSES = Partition(kind="classes", classes=5, overlap=True)
IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SGD = Sgd(epochs=5, batch_size=60, lr=0.15, momentum=0.9, weight_decay=1e-4, tail="keep")


def data_of(source: str, views: str | None = None) -> DataConfig:
    own = "fedlsr-cifar10" if source == "cifar10" else "fedlsr-mnist"
    normalised = IMAGENET if source == "cifar10" else {}
    return DataConfig(source=source, path=Path("data"), views=views or own, **normalised)


def lsr(source: str, column: str, **settings: Any) -> fedlsr.Config:
    gamma = TABLE_2[source][list(NOISES).index(column)]
    values: dict[str, Any] = {"gamma": gamma, "warmup_rounds": WARM_UP[source]}
    return fedlsr.Config(preset="authors", **(values | settings))


def small(name: str, source: str, column: str, method: Any, **changes: Any) -> Recipe:
    """A run of the first three data sets as in section 4.1."""
    recipe = Recipe(
        name=f"fedlsr-{name}",
        seed=1,
        rounds=100,
        clients_per_round=5,
        precision="bf16",
        data=data_of(source),
        scene=SceneConfig(clients=100, partition=IID, noise=NOISES[column]),
        model=ModelConfig(name="cnn9", always_on_dropout=True),
        sgd=SGD,
        method=method,
    )
    return replace(recipe, **changes)


def table_1() -> dict[str, dict[str, Recipe]]:
    views = {"original": "plain"} | {v: v for v in ("flip", "rotate5", "rotate15", "rotate30")}
    noises = {"clean": Noise(), "symmetric0.4": NOISES["symmetric0.4"]}
    return {
        "table1": {
            f"{source}-{noise}-{row}": small(
                "table1",
                source,
                "symmetric0.4",
                fedavg.Config(),
                data=data_of(source, view),
                scene=SceneConfig(clients=100, partition=IID, noise=noises[noise]),
            )
            for source, noise, (row, view) in product(
                ("fashion-mnist", "cifar10"), noises, views.items()
            )
        }
    }


def table_3() -> dict[str, dict[str, Recipe]]:
    files = {}
    for source, column in product(TABLE_2, NOISES):
        name = f"table3-{source}-{column}"
        files[name] = {
            "fedavg": small(name, source, column, fedavg.Config()),
            "fedlsr": small(name, source, column, lsr(source, column)),
        }
    return files


def symmetric_ce() -> dict[str, dict[str, Recipe]]:
    """Its row of Table 3, and its combination with LSR of Table 7."""
    alpha = {"mnist": 0.01, "fashion-mnist": 0.1, "cifar10": 0.1}
    return {
        "table3-symmetric-ce": {
            f"{source}-{column}": small(
                "table3-symmetric-ce", source, column, fedsce.Config(alpha=alpha[source])
            )
            for source, column in product(TABLE_2, NOISES)
        },
        "table7": {
            column: small(
                "table7",
                "fashion-mnist",
                column,
                lsr("fashion-mnist", column, prediction="logits", alpha=0.1, beta=1.0),
            )
            for column in ("symmetric0.7", "pairwise0.4")
        },
    }


def coteaching() -> dict[str, dict[str, Recipe]]:
    """Its rows of Tables 3 and 6, and Table 7's combination with LSR; τ is the noise's rate."""

    def method(column: str, **settings: Any) -> fedcoteaching.Config:
        rate = NOISES[column].rate
        assert rate is not None
        return fedcoteaching.Config(forget_rate=rate, ramp_rounds=10, **settings)

    of_table_7 = ("symmetric0.7", "pairwise0.4")
    fashion = "fashion-mnist"
    return {
        "table3-coteaching": {
            f"{source}-{column}": small("table3-coteaching", source, column, method(column))
            for source, column in product(TABLE_2, NOISES)
        },
        "table6-coteaching": {
            column: small(
                "table6-coteaching",
                fashion,
                column,
                method(column),
                scene=SceneConfig(clients=100, partition=FIVE_CLASSES, noise=NOISES[column]),
            )
            for column in of_table_7
        },
        "table7-coteaching": {
            column: small(
                "table7-coteaching", fashion, column, method(column, objective="sharpened")
            )
            for column in of_table_7
        },
    }


def robust_fl() -> dict[str, dict[str, Recipe]]:
    """RoFL's rows of Tables 3 and 6; it forgets the noise's rate."""

    def run(name: str, source: str, column: str, **changes: Any) -> Recipe:
        rate = NOISES[column].rate
        assert rate is not None
        return small(name, source, column, rofl.Config(forget_rate=rate), **changes)

    return {
        "table3-rofl": {
            f"{source}-{column}": run("table3-rofl", source, column)
            for source, column in product(TABLE_2, NOISES)
        },
        "table6-rofl": {
            column: run(
                "table6-rofl",
                "fashion-mnist",
                column,
                scene=SceneConfig(clients=100, partition=FIVE_CLASSES, noise=NOISES[column]),
            )
            for column in ("symmetric0.7", "pairwise0.4")
        },
    }


ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "table4": {
        "w/o MixUp prediction": {"prediction": "none"},
        "lambda=1": {"prediction": "original"},
    },
    "table5": {
        "w/o": {"gamma": 0.0},
        **{distance: {"distance": distance} for distance in ("l1", "l2", "cosine")},
    },
}
"""Every row but that of FedLSR itself, which is Table 3's."""


def tables_4_to_6() -> dict[str, dict[str, Recipe]]:
    source = "fashion-mnist"
    files = {
        table: {
            f"{column}-{row}": small(table, source, column, lsr(source, column, **settings))
            for column, (row, settings) in product(NOISES, rows.items())
        }
        for table, rows in ROWS.items()
    }
    files["table6"] = {
        f"{column}-{method.name}": small(
            "table6",
            source,
            column,
            method,
            scene=SceneConfig(clients=100, partition=FIVE_CLASSES, noise=NOISES[column]),
        )
        for column in ("symmetric0.7", "pairwise0.4")
        for method in (fedavg.Config(), fedsce.Config(), lsr(source, column, distance="l1"))
    }
    return files


def table_8() -> dict[str, dict[str, Recipe]]:
    base = Recipe(
        name="fedlsr-table8",
        seed=1,
        rounds=40,
        clients_per_round=2,
        precision="bf16",
        data=DataConfig(
            source="clothing1m", path=Path("data/clothing1m"), views="fedlsr-clothing1m"
        ),
        scene=SceneConfig(clients=100),
        model=ModelConfig(name="resnet50", weights=Path("data/resnet50-0676ba61.pth")),
    )
    slow, fast = replace(SGD, lr=0.01), replace(SGD, lr=0.1)
    method = fedlsr.Config(preset="authors", gamma=1.2, warmup_rounds=10, distance="l1")
    joined = replace(method, gamma=1.0, prediction="logits")
    return {
        "table8": {
            "fedavg": replace(base, sgd=slow),
            "fedlsr": replace(base, sgd=fast, method=replace(method, lr_drop_round=20)),
            "fedsce": replace(base, sgd=slow, method=fedsce.Config()),
            "fedsce-lsr": replace(base, sgd=slow, method=joined),
        }
    }


def figure_6() -> dict[str, dict[str, Recipe]]:
    plus = {"gamma": 0.4, "lambda_e": 0.6, "warmup_rounds": 60}
    return {
        f"figure6-{source}": {
            f"{column}-{row}": small(
                f"figure6-{source}", source, column, lsr(source, column, **settings), rounds=300
            )
            for column, (row, settings) in product(NOISES, {"LSR": {}, "LSR+": plus}.items())
        }
        for source in ("fashion-mnist", "cifar10")
    }


def fedgr_tables() -> dict[str, dict[str, Recipe]]:
    """The scenes, networks and solver of FedGR's own baselines, with LSR+ as recommended."""
    files = {}
    for table, partition in product((1, 2), ("iid", "dirichlet")):
        baselines = cells(read_recipe(f"fedgr/table{table}-{partition}-baselines"))
        method = fedlsr.Config(
            preset="authors",
            gamma=0.4,
            lambda_e=0.6,
            warmup_rounds=100,
            distance="js" if partition == "iid" else "l1",
            view="weak",
        )
        name = f"fedgr-table{table}-{partition}"
        files[name] = {
            cell.name.removeprefix("FedAvg-"): replace(
                recipe_from_table(cell.table), name=f"fedlsr-{name}", method=method
            )
            for cell in baselines
            if cell.name.startswith("FedAvg-")
        }
    return files


EXPECTED = (
    table_1()
    | table_3()
    | symmetric_ce()
    | coteaching()
    | robust_fl()
    | tables_4_to_6()
    | table_8()
    | figure_6()
    | fedgr_tables()
)


def runs(file: str) -> dict[str, Recipe]:
    return {
        cell.name: recipe_from_table(cell.table) for cell in cells(read_recipe(f"fedlsr/{file}"))
    }


# ----------------------------------------------------------------------------- the files


def test_there_is_a_file_for_every_published_setting_and_no_other() -> None:
    assert sorted(FILES) == sorted(EXPECTED)
    assert len(EXPECTED["table1"]) == 2 * 2 * 5
    assert sum(map(len, table_3().values())) == 3 * 8 * 2
    assert [len(found) for found in tables_4_to_6().values()] == [2 * 8, 4 * 8, 2 * 3]
    assert sum(map(len, fedgr_tables().values())) == 2 * 2 * 7


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_file_asks_for_what_the_paper_did(file: str) -> None:
    assert runs(file) == EXPECTED[file]


@pytest.mark.parametrize("file", sorted(FILES))
def test_the_header_says_what_it_is_and_how_to_run_it(file: str) -> None:
    first, *header = FILES[file].partition("\nname = ")[0].splitlines()
    where = file.split("-")[1 if file.startswith("fedgr-") else 0]
    named = where.replace("table", "Table ").replace("figure", "Figure ")
    assert first.startswith("# FedLSR")
    assert f"{named}: " in first
    assert 20 < len(first_comment(FILES[file])) <= 98
    assert header[1] == f"#   fedsieve run fedlsr/{file} --seed 1"
    assert all(line.startswith("#") and len(line) <= 100 for line in header)
    for other in re.findall(r"\b(fed\w+/[\w.-]*\w)", FILES[file]):
        assert other in shipped_recipes()


def published_rows(section: str) -> list[list[str]]:
    """The rows of eight and more numbers in a table of the paper."""
    numbers = [re.findall(r"\b\d\d\.\d\d\b", line) for line in section.splitlines()]
    return [row[:8] for row in numbers if len(row) == 9]


def paper() -> str:
    if not PAPER.is_file():
        pytest.skip(f"the paper is not on this machine ({PAPER})")
    return PAPER.read_text(encoding="utf-8")


def test_the_header_of_a_column_gives_both_published_numbers() -> None:
    section = paper().split("Table 3: Test accuracy on benchmark")[1].split("Table 4")[0]
    rows = published_rows(section)
    assert len(rows) == 3 * 5, "FedAvg is the first and FedLSR the last of five methods"
    for i, source in enumerate(TABLE_2):
        for column, ours, theirs in zip(NOISES, rows[5 * i + 4], rows[5 * i], strict=True):
            header = FILES[f"table3-{source}-{column}"]
            assert f"# Published: FedAvg {theirs}, FedLSR {ours}, " in header


@pytest.mark.parametrize(
    ("place", "file"),
    [(1, "table3-symmetric-ce"), (2, "table3-coteaching"), (3, "table3-rofl")],
)
def test_the_header_of_another_method_gives_its_rows(place: int, file: str) -> None:
    section = paper().split("Table 3: Test accuracy on benchmark")[1].split("Table 4")[0]
    rows = published_rows(section)
    for i, name in enumerate(("MNIST", "Fashion-MNIST", "CIFAR-10")):
        assert f"#   {name} {' '.join(rows[5 * i + place])}\n" in FILES[file]


@pytest.mark.parametrize(("table", "columns"), [("4", (0, 1)), ("5", (0, 2, 3, 4))])
def test_the_header_of_an_ablation_gives_its_rows(table: str, columns: tuple[int, ...]) -> None:
    """The paper's tables have a line for each noise level, and our headers one for each variant."""
    section = paper().split(f"Table {table}: Test accuracy")[1]
    without_differences = re.sub(r"\([^)]*\)", "", section)
    lines = [re.findall(r"\b\d\d\.\d\d", line) for line in without_differences.splitlines()]
    found = [row for row in lines if len(row) == max(columns) + (2 if table == "4" else 1)]
    found = found[: len(NOISES)]
    assert len(found) == len(NOISES)
    for column in columns:
        assert " ".join(row[column] for row in found) in FILES[f"table{table}"]


def test_the_headers_of_the_other_tables_give_their_numbers() -> None:
    text = paper()
    rows = re.findall(r"(Original|Flip|°\]) ((?:\d\d\.\d\d ?){4})$", text, flags=re.MULTILINE)
    found = re.findall(r"(?:original|flip|rotate\d+) ((?:\d\d\.\d\d ?){4})", FILES["table1"])
    assert found == [numbers for _, numbers in rows]
    assert len(found) == 5
    section = text.split("Table 6: Test accuracy")[1].split("4.5 Potential")[0]
    fedavg_6, sce_6, coteaching_6, robust_6, *_, ours_6 = re.findall(
        r"Non-IID (\d\d\.\d\d \d\d\.\d\d)", section
    )
    header = " ".join(FILES["table6"].replace("#", "").split())
    assert f"FedAvg {fedavg_6}, Symmetric CE {sce_6}, FedLSR {ours_6}." in header
    assert f"Co-teaching {coteaching_6}.\n" in FILES["table6-coteaching"]
    assert f"Robust FL {robust_6}.\n" in FILES["table6-rofl"]
    for method, file in (("Symmetric CE", "table7"), ("Co-teaching", "table7-coteaching")):
        joined_7 = re.search(rf"{method} \+ LSR (\S+) \S+ (\S+)", text.replace("(+ ", "(+"))
        assert joined_7 is not None
        header = " ".join(FILES[file].replace("#", "").split())
        assert f"{method} + LSR {joined_7[1]} {joined_7[2]}." in header
    section = text.split("Table 8: Average")[1]
    fedavg_8, ours_8, sce_8, joined_8 = re.findall(
        r"^[5-8] .* F\. L\. (\d\d\.\d\d)$", section, flags=re.MULTILINE
    )
    published = (
        f"FedAvg {fedavg_8}, FedLSR {ours_8}, Symmetric CE {sce_8}, Symmetric CE + LSR {joined_8}"
    )
    assert f"{published}, best round" in FILES["table8"]


# --------------------------------------------------------------- options named in the headers


def test_the_papers_text_is_three_options_away() -> None:
    options = {
        "method.preset": "paper",
        "model.always_on_dropout": False,
        "scene.partition.overlap": False,
    }
    table = read_recipe("fedlsr/table3-fashion-mnist-symmetric0.4")
    both = {run.recipe.method.name: run.recipe for run in expand(table, options, ()).runs}
    assert set(both) == {"fedavg", "fedlsr"}
    for recipe in both.values():
        assert recipe.scene.partition == Partition(kind="iid", stratified=True)
        assert recipe.model == ModelConfig(name="cnn9")
    ours = both["fedlsr"].method
    assert isinstance(ours, fedlsr.Config)
    assert (ours.gamma, ours.switches) == (0.2, fedlsr.PRESETS["paper"])


# ---------------------------------------------------------------------------- the scenes

LABELS = {
    "mnist": np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    "fashion-mnist": np.repeat(np.arange(10), 6000),
    "cifar10": np.repeat(np.arange(10), 5000),
}
"""As many samples of each class as the real sets."""


@pytest.mark.parametrize("source", LABELS)
@pytest.mark.parametrize("column", NOISES)
def test_every_class_has_its_share_of_wrong_labels(source: str, column: str) -> None:
    true = LABELS[source]
    recipe = runs(f"table3-{source}-{column}")["fedlsr"]
    scene = build_scene(recipe.scene, true, 10, recipe.seed)
    rate = recipe.scene.noise.rate
    assert rate is not None
    for c in range(10):
        given = scene.given[true == c]
        wrong = given[given != c]
        assert len(wrong) == int((true == c).sum() * rate)
        targets = {(c - 1) % 10} if column.startswith("pairwise") else set(range(10)) - {c}
        assert set(wrong.tolist()) == targets


def test_clients_hold_600_images_with_60_of_each_class() -> None:
    true = LABELS["fashion-mnist"]
    recipe = runs("table3-fashion-mnist-symmetric0.4")["fedavg"]
    scene = build_scene(recipe.scene, true, 10, 1)
    assert len(scene.clients) == 100
    for held in scene.clients:
        assert len(set(held.tolist())) == 600
        assert np.bincount(true[held], minlength=10).tolist() == [60] * 10
    # each of 100 clients misses a sample with probability 0.99, so 0.366 of them are nobody's
    used = len(np.unique(np.concatenate(scene.clients))) / len(true)
    assert used == pytest.approx(1 - 0.99**100, abs=0.01)


def test_clients_of_table_6_hold_five_classes() -> None:
    true = LABELS["fashion-mnist"]
    recipe = runs("table6")["symmetric0.7-fedlsr"]
    scene = build_scene(recipe.scene, true, 10, 1)
    for held in scene.clients:
        assert np.count_nonzero(np.bincount(true[held], minlength=10)) <= 5
        assert 595 <= len(held) <= 600, "each share of 600 is rounded down"
