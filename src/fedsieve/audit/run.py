"""The whole audit: judge every label, train the model, write what each side may know.

DIR/sites/SITE/suspects.csv, review.html    stay with the site
DIR/summary.csv, report.html                the coordinator's: counts, nothing about one sample
DIR/model.safetensors                       the model, trained on all samples but the flagged
DIR/runs/                                   the federations, to go on after a cut
DIR/audit.json                              what was audited, and how
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.audit.crossfit import fitted_to, fold_name, held_out_logits, only
from fedsieve.audit.folds import deal
from fedsieve.audit.noise import Evidence, fit_noise
from fedsieve.audit.score import Scores, agreed, listed, scores_of
from fedsieve.audit.settings import Settings
from fedsieve.audit.site import write_for_site
from fedsieve.audit.suspects import FLAG, Suspect
from fedsieve.data.own import OwnData, as_dataset, thumbnail
from fedsieve.data.own.tables import write_rows
from fedsieve.data.sources import Dataset
from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.losses import cross_entropy
from fedsieve.pages import ReportExtras, report_page
from fedsieve.simulate.control import Reporter
from fedsieve.simulate.directory import MODEL
from fedsieve.simulate.findings import SiteLabels, findings_of
from fedsieve.simulate.run import run
from fedsieve.simulate.world import make_setup

CHECKED_DURING_TRAINING = 500
"""Images that the final model's agreement with given labels is followed on, without test data."""
DESCRIPTION = "audit.json"
WEAK = 0.75
"""Models that predict a smaller share of the labels which they take for right cannot tell wrong
labels from mistakes of their own: docs/audit.md has what was measured."""
FINAL = "model"
"""What the run of the final model is called."""


def federation_names(folds: int) -> list[str]:
    """The runs of an audit, in order."""
    return [*map(fold_name, range(folds)), FINAL]


@dataclass(frozen=True, eq=False)
class AuditedSite:
    """What an audit found at one site."""

    name: str
    scores: Scores
    given: NDArray[np.int64]
    suspects: tuple[Suspect, ...]
    agreed: int
    """Given labels that models predict which had not seen them."""

    @property
    def flagged(self) -> int:
        return sum(suspect.is_flagged for suspect in self.suspects)

    @property
    def noise(self) -> float:
        """Estimated share of wrong labels: the mean of p_wrong."""
        return float(self.scores.p_wrong.mean())


@dataclass(frozen=True, eq=False)
class Audit:
    sites: tuple[AuditedSite, ...]
    accuracy: float | None
    """of the final model on the test data, per cent"""

    @property
    def agreement(self) -> float:
        """Share of the given labels that models predict which had not seen them."""
        return sum(site.agreed for site in self.sites) / sum(map(_samples, self.sites))

    @property
    def noise(self) -> float:
        """Estimated share of wrong labels at all sites."""
        return sum(site.noise * _samples(site) for site in self.sites) / sum(
            map(_samples, self.sites)
        )

    @property
    def caution(self) -> str | None:
        """A sentence where the models are too weak for their probabilities to be taken at their
        word."""
        if self.agreement >= WEAK * (1 - self.noise):
            return None
        return (
            f"The models agree with {self.agreement:.0%} of the labels that they had not seen, and "
            f"take {1 - self.noise:.0%} of them for right: they are too weak to tell wrong labels "
            "from mistakes of their own, so do not rely on the shares and probabilities. The order "
            "of the lists still says where to look first; more --rounds, a larger --size, another "
            "--model or more images may help."
        )


def _samples(site: AuditedSite) -> int:
    return len(site.given)


def audit(
    own: OwnData,
    test: OwnData | None,
    settings: Settings,
    out: Path,
    reporter: Reporter | None = None,
    *,
    command: str | None = None,
    may_fork_out: bool = False,
) -> Audit:
    """Audit `own` in the folder `out`, or go on with what is left of it.

    `test` are images that only the final model's accuracy is measured on; `command` is for the
    record.
    """
    fingerprint, data = _fingerprint(own), federated(own, test, settings)
    make_setup(settings.recipe(), data).make_model()  # a folder is not taken by a model's bad name
    _claim(out, fingerprint, settings)
    runs = out / "runs"
    logits = held_out_logits(
        settings.recipe(),
        data,
        folds_of(own, settings),
        runs,
        reporter,
        may_fork_out=may_fork_out,
    )
    evidence = {
        name: Evidence(logits[held].astype(np.float64), own.labels.numpy()[held])
        for name, held in own.sites.items()
    }
    shared = fit_noise(tuple(evidence.values())).shared
    scores = {name: scores_of(at_site, shared) for name, at_site in evidence.items()}
    kept = only(data, trusted(own, scores))
    recipe = fitted_to(settings.recipe(), kept, FINAL)
    summary = run(recipe, runs / FINAL, reporter, may_fork_out=may_fork_out, data=kept)

    folders = site_folders(own.sites)
    sites = tuple(
        _audited(
            own, name, out / "sites" / folders[name], scores[name], evidence[name], fingerprint
        )
        for name in own.sites
    )
    found = Audit(sites, None if test is None else float(summary["final"]))
    write_atomically(out / MODEL, (runs / FINAL / MODEL).read_bytes())
    write_summary(out / "summary.csv", sites)
    write_atomically(out / "report.html", _report(own, found, evidence, runs, command).encode())
    return found


def trusted(own: OwnData, scores: Mapping[str, Scores]) -> NDArray[np.int64]:
    """The samples that the final model is trained on: all but those whose label is flagged."""
    kept = [held[scores[name].p_wrong < FLAG] for name, held in own.sites.items()]
    check(
        any(map(len, kept)),
        "Every label was flagged, so there is nothing to train a model on; audit with more "
        "--rounds or another --model.",
    )
    return np.sort(np.concatenate(kept))


def federated(own: OwnData, test: OwnData | None, settings: Settings) -> Dataset:
    """All samples to train on, each at its site; without sites, at a virtual one."""
    data = as_dataset(own, own if test is None else test)
    if test is None:
        few = torch.arange(0, len(own), -(-len(own) // CHECKED_DURING_TRAINING))
        data = replace(data, test_images=own.images[few], test_labels=own.labels[few])
    if settings.is_virtual:
        virtual = deal(own.ids, own.labels.numpy(), settings.sites, f"virtual/{settings.seed}")
        data = replace(data, sites=virtual)
    return data


def folds_of(own: OwnData, settings: Settings) -> NDArray[np.int64]:
    """(n,) the fold of each sample; every site deals its own."""
    fold_of = np.empty(len(own), dtype=np.int64)
    labels = own.labels.numpy()
    for name, held in own.sites.items():
        ids = [own.ids[i] for i in held]
        fold_of[held] = deal(ids, labels[held], settings.folds, f"folds/{settings.seed}/{name}")
    return fold_of


def site_folders(names: Iterable[str]) -> Mapping[str, str]:
    """Site → a folder name that is safe everywhere: letters, digits, and . _ - within."""
    folders: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        plain = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._")[:60] or "site"
        folder, number = plain, 1
        while folder.casefold() in taken:
            number += 1
            folder = f"{plain}-{number}"
        taken.add(folder.casefold())
        folders[name] = folder
    return folders


def write_summary(path: Path, sites: Iterable[AuditedSite]) -> None:
    """The coordinator's copy: counts by site."""
    rows = [
        (
            site.name,
            str(len(site.given)),
            f"{site.noise:.4f}",
            str(site.flagged),
            f"{site.agreed / len(site.given):.4f}",
        )
        for site in sites
    ]
    write_rows(path, ("site", "samples", "estimated_noise", "flagged", "model_agrees"), rows)


def _audited(
    own: OwnData,
    name: str,
    folder: Path,
    scores: Scores,
    evidence: Evidence,
    fingerprint: str,
) -> AuditedSite:
    """Write the files that stay with a site."""
    held = own.sites[name]
    given = own.labels.numpy()[held]
    suspects = listed([own.ids[i] for i in held], given, own.classes, scores)
    index_of = {own.ids[i]: int(i) for i in held}
    write_for_site(
        folder,
        name,
        own.classes,
        suspects,
        lambda sample: thumbnail(own, index_of[sample]),
        key=f"{fingerprint[:16]}/{name}",
    )
    return AuditedSite(name, scores, given, suspects, agreed(evidence))


def _report(
    own: OwnData,
    found: Audit,
    evidence: Mapping[str, Evidence],
    runs: Path,
    command: str | None,
) -> str:
    labels = [
        SiteLabels(
            name=site.name,
            given=site.given,
            p_wrong=site.scores.p_wrong,
            suggested=site.scores.suggested,
            losses=_losses(evidence[site.name]),
        )
        for site in found.sites
    ]
    extras = ReportExtras(
        title=f"Audit of {own.root.resolve().name}",
        lead="Which labels are wrong, by models that had not seen them, and the model trained on "
        "the others. It holds counts only; the lists of labels are at the sites.",
        findings=findings_of(own.classes, labels),
        notices=() if found.caution is None else (found.caution,),
        is_tested=found.accuracy is not None,
        also_sent="For the lists of suspects it sent sums over its labels by class, and for this "
        "page counts by class.",
    )
    return report_page([runs / FINAL], command=command, extras=extras)


def _losses(evidence: Evidence) -> NDArray[np.float32]:
    """(n,) cross entropy of each given label under the model that had not seen it."""
    losses: NDArray[np.float32] = cross_entropy(
        torch.from_numpy(evidence.logits), torch.from_numpy(evidence.given)
    ).numpy()
    return losses


def _claim(out: Path, fingerprint: str, settings: Settings) -> None:
    """Make the folder this audit's own, or refuse it when it holds another one."""
    held = asdict(settings)
    del held["device"]  # where it runs may change
    wanted = {"data": fingerprint, "settings": held}
    file = out / DESCRIPTION
    if file.exists():
        try:
            found = json.loads(file.read_bytes())
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("data") != wanted["data"]:
            raise FedsieveError(
                f"{out} holds an audit of other data, or of these before they changed; give "
                "another folder with --out."
            )
        check(
            found == wanted,
            f"{out} holds an audit with other settings; give another folder with --out, or the "
            "settings that it began with.",
        )
    write_atomically(file, json.dumps(wanted, indent=1).encode() + b"\n")


def _fingerprint(own: OwnData) -> str:
    """sha256 of ids, labels, classes, sites and pixels."""
    digest = hashlib.sha256()
    names = [own.classes, own.ids, [(name, held.tolist()) for name, held in own.sites.items()]]
    digest.update(json.dumps(names).encode())
    digest.update(own.labels.numpy().astype("<i8").tobytes())
    digest.update(own.images.contiguous().numpy().data)
    return digest.hexdigest()
