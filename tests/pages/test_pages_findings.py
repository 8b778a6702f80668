"""What a run found out about its labels: counts that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.errors import FedsieveError
from fedsieve.simulate.findings import (
    BINS,
    DEPTHS,
    FINDINGS,
    Depth,
    Mistaken,
    Site,
    SiteLabels,
    findings_of,
    load_findings,
    save_findings,
)


def site(**changes: Any) -> SiteLabels:
    """Four labels: the second and the third are wrong, and the method suspects the last two."""
    values: dict[str, Any] = {
        "name": "A",
        "given": np.array([0, 0, 1, 2]),
        "true": np.array([0, 1, 0, 2]),
        "p_wrong": np.array([0.1, 0.4, 0.9, 0.5]),
        "suggested": np.array([0, 1, 0, 1]),
        "losses": np.array([0.1, 0.4, 4.0, 0.2]),
    }
    return SiteLabels(**(values | changes))


OTHER = site(name="B", given=np.array([1]), true=np.array([0]), p_wrong=np.array([1.0]),
             suggested=np.array([0]), losses=np.array([5.0]), noise_rate=0.75)  # fmt: skip
CLASSES = ("ant", "bee", "cow")


def test_sites_suspects_precision_and_recall() -> None:
    found = findings_of(CLASSES, [site(), OTHER])
    assert found.sites == (
        Site(name="A", samples=4, estimated=pytest.approx(1.9 / 4), true=0.5),
        Site(name="B", samples=1, estimated=0.75, true=1.0),
    )
    assert (found.samples, found.suspects, found.wrong, found.wrong_suspects) == (5, 3, 3, 2)
    assert found.estimated == pytest.approx((1.9 + 0.75) / 5)
    assert found.precision == pytest.approx(2 / 3)
    assert found.recall == pytest.approx(2 / 3)


def test_pairs_of_classes_count_suspects_and_truth() -> None:
    found = findings_of(CLASSES, [site(), OTHER])
    assert found.mistaken == (
        Mistaken(given=1, likely=0, suspects=2, true=2),
        Mistaken(given=2, likely=1, suspects=1, true=0),
        Mistaken(given=0, likely=1, suspects=0, true=1),
    )


def test_a_suspect_whose_own_label_is_suggested_is_no_pair() -> None:
    found = findings_of(CLASSES, [site(suggested=np.array([0, 0, 1, 2]), true=None)])
    assert found.suspects == 2
    assert found.mistaken == ()


def test_depths_follow_the_list_from_its_worst_label() -> None:
    found = findings_of(CLASSES, [site(), OTHER])
    # p_wrong in falling order: 1.0 (wrong), 0.9 (wrong), 0.5 (right), 0.4 (wrong), 0.1 (right)
    expected = [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]
    assert found.depths == tuple(Depth(checked=n, wrong=w) for n, w in expected)


def test_what_one_site_does_not_know_is_left_out_for_all() -> None:
    found = findings_of(CLASSES, [site(true=None, losses=None), OTHER])
    assert (found.wrong, found.wrong_suspects, found.precision, found.recall) == (None,) * 4
    assert found.depths == ()
    assert found.losses is None
    assert found.mixture is None
    assert [one.true for one in found.sites] == [None, 1.0]
    assert all(pair.true is None for pair in found.mistaken)


def test_a_share_of_nothing_is_no_number() -> None:
    quiet = site(p_wrong=np.zeros(4), true=np.array([0, 0, 1, 2]))
    found = findings_of(CLASSES, [quiet])
    assert (found.precision, found.recall) == (None, None)


def test_the_histogram_counts_every_finite_loss_once() -> None:
    rng = np.random.default_rng(3)
    losses = np.concatenate([rng.normal(1, 0.1, 300), rng.normal(5, 0.3, 200), [90.0, np.inf]])
    n = len(losses)
    wrong = np.arange(n) >= 300
    found = findings_of(
        CLASSES,
        [
            SiteLabels(
                name="A",
                given=wrong.astype(np.int64),
                true=np.zeros(n, np.int64),
                p_wrong=wrong.astype(float),
                suggested=np.zeros(n, np.int64),
                losses=losses,
            )
        ],
    )
    assert found.losses is not None
    assert found.losses.wrong is not None
    assert len(found.losses.labels) == BINS
    assert sum(found.losses.labels) == 501
    assert sum(found.losses.wrong) == 201
    assert found.losses.edges[-1] < 90, "one odd loss does not squeeze all others"
    assert found.losses.labels[-1] >= 1, "it counts in the last bin"
    assert len(found.depths) == DEPTHS
    assert found.mixture is not None
    assert found.mixture.means[0] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("losses", [np.full(4, 2.0), np.full(4, np.nan)])
def test_equal_or_unusable_losses_have_no_mixture(losses: np.ndarray) -> None:
    found = findings_of(CLASSES, [site(losses=losses)])
    assert found.mixture is None
    assert (found.losses is None) == bool(np.isnan(losses).any())


def test_without_labels_there_is_nothing_to_find() -> None:
    none = site(given=np.array([], np.int64))
    with pytest.raises(FedsieveError, match="no labels"):
        findings_of(CLASSES, [none])
    assert findings_of(CLASSES, [none, site()]).samples == 4


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)),
        min_size=1,
        max_size=80,
    )
)
def test_what_is_saved_is_what_is_read(
    labels: list[tuple[int, int, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    given_, true, suggested, p_wrong = (np.array(column) for column in zip(*labels, strict=True))
    held = SiteLabels(
        name="é", given=given_, true=true, suggested=suggested, p_wrong=p_wrong, losses=p_wrong
    )
    found = findings_of(CLASSES, [held])
    folder = tmp_path_factory.mktemp("run")
    save_findings(found, folder)
    assert load_findings(folder) == found
    assert found.depths[-1] == Depth(checked=len(labels), wrong=int((given_ != true).sum()))


def test_a_damaged_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    assert load_findings(tmp_path) is None
    found = findings_of(CLASSES, [site()])
    save_findings(found, tmp_path)
    table = json.loads((tmp_path / FINDINGS).read_bytes())
    bad_pair = table | {"mistaken": [{"given": 7, "likely": 0, "suspects": 1}]}
    bad_bins = table | {"losses": table["losses"] | {"edges": [0.0, 1.0]}}
    for content in (
        "{",
        "[]",
        json.dumps({"classes": 1}),
        json.dumps(bad_pair),
        json.dumps(bad_bins),
    ):
        (tmp_path / FINDINGS).write_text(content)
        with pytest.raises(FedsieveError, match=r"findings.json cannot be read .*; delete it\."):
            load_findings(tmp_path)
    save_findings(replace(found, losses=None), tmp_path)
    assert load_findings(tmp_path) is not None
