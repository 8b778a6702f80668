"""From held-out predictions to suspects: pure functions, so that a site can call them by itself.

Nothing here leaves a site; what a site tells the server before is in `fedsieve.audit.noise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsieve.audit.noise import (
    Evidence,
    Floats,
    Labels,
    Shared,
    Site,
    fit_noise,
    model_opinion,
    own_view,
    posterior_of,
)
from fedsieve.audit.suspects import FLAG, Suspect
from fedsieve.errors import check

SURE = 0.9
"""A model that gives a class this probability is called sure of it."""
RARE = 0.5
"""A class that is this much rarer at a site than in the federation is called rare there."""

NO_DOUBT = "no strong doubt"
SURE_OF_ANOTHER = "model sure of another class"
PREFERS_ANOTHER = "model prefers another class"
RARE_HERE = "class rare at this site"
OFTEN_MISTAKEN = "often given for another class"


@dataclass(frozen=True, eq=False)
class Scores:
    """What an audit thinks of the labels of one site, in their order."""

    p_wrong: Floats
    """(n,) probability that the given label is wrong"""
    suggested: Labels
    """(n,) the most likely class; where p_wrong is at least ½, of those that are not given"""
    ranks: Labels
    """(n,) 1 is the most suspicious; equals are ranked in their order"""
    reasons: tuple[str, ...]


def scores_of(evidence: Evidence, shared: Shared | None = None) -> Scores:
    """Score the labels of one site, with the noise of its federation or, without, with its own."""
    if shared is None:
        shared = fit_noise([evidence]).shared
    site = own_view(evidence, shared)
    posterior = posterior_of(evidence, site, shared)
    rows = np.arange(len(evidence.given))
    p_wrong = np.clip(1 - posterior[rows, evidence.given], 0.0, 1.0)
    others = posterior.copy()
    flagged = p_wrong >= FLAG
    others[rows[flagged], evidence.given[flagged]] = -1
    suggested = others.argmax(axis=1)
    ranks = np.empty(len(rows), dtype=np.int64)
    ranks[np.argsort(-p_wrong, kind="stable")] = rows + 1
    reasons = _reasons(evidence, site, shared, suggested, flagged)
    return Scores(p_wrong, suggested, ranks, reasons)


def agreed(evidence: Evidence) -> int:
    """How many of the given labels a model predicts that has not seen them."""
    return int((evidence.logits.argmax(axis=1) == evidence.given).sum())


def suspects_of(
    ids: Sequence[str],
    evidence: Evidence,
    classes: Sequence[str],
    shared: Shared | None = None,
) -> tuple[Suspect, ...]:
    """All labels of one site, the most suspicious first."""
    check(
        len(ids) == len(evidence.given) and len(classes) == evidence.classes,
        f"There are {len(ids)} ids for {len(evidence.given)} labels, and {len(classes)} class "
        f"names for {evidence.classes} classes; give one for each.",
    )
    return listed(ids, evidence.given, classes, scores_of(evidence, shared))


def listed(
    ids: Sequence[str], given: Labels, classes: Sequence[str], scores: Scores
) -> tuple[Suspect, ...]:
    """Scores with names, the most suspicious label first."""
    return tuple(
        Suspect(
            ids[i],
            classes[given[i]],
            classes[scores.suggested[i]],
            float(scores.p_wrong[i]),
            int(scores.ranks[i]),
            scores.reasons[i],
        )
        for i in np.argsort(scores.ranks)
    )


def _reasons(
    evidence: Evidence, site: Site, shared: Shared, suggested: Labels, flagged: np.ndarray
) -> tuple[str, ...]:
    """Why each label is flagged, from the strongest ground to the weakest."""
    rows = np.arange(len(suggested))
    opinion = model_opinion(evidence.logits, shared)
    for_suggested, for_given = opinion[rows, suggested], opinion[rows, evidence.given]
    is_rare = (site.prior < RARE * shared.prior)[evidence.given]
    grounds = [
        (~flagged, NO_DOUBT),
        (for_suggested >= SURE, SURE_OF_ANOTHER),
        (for_suggested > for_given, PREFERS_ANOTHER),
        (is_rare, RARE_HERE),
    ]
    chosen = np.select([holds for holds, _ in grounds], range(len(grounds)), len(grounds))
    words = [*(text for _, text in grounds), OFTEN_MISTAKEN]
    return tuple(words[ground] for ground in chosen)
