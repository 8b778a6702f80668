"""Corrected data: what people decided about labels, carried out on a copy.

The original is only read. The copy is a new folder of the same layout:

- folder: the image files, byte for byte; one with a new label lies in the folder of its new class,
  under a name of its own if that is taken.
- table: labels.csv with the original's columns, and the images it lists, copied to the same paths.
- .npz: a file of the same name. Arrays with one entry for each image lose those of dropped rows.
- sites: each of them in its way.

Files that are no images of the data (notes, links to folders) are not copied.
"""

from __future__ import annotations

import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from fedsieve.data.own.folders import new_folder
from fedsieve.data.own.layout import (
    TABLE_NAMES,
    Found,
    Part,
    Sample,
    found_at,
    is_file_inside,
    kind_of,
    read_npz,
    read_table,
    refuse_inside,
    root_of,
)
from fedsieve.data.own.names import CLASSES_FILE, candidates, class_name, id_of, path_of, some
from fedsieve.data.own.read import classes_found, fixed_classes
from fedsieve.data.own.reading import AS_FOUND, Reading
from fedsieve.data.own.tables import read_columns, write_rows
from fedsieve.errors import FedsieveError, check

Word: TypeAlias = Literal["keep", "relabel", "drop", "skip"]
COLUMNS = ("id", "site", "given", "verdict", "new_label")


@dataclass(frozen=True)
class Verdict:
    """What someone decided about one label."""

    id: str
    site: str
    given: str
    """The label that was judged, by its name."""
    verdict: Word
    """`skip` is "not decided"; such a sample stays as it is."""
    new_label: str
    """The right class for `relabel`; means nothing otherwise."""


@dataclass(frozen=True)
class Correction:
    """What was done."""

    kept: int
    relabelled: int
    dropped: int


def read_verdicts(path: Path) -> tuple[Verdict, ...]:
    """The verdicts of a table with the columns id, site, given, verdict and new_label."""
    verdicts = []
    for number, cells in enumerate(read_columns(path, COLUMNS, "verdicts need"), start=1):
        sample_id, site, given, word, new_label = cells
        word = word.strip().lower()  # some spreadsheets begin every cell with a capital
        check(
            word in get_args(Word),
            f"{path}, row {number}: the verdict must be {', '.join(get_args(Word))}, not {word!r}.",
        )
        verdicts.append(Verdict(sample_id, site, given, word, new_label))  # type: ignore[arg-type]
    return tuple(verdicts)


def apply_verdicts(
    verdicts: Iterable[Verdict], data: Path, out: Path, reading: Reading = AS_FOUND
) -> Correction:
    """Write the data at `data` to the new folder `out` with the verdicts carried out.

    `out` is whole or absent, whatever happens. Verdicts about other data are refused: each must
    name a sample that is there, with the label that it has.
    """
    kind = kind_of(data, reading.kind)
    root = root_of(data)
    refuse_inside(data, out)
    names = fixed_classes(root, reading)
    found_in = found_at(data, kind, names)
    found = Found()
    for one in found_in.values():
        found.add(one)
    classes = names or classes_found(data, found, keep_order=kind == "npz")
    decisions = _decisions(tuple(verdicts), found.samples, classes)
    labels = {sample.id: decisions.get(sample.id, sample.label) for sample in found.samples}
    check(
        any(label is not None for label in labels.values()),
        f"These verdicts drop every image of {data}; keep some.",
    )
    with new_folder(out) as draft:
        copy = _Copy(draft, root, labels, names)
        for part, one in found_in.items():
            _WRITERS[part.kind](copy, part, one)
        _write_classes(copy, classes, found)
    return Correction(
        kept=sum(labels[s.id] == s.label for s in found.samples),
        relabelled=sum(labels[s.id] not in (s.label, None) for s in found.samples),
        dropped=sum(labels[s.id] is None for s in found.samples),
    )


Labels: TypeAlias = Mapping[str, str | None]
"""Sample id → the label that it gets, or None where it is dropped."""


def _decisions(
    verdicts: Sequence[Verdict], samples: Sequence[Sample], classes: Sequence[str]
) -> dict[str, str | None]:
    """The new label of each sample that was judged; None for one to drop."""
    sample_of = {sample.id: sample for sample in samples}
    strange = sorted({v.id for v in verdicts if v.id not in sample_of})
    check(
        not strange,
        f"{len(strange):,} verdicts are about samples that are not in the data, such as "
        f"{some(strange, 5)}; give the data that were audited.",
    )
    decisions: dict[str, str | None] = {}
    for verdict in verdicts:
        sample = sample_of[verdict.id]
        where = f"The verdict on {verdict.id!r}"
        check(
            class_name(verdict.given) == sample.label,
            f"{where} is about the label {verdict.given!r}, but it is {sample.label!r} now; audit "
            "the data again.",
        )
        check(
            class_name(verdict.site) in ("", sample.site),
            f"{where} names the site {verdict.site!r}, but it is at {sample.site!r}.",
        )
        label: str | None = sample.label
        if verdict.verdict == "drop":
            label = None
        elif verdict.verdict == "relabel":
            label = class_name(verdict.new_label)
            if label not in classes:
                raise FedsieveError(
                    f"{where} gives it the label {verdict.new_label!r}, which is no class of the "
                    f"data; {candidates(label, classes)}"
                )
        check(
            decisions.setdefault(verdict.id, label) == label,
            f"There are two different verdicts on {verdict.id!r}; keep one of them.",
        )
    return decisions


@dataclass(frozen=True)
class _Copy:
    """What is written where."""

    draft: Path
    root: Path
    labels: Labels
    names: Sequence[str] | None
    """The classes, where they are written down beside the data."""

    def kept_labels(self, found: Found) -> set[str]:
        """The labels that the samples have in the copy."""
        return {label for s in found.samples if (label := self.labels[s.id]) is not None}

    def image(self, sample: Sample, path: str) -> None:
        """Copy an image file to `path` in the draft, byte for byte."""
        assert isinstance(sample.source, Path)
        target = self.draft / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sample.source, target)


def _write_folder(copy: _Copy, part: Part, found: Found) -> None:
    """Copy the images; those with a new label last, so that the others keep their names."""
    if not found.class_names:
        return  # perhaps a site's that may not be opened
    folder_of = _class_folders(part, {*found.class_names, *copy.kept_labels(found)})
    for folder in folder_of.values():
        (copy.draft / part.below / folder).mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    for sample in sorted(found.samples, key=lambda s: (copy.labels[s.id] != s.label, s.id)):
        label = copy.labels[sample.id]
        if label is None:
            continue
        path = path_of(sample.id)
        if label != sample.label:
            _, _, rest = path.removeprefix(part.below).partition("/")
            moved = Path(part.below, folder_of[label], rest)
            path = _free_name(moved, folder_of[sample.label], taken)
        taken.add(path.casefold())
        copy.image(sample, path)


def _class_folders(part: Part, classes: Iterable[str]) -> dict[str, str]:
    """Class → the name of its folder: the one that is there, else a new one."""
    there = {class_name(e.name): e.name for e in sorted(part.place.iterdir()) if e.is_dir()}
    folder_of = {}
    for name in classes:
        folder = there.get(name, name)
        check(
            not folder.startswith(".") and "/" not in folder and "\0" not in folder,
            f"No folder can be called {name!r}; name the class otherwise.",
        )
        folder_of[name] = folder
    return folder_of


def _free_name(path: Path, came_from: str, taken: set[str]) -> str:
    """`path`, or where that is taken, a name with the old class, or with that and a number."""
    stem = f"{path.stem}-from-{came_from}"
    numbered = (path.with_stem(f"{stem}-{number}") for number in itertools.count(2))
    names = itertools.chain([path, path.with_stem(stem)], numbered)
    return next(name for n in names if (name := n.as_posix()).casefold() not in taken)


def _write_table(copy: _Copy, part: Part, found: Found) -> None:
    """Copy the images that are listed, and write the table with its new labels."""
    for sample in found.samples:
        if copy.labels[sample.id] is not None:
            copy.image(sample, path_of(sample.id))
    table = read_table(copy.root, part)
    rows = []
    for row in table.rows:
        label = copy.labels.get(id_of(row.path), row.label)
        if label is None:
            continue
        cells = list(row.cells)
        if label != row.label:
            cells[table.label_at] = label
        rows.append(cells)
    write_rows(copy.draft / part.below / TABLE_NAMES[0], table.header, rows)


def _write_npz(copy: _Copy, part: Part, found: Found) -> None:
    """Write the file without its dropped rows.

    Numbers get names of their own wherever no list beside the data has them all: without one, what
    a number means may hang on a class that is gone now.
    """
    final = [copy.labels[sample.id] for sample in found.samples]
    kept = np.array([label is not None for label in final])
    if not kept.any():
        return
    classes = read_npz(part.place, copy.names).classes
    arrays = _all_arrays(part.place)
    for name, array in arrays.items():
        if name not in NOT_PER_IMAGE and array.shape[:1] == kept.shape:
            arrays[name] = array[kept]
    left = [label for label in final if label is not None]
    if arrays["y"].dtype.kind == "U":
        arrays["y"] = np.array(left)
    else:
        listed = tuple(dict.fromkeys((*classes, *left)))
        number_of = {name: number for number, name in enumerate(listed)}
        arrays["y"] = np.array([number_of[label] for label in left], dtype=np.int64)
        if copy.names is None or listed != classes:
            arrays["classes"] = np.array(listed)
    with zipfile.ZipFile(copy.draft / part.place.name, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


NOT_PER_IMAGE = ("classes", "x_test", "y_test")


def _all_arrays(file: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as content:
            return {
                name: array
                for name in content.files
                if isinstance(array := content[name], np.ndarray)
            }
    except ValueError as error:
        raise FedsieveError(
            f"{file} holds an array of Python objects, which is not read; save it without."
        ) from error


_WRITERS: Mapping[str, Callable[[_Copy, Part, Found], None]] = {
    "folder": _write_folder,
    "table": _write_table,
    "npz": _write_npz,
}


def _write_classes(copy: _Copy, classes: Sequence[str], found: Found) -> None:
    """Keep the classes as they were, also where a class has lost all its images."""
    target = copy.draft / CLASSES_FILE
    if is_file_inside(copy.root / CLASSES_FILE, copy.root):
        shutil.copyfile(copy.root / CLASSES_FILE, target)
    elif {sample.label for sample in found.samples} - copy.kept_labels(found):
        target.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
