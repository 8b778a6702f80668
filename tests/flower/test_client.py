"""A site: its settings, its data, and a folder that survives everything."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("flwr", reason="the federation needs fedsieve[flower]")

from flower_stage import SpoiledGrid, Stage, small_recipe, untouched
from flwr.app import Context, Message, RecordDict

from fedsieve.audit.suspects import read_suspects
from fedsieve.data.own.read import read_own
from fedsieve.errors import FedsieveError
from fedsieve.files import write_atomically
from fedsieve.flower import client, site
from fedsieve.flower.founding import to_send
from fedsieve.flower.grid import InProcessGrid
from fedsieve.flower.messages import HELLO, ROUND, Charter, Order, Question
from fedsieve.flower.records import read, to_content
from fedsieve.flower.site import Place, SiteFolder, data_of, load_site
from fedsieve.methods import fedavg
from fedsieve.recipe import Recipe
from fedsieve.simulate.directory import read_lines
from fedsieve.simulate.run import run
from helpers import Cut

# ------------------------------------------------------------------------------------ settings


def test_a_site_reads_its_settings() -> None:
    place = Place.of(
        {
            "site": "clinic-a",
            "state-path": "/srv/state",
            "data-path": "/srv/images",
            "data-source": "folder",
            "partition-id": 3,  # another app's
        }
    )
    assert place == Place("clinic-a", Path("/srv/state"), "folder", Path("/srv/images"), None)
    assert place.folder("run-1") == Path("/srv/state/run-1")
    assert Place.of({"client": 3, "state-path": "x"}).site == "client-3"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "needs a name and a folder of its own"),
        ({"site": "a"}, "needs a name and a folder of its own"),
        ({"site": "a", "state-path": ""}, "needs a name and a folder of its own"),
        ({"site": "../a", "state-path": "x"}, "must begin with a letter or digit"),
        ({"site": 3, "state-path": "x"}, "site must be text, not 3"),
        ({"client": "3", "state-path": "x"}, "client must be a number, not '3'"),
        ({"client": True, "state-path": "x"}, "client must be a number, not True"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config: Any, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        Place.of(config)


@pytest.mark.parametrize("name", ["../out", "a/b", "..", "", "a\nb"])
def test_the_server_cannot_send_a_site_out_of_its_folder(name: str) -> None:
    with pytest.raises(FedsieveError, match="The federation"):
        Place("a", Path("/srv"), "", None, None).folder(name)


# ---------------------------------------------------------------------------------------- folder


@dataclass(frozen=True)
class Remembered:
    rounds: tuple[int, ...]


class DiedError(Exception):
    """The site's process dies here."""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["used", "refused", "again", "dies early", "dies late"]), max_size=8)
)
def test_a_site_always_goes_on_from_the_state_that_the_server_names(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    """Whatever happens, its memory is the list of the rounds that the server used."""
    folder = SiteFolder(tmp_path_factory.mktemp("site"), Remembered)
    used: list[int] = []
    for round, event in enumerate(story):
        after = used[-1] if used else -1
        for _ in range(2 if event == "again" else 1):
            with folder.lock():
                state = folder.load(after)
                assert (state.rounds if state else ()) == tuple(used)
                if event != "dies early":
                    folder.commit(round, Remembered((*used, round)), after)
        if event in ("used", "again"):
            used.append(round)
        # Of a refused reply and of one that was lost with its process the server knows nothing.
        assert len(list(folder.path.glob("state-*"))) <= 2


def test_a_death_while_writing_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SiteFolder(tmp_path, Remembered)
    folder.commit(0, Remembered((0,)), -1)

    def die(path: Path, content: bytes) -> None:
        path.with_name(f".{path.name}.1.draft").write_bytes(content[:10])
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(site, "write_atomically", die)
        with pytest.raises(DiedError):
            folder.commit(1, Remembered((0, 1)), 0)
    assert list(tmp_path.glob(".state*"))
    with folder.lock():
        assert folder.load(0) == Remembered((0,))
        assert folder.load(1) is None
        assert not list(tmp_path.glob(".state*"))


def test_a_death_before_the_old_state_is_removed_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SiteFolder(tmp_path, Remembered)
    folder.commit(0, Remembered((0,)), -1)
    folder.commit(1, Remembered((0, 1)), 0)

    def write_and_die(path: Path, content: bytes) -> None:
        write_atomically(path, content)
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(site, "write_atomically", write_and_die)
        with pytest.raises(DiedError):
            folder.commit(2, Remembered((0, 1, 2)), 1)
    assert folder.load(1) == Remembered((0, 1))  # whichever of the two the server names is there
    assert folder.load(2) == Remembered((0, 1, 2))


def test_a_damaged_state_is_refused_and_not_taken_for_none(tmp_path: Path) -> None:
    folder = SiteFolder(tmp_path, Remembered)
    (tmp_path / "state-3.safetensors").write_bytes(b"half")
    with pytest.raises(FedsieveError, match="not a Remembered record"):
        folder.load(3)


def test_a_method_without_memory_writes_none(tmp_path: Path) -> None:
    folder = SiteFolder(tmp_path, fedavg.Client)
    folder.commit(0, fedavg.Client(), -1)
    assert folder.load(0) is None
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ data


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    """Two sites with folders of images, not of one size, that share one class."""
    rng = np.random.default_rng(5)
    classes = {"clinic-a": ("cat", "dog"), "clinic-b": ("dog", "owl")}
    for number, (name, own) in enumerate(classes.items()):
        for label in own:
            folder = tmp_path / "data" / name / label
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(0, 256, (10 + 2 * number, 12, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


def own_nodes(clinics: Path, states: Path) -> dict[int, dict[str, Any]]:
    return {
        7 + number: {
            "site": name,
            "data-path": str(clinics / name),
            "data-source": "folder",
            "state-path": str(states / name),
        }
        for number, name in enumerate(("clinic-b", "clinic-a"))
    }


def own_recipe(**settings: Any) -> Recipe:
    return small_recipe(
        "fedgr",
        **{
            "data": {"source": "folder"},
            "scene": {"clients": 2},
            "clients_per_round": 2,
            "rounds": 2,
            "model": {"name": "flower_model:tiny"},
        }
        | settings,
    )


def test_sites_with_data_and_a_model_of_their_own(clinics: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    grid = SpoiledGrid(own_nodes(clinics, tmp_path / "states"), untouched)
    summary = stage.run(own_recipe(), grid, sites=2)
    assert summary["rounds"] == 2
    assert "last10" not in summary  # nobody has a test set
    assert all(line["refused"] == {} for line in read_lines(stage.out / "metrics.jsonl"))
    rounds = [m for m, _ in grid.seen if m.metadata.message_type == ROUND]
    orders = [read(message.content, "order", Order) for message in rounds]
    charter = orders[0].charter
    assert charter.classes == ("cat", "dog", "owl")
    assert charter.shape == (3, 10, 12)  # the lower one of two is their low median
    # Clients are numbered by the names of the sites, whatever Flower calls their nodes.
    assert {(m.metadata.dst_node_id, o.client) for m, o in zip(rounds, orders, strict=True)} == {
        (8, 0),
        (7, 1),
    }
    for name, own in (("clinic-a", ("cat", "dog")), ("clinic-b", ("dog", "owl"))):
        (file,) = (tmp_path / "states" / name).glob("*/suspects.csv")
        suspects = read_suspects(file)
        assert sorted(s.id for s in suspects) == sorted(
            f"{label}/{i}.png" for label in own for i in range(6)
        )
        assert [s.rank for s in suspects] == list(range(1, 13))
        assert all(a.p_wrong >= b.p_wrong for a, b in itertools.pairwise(suspects))
        assert {s.given for s in suspects} == set(own)
        page = file.with_name("review.html").read_text()
        assert f"Suspicious labels at {name}" in page
        # A PNG in base 64 begins so.
        assert page.count("iVBORw0KGgo") == max(10, sum(s.is_flagged for s in suspects))


def test_the_normalisation_is_that_of_all_images_together(clinics: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    grid = SpoiledGrid(own_nodes(clinics, tmp_path / "states"), untouched)
    stage.run(own_recipe(rounds=1), grid, sites=2)
    order = next(
        read(m.content, "order", Order) for m, _ in grid.seen if m.metadata.message_type == ROUND
    )
    data = site.recipe_of(order.charter.recipe).data
    values = {
        name: np.concatenate(
            [
                np.asarray(Image.open(f)).reshape(-1, 3) / 255
                for f in (clinics / name).rglob("*.png")
            ]
        )
        for name in ("clinic-a", "clinic-b")
    }
    # Sites count by their samples, of which both have twelve.
    mean = (values["clinic-a"].mean(axis=0) + values["clinic-b"].mean(axis=0)) / 2
    square = ((values["clinic-a"] ** 2).mean(axis=0) + (values["clinic-b"] ** 2).mean(axis=0)) / 2
    assert data.mean == pytest.approx(mean, abs=1e-9)
    assert data.std == pytest.approx(np.sqrt(square - mean**2), abs=1e-9)
    assert data.views == "digits"  # what suits images of ten by twelve


def test_a_recipe_may_give_views_and_normalisation(clinics: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    data = {"source": "folder", "views": "plain", "mean": [0.5] * 3, "std": [0.25] * 3}
    grid = SpoiledGrid(own_nodes(clinics, tmp_path / "states"), untouched)
    stage.run(own_recipe(rounds=1, data=data), grid, sites=2)
    order = next(
        read(m.content, "order", Order) for m, _ in grid.seen if m.metadata.message_type == ROUND
    )
    sent = site.recipe_of(order.charter.recipe).data
    assert (sent.views, sent.mean, sent.std) == ("plain", (0.5,) * 3, (0.25,) * 3)


def test_a_part_of_a_folder_of_sites_is_found_by_the_sites_name(clinics: Path) -> None:
    place = Place("clinic-b", Path("s"), "sites", clinics, None)
    data = load_site(place, None)
    assert {name.split("/")[0] for name in data.names} == {"clinic-b"}
    with pytest.raises(FedsieveError, match="none of them is clinic-c"):
        load_site(replace(place, site="clinic-c"), None)


def test_images_are_decoded_once_and_again_when_files_change(
    clinics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("clinic-a", tmp_path / "state", "folder", clinics / "clinic-a", None)
    charter = Charter("f", to_send(own_recipe()), ("cat", "dog", "owl"), (3, 10, 12))
    reads: list[Path] = []

    def counted(path: Path, reading: Any) -> Any:
        reads.append(path)
        return read_own(path, reading)

    monkeypatch.setattr(site, "read_own", counted)

    def in_new_processes() -> tuple[Any, Any]:
        site.data_of.cache_clear()
        said = site.hello(place, charter.recipe)
        site.data_of.cache_clear()
        return said, data_of(place, charter.recipe, charter)

    said, data = in_new_processes()
    assert len(reads) == 2
    again, same = in_new_processes()
    assert len(reads) == 2
    assert again == said
    assert torch.equal(same.images, data.images)
    assert (same.names, same.classes, same.mean) == (data.names, data.classes, data.mean)
    (kept,) = (tmp_path / "state").glob("images-*")
    kept.write_bytes(b"damaged")
    in_new_processes()
    assert len(reads) == 3
    Image.new("RGB", (12, 10)).save(clinics / "clinic-a" / "cat" / "new.png")
    more, data = in_new_processes()
    assert len(reads) == 5
    assert more.samples == len(data.labels) == 13
    assert len(list((tmp_path / "state").iterdir())) == 2  # what is out of date is gone


def test_a_real_site_may_hold_a_source(tmp_path: Path) -> None:
    data = load_site(Place("a", tmp_path, "digits", None, None), None)
    assert len(data.labels) == 1438
    assert data.shape == (1, 8, 8)
    one, other = data.shard(0), data.shard(3)
    assert len({*one.ids.tolist(), *other.ids.tolist()}) == 2 * 1438


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (Place("a", Path("s"), "nonsense", Path("x"), None), "no data source 'nonsense'"),
        (Place("a", Path("s"), "folder", None, None), "A site needs data"),
        (Place("a", Path("s"), "", None, 4), "has 4 clients; there is no client 4"),
    ],
)
def test_data_that_are_not_there_are_named(place: Place, sentence: str) -> None:
    with pytest.raises(FedsieveError, match=sentence):
        data_of(place, to_send(small_recipe()), None)


def test_data_that_do_not_fit_the_charter_are_refused() -> None:
    recipe = to_send(small_recipe())
    charter = Charter("f", recipe, ("a", "b"), (1, 8, 8))
    with pytest.raises(FedsieveError, match="The federation has images of"):
        data_of(Place("a", Path("s"), "", None, 0), recipe, charter)


def test_a_recipe_of_the_servers_is_checked() -> None:
    with pytest.raises(FedsieveError, match="The server's recipe is not valid TOML"):
        site.recipe_of("rounds = ")
    with pytest.raises(FedsieveError, match="rounds must be at least 1"):
        site.recipe_of("rounds = 0")


# ----------------------------------------------------------------------------------- the ClientApp


def asked(content: RecordDict, kind: str, config: dict[str, Any]) -> Message:
    """The ClientApp's answer to one message."""
    InProcessGrid(client.app, {})  # makes messages possible outside of Flower
    message = Message(content, 1, kind)
    return client.app(message, Context(1, 1, config, RecordDict(), {}))


def test_a_node_without_settings_answers_with_the_kind_of_its_error() -> None:
    reply = asked(to_content(question=Question(to_send(small_recipe()))), HELLO, {})
    assert (reply.error.code, reply.error.reason) == (100, "FedsieveError")


def test_an_error_that_cannot_be_written_down_is_still_answered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = {"client": 0, "state-path": str(tmp_path / "file")}
    reply = asked(RecordDict(), HELLO, config)
    assert reply.error.reason == "FedsieveError"


def test_a_node_plays_only_its_own_client(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    grid = SpoiledGrid(stage.nodes(), untouched)
    stage.run(small_recipe(rounds=1), grid)
    message = next(m for m, _ in grid.seen if m.metadata.message_type == ROUND)
    order = read(message.content, "order", Order)
    other = {"client": order.client + 1, "state-path": str(tmp_path / "x")}
    assert asked(message.content, ROUND, other).error.reason == "FedsieveError"
    assert "plays client 1, but was asked to be 0" in (tmp_path / "x" / "errors.log").read_text()


def test_the_state_is_committed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that dies in its training, however late, is as it was before."""
    stage = Stage(tmp_path)
    recipe = small_recipe("fedgr", rounds=2)

    def die(*_: Any, **__: Any) -> Any:
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(SiteFolder, "commit", die)
        with pytest.raises(Cut):
            stage.run(recipe)
    for number in range(4):
        assert list(stage.state(number).rglob("state-*")) == []
    stage.run(recipe)
    run(recipe, tmp_path / "simulated")
    assert (stage.out / "model.safetensors").read_bytes() == (
        tmp_path / "simulated" / "model.safetensors"
    ).read_bytes()
