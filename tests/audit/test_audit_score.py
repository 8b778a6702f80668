"""Suspects: ranks, suggestions, reasons, folds and the list as a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.audit import noise, score
from fedsieve.audit.folds import deal
from fedsieve.audit.noise import Evidence, Shared
from fedsieve.audit.score import scores_of, suspects_of
from fedsieve.audit.suspects import COLUMNS, Suspect, read_suspects, write_suspects
from fedsieve.errors import FedsieveError

CLASSES = ("cat", "dog", "eel")


def shared(rate: float = 0.1) -> Shared:
    return noise.Shared(1.0, False, np.full(3, 1 / 3), np.full(3, rate), (1 - np.eye(3)) / 2)


def evidence(*rows: tuple[tuple[float, float, float], int]) -> Evidence:
    return Evidence(np.log([p for p, _ in rows]), np.array([y for _, y in rows]))


def test_the_most_suspicious_label_comes_first() -> None:
    """A sure dog called cat, a cat called cat, an eel of .7 called dog of .3."""
    found = suspects_of(
        ["a", "b", "c"],
        evidence(((0.01, 0.98, 0.01), 0), ((0.98, 0.01, 0.01), 0), ((0.0001, 0.3, 0.6999), 1)),
        CLASSES,
        shared(),
    )
    assert [(s.id, s.given, s.rank) for s in found] == [
        ("a", "cat", 1),
        ("c", "dog", 2),
        ("b", "cat", 3),
    ]
    assert (found[0].suggested, found[0].reason) == ("dog", score.SURE_OF_ANOTHER)
    assert found[0].is_flagged
    assert (found[2].suggested, found[2].reason) == ("cat", score.NO_DOUBT)
    assert not found[2].is_flagged
    assert 1 > found[0].p_wrong > found[1].p_wrong > found[2].p_wrong > 0


def test_a_flagged_label_is_never_suggested() -> None:
    """T = .55 on the diagonal, .225 beside it, so the posteriors are .45, .275 and .275: flagged,
    though the given class is the most likely one."""
    likely = np.array([0.45 / 0.55, 0.275 / 0.225, 0.275 / 0.225])
    row = tuple(likely / likely.sum())
    rows = [(row, 0)] * 3
    found = scores_of(evidence(*rows), shared(0.45))
    assert (found.p_wrong >= 0.5).all()
    assert (found.suggested != 0).all()


def test_reasons_go_from_the_model_to_the_site() -> None:
    """The model prefers dog, but not by .9; the site has hardly any cats although the model leans
    to cat; and a class that is often given for another one."""
    prefers = evidence(*[((0.05, 0.85, 0.10), 0)] * 5)
    assert set(scores_of(prefers, shared(0.3)).reasons) == {score.PREFERS_ANOTHER}

    dog = (0.001, 0.998, 0.001)
    rare = [(dog, 1)] * 320 + [(dog, 2)] * 80 + [((0.5, 0.49, 0.01), 0)]
    assert scores_of(evidence(*rare), shared(0.2)).reasons[-1] == score.RARE_HERE

    spread = np.array([[0, 0.5, 0.5], [1.0, 0, 0], [1.0, 0, 0]])
    mixed_up = noise.Shared(1.0, False, np.full(3, 1 / 3), np.array([0.01, 0.9, 0.9]), spread)
    some = [((0.4, 0.3, 0.3), 0), ((0.4, 0.3, 0.3), 1), ((0.4, 0.3, 0.3), 2)]
    assert scores_of(evidence(*some), mixed_up).reasons[0] == score.OFTEN_MISTAKEN


def test_a_site_alone_fits_its_own_noise() -> None:
    """60 sure cats and dogs, six of them called the other: these six are flagged."""
    true = np.arange(60) % 2
    labels = np.where(np.arange(60) < 6, 1 - true, true)
    rows = [
        ((0.96, 0.02, 0.02) if c == 0 else (0.02, 0.96, 0.02), int(y))
        for c, y in zip(true, labels, strict=True)
    ]
    found = suspects_of([str(i) for i in range(60)], evidence(*rows), CLASSES)
    assert {s.id for s in found if s.is_flagged} == set("012345")


def test_names_must_fit_the_labels() -> None:
    with pytest.raises(FedsieveError, match="2 ids for 1 labels"):
        suspects_of(["a", "b"], evidence(((0.5, 0.4, 0.1), 0)), CLASSES, shared())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6), st.randoms())
@settings(max_examples=25, deadline=None)
def test_folds_are_even_in_every_class_and_do_not_depend_on_the_order(
    labels: list[int], parts: int, random: object
) -> None:
    ids = [f"id-{i}" for i in range(len(labels))]
    part = deal(ids, np.array(labels), parts, "key")
    assert part.min() >= 0
    assert part.max() < parts
    for chosen in (np.ones(len(labels), dtype=bool), *(np.array(labels) == c for c in set(labels))):
        counts = np.bincount(part[chosen], minlength=parts)
        assert counts.max() - counts.min() <= 1
    order = np.random.default_rng(0).permutation(len(ids))
    again = deal([ids[i] for i in order], np.array(labels)[order], parts, "key")
    np.testing.assert_array_equal(again, part[order])


def test_another_key_deals_otherwise() -> None:
    ids = [str(i) for i in range(50)]
    labels = np.zeros(50, dtype=np.int64)
    assert (deal(ids, labels, 5, "a") != deal(ids, labels, 5, "b")).any()


def test_folds_need_parts_and_different_ids() -> None:
    with pytest.raises(FedsieveError, match="at least 1 part"):
        deal(["a"], np.array([0]), 0, "key")
    with pytest.raises(FedsieveError, match="same id"):
        deal(["a", "a"], np.array([0, 0]), 2, "key")


def test_a_list_survives_the_file(tmp_path: Path) -> None:
    """Names that a spreadsheet would take for formulas, commas and other alphabets too."""
    suspects = (
        Suspect("=1+1.png", "cat, wild", "犬", 0.875, 1, score.SURE_OF_ANOTHER),
        Suspect("a/b.png", "犬", "犬", 0.25, 2, score.NO_DOUBT),
    )
    write_suspects(tmp_path / "suspects.csv", suspects)
    assert read_suspects(tmp_path / "suspects.csv") == suspects
    assert "\n=1" not in (tmp_path / "suspects.csv").read_text(encoding="utf-8")


def test_a_strange_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "suspects.csv"
    file.write_text("id,given\na,b\n")
    with pytest.raises(FedsieveError, match="no column suggested or p_wrong or rank or reason"):
        read_suspects(file)
    head = ",".join(COLUMNS)
    file.write_text(f"{head}\na,b,c,much,1,why\n")
    with pytest.raises(FedsieveError, match="row 1: p_wrong and rank must be numbers"):
        read_suspects(file)
    file.write_text(f"{head}\na,b,c,1.5,1,why\n")
    with pytest.raises(FedsieveError, match=r"must lie in \[0, 1\]"):
        read_suspects(file)
