"""A whole audit of a few digits at three sites: the files, going on after a cut, refusals."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsieve.audit import crossfit, run
from fedsieve.audit.run import Audit, AuditedSite, audit, folds_of, site_folders
from fedsieve.audit.score import Scores
from fedsieve.audit.settings import Asked, Settings, choose
from fedsieve.audit.suspects import read_suspects
from fedsieve.data.own import OwnData, read_own
from fedsieve.data.sources.digits import load_digits
from fedsieve.errors import FedsieveError
from fedsieve.methods import fedcorr
from fedsieve.methods.contract import Federation
from fedsieve.recipe import Recipe
from fedsieve.scenes import load_scene
from fedsieve.simulate.control import Silent

WRONG = 12
"""Labels that are wrong at the second site; those of the others are right."""


def digits(folder: Path, sites: Mapping[str, int], *, wrong_at: str = "two") -> OwnData:
    """So many digits of the classes 0, 1 and 2 at each site, one .npz file each."""
    data = load_digits()
    chosen = torch.nonzero(data.train_labels < 3).squeeze(1).numpy()
    folder.mkdir(parents=True)
    first = 0
    for name, count in sites.items():
        rows = chosen[first : first + count]
        first += count
        labels = data.train_labels[rows].numpy().copy()
        if name == wrong_at:
            labels[:WRONG] = (labels[:WRONG] + 1) % 3
        np.savez(
            folder / f"{name}.npz",
            x=data.train_images[rows, 0].numpy(),
            y=labels,
            classes=np.array(["zero", "one", "two"]),
        )
    return read_own(folder)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> OwnData:
    return digits(tmp_path_factory.mktemp("own") / "data", {"one": 90, "two": 90, "three": 60})


def quick(own: OwnData, **asked: Any) -> Settings:
    return choose(own, Asked(**{"rounds": 25, "folds": 2, "device": "cpu", **asked}))


@pytest.fixture(scope="module")
def out(own: OwnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "out"
    audit(own, own, quick(own), folder, command="fedsieve audit data")
    return folder


def test_every_side_gets_its_files(own: OwnData, out: Path) -> None:
    assert sorted(p.name for p in out.iterdir()) == [
        "audit.json",
        "model.safetensors",
        "report.html",
        "runs",
        "sites",
        "summary.csv",
    ]
    for name, held in own.sites.items():
        suspects = read_suspects(out / "sites" / name / "suspects.csv")
        assert sorted(s.id for s in suspects) == sorted(own.ids[i] for i in held)
        assert [s.rank for s in suspects] == list(range(1, len(held) + 1))
        assert all(a.p_wrong >= b.p_wrong for a, b in pairwise(suspects))
        page = (out / "sites" / name / "review.html").read_text(encoding="utf-8")
        assert f"Suspicious labels at {name}" in page
        assert suspects[0].id in page


def test_the_wrong_labels_are_found_where_they_are(out: Path) -> None:
    """Twelve at the second site and none elsewhere; digits 0, 1 and 2 are easy to tell apart."""
    flagged = {
        name: {s.id for s in read_suspects(out / "sites" / name / "suspects.csv") if s.is_flagged}
        for name in ("one", "two", "three")
    }
    wrong = {f"two/row-{i}" for i in range(WRONG)}
    assert len(flagged["two"] & wrong) >= WRONG - 2
    assert len(flagged["two"] - wrong) + len(flagged["one"]) + len(flagged["three"]) <= 6


def held_out_of(own: OwnData, out: Path) -> list[tuple[str, bool]]:
    """(site, whether the model that did not see it predicts its label) of every sample: by the
    models of the folds, put to work once more."""
    settings = quick(own)
    data = run.federated(own, own, settings)
    logits = crossfit.held_out_logits(
        settings.recipe(), data, folds_of(own, settings), out / "runs"
    )
    agrees = logits.argmax(axis=1) == own.labels.numpy()
    return [(name, bool(agrees[i])) for name, held in own.sites.items() for i in held]


def a_site(agreed: int, p_wrong: float) -> AuditedSite:
    """A hundred samples, all with this p_wrong."""
    labels = np.zeros(100, dtype=np.int64)
    scores = Scores(np.full(100, p_wrong), labels, labels, ())
    return AuditedSite("ward", scores, labels, (), agreed)


@pytest.mark.parametrize(
    ("agreed", "p_wrong", "is_weak"),
    [(61, 0.2, False), (59, 0.2, True), (75, 0.0, False), (12, 0.0, True), (33, 0.39, True)],
)
def test_weak_models_are_cautioned_against(agreed: int, p_wrong: float, is_weak: bool) -> None:
    """Of 80 labels that are taken for right three quarters are 60. Models that have learnt nothing
    take all labels for right, and agree with hardly any."""
    found = Audit((a_site(agreed, p_wrong),), None)
    assert (found.agreement, found.noise) == pytest.approx((agreed / 100, p_wrong))
    assert (found.caution is not None) == is_weak
    if found.caution is not None:
        assert f"agree with {agreed}% of the labels" in found.caution
        assert f"take {1 - p_wrong:.0%} of them for right" in found.caution


def test_an_untested_audit_reports_no_accuracy_and_a_weak_one_a_caution(
    own: OwnData, out: Path, tmp_path: Path
) -> None:
    """One round teaches these models nothing; the model's own images cannot test it."""
    found = audit(own, None, quick(own, rounds=1), tmp_path / "weak")
    page = (tmp_path / "weak" / "report.html").read_text(encoding="utf-8")
    assert found.caution is not None
    assert found.caution.partition(":")[0] in page
    tested = (out / "report.html").read_text(encoding="utf-8")
    for words in ("best round", "test accuracy, %"):
        assert words not in page
    assert "test accuracy, %" in tested
    assert "too weak" not in tested


def test_a_model_with_a_bad_name_does_not_take_the_folder(own: OwnData, tmp_path: Path) -> None:
    with pytest.raises(FedsieveError, match="resnet19"):
        audit(own, None, quick(own, model="resnet19"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_coordinator_gets_counts_and_nothing_about_a_sample(own: OwnData, out: Path) -> None:
    with (out / "summary.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["site"], row["samples"]) for row in rows] == [
        (name, str(len(held))) for name, held in own.sites.items()
    ]
    for row in rows:
        suspects = read_suspects(out / "sites" / row["site"] / "suspects.csv")
        mean = np.mean([s.p_wrong for s in suspects])
        assert float(row["estimated_noise"]) == pytest.approx(mean, abs=1e-4)
        assert int(row["flagged"]) == sum(s.is_flagged for s in suspects)
        fold = [line for line in held_out_of(own, out) if line[0] == row["site"]]
        assert float(row["model_agrees"]) == pytest.approx(
            sum(agrees for _, agrees in fold) / len(fold), abs=1e-4
        )
    for text in (out / "summary.csv", out / "report.html"):
        assert "row-" not in text.read_text(encoding="utf-8")


def test_no_model_judges_a_label_that_it_has_seen(own: OwnData) -> None:
    """The federation of a fold holds all samples but the fold's, each at its site."""
    settings = quick(own, folds=3)
    data = run.federated(own, None, settings)
    fold_of = folds_of(own, settings)
    owners = np.concatenate([np.full(len(h), k) for k, h in enumerate(own.sites.values())])
    owners = owners[np.argsort(np.concatenate(list(own.sites.values())))]
    np.testing.assert_array_equal(data.sites, owners)
    seen = 0
    for _, part, held_out in crossfit.federations(data, fold_of):
        kept = np.setdiff1d(np.arange(len(own)), held_out)
        assert torch.equal(part.train_images, own.images[kept])
        assert torch.equal(part.test_images, own.images[held_out])
        np.testing.assert_array_equal(part.sites, owners[kept])
        seen += len(held_out)
    assert seen == len(own)


def test_the_model_is_trained_on_all_labels_but_the_flagged(own: OwnData, out: Path) -> None:
    trained_on = sum(map(len, load_scene(out / "runs" / "model" / "scene.safetensors").clients))
    lists = [read_suspects(out / "sites" / name / "suspects.csv") for name in own.sites]
    assert trained_on == len(own) - sum(s.is_flagged for suspects in lists for s in suspects)


def test_a_model_needs_some_labels_that_are_not_flagged(own: OwnData) -> None:
    n = len(own)
    all_wrong = Scores(np.ones(n), np.zeros(n, dtype=np.int64), np.arange(n) + 1, ("why",) * n)
    with pytest.raises(FedsieveError, match="Every label was flagged"):
        run.trusted(replace(own, sites={"all": np.arange(n)}), {"all": all_wrong})


class Cut(Silent):
    """A power cut in the fourth round of the second federation."""

    def started(self, recipe: Recipe, path: Path, rounds_done: int) -> None:
        self.name = path.name

    def finished_round(self, line: Mapping[str, Any]) -> None:
        if self.name == "fold-2" and line["round"] == 3:
            raise KeyboardInterrupt


def test_after_a_cut_the_same_call_goes_on(own: OwnData, out: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        audit(own, own, quick(own), tmp_path / "out", Cut())
    assert not (tmp_path / "out" / "sites").exists()
    audit(own, own, quick(own), tmp_path / "out")
    for name in own.sites:
        file = Path("sites", name, "suspects.csv")
        assert (tmp_path / "out" / file).read_bytes() == (out / file).read_bytes()


def test_a_folder_of_another_audit_is_refused(own: OwnData, out: Path) -> None:
    before = (out / "audit.json").read_bytes()
    changed = replace(own, labels=own.labels.roll(1))
    with pytest.raises(FedsieveError, match="audit of other data"):
        audit(changed, None, quick(own), out)
    with pytest.raises(FedsieveError, match="other settings"):
        audit(own, None, quick(own, rounds=26), out)
    assert (out / "audit.json").read_bytes() == before


def test_a_folder_with_a_damaged_description_is_refused(own: OwnData, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(FedsieveError, match="give another folder"):
        audit(own, None, quick(own), tmp_path)


def test_data_without_sites_are_split_into_virtual_ones(own: OwnData, tmp_path: Path) -> None:
    one = replace(own, sites={"all": np.arange(len(own))}, kind="folder")
    settings = quick(one, rounds=1)
    assert settings.is_virtual
    assert settings.sites == len(one) // 50
    data = run.federated(one, None, settings)
    assert sorted(np.unique(data.sites)) == list(range(settings.sites))
    found = audit(one, None, settings, tmp_path / "out")
    assert [site.name for site in found.sites] == ["all"]
    assert len(found.sites[0].suspects) == len(one)
    assert found.accuracy is None


def test_a_site_of_one_sample_is_judged_too(tmp_path: Path) -> None:
    """It is missing from the federation that judges its only sample."""
    own = digits(tmp_path / "data", {"big": 60, "tiny": 1})
    found = audit(own, None, quick(own, rounds=1), tmp_path / "out")
    assert {site.name: len(site.suspects) for site in found.sites} == {"big": 60, "tiny": 1}


def test_folders_of_sites_cannot_lead_astray() -> None:
    names = ["../../etc", "a/b", "a_b", "A_b", "", ".", "klinik süd", "x" * 300]
    folders = site_folders(names)
    assert list(folders) == names
    assert len({folder.casefold() for folder in folders.values()}) == len(names)
    for folder in folders.values():
        assert Path(folder).name == folder
        assert not folder.startswith(".")
        assert len(folder) < 70


def test_settings_follow_the_data(own: OwnData, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 digits at 3 sites: 80 each, batches of 16, so 5 steps a round; 600 steps are 120 rounds,
    more than the 60 allowed. A GPU and large images get a deeper model."""
    settings = choose(own, Asked(device="cpu"))
    assert (settings.sites, settings.batch_size, settings.rounds) == (3, 16, 60)
    assert (settings.model, settings.source, settings.side) == ("small", "sites", 8)
    gr = choose(own, Asked(device="cpu", method="fedgr")).recipe().method
    assert (gr.warmup_rounds, gr.student_view) == (30, "weak")  # type: ignore[attr-defined]
    assert settings.all_rounds == 6 * 60
    large = replace(own, images=torch.zeros((len(own), 3, 64, 64), dtype=torch.uint8))
    monkeypatch.setattr("fedsieve.audit.settings.pick_device", torch.device)
    assert choose(large, Asked(device="cuda")).model == "resnet18"
    assert choose(large, Asked(device="cpu")).model == "small"
    recipe = choose(large, Asked(device="cpu", method="fedgr")).recipe()
    assert recipe.method.student_view == "strong"  # type: ignore[attr-defined]


def test_many_sites_take_turns(own: OwnData) -> None:
    """240 sites of one sample: 20 a round, so 12 turns of 60 rounds."""
    many = replace(own, sites={str(i): np.array([i]) for i in range(len(own))})
    settings = choose(many, Asked(device="cpu"))
    assert settings.recipe().clients_per_round == 20
    assert settings.rounds == 12 * 60


@pytest.mark.parametrize(("sites", "rounds"), [(3, 60), (3, 20), (30, 120), (240, 720)])
def test_methods_that_begin_with_a_walk_come_to_its_end(
    sites: int, rounds: int, own: OwnData
) -> None:
    """Their defaults, five passes of one site a round, would be the whole audit."""
    parts = np.array_split(np.arange(len(own)), sites)
    data = replace(own, sites={str(i): part for i, part in enumerate(parts)})
    recipe = choose(data, Asked(device="cpu", method="fedcorr", rounds=rounds)).recipe()
    federation = Federation((1,) * sites, recipe.clients_per_round, rounds, 10)
    cfg: Any = recipe.method
    assert 0 < fedcorr.first_fine_tuning_round(cfg, federation) <= rounds / 4
    assert rounds / 4 < fedcorr.first_usual_round(cfg, federation) <= rounds / 2
    cfg = choose(data, Asked(device="cpu", method="feddiv", rounds=rounds)).recipe().method
    assert 0 < cfg.warmup_passes * sites <= rounds / 2


def test_too_few_rounds_for_a_walk_are_told_in_a_sentence(own: OwnData) -> None:
    settings = choose(own, Asked(device="cpu", method="feddiv", rounds=5))
    with pytest.raises(FedsieveError, match="audit of 3 sites needs at least 6 rounds; ask for"):
        settings.recipe()


def test_what_cannot_be_audited_is_told_in_a_sentence(own: OwnData) -> None:
    for words, sentence in {
        "folds": "at least 2 folds",
        "rounds": "rounds must be at least 1",
        "virtual_sites": "virtual_sites must be at least 1",
    }.items():
        with pytest.raises(FedsieveError, match=sentence):
            Asked(**{words: 0})
    with pytest.raises(FedsieveError, match="fedavgg"):
        Asked(method="fedavgg")
    with pytest.raises(FedsieveError, match=r"which leaves method\.forget_rate open; choose anoth"):
        Asked(method="fedcoteaching")
    few = replace(
        own,
        images=own.images[:4],
        labels=own.labels[:4],
        ids=own.ids[:4],
        sites={"all": np.arange(4)},
    )
    with pytest.raises(FedsieveError, match="too few for 5 folds"):
        choose(few, Asked(device="cpu"))
    with pytest.raises(FedsieveError, match="cannot be split into 9 virtual sites"):
        choose(few, Asked(device="cpu", folds=2, virtual_sites=9))
