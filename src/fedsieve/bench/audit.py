"""How well wrong labels are found: fedsieve's audit against cleanlab on pooled data.

Both get the same images with the same wrong labels, the same network, solver, folds and number of
epochs. cleanlab gets them all in one place, and ranks by the self-confidence of cross-validated
predictions; the audit gets them at sites that share no data.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from fedsieve.audit.crossfit import held_out_logits
from fedsieve.audit.folds import deal
from fedsieve.audit.noise import Evidence, fit_noise
from fedsieve.audit.score import scores_of
from fedsieve.audit.suspects import FLAG
from fedsieve.bench.report import Bar, machine
from fedsieve.data.own.tables import write_rows
from fedsieve.data.sources import Dataset, load
from fedsieve.errors import check
from fedsieve.local.bench import Precision
from fedsieve.local.plan import Sgd
from fedsieve.methods import method
from fedsieve.recipe import DataConfig, EngineConfig, Recipe
from fedsieve.scenes import Noise, Partition, Scene, SceneConfig, build_scene
from fedsieve.scenes.noise import NoiseKind

CALIBRATION = Bar(0.05, at_most=True)
BINS = 15
POOLED = "cleanlab, pooled data"


@dataclass(frozen=True, kw_only=True)
class AuditWork:
    """What is audited, and how."""

    source: str = "fashion-mnist"
    images: int | None = None
    """Images to take, at random; None: all."""
    sites: int = 20
    alpha: float = 0.5
    """Dirichlet concentration of the classes at the sites."""
    kinds: tuple[NoiseKind, ...] = ("symmetric", "asymmetric")
    rate: float = 0.2
    """Share of wrong labels at every site."""
    methods: tuple[str, ...] = ("fedavg",)
    folds: int = 5
    rounds: int = 20
    """Epochs over all data in each fold."""
    sgd: Sgd = field(default_factory=lambda: Sgd(batch_size=32, lr=0.05, momentum=0.9))
    seed: int = 1
    device: str = "cpu"
    precision: Precision = "fp32"

    def recipe(self, name: str) -> Recipe:
        return Recipe(
            name="audit",
            seed=self.seed,
            rounds=self.rounds,
            clients_per_round=self.sites,
            precision=self.precision,
            data=DataConfig(source=self.source),
            scene=SceneConfig(clients=self.sites),
            sgd=self.sgd,
            method=method(name).config(name=name),
            engine=EngineConfig(device=self.device),
        )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """How well one way of finding wrong labels did; NaN where it could not be tried."""

    noise: str
    way: str
    auroc: float = math.nan
    average_precision: float = math.nan
    calibration_error: float = math.nan
    flagged: int = 0
    flagged_wrong: int = 0
    """of the flagged labels, those that are wrong"""
    wrong: int = 0
    """of all labels"""
    seconds: float = math.nan
    """of the way's training and scoring, wall clock"""

    @property
    def was_tried(self) -> bool:
        return not math.isnan(self.auroc)


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    judged: tuple[Judged, ...]
    work: AuditWork
    samples: int
    machine: Mapping[str, Any]

    title = "Finding wrong labels: the audit of a federation and cleanlab on pooled data"

    def header(self) -> list[str]:
        return [
            "wrong labels",
            "found by",
            "AUROC",
            "average precision",
            "calibration error",
            "flagged",
            "of these wrong",
            "seconds",
        ]

    def cells(self) -> list[list[str]]:
        return [_row(judged) for judged in self.judged]

    def notes(self) -> list[str]:
        work = self.work
        notes = [
            f"{self.samples:,} images of {work.source}, {work.sites} sites with Dirichlet"
            f"({work.alpha:g}) classes, {work.rate:.0%} wrong labels at each, seed {work.seed}; "
            f"{work.folds} folds of {work.rounds} epochs each for both, the small network, "
            f"batches of {work.sgd.batch_size}, learning rate {work.sgd.lr:g}.",
            "cleanlab ranks by self-confidence, 1 − p(given label), and flags by find_label_issues;"
            f" the audit flags p_wrong ≥ {FLAG:g}. Calibration error: {BINS} equal bins.",
        ]
        for kind in work.kinds:
            notes += self._verdicts(kind)
        return notes

    def _verdicts(self, kind: str) -> list[str]:
        here = {judged.way: judged for judged in self.judged if judged.noise == kind}
        pooled = here.pop(POOLED)
        verdicts = []
        for judged in here.values():
            calibration = _verdict(CALIBRATION.holds(judged.calibration_error))
            text = f"{kind}, {judged.way}: calibration error {CALIBRATION}: {calibration}"
            if pooled.was_tried:
                better = (
                    judged.auroc >= pooled.auroc
                    and judged.average_precision >= pooled.average_precision
                )
                text += f"; AUROC and average precision at least cleanlab's: {_verdict(better)}"
            verdicts.append(text + ".")
        return verdicts

    def write_csv(self, path: Path) -> None:
        rows = [[judged.noise, judged.way, *_numbers(judged)] for judged in self.judged]
        header = ["noise", "found_by", "auroc", "average_precision", "calibration_error"]
        write_rows(path, [*header, "flagged", "flagged_wrong", "wrong", "seconds"], rows)


def _verdict(holds: bool) -> str:
    return "reached" if holds else "MISSED"


def _row(judged: Judged) -> list[str]:
    if not judged.was_tried:
        return [judged.noise, judged.way, "not installed (pip install 'fedsieve[bench]')", *5 * "–"]
    return [
        judged.noise,
        judged.way,
        f"{judged.auroc:.4f}",
        f"{judged.average_precision:.4f}",
        f"{judged.calibration_error:.4f}",
        f"{judged.flagged:,}",
        f"{judged.flagged_wrong / max(1, judged.flagged):.1%}",
        f"{judged.seconds:.0f}",
    ]


def _numbers(judged: Judged) -> list[str]:
    if not judged.was_tried:
        return [""] * 7
    shares = (judged.auroc, judged.average_precision, judged.calibration_error)
    counts = (judged.flagged, judged.flagged_wrong, judged.wrong)
    return [*(f"{v:.6f}" for v in shares), *map(str, counts), f"{judged.seconds:.1f}"]


def measure_audit(
    work: AuditWork, path: Path, out: Path | None = None, *, may_fork_out: bool = False
) -> AuditReport:
    """Audit each kind of wrong labels with each method, and with cleanlab where it is installed.

    `path` is where the data of `work.source` lie; `out` gets the numbers as audit.csv.
    `may_fork_out` lets long federations start worker processes (see `simulate.run.run`).
    """
    facts = machine()
    data = _subset(load(work.source, path), work.images, work.seed)
    judged = []
    with tempfile.TemporaryDirectory(prefix="fedsieve-audit-") as folder:
        for kind in work.kinds:
            scene = _scene(work, data, kind)
            judged += _judge(work, data, scene, kind, Path(folder) / kind, may_fork_out)
    report = AuditReport(
        judged=tuple(judged), work=work, samples=len(data.train_labels), machine=facts
    )
    if out is not None:
        report.write_csv(out / "audit.csv")
    return report


def _subset(data: Dataset, images: int | None, seed: int) -> Dataset:
    if images is None or images >= len(data.train_labels):
        return data
    check(images >= 100, f"A benchmark needs at least 100 images, not {images}.")
    rows = torch.from_numpy(
        np.random.default_rng(seed).permutation(len(data.train_labels))[:images]
    )
    return replace(data, train_images=data.train_images[rows], train_labels=data.train_labels[rows])


def _scene(work: AuditWork, data: Dataset, kind: NoiseKind) -> Scene:
    return build_scene(
        SceneConfig(
            clients=work.sites,
            partition=Partition(kind="dirichlet", alpha=work.alpha, min_size=2 * work.folds),
            noise=Noise(kind=kind, clients="fixed", rate=work.rate),
        ),
        data.train_labels.numpy(),
        len(data.classes),
        work.seed,
    )


def _judge(
    work: AuditWork, data: Dataset, scene: Scene, kind: str, folder: Path, may_fork_out: bool
) -> list[Judged]:
    """Every way of finding the wrong labels of one scene; the truth is used for judging only."""
    given = torch.tensor(scene.given)
    sites = np.empty(len(given), dtype=np.int64)
    fold_of = np.empty(len(given), dtype=np.int64)
    for number, held in enumerate(scene.clients):
        sites[held] = number
        ids = [str(i) for i in held]
        fold_of[held] = deal(ids, scene.given[held], work.folds, f"{work.seed}/{number}")
    federated = replace(data, train_labels=given, sites=sites)
    wrong = scene.given != data.train_labels.numpy()
    judged = []
    for name in work.methods:
        started = time.perf_counter()
        logits = held_out_logits(
            work.recipe(name), federated, fold_of, folder / name, may_fork_out=may_fork_out
        )
        p_wrong = _audited(logits, scene)
        seconds = time.perf_counter() - started
        way = f"fedsieve audit, {name}"
        judged.append(_judged(kind, way, p_wrong, p_wrong >= FLAG, wrong, seconds))
    if find_spec("cleanlab") is None:
        return [*judged, Judged(noise=kind, way=POOLED)]
    started = time.perf_counter()
    pooled = replace(federated, sites=np.zeros(len(given), dtype=np.int64))
    logits = held_out_logits(work.recipe("fedavg"), pooled, fold_of, folder / "pooled")
    p_wrong, flagged = _by_cleanlab(logits, scene.given)
    seconds = time.perf_counter() - started
    return [*judged, _judged(kind, POOLED, p_wrong, flagged, wrong, seconds)]


def _audited(logits: NDArray[np.float32], scene: Scene) -> NDArray[np.float64]:
    """(n,) p_wrong: sums to the server, scores at each site."""
    evidence = [
        Evidence(logits[held].astype(np.float64), scene.given[held]) for held in scene.clients
    ]
    shared = fit_noise(evidence).shared
    p_wrong = np.empty(len(logits))
    for held, at_site in zip(scene.clients, evidence, strict=True):
        p_wrong[held] = scores_of(at_site, shared).p_wrong
    return p_wrong


def _by_cleanlab(
    logits: NDArray[np.float32], given: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """1 − self-confidence of every label, and what `find_label_issues` flags."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    probabilities = torch.from_numpy(logits).double().softmax(dim=1).numpy()
    quality = get_label_quality_scores(given, probabilities, method="self_confidence")
    return 1 - quality, find_label_issues(given, probabilities, n_jobs=1)


def _judged(
    kind: str,
    way: str,
    p_wrong: NDArray[np.float64],
    flagged: NDArray[np.bool_],
    wrong: NDArray[np.bool_],
    seconds: float,
) -> Judged:
    return Judged(
        noise=kind,
        way=way,
        auroc=float(roc_auc_score(wrong, p_wrong)),
        average_precision=float(average_precision_score(wrong, p_wrong)),
        calibration_error=calibration_error(p_wrong, wrong),
        flagged=int(flagged.sum()),
        flagged_wrong=int((flagged & wrong).sum()),
        wrong=int(wrong.sum()),
        seconds=seconds,
    )


def calibration_error(
    p_wrong: NDArray[np.float64], wrong: NDArray[np.bool_], bins: int = BINS
) -> float:
    """Σ_b (n_b/n)·|mean p_wrong − share of wrong labels| over bins b of equal width."""
    number = np.minimum((p_wrong * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(number, weights=p_wrong - wrong, minlength=bins)
    return float(np.abs(gaps).sum() / len(p_wrong))
