"""The recipes of FedGR's tables and figures: that there is one for each, and what each must say.

`EXPECTED` is built here from the structure of the paper's tables (columns × rows), its Table 17 and
Tables 10–13; the files are compared with it run by run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fedsieve.cli.grid import expand
from fedsieve.cli.recipes import first_comment
from fedsieve.local.plan import Sgd
from fedsieve.methods import (
    fedavg,
    fedcorr,
    fedcoteaching,
    feddividemix,
    fedgr,
    fednoro,
    fedprox,
)
from fedsieve.methods.contract import Config as MethodConfig
from fedsieve.models import ModelConfig
from fedsieve.recipe import (
    DataConfig,
    EngineConfig,
    Recipe,
    cells,
    identity,
    read_recipe,
    recipe_from_table,
    shipped_recipes,
)
from fedsieve.scenes import Noise, Partition, SceneConfig, build_scene

FILES = {
    name.removeprefix("fedgr/"): text
    for name, text in shipped_recipes().items()
    if name.startswith("fedgr/")
}
RESULTS = Path(__file__).resolve().parents[2] / "shared" / "specs" / "results.md"

# ------------------------------------------------------------------- the paper's settings

SGD = Sgd(epochs=10, batch_size=32, lr=0.01, momentum=0.5, weight_decay=5e-4, tail="keep")
DROP = replace(SGD, tail="drop")
PARTITIONS = {
    "iid": Partition(kind="iid"),
    "dirichlet": Partition(kind="balanced-dirichlet", alpha=0.3),
}
SOURCE_OF = {1: "cifar10", 2: "cifar100"}
NETWORK_OF = {"cifar10": "resnet18", "cifar100": "resnet34", "clothing1m": "resnet50"}
IN_PAPER: Any = {
    "warmup_rounds": 100,
    "lambda_b": 1.0,
    "lambda_r": 0.1,
    "epsilon": 0.9,
    "beta": 0.8,
    "gamma_l": 0.99,
    "gamma_g": 0.9,
    "temperature": 0.5,
    "mu": 0.5,
}
FEDGR = {
    PARTITIONS["iid"]: fedgr.Config(preset="published", **IN_PAPER),
    PARTITIONS["dirichlet"]: fedgr.Config(preset="authors", **IN_PAPER),
}
OTHERWISE: dict[str, Any] = {
    "cifar10": {},
    "cifar100": {"lambda_r": 0.2},
    "clothing1m": {"lambda_r": 0.2, "warmup_rounds": 50},
}
BASELINES = {"FedAvg": fedavg.Config(), "FedProx": fedprox.Config(mu=1.0)}
COTEACHING = fedcoteaching.Config(forget_rate=0.39, ramp_rounds=25, exponent=1.0)
"""On Clothing1M, where the networks are pretrained; on CIFAR τ is the share of wrong labels."""
DIVIDEMIX = feddividemix.Config(
    warmup_rounds=100,
    clean_threshold=0.5,
    temperature=0.5,
    mixup_alpha=4.0,
    lambda_u=25.0,
    ramp_rounds=16,
    lambda_r=1.0,
    evaluation_view="weak",
)
FEDCORR = {
    "cifar10": (fedcorr.Config(preset="authors", iterations=5, fine_tuning_rounds=237), 213),
    "cifar100": (fedcorr.Config(preset="authors", iterations=10, fine_tuning_rounds=200), 200),
    "clothing1m": (
        fedcorr.Config(
            preset="authors",
            iterations=2,
            fine_tuning_rounds=50,
            relabel_share=0.8,
            confidence=0.9,
        ),
        50,
    ),
}
"""Its three stages: with a walk counted as ten rounds they add up to 500, and the second and third
are as 500 to 450 or as one to one. On Clothing1M a walk counts as fifty, and they add up to 200."""
FEDNORO = {
    "cifar10": fednoro.Config(preset="authors", warmup_rounds=100),
    "cifar100": fednoro.Config(preset="authors", warmup_rounds=100, covariance="diagonal"),
}
KINDS: tuple[Literal["symmetric", "asymmetric", "mixed"], ...] = (
    "symmetric",
    "asymmetric",
    "mixed",
)


def noise_columns(source: str) -> dict[str, Noise]:
    """Clean; then Sym U(.5, 1), Asym and Mixed U(.2, .4), each with φ = .6 and 1."""
    columns = {"clean": Noise(kind="none")}
    flips: Any = {"flip_to": "next"}
    if source == "cifar100":
        flips = {"flip_to": "next-in-block", "block": 5}
    for kind, (phi, share) in product(KINDS, {"0.6": 0.6, "1": 1.0}.items()):
        rates: Any = {"low": 0.2, "high": 0.4, **flips}
        if kind == "symmetric":
            rates = {"low": 0.5, "high": 1.0}
        columns[f"{kind}-phi{phi}"] = Noise(kind=kind, share=share, **rates)
    return columns


def cifar(name: str, source: str, partition: Partition, noise: Noise) -> Recipe:
    """FedGR on CIFAR as in Table 17."""
    return Recipe(
        name=f"fedgr-{name}",
        seed=1,
        rounds=500,
        clients_per_round=10,
        precision="bf16",
        data=DataConfig(source=source, path=Path("data")),
        scene=SceneConfig(clients=100, partition=partition, noise=noise),
        model=ModelConfig(name=NETWORK_OF[source]),
        sgd=DROP,
        method=replace(FEDGR[partition], **OTHERWISE[source]),
    )


def clothing(name: str, partition: Partition) -> Recipe:
    weights = Path("data/resnet50-0676ba61.pth")
    return replace(
        cifar(name, "cifar10", partition, Noise()),
        rounds=200,
        data=DataConfig(source="clothing1m", path=Path("data/clothing1m")),
        scene=SceneConfig(clients=500, partition=partition),
        model=ModelConfig(name="resnet50", weights=weights),
        sgd=replace(DROP, epochs=2),
        method=replace(FEDGR[partition], **OTHERWISE["clothing1m"]),
    )


def as_baseline(recipe: Recipe, method: MethodConfig) -> Recipe:
    """The same scene for a baseline: weak view, all batches."""
    return replace(recipe, method=method, sgd=replace(recipe.sgd, tail="keep"))


def coteaching(noise: Noise) -> fedcoteaching.Config:
    """φ·E of a rate between its bounds."""
    assert noise.low is not None
    assert noise.high is not None
    rate = round(noise.share * (noise.low + noise.high) / 2, 6)
    return replace(COTEACHING, forget_rate=rate)


def as_fedcorr(recipe: Recipe, source: str) -> Recipe:
    method, usual = FEDCORR[source]
    rounds = recipe.scene.clients * method.iterations + method.fine_tuning_rounds + usual
    return replace(as_baseline(recipe, method), rounds=rounds)


def tables_1_and_2() -> dict[str, dict[str, Recipe]]:
    files: dict[str, dict[str, Recipe]] = {}
    for (table, source), (p, partition) in product(SOURCE_OF.items(), PARTITIONS.items()):
        columns = noise_columns(source)
        for column, noise in columns.items():
            name = f"table{table}-{p}-{column}"
            files[name] = {"": cifar(name, source, partition, noise)}
        name = f"table{table}-{p}-baselines"
        files[name] = {
            f"{label}-{column}": as_baseline(cifar(name, source, partition, noise), method)
            for (label, method), (column, noise) in product(BASELINES.items(), columns.items())
        }
        for label, make in (
            ("FL-Coteaching", coteaching),
            ("FL-DivideMix", lambda noise: DIVIDEMIX),
        ):
            name = f"table{table}-{p}-{label.lower().removeprefix('fl-')}"
            files[name] = {
                f"{label}-{column}": as_baseline(cifar(name, source, partition, noise), make(noise))
                for column, noise in columns.items()
                if column != "clean"
            }
        name = f"table{table}-{p}-fednoro"
        files[name] = {
            column: as_baseline(cifar(name, source, partition, noise), FEDNORO[source])
            for column, noise in columns.items()
            if column != "clean"
        }
        name = f"table{table}-{p}-fedcorr"
        files[name] = {
            column: as_fedcorr(cifar(name, source, partition, noise), source)
            for column, noise in columns.items()
        }
    return files


def table_3() -> dict[str, dict[str, Recipe]]:
    files = {f"table3-{p}": {"": clothing(f"table3-{p}", q)} for p, q in PARTITIONS.items()}
    baselines: dict[str, MethodConfig] = {
        **BASELINES,
        "FL-Coteaching": replace(COTEACHING, second_start="head"),
        "FL-DivideMix": replace(DIVIDEMIX, second_start="head"),
    }
    files["table3-baselines"] = {
        f"{label}-{p}": as_baseline(clothing("table3-baselines", q), method)
        for (label, method), (p, q) in product(baselines.items(), PARTITIONS.items())
    }
    files["table3-fedcorr"] = {
        p: as_fedcorr(clothing("table3-fedcorr", q), "clothing1m") for p, q in PARTITIONS.items()
    }
    return files


ROWS: dict[str, dict[str, Mapping[str, Any]]] = {
    "table4": {
        "w/o FS": {"sieve_at": "client"},
        "w/o LR": {"refine_labels": False},
        "w/o R_k": {"lambda_r": 0.0},
        "w/o B_k": {"lambda_b": 0.0},
    },
    "table5": {
        "w/o weak aug": {"teacher_view": "strong"},
        "w/o strong aug": {"student_view": "weak"},
        "Online EMA distill": {"teacher": "online"},
        "Randomly sample clients w/ replacement in warmup": {"warmup_sampling": "with_replacement"},
    },
    "table6": {
        f"lambda_b={b} lambda_r={r}": {"lambda_b": b, "lambda_r": r}
        for b, r in ((1.0, 0.2), (1.0, 0.5), (0.5, 0.1), (2.0, 0.1))
    },
    "table7": {
        f"gamma_g={of_global} gamma_l={of_local}": {"gamma_g": of_global, "gamma_l": of_local}
        for of_global, of_local in ((0.95, 0.99), (0.99, 0.99), (0.9, 0.9), (0.9, 0.999))
    },
}
"""Every row but that of FedGR itself, which is Table 1's."""


def tables_4_to_7() -> dict[str, dict[str, Recipe]]:
    noises = noise_columns("cifar10")
    return {
        f"{table}-{p}": {
            f"{row}-{kind}": replace(
                cifar(f"{table}-{p}", "cifar10", partition, noises[f"{kind}-phi1"]),
                method=replace(FEDGR[partition], **settings),
            )
            for (row, settings), kind in product(rows.items(), KINDS)
        }
        for (table, rows), (p, partition) in product(ROWS.items(), PARTITIONS.items())
    }


def observed(
    name: str,
    scene: SceneConfig,
    *,
    source: str = "cifar10",
    per_round: int = 1,
    epochs: int = 1,
    batch: int = 32,
    client_lines: bool = False,
) -> Recipe:
    """FedAvg as in Tables 10 and 12."""
    return Recipe(
        name=f"fedgr-{name}",
        seed=1,
        rounds=200,
        clients_per_round=per_round,
        precision="bf16",
        data=DataConfig(source=source, path=Path("data")),
        scene=scene,
        model=ModelConfig(name="resnet18", head="linear"),
        sgd=replace(SGD, epochs=epochs, batch_size=batch),
        engine=EngineConfig(memorisation_every=1, client_lines=client_lines),
    )


def memorisation_study() -> dict[str, dict[str, Recipe]]:
    def everywhere(rate: float) -> Noise:
        return Noise(kind="symmetric", clients="fixed", rate=rate)

    sources, rates = ("cifar10", "cifar100"), (0.1866, 0.1536)
    uneven = Noise(kind="symmetric", share=0.6, low=0.2, high=0.4)
    federated = {
        f"{source}-{p}-epochs{epochs}-clients_per_round{k}": observed(
            "memorisation",
            SceneConfig(clients=10, partition=partition, noise=uneven),
            source=source,
            per_round=k,
            epochs=epochs,
            client_lines=True,
        )
        for source, (p, partition), epochs, k in product(
            sources, PARTITIONS.items(), (1, 10), (2, 5, 10)
        )
    }
    central = {
        f"{source}-rate{rate}-batch_size{32 * k}": observed(
            "memorisation-central",
            SceneConfig(clients=1, noise=everywhere(rate)),
            source=source,
            batch=32 * k,
        )
        for source, rate, k in product(sources, rates, (2, 5, 10))
    }
    high = {
        f"{clients}-clients-{p}-rate{rate}": observed(
            "memorisation-high-noise",
            SceneConfig(clients=clients, partition=partition, noise=everywhere(rate)),
            per_round=clients // 5,
        )
        for clients, (p, partition), rate in product((20, 100), PARTITIONS.items(), (0.5, 0.8))
    }
    high_central = {
        f"rate{rate}": observed(
            "memorisation-high-noise-central",
            SceneConfig(clients=1, noise=everywhere(rate)),
            batch=64,
        )
        for rate in (0.5, 0.8)
    }
    return {
        "memorisation": federated,
        "memorisation-central": central,
        "memorisation-high-noise": high,
        "memorisation-high-noise-central": high_central,
    }


EXPECTED = tables_1_and_2() | table_3() | tables_4_to_7() | memorisation_study()


def runs(file: str) -> dict[str, Recipe]:
    return {
        cell.name: recipe_from_table(cell.table) for cell in cells(read_recipe(f"fedgr/{file}"))
    }


# ----------------------------------------------------------------------------- the files


def test_there_is_a_file_for_every_published_setting_and_no_other() -> None:
    assert sorted(FILES) == sorted(EXPECTED)
    found = sum(map(len, tables_1_and_2().values()))
    others = (
        "FedGR, FedAvg, FedProx, FedCorr; FL-Coteaching, FL-DivideMix and FedNoRo on wrong labels"
    )
    assert found == 2 * 2 * (7 * 4 + 6 * 3), others
    assert sum(map(len, table_3().values())) == 2 * 6, "FedDiv is with the recipes of its paper"
    assert sum(map(len, tables_4_to_7().values())) == 4 * 4 * 6
    assert [len(found) for found in memorisation_study().values()] == [24, 12, 8, 2]


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_file_asks_for_what_the_paper_did(file: str) -> None:
    assert runs(file) == EXPECTED[file]


def test_no_setting_is_asked_for_twice() -> None:
    seen: dict[str, str] = {}
    for file in FILES:
        for cell, recipe in runs(file).items():
            key = repr(identity(replace(recipe, name="")))
            assert key not in seen, f"{file} {cell} repeats {seen[key]}"
            seen[key] = f"{file} {cell}"


TABLE_17 = {
    "scene": {"clients": (100, 100, 500)},
    "": {"rounds": (500, 500, 200), "clients_per_round": (10, 10, 10)},
    "model": {"name": ("resnet18", "resnet34", "resnet50")},
    "sgd": {
        "lr": (0.01, 0.01, 0.01),
        "momentum": (0.5, 0.5, 0.5),
        "weight_decay": (5e-4, 5e-4, 5e-4),
        "batch_size": (32, 32, 32),
        "epochs": (10, 10, 2),
    },
    "method": {
        "lambda_b": (1.0, 1.0, 1.0),
        "lambda_r": (0.1, 0.2, 0.2),
        "warmup_rounds": (100, 100, 50),
        "epsilon": (0.9, 0.9, 0.9),
        "beta": (0.8, 0.8, 0.8),
        "gamma_l": (0.99, 0.99, 0.99),
        "gamma_g": (0.9, 0.9, 0.9),
        "temperature": (0.5, 0.5, 0.5),
        "mu": (0.5, 0.5, 0.5),
    },
}
"""The paper's Table 17, columns CIFAR-10, CIFAR-100, Clothing1M (sample ratios as clients)."""


@pytest.mark.parametrize("file", [name for name in sorted(FILES) if name.startswith("table")])
def test_table_17_is_written_out(file: str) -> None:
    table = read_recipe(f"fedgr/{file}")
    column = ["cifar10", "cifar100", "clothing1m"].index(table["data"]["source"])
    for section, values in TABLE_17.items():
        if section == "method" and table["method"]["name"] != "fedgr":
            continue
        written = dict(table[section] if section else table)
        if table["method"]["name"] == "fedcorr" and not section:
            clients = table["scene"]["clients"]  # rounds of a walk, which count as a tenth of them
            written["rounds"] -= table["method"]["iterations"] * (clients - clients // 10)
        assert {key: written[key] for key in values} == {k: v[column] for k, v in values.items()}
    dirichlet = [
        run.scene.partition.alpha for run in runs(file).values() if run.scene.partition.alpha
    ]
    assert set(dirichlet) <= {0.3}


# --------------------------------------------------------------------------- the headers


@pytest.mark.parametrize("file", sorted(FILES))
def test_the_header_says_what_it_is_and_how_to_run_it(file: str) -> None:
    first, *header = FILES[file].partition("\nname = ")[0].splitlines()
    assert first.startswith("# FedGR, ")
    assert 20 < len(first_comment(FILES[file])) <= 98
    assert header[1] == f"#   fedsieve run fedgr/{file} --seed 1"
    assert all(line.startswith("#") for line in header)
    table = re.match(r"table(\d)", file)
    assert table is None or f"Table {table.group(1)}:" in first


@pytest.mark.parametrize("file", sorted(FILES))
def test_the_files_that_a_header_names_exist(file: str) -> None:
    for named in re.findall(r"\bfedgr/([\w.-]*[\w])", FILES[file]):
        if not named.endswith("-COLUMN"):
            assert named in FILES


def published(table: int, partition: str, method: str = "FedGR") -> dict[str, str]:
    """Column → a method's number in the transcript of the paper's tables."""
    if not RESULTS.is_file():
        pytest.skip(f"the published numbers are not on this machine ({RESULTS})")
    section = RESULTS.read_text(encoding="utf-8").split(f"### FedGR Table {table} ")[1]
    section = section.split("\n### ")[0]
    if table == 3:
        mark = "| T3 IID" if partition == "iid" else "| T3 non-IID"
        lines = section.splitlines()
        methods = next(line for line in lines if line.startswith("| |"))
        row = next(line for line in lines if line.startswith(mark))
        by_method = dict(zip(methods.split("|"), row.split("|"), strict=True))
        return {"": by_method[f" {method} "].strip()}
    section = section.split("**Non-IID")[0 if partition == "iid" else 1]
    row = next(line for line in section.splitlines() if line.startswith(f"| {method} "))
    numbers = [cell.strip() for cell in row.strip(" |").split("|")[1:8]]
    return dict(zip(noise_columns(SOURCE_OF[table]), numbers, strict=True))


@pytest.mark.parametrize(("table", "partition"), list(product((1, 2, 3), PARTITIONS)))
def test_the_header_of_a_column_gives_the_published_number(table: int, partition: str) -> None:
    for column, number in published(table, partition).items():
        file = f"table{table}-{partition}-{column}".removesuffix("-")
        assert f"# Published: {number.replace('±', ' ± ')}, " in FILES[file]


@pytest.mark.parametrize("method", ["FL-Coteaching", "FL-DivideMix", "FedNoRo"])
@pytest.mark.parametrize(("table", "partition"), list(product(SOURCE_OF, PARTITIONS)))
def test_the_header_of_wrong_labels_alone_gives_its_row(
    table: int, partition: str, method: str
) -> None:
    clean, *numbers = published(table, partition, method).values()
    file = f"table{table}-{partition}-{method.lower().removeprefix('fl-')}"
    text = FILES[file].partition("\nname = ")[0]
    assert clean == "–"
    assert re.findall(r"\d\d\.\d\d ± \d\.\d\d", text) == [n.replace("±", " ± ") for n in numbers]


@pytest.mark.parametrize("method", ["FedAvg", "FedProx", "FL-Coteaching", "FL-DivideMix"])
def test_the_header_of_clothing1ms_baselines_gives_their_rows(method: str) -> None:
    numbers = [published(3, p, method)[""].replace("±", " ± ") for p in PARTITIONS]
    assert re.search(rf"# +{method} +{', '.join(numbers)}\n", FILES["table3-baselines"])


def test_coteaching_forgets_as_much_as_is_wrong() -> None:
    """As expected before the rates are drawn; the share that is drawn is within 0.02 of it."""
    found = runs("table1-iid-coteaching")
    rates = [recipe.method.forget_rate for recipe in found.values()]  # type: ignore[attr-defined]
    assert rates == [0.45, 0.75, 0.18, 0.3, 0.18, 0.3]
    for recipe, rate in zip(found.values(), rates, strict=True):
        assert overall_noise(recipe, 1) == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize(("table", "partition"), list(product((1, 2), PARTITIONS)))
def test_the_header_of_fedcorr_gives_its_row(table: int, partition: str) -> None:
    for column, number in published(table, partition, "FedCorr").items():
        header = FILES[f"table{table}-{partition}-fedcorr"]
        assert f"{column}: {number.replace('±', ' ± ')}" in header


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_header_of_fedcorr_on_clothing1m_gives_its_row(partition: str) -> None:
    number = published(3, partition, "FedCorr")[""].replace("±", " ± ")
    assert f" {partition}: {number}" in FILES["table3-fedcorr"]


# ------------------------------------------------------------- the commands in the headers


@pytest.mark.parametrize("method", BASELINES)
@pytest.mark.parametrize(("table", "partition"), list(product(SOURCE_OF, PARTITIONS)))
def test_three_options_make_a_baseline_of_a_column(table: int, partition: str, method: str) -> None:
    options = {"method.name": method.lower(), "model.head": "linear", "sgd.tail": "keep"}
    baselines = runs(f"table{table}-{partition}-baselines")
    for column in noise_columns(SOURCE_OF[table]):
        alone = read_recipe(f"fedgr/table{table}-{partition}-{column}")
        (run,) = expand(alone, options, ()).runs
        same = replace(run.recipe, name=f"fedgr-table{table}-{partition}-baselines")
        assert same == baselines[f"{method}-{column}"]


@pytest.mark.parametrize(("table", "partition"), list(product(ROWS, PARTITIONS)))
def test_a_part_of_a_grid_can_be_asked_for(table: str, partition: str) -> None:
    grid = read_recipe(f"fedgr/{table}-{partition}")
    symmetric = expand(grid, {"scene.noise.kind": "symmetric"}, ()).runs
    assert [run.recipe.scene for run in symmetric] == [
        EXPECTED[f"table1-{partition}-symmetric-phi1"][""].scene
    ] * 4


@pytest.mark.parametrize(("table", "partition"), list(product(ROWS, PARTITIONS)))
def test_another_preset_leaves_a_grid_whole(table: str, partition: str) -> None:
    runs = expand(read_recipe(f"fedgr/{table}-{partition}"), {"method.preset": "paper"}, ()).runs
    assert len(runs) == 12
    assert {run.recipe.method.mix for run in runs} == {"per_sample"}


def test_the_switches_follow_a_preset_that_is_asked_for() -> None:
    column = read_recipe("fedgr/table1-iid-symmetric-phi1")
    (run,) = expand(column, {"method.preset": "authors"}, ()).runs
    assert isinstance(run.recipe.method, fedgr.Config)
    assert run.recipe.method.switches == fedgr.PRESETS["authors"]


# ---------------------------------------------------------------------------- the scenes

LABELS = {"cifar10": np.repeat(np.arange(10), 5000), "cifar100": np.repeat(np.arange(100), 500)}
"""As many samples of each class as the real sets: how many labels are wrong depends on no more."""
COLUMNS = ("symmetric-phi0.6", "symmetric-phi1", "asymmetric-phi0.6", "mixed-phi1")
OVERALL = {
    ("iid", 1): (0.4467, 0.7574, 0.1783, 0.3024),
    ("iid", 13): (0.4409, 0.7437, 0.1759, 0.2968),
    ("iid", 42): (0.4376, 0.7276, 0.1748, 0.2905),
    ("dirichlet", 1): (0.4489, 0.7403, 0.1791, 0.2956),
    ("dirichlet", 13): (0.4529, 0.7457, 0.1808, 0.2977),
    ("dirichlet", 42): (0.4574, 0.7635, 0.1826, 0.3048),
}
"""Share of wrong labels on CIFAR-10 by FedGR's own program; IID it is the same on CIFAR-100."""


def overall_noise(recipe: Recipe, seed: int) -> float:
    labels = LABELS[recipe.data.source]
    scene = build_scene(recipe.scene, labels, int(labels.max()) + 1, seed)
    return scene.overall_noise(labels)


@pytest.mark.parametrize(("partition", "seed"), list(OVERALL))
def test_columns_have_as_many_wrong_labels_as_in_the_paper(partition: str, seed: int) -> None:
    for table in (1, 2) if partition == "iid" else (1,):
        for column, share in zip(COLUMNS, OVERALL[partition, seed], strict=True):
            (recipe,) = runs(f"table{table}-{partition}-{column}").values()
            assert overall_noise(recipe, seed) == pytest.approx(share, abs=5.01e-5)


def test_clean_columns_are_clean() -> None:
    (recipe,) = runs("table1-dirichlet-clean").values()
    assert overall_noise(recipe, 13) == 0


def test_the_memorisation_study_has_the_noise_of_table_11() -> None:
    federated = runs("memorisation")
    for p, share in (("iid", 0.18662), ("dirichlet", 0.15362)):
        recipe = federated[f"cifar10-{p}-epochs1-clients_per_round2"]
        assert overall_noise(recipe, 1) == pytest.approx(share, abs=1e-9)
    recipe = federated["cifar100-dirichlet-epochs1-clients_per_round2"]
    assert f"{100 * overall_noise(recipe, 1):.2f} %" in FILES["memorisation-central"]
    central = runs("memorisation-central")
    for source, rate in product(LABELS, (0.1866, 0.1536)):
        recipe = central[f"{source}-rate{rate}-batch_size64"]
        assert overall_noise(recipe, 1) == pytest.approx(rate, abs=1.01 / 50_000), "⌊n·rate⌋"


def test_high_noise_is_the_same_at_every_client() -> None:
    """Each of K clients has ⌊n_k·rate⌋ wrong labels, so fewer than K of 50,000 are missing."""
    recipe = runs("memorisation-high-noise")["100-clients-dirichlet-rate0.8"]
    assert 0.8 - 100 / 50_000 < overall_noise(recipe, 1) <= 0.8
    recipe = runs("memorisation-high-noise-central")["rate0.8"]
    assert overall_noise(recipe, 1) == pytest.approx(0.8)
