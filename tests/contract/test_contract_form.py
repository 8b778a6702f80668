"""The form of every method: its records, signatures, configuration, header and imports."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from typing import Any

import pytest

from fedsieve.config import from_table
from fedsieve.errors import FedsieveError
from fedsieve.methods import METHODS, contract
from fedsieve.methods.contract import Method
from helpers import NEEDED

FUNCTIONS = {
    name: protocol
    for name, protocol in typing.get_type_hints(Method).items()
    if getattr(protocol, "_is_protocol", False)
}
"""Every function that a method consists of, with its protocol."""


def module_of(method: Method) -> Any:
    return importlib.import_module(method.config.__module__)


def test_it_is_registered_under_its_own_name(method: Method) -> None:
    assert METHODS[method.name] is method
    assert re.fullmatch(r"[a-z][a-z0-9-]*", method.name)


@pytest.mark.parametrize("part", ["config", "server", "client", "down", "up"])
def test_its_records_are_frozen(method: Method, part: str) -> None:
    record: Any = getattr(method, part)
    assert dataclasses.is_dataclass(record)
    assert record.__dataclass_params__.frozen  # type: ignore[union-attr]


def test_its_configuration_is_made_by_keywords_with_its_name_as_default(method: Method) -> None:
    cfg = method.config(**NEEDED.get(method.name, {}))  # type: ignore[arg-type]
    assert isinstance(cfg, contract.Config)
    assert cfg.name == method.name
    assert all(field.kw_only for field in dataclasses.fields(method.config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.name = "other"  # type: ignore[misc]
    with pytest.raises(FedsieveError, match="name must be one of"):
        from_table(method.config, {"name": "someone else"})


def test_each_setting_is_explained(method: Method) -> None:
    """A field of the configuration is followed by a string that says what it is."""
    source = ast.parse(inspect.getsource(method.config)).body[0]
    assert isinstance(source, ast.ClassDef)
    for statement, following in zip(source.body, [*source.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.target.id == "name":
                continue
            explained = isinstance(following, ast.Expr) and isinstance(
                following.value, ast.Constant
            )
            assert explained, f"{method.name}.{statement.target.id} has no explanation"


def test_a_method_consists_of_functions() -> None:
    assert {"init_server", "init_client", "select", "send", "train", "merge", "suspect"} <= set(
        FUNCTIONS
    )


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_its_functions_have_the_contracts_arguments(method: Method, name: str) -> None:
    wanted = list(inspect.signature(FUNCTIONS[name].__call__).parameters)[1:]
    assert list(inspect.signature(getattr(method, name)).parameters) == wanted


def test_its_header_names_the_paper_and_the_deviations(method: Method) -> None:
    header = inspect.getdoc(module_of(method)) or ""
    surname, year = method.paper.split()[0], re.search(r"\d{4}", method.paper)
    assert surname in header
    assert year is not None
    assert year.group() in header
    assert "Deviations" in header
    assert re.search(r"^ +paper +here$", header, re.MULTILINE), "the map from symbols to names"
    assert 10 < len(method.title) < 120


FORBIDDEN_MODULES = re.compile(
    r"fedsieve\.(scenes|simulate|data|flower|audit|report|bench|cli|recipe)\b"
    r"|(flwr|logging|matplotlib|os|sys|io|pathlib|random|time|pickle|subprocess|warnings)\b"
)
FORBIDDEN_CALLS = re.compile(
    r"(open|print|input|exec|eval|breakpoint"
    r"|torch\.(manual_seed|rand\w*|bernoulli|normal|multinomial|save|load)"
    r"|(np|numpy)\.random\.\w+)\((?!\d+\)$)"
)
"""Calls that do something behind the caller's back; a generator with a fixed seed is none."""


def test_it_touches_no_files_no_logs_no_truth_and_no_hidden_randomness(method: Method) -> None:
    tree = ast.parse(inspect.getsource(module_of(method)))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            assert not FORBIDDEN_MODULES.match(name), f"{method.name} imports {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node)
            assert not FORBIDDEN_CALLS.match(called), f"{method.name} calls {called}"
