"""The server's settings, how a federation is founded, and the folder it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_stage import Stage, small_recipe
from flwr.app import Context, RecordDict

from fedsieve.cli import main as command_line
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.flower import app_folder, client, server
from fedsieve.flower.founding import Founded, Member, data_of_server, found, to_send
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.messages import Hello
from fedsieve.flower.server import first_mismatch, most_bytes
from fedsieve.flower.settings import Settings
from fedsieve.methods import METHODS, feddiv
from fedsieve.recipe import EngineConfig, recipe_from_table
from fedsieve.simulate.findings import load_findings
from fedsieve.simulate.run import run


def config_of_app(**settings: Any) -> dict[str, Any]:
    """The run config that the app's own pyproject declares, with some settings changed."""
    table = tomllib.loads((app_folder() / "pyproject.toml").read_text())
    declared: dict[str, Any] = table["tool"]["flwr"]["app"]["config"]
    changed = {key.replace("_", "-"): value for key, value in settings.items()}
    assert set(changed) <= set(declared)
    return declared | changed


def test_the_app_names_things_that_are_there() -> None:
    table = tomllib.loads((app_folder() / "pyproject.toml").read_text())
    for component in table["tool"]["flwr"]["app"]["components"].values():
        module, name = component.split(":")
        text = (app_folder() / f"{module.replace('.', '/')}.py").read_text()
        assert f'__all__ = ["{name}"]' in text
    code = "import fedsieve_app.client_app as c, fedsieve_app.server_app as s; print(c.app, s.app)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(app_folder()), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert b"ClientApp" in done.stdout
    assert b"ServerApp" in done.stdout


def test_flower_reports_to_nobody_unless_told_to() -> None:
    code = "import fedsieve.flower, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    env = {k: v for k, v in os.environ.items() if k != "FLWR_TELEMETRY_ENABLED"}
    for said, expected in ((None, b"0"), ("1", b"1")):
        told = env if said is None else env | {"FLWR_TELEMETRY_ENABLED": said}
        done = subprocess.run(
            [sys.executable, "-c", code], env=told, capture_output=True, check=True
        )
        assert done.stdout.strip() == expected


def test_a_recipe_comes_by_name_by_path_or_as_text(tmp_path: Path) -> None:
    text = "rounds = 7\nclients_per_round = 2\n[scene]\nclients = 5\n"
    (tmp_path / "mine.toml").write_text(text)
    by_path = Settings.of(config_of_app(recipe=str(tmp_path / "mine.toml"), out="/srv/run"))
    by_text = Settings.of(config_of_app(recipe_toml=text, out="/srv/run", sites=3))
    assert by_path.recipe == by_text.recipe
    assert (by_path.sites, by_text.sites) == (5, 3)
    assert by_path.recipe.rounds == 7
    assert (by_path.out, by_path.deadline, by_path.wait) == (Path("/srv/run"), 3600.0, 3600.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"out": "/x"}, "Give either recipe or recipe-toml"),
        ({"out": "/x", "recipe": "demo", "recipe_toml": "rounds = 1"}, "Give either recipe or"),
        ({"recipe_toml": "rounds = 1"}, "Give out="),
        ({"recipe_toml": "rounds = 1", "out": "here"}, "absolute path of a folder at the server"),
        ({"recipe_toml": "rounds =", "out": "/x"}, "recipe-toml is not valid TOML"),
        ({"recipe": "demo", "out": "/x"}, r"has a \[sweep\] of 6 runs"),
        ({"recipe": "no-such", "out": "/x"}, "There is no recipe 'no-such'"),
        ({"recipe_toml": "rounds = 1", "out": "/x", "sites": "3"}, "sites must be a number"),
        ({"recipe_toml": "rounds = 1", "out": "/x", "wait": True}, "wait must be a number"),
        ({"recipe_toml": "rounds = 1", "out": "/x", "sites": -1}, "sites must be at least 0"),
        ({"recipe_toml": "rounds = 1", "out": "/x", "deadline": 0.0}, "deadline must be above 0"),
        ({"recipe_toml": "rounds = 1", "out": "/x", "wait": -1.0}, "wait must be at least 0"),
        (
            {"recipe_toml": "[engine]\nstop_after_rounds = 1", "out": "/x"},
            "engine.stop_after_rounds is for simulations; .* set it to none",
        ),
        (
            {"recipe_toml": "[engine]\nclient_lines = true", "out": "/x"},
            "engine.client_lines is for simulations; .* set it to false",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        Settings.of(config_of_app(**settings))


def test_the_server_app_runs_by_its_settings(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (tmp_path / "recipe.toml").write_text(to_send(small_recipe(rounds=1)))
    config = config_of_app(recipe=str(tmp_path / "recipe.toml"), out=str(stage.out))
    context = Context(1, 1, {}, RecordDict(), config)
    server.app(InProcessGrid(client.app, stage.nodes()), context)
    assert json.loads((stage.out / "summary.json").read_bytes())["rounds"] == 1


@pytest.mark.parametrize("command", ["", "fedsieve deploy server hospitals own --rounds 5"])
def test_the_token_of_the_servers_process_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Flower starts the ServerApp with a token; on record is what a person typed, or nothing."""
    token = "8f4a7e3ab6da695c"
    words = ["flwr-serverapp", "--runtime-api-address", "127.0.0.1:1", "--token", token]
    monkeypatch.setattr(sys, "argv", words)
    stage = Stage(tmp_path)
    config = config_of_app(
        recipe_toml=to_send(small_recipe(rounds=1)), out=str(stage.out), command=command
    )
    context = Context(1, 1, {}, RecordDict(), config)
    server.app(InProcessGrid(client.app, stage.nodes()), context)
    assert json.loads((stage.out / "env.json").read_bytes())["command"] == (command or None)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stage.out / "env.json" in written
    for path in written:
        assert token.encode() not in path.read_bytes(), path
        assert b"flwr-serverapp" not in path.read_bytes(), path


@pytest.mark.parametrize("method", ["fedgr", "fedes", "fednoro", "feddiv", "fedcorr"])
def test_the_coordinator_learns_how_noisy_each_site_is(tmp_path: Path, method: str) -> None:
    """As in a simulation of the same recipe, whose findings ask the same server."""
    stage, recipe = Stage(tmp_path), small_recipe(method)
    noise = stage.run(recipe)["site_noise"]
    assert json.loads((stage.out / "summary.json").read_bytes())["site_noise"] == noise
    run(recipe, tmp_path / "simulated")
    findings = load_findings(tmp_path / "simulated")
    assert findings is not None
    simulated = [site.estimated for site in findings.sites]
    assert list(noise) == [f"client-{k}" for k in range(len(simulated))]
    assert list(noise.values()) == pytest.approx(simulated, abs=1e-6)

    (told,) = [said for said in stage.said if "takes for wrong" in said]
    rows = [line.split() for line in told.splitlines()[1:]]
    assert {site: share for site, share, _ in rows} == {
        k: f"{100 * v:.1f}" for k, v in noise.items()
    }
    shares = [float(share) for _, share, _ in rows]
    assert shares == sorted(shares, reverse=True)


def test_a_server_without_an_opinion_tells_of_no_noise(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert METHODS["fedavg"].sieve(None) == {}
    assert "site_noise" not in stage.run(small_recipe("fedavg", rounds=1))
    assert not any("takes for wrong" in said for said in stage.said)


def test_noise_is_told_the_noisiest_site_first() -> None:
    assert server.noise_in_words({"site_noise": {"a": 0.025, "clinic-b": 1.0, "c": 0.25}}) == (
        "Share of each site's labels that the method takes for wrong:\n"
        "  clinic-b 100.0 %\n"
        "  c         25.0 %\n"
        "  a          2.5 %"
    )
    assert server.noise_in_words({}) is None


def test_a_federation_that_ends_in_its_warm_up_says_so(tmp_path: Path) -> None:
    """Four sites and five walks are twenty rounds."""
    stage = Stage(tmp_path)
    recipe = small_recipe(rounds=1)
    stage.run(replace(recipe, method=feddiv.Config(warmup_passes=5)))
    assert any("feddiv begins with round 21, but this run ends" in line for line in stage.said)


def test_a_server_adds_up_in_the_same_order_on_any_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, method = [], METHODS["fedavg"]

    def merge(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return method.merge(*arguments)

    monkeypatch.setitem(METHODS, "fedavg", replace(method, merge=merge))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Stage(tmp_path).run(small_recipe(rounds=1))
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_what_is_sent_holds_no_path_of_the_servers(tmp_path: Path) -> None:
    recipe = small_recipe(
        data={"source": "sites", "path": str(tmp_path)},
        model={"name": "resnet50", "weights": str(tmp_path / "resnet50.pth")},
        engine={"device": "cuda:3"},
    )
    assert str(tmp_path) not in to_send(recipe)
    sent = recipe_from_table(tomllib.loads(to_send(recipe)))
    assert sent.engine == EngineConfig(), "a site has devices of its own"
    rest = {"data": recipe.data, "model": recipe.model, "engine": recipe.engine}
    assert replace(sent, **rest) == recipe


# ------------------------------------------------------------------------------------- founding


def hello(site: str, client: int | None = None, **changes: Any) -> Hello:
    return replace(
        Hello(site, client, 10, ("a", "b"), (1, 8, 8), (0.5,), (0.2,)),
        **changes,
    )


def own_data(**settings: Any) -> Any:
    return small_recipe(data={"source": "folder"}, **settings)


def test_sites_are_numbered_by_name_or_as_they_play() -> None:
    sites = [hello(name) for name in "dbca"]
    assert [m.site for m in found(own_data(), None, sites).members] == ["a", "b", "c", "d"]
    playing = [hello(f"s{9 - k}", k) for k in (2, 0, 3, 1)]
    assert [m.site for m in found(own_data(), None, playing).members] == ["s9", "s8", "s7", "s6"]


@pytest.mark.parametrize(
    ("hellos", "sentence"),
    [
        ([hello("a", 0), hello("b", 1)], "scene has 4 clients, so 4 nodes must play one each"),
        ([hello(f"s{k}", k % 3) for k in range(4)], "4 nodes must play one each"),
        ([hello(f"s{k}", k or None) for k in range(4)], "4 nodes must play one each"),
        ([hello("a"), hello("b")], "clients_per_round is 4, but only 2 sites take part"),
        ([hello(name, samples=0) for name in "abcd"], "No site holds a single sample"),
        ([hello(name, std=(0.0,)) for name in "abcd"], "cannot be normalised"),
    ],
)
def test_a_federation_that_cannot_be_founded_says_why(hellos: Any, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        found(own_data(), None, hellos)


def test_a_class_that_the_servers_data_do_not_know_is_refused() -> None:
    sites = [hello(name, classes=("1", "x")) for name in "abcd"]
    with pytest.raises(FedsieveError, match="a has the classes x, which the server's digits"):
        found(small_recipe(), load_digits(), sites)


def test_the_charter_covers_grey_and_colour_and_every_size() -> None:
    sites = [
        hello("a", shape=(1, 20, 30)),
        hello("b", shape=(3, 40, 10), mean=(0.1, 0.2, 0.3), std=(0.2, 0.2, 0.2)),
        hello("c", shape=(1, 60, 20), classes=("c", "b")),
        hello("d", shape=(1, 60, 20)),
    ]
    charter = found(own_data(), None, sites).charter
    assert charter.shape == (3, 40, 20)
    assert charter.classes == ("a", "b", "c")
    data = recipe_from_table(tomllib.loads(charter.recipe)).data
    # Three grey sites with mean ½ in each channel, one with a colour of its own; ten samples each.
    assert data.mean == pytest.approx([(1.5 + x) / 4 for x in (0.1, 0.2, 0.3)])


def test_what_was_founded_is_kept(tmp_path: Path) -> None:
    founded = found(own_data(), None, [hello(name) for name in "abcd"])
    founded.save(tmp_path)
    assert Founded.load(tmp_path) == founded
    assert founded.sizes == (10,) * 4
    assert [founded.client_of(name) for name in ("a", "d", "x")] == [0, 3, None]
    assert found(own_data(), None, [hello(n) for n in "abcd"]).charter != founded.charter
    (tmp_path / "federation.json").write_text('{"members": 3}')
    with pytest.raises(FedsieveError, match=r"federation.json cannot be read"):
        Founded.load(tmp_path)
    assert Founded.load(tmp_path / "elsewhere") is None


def test_the_server_has_data_unless_the_recipe_leaves_them_to_the_sites(tmp_path: Path) -> None:
    data = data_of_server(small_recipe())
    assert data is not None
    assert len(data.test_labels) == 359
    assert data_of_server(own_data()) is None
    with pytest.raises(FedsieveError):
        data_of_server(small_recipe(data={"source": "folder", "path": str(tmp_path / "no")}))


def test_a_name_of_any_kind_makes_a_harmless_federation() -> None:
    founded = found(own_data(name="../ß é"), None, [hello(n) for n in "abcd"])
    assert founded.charter.federation.startswith("run-")
    assert founded.members[0] == Member("a", 10)


# ---------------------------------------------------------------------------------- the folder


def test_tables_and_curves_read_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path / "runs")
    recipe = small_recipe()
    stage.run(recipe)
    run(recipe, tmp_path / "simulated")
    tables = []
    for folder in (stage.out, tmp_path / "simulated"):
        assert command_line(["table", str(folder), "--format", "csv"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    picture = tmp_path / "curves.svg"
    assert command_line(["curves", str(stage.out), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 1000


def test_another_recipe_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.run(small_recipe(rounds=1))
    with pytest.raises(FedsieveError, match="already holds a run with rounds = 1"):
        stage.run(small_recipe(rounds=2))


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    with (
        server.RunDirectory(stage.out).lock(),
        pytest.raises(FedsieveError, match="Another fedsieve process"),
    ):
        stage.run(small_recipe())


def test_the_limit_of_a_reply_follows_from_model_and_samples() -> None:
    weights = {"w": torch.zeros(1000)}
    assert most_bytes(weights, 0) == 4 * 4000 + 2**20
    assert most_bytes(weights, 100) == 4 * 4000 + 102_400 + 2**20
    assert first_mismatch(weights, weights) is None
    assert first_mismatch({}, weights) == "w"
    assert first_mismatch({**weights, "v": torch.zeros(1)}, weights) == "v"
