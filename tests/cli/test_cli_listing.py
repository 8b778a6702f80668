"""`fedsieve methods`, `recipes`, `scene` and `data`."""

from __future__ import annotations

import io
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsieve.cli import data as data_command
from fedsieve.cli.data import facts, is_readable
from fedsieve.cli.recipes import first_comment
from fedsieve.cli.scene import numbered
from fedsieve.data.sources import SOURCES, load
from fedsieve.methods import METHODS
from fedsieve.recipe import shipped_recipes
from fedsieve.scenes import load_scene


def test_methods_are_listed_with_their_papers(cli):
    answer = cli("methods")
    assert answer.status == 0
    words = answer.out.split()
    assert all(name in words for name in METHODS)
    assert "AISTATS" in words


def test_a_method_is_explained(cli):
    answer = cli("methods", "fedprox")
    line = next(line for line in answer.out.splitlines() if "--method.mu" in line)
    assert line.split()[:4] == ["--method.mu", "NUMBER", "1.0", "μ,"]
    assert answer.out.startswith("fedprox: ")
    answer = cli("methods", "fedcoteaching")
    line = next(line for line in answer.out.splitlines() if "--method.forget_rate" in line)
    assert line.split()[:5] == ["--method.forget_rate", "NUMBER", "must", "be", "set"]
    assert "fedavg has no settings of its own." in cli("methods", "fedavg").out
    assert cli("methods", "fedpro").err.startswith("fedsieve: There is no method 'fedpro'")


def test_only_a_method_of_a_similar_name_is_suggested(cli):
    assert "did you mean 'fedprox'?" in cli("methods", "fedpro").err
    for answer in (cli("methods", "nonsense"), cli("run", "--method.name", "nonsense")):
        assert "did you mean" not in answer.err
        assert answer.err.startswith(
            f"fedsieve: There is no method 'nonsense'; possible are {', '.join(METHODS)}."
        )


def test_every_setting_of_every_method_is_listed(cli):
    for name, method in METHODS.items():
        out = cli("methods", name).out
        own = {member.name for member in fields(method.config)} - {"name"}
        assert all(f" --method.{setting} " in out for setting in own)


def test_recipes_are_listed_with_their_first_line(cli):
    answer = cli("recipes")
    demo = next(line for line in answer.out.splitlines() if line.split()[:1] == ["demo"])
    assert shipped_recipes()["demo"].splitlines()[0].lstrip("# ") in demo


def test_a_word_chooses_the_recipes_that_have_it_in_their_names(cli):
    listed = cli("recipes", "list", "fedes/table1").out.split()
    wanted = [name for name in shipped_recipes() if "fedes/table1" in name]
    assert [word for word in listed if word in shipped_recipes()] == wanted
    assert len(wanted) == 3


def test_a_recipe_is_shown_and_copied(cli):
    text = shipped_recipes()["demo"]
    assert cli("recipes", "show", "demo").out == text
    answer = cli("recipes", "copy", "demo", "mine.toml")
    assert "fedsieve run mine.toml" in answer.out
    assert Path("mine.toml").read_text() == text
    Path("mine.toml").write_text("mine")
    assert "mine.toml exists already" in cli("recipes", "copy", "demo", "mine.toml").err
    assert Path("mine.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show"], "Give a name: fedsieve recipes show NAME"),
        (["copy", "demo"], "Give the new file: fedsieve recipes copy demo FILE"),
        (["show", "dmo"], "There is no recipe 'dmo'; did you mean 'demo'?"),
        (["list", "dmo"], "There is no recipe 'dmo'; did you mean 'demo'?"),
        (["list", "demo", "f.toml"], "'f.toml' is one word too many"),
        (["show", "demo", "f.toml"], "'f.toml' is one word too many"),
        (["shwo", "demo"], "action must be one of 'list', 'show', 'copy'"),
        (["copy", "demo", "no/such/folder.toml"], "No such file or directory"),
    ],
)
def test_mistakes_with_recipes(argv, words, cli):
    answer = cli("recipes", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")


def test_first_comment():
    assert first_comment("\n# A: b\n# c\n") == "A: b"
    assert first_comment("x = 1\n# c\n") == ""


def test_a_scene_is_described_drawn_and_saved(cli):
    answer = cli("scene", "tiny.toml", "--out", "s.png", "--save", "s.safetensors", "--rows", "2")
    assert answer.status == 0
    assert "clients       4" in answer.out
    assert "and 2 more clients" in answer.out
    with Image.open("s.png") as image:
        assert image.format == "PNG"
    assert len(load_scene(Path("s.safetensors")).clients) == 4


def test_a_grid_shows_each_of_its_scenes_once(cli):
    answer = cli("scene", "demo", "--save", "s.safetensors")
    assert answer.out.count("wrong labels  ") == 2
    assert "Scene 2 of 2" in answer.out
    assert load_scene(Path("s-1.safetensors")).config.noise.kind == "symmetric"
    assert load_scene(Path("s-2.safetensors")).config.noise.kind == "none"
    assert numbered(Path("a/b.png"), 1, 1) == Path("a/b.png")


def test_a_picture_must_be_png(cli):
    assert "--out must end in .png" in cli("scene", "tiny.toml", "--out", "s.jpg").err
    assert cli("scene", "tiny.toml", "--out", "new/folder/s.png").status == 0
    assert Path("new/folder/s.png").is_file()
    assert cli("scene", "tiny.toml", "--out", "tiny.toml/s.png").status == 2


def test_sources_are_listed(cli):
    answer = cli("data")
    words = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert set(SOURCES) <= set(words)
    assert "built in" in words["digits"]
    assert "fedsieve data get mnist" in words["mnist"]
    assert words["cifar10"].split()[1] == "no"


def test_real_cifar10_is_found(cifar10_dir):
    assert is_readable("cifar10", cifar10_dir)
    assert not is_readable("cifar100", cifar10_dir)


def test_a_source_is_described(cli):
    digits = load("digits")
    out = cli("data", "info", "digits").out
    assert f"{len(digits.train_labels):,} images, labels taken as right" in out
    assert "1 x 8 x 8" in out
    x = np.zeros((60, 4, 4, 3), np.uint8)
    x[::2] = 255
    np.savez("own.npz", x=x, y=np.arange(60) % 12)
    text = facts(load("npz", Path("own.npz")))
    assert "3 x 4 x 4" in text
    assert ", …" in text


def test_a_source_is_fetched(cli, monkeypatch):
    asked = []

    def download(name, path, on_bytes):
        asked.append((name, path, on_bytes))
        return (path / "a", path / "b")

    monkeypatch.setattr(data_command, "download", download)
    answer = cli("data", "get", "mnist", "--path", "here")
    assert asked == [("mnist", Path("here"), None)]
    assert answer.out.splitlines() == [
        "here/a",
        "here/b",
        "Use it with: --data.source mnist --data.path here",
    ]


def test_a_terminal_shows_the_bytes(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def download(name, path, on_bytes):
        on_bytes(5000, 10000)
        return ()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr(data_command, "download", download)
    assert data_command.main(["get", "mnist"]) == 0
    assert "5.0/10.0 kB" in terminal.getvalue()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["get"], "Give a name: fedsieve data get NAME"),
        (["get", "digits"], "digits needs no download"),
        (["get", "nope"], "There is no source 'nope' to download"),
        (["info", "nope"], "There is neither a source 'nope' nor a folder"),
        (["info", "cifar10"], "cifar10 is not in data"),
    ],
)
def test_mistakes_with_data(argv, words, cli):
    answer = cli("data", *argv)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"fedsieve: {words}")
