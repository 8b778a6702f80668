"""What a run found out about its labels, in a few numbers: the file `findings.json` of a run.

It holds counts over classes, sites and bins, never anything about a single sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsieve.config import from_table, to_table
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.sieve.gmm import Mixture, fit_mixture

FINDINGS = "findings.json"
BINS = 40
DEPTHS = 50
SUSPECT = 0.5
"""A label whose probability of being wrong reaches this is a suspect."""

Floats = npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteLabels:
    """All labels of one site as the method sees them; arrays are (n,), in the same order."""

    name: str
    given: Labels
    p_wrong: Floats
    """probability that the given label is wrong"""
    suggested: Labels
    """the label that the method would give"""
    losses: Floats | None = None
    """cross entropy of the given label under the global model"""
    true: Labels | None = None
    """the true labels, in a simulation"""
    noise_rate: float | None = None
    """the method's own estimate of the share of wrong labels; without it the mean of p_wrong"""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One site's share of wrong labels."""

    name: str
    samples: int
    estimated: float
    true: float | None = None


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Losses by bins of equal width; what lies above the last edge counts in the last bin."""

    edges: tuple[float, ...]
    labels: tuple[int, ...]
    """all labels in each bin"""
    wrong: tuple[int, ...] | None = None
    """those of them that are wrong, where that is known"""


@dataclass(frozen=True, kw_only=True)
class Mistaken:
    """How often one class stands where another one belongs; classes by index."""

    given: int
    likely: int
    suspects: int
    """suspects with this given label for which the method suggests `likely`"""
    true: int | None = None
    """labels `given` of samples that truly are `likely`, where that is known"""


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Of the `checked` most suspicious labels, so many are wrong."""

    checked: int
    wrong: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a run found out about the labels of all its sites."""

    classes: tuple[str, ...]
    samples: int
    suspects: int
    """labels with p_wrong ≥ ½"""
    sites: tuple[Site, ...]
    mistaken: tuple[Mistaken, ...]
    """most suspects first; pairs without any are left out"""
    losses: Histogram | None = None
    mixture: Mixture | None = None
    """of the losses, where they fall into two groups"""
    wrong: int | None = None
    """labels that are wrong, where that is known; with it come `wrong_suspects` and `depths`"""
    wrong_suspects: int | None = None
    depths: tuple[Depth, ...] = ()

    @property
    def estimated(self) -> float:
        """The sites' estimated shares of wrong labels together: their mean by labels."""
        return sum(site.samples * site.estimated for site in self.sites) / self.samples

    @property
    def precision(self) -> float | None:
        """The share of the suspects that is wrong; None where unknown or without suspects."""
        return None if self.wrong_suspects is None else _share(self.wrong_suspects, self.suspects)

    @property
    def recall(self) -> float | None:
        """The share of the wrong labels that is suspected; None where unknown or without any."""
        if self.wrong is None or self.wrong_suspects is None:
            return None
        return _share(self.wrong_suspects, self.wrong)


def findings_of(classes: Sequence[str], sites: Sequence[SiteLabels]) -> Findings:
    """Count what the sites' labels look like; truth and losses only if every site has them."""
    held = [site for site in sites if len(site.given)]
    check(bool(held), "There are no labels to report on.")
    given = np.concatenate([site.given for site in held])
    p_wrong = np.concatenate([site.p_wrong for site in held]).astype(np.float64)
    suggested = np.concatenate([site.suggested for site in held])
    truths = [site.true for site in held if site.true is not None]
    true = np.concatenate(truths) if len(truths) == len(held) else None
    observed = [site.losses for site in held if site.losses is not None]
    losses = np.concatenate(observed) if len(observed) == len(held) else None
    is_suspect = p_wrong >= SUSPECT
    is_wrong = None if true is None else given != true
    histogram, mixture = (None, None) if losses is None else _histogram(losses, is_wrong)
    return Findings(
        classes=tuple(classes),
        samples=len(given),
        suspects=int(is_suspect.sum()),
        sites=tuple(_site(site) for site in held),
        mistaken=_mistaken(len(classes), given, suggested, is_suspect, true),
        losses=histogram,
        mixture=mixture,
        wrong=None if is_wrong is None else int(is_wrong.sum()),
        wrong_suspects=None if is_wrong is None else int((is_suspect & is_wrong).sum()),
        depths=() if is_wrong is None else _depths(p_wrong, is_wrong),
    )


def save_findings(findings: Findings, folder: Path) -> None:
    write_atomically(folder / FINDINGS, json.dumps(to_table(findings), indent=1).encode() + b"\n")


def load_findings(folder: Path) -> Findings | None:
    """What `save_findings` wrote; None where a run wrote none."""
    path = folder / FINDINGS
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_bytes())
        check(isinstance(table, dict), "it holds no table")
        findings = from_table(Findings, table)
        _check_consistent(findings)
    except (ValueError, FedsieveError) as error:
        raise FedsieveError(f"{path} cannot be read ({error}); delete it.") from None
    return findings


def _check_consistent(findings: Findings) -> None:
    """What the types of the fields do not say."""
    known = range(len(findings.classes))
    check(
        all(pair.given in known and pair.likely in known for pair in findings.mistaken),
        "a pair names a class that is not there",
    )
    if findings.losses is not None:
        bins = len(findings.losses.labels)
        wrong = findings.losses.wrong
        check(
            len(findings.losses.edges) == bins + 1 and (wrong is None or len(wrong) == bins),
            "the bins and edges of the losses do not fit each other",
        )


def _site(site: SiteLabels) -> Site:
    rate = float(site.p_wrong.mean()) if site.noise_rate is None else site.noise_rate
    true = None if site.true is None else float((site.given != site.true).mean())
    return Site(name=site.name, samples=len(site.given), estimated=rate, true=true)


def _histogram(
    losses: Floats, is_wrong: npt.NDArray[np.bool_] | None
) -> tuple[Histogram | None, Mixture | None]:
    """Bins up to the 99.5th percentile, and the mixture of the losses as they are binned.

    Larger losses count as the last edge, so that a few odd ones are not a group of their own.
    """
    finite = np.isfinite(losses)
    values = losses[finite].astype(np.float64)
    if len(values) == 0:
        return None, None
    low, high = float(values.min()), float(np.percentile(values, 99.5))
    edges = np.linspace(low, max(high, low + 1e-6), BINS + 1)
    inside = np.clip(values, edges[0], edges[-1])
    labels = np.histogram(inside, edges)[0]
    wrong = None if is_wrong is None else np.histogram(inside[is_wrong[finite]], edges)[0]
    mixture = fit_mixture(inside)
    return (
        Histogram(
            edges=tuple(edges.tolist()),
            labels=tuple(labels.tolist()),
            wrong=None if wrong is None else tuple(wrong.tolist()),
        ),
        None if mixture.degenerate else mixture,
    )


def _mistaken(
    classes: int,
    given: Labels,
    suggested: Labels,
    is_suspect: npt.NDArray[np.bool_],
    true: Labels | None,
) -> tuple[Mistaken, ...]:
    suspects = _pairs(classes, given[is_suspect], suggested[is_suspect])
    truly = None if true is None else _pairs(classes, given, true)
    seen = suspects > 0 if truly is None else (suspects > 0) | (truly > 0)
    np.fill_diagonal(seen, False)
    pairs = [
        Mistaken(
            given=int(g),
            likely=int(s),
            suspects=int(suspects[g, s]),
            true=None if truly is None else int(truly[g, s]),
        )
        for g, s in np.argwhere(seen)
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.suspects))


def _pairs(classes: int, given: Labels, other: Labels) -> npt.NDArray[np.int64]:
    """(C, C) how many labels have each pair of given and other class."""
    counts = np.bincount(given * classes + other, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.int64)


def _depths(p_wrong: npt.NDArray[np.float64], is_wrong: npt.NDArray[np.bool_]) -> tuple[Depth, ...]:
    """The list of suspects, worst first, cut at up to `DEPTHS` places of equal distance."""
    found = np.cumsum(is_wrong[np.argsort(-p_wrong, kind="stable")])
    places = np.unique(np.ceil(np.linspace(0, len(found), DEPTHS + 1)[1:]).astype(int))
    return tuple(Depth(checked=int(n), wrong=int(found[n - 1])) for n in places)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
