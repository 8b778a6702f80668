"""Read people's own data: find the files, agree on classes and size, decode."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedsieve.data.own.layout import (
    Found,
    Sample,
    found_at,
    is_file_inside,
    kind_of,
    misplaced_beside_sites,
    root_of,
)
from fedsieve.data.own.names import (
    CLASSES_FILE,
    candidates,
    class_name,
    read_classes,
)
from fedsieve.data.own.pixels import Look, UnreadableError, decode, look_at
from fedsieve.data.own.reading import AS_FOUND, Kind, OwnData, Reading, Skipped
from fedsieve.data.sources.dataset import Progress
from fedsieve.errors import FedsieveError, check

LONGEST_SIDE = 64
"""Of images whose size is chosen from the data."""
CHUNK = 64
"""Files that a thread takes at once."""

S = TypeVar("S")
T = TypeVar("T")


def read_own(path: Path, reading: Reading = AS_FOUND, progress: Progress | None = None) -> OwnData:
    """Read the data at `path`: a folder per class, a table, an .npz file, or one of these per site.

    What cannot be read is listed in `skipped`; with `reading.strict` it is refused. The result does
    not depend on the order in which the file system lists files, nor on the number of threads.
    """
    kind = kind_of(path, reading.kind)
    root = root_of(path)
    fixed = fixed_classes(root, reading)
    found = misplaced_beside_sites(root) if kind == "sites" else Found()
    for part in found_at(path, kind, fixed).values():
        found.add(part)
    if not found.samples:
        _refuse_other_kind(path, kind)
    samples = sorted(found.samples, key=_place)
    classes = fixed or classes_found(path, found, keep_order=kind == "npz")
    _refuse_unknown(samples, classes)
    with warnings.catch_warnings():
        # What is wrong with a file is said in `skipped`; Pillow's warnings add nothing to it.
        warnings.simplefilter("ignore")
        images, kept, unreadable = _decoded(samples, reading, progress)
    skipped = tuple(sorted((*found.skipped, *unreadable), key=lambda s: (s.id, s.reason)))
    _refuse_skipped(path, skipped, reading.strict, len(kept))
    index_of = {name: index for index, name in enumerate(classes)}
    return OwnData(
        root=root,
        kind=kind,
        classes=classes,
        images=torch.from_numpy(images),
        labels=torch.tensor([index_of[s.label] for s in kept], dtype=torch.int64),
        ids=tuple(s.id for s in kept),
        sites=_by_site([s.site for s in kept]),
        skipped=skipped,
    )


def fixed_classes(root: Path, reading: Reading) -> tuple[str, ...] | None:
    """The class names that are written down: in the reading, else in classes.txt."""
    if reading.classes is not None:
        return tuple(map(class_name, reading.classes))
    file = root / CLASSES_FILE
    return read_classes(file) if is_file_inside(file, root) else None


def chosen_size(looks: Sequence[Look]) -> tuple[int, int]:
    """The median height and width, scaled down together until the longer one is at most 64."""
    height = float(np.median([look.height for look in looks]))
    width = float(np.median([look.width for look in looks]))
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _place(sample: Sample) -> str:
    """What samples are sorted by: rows keep the order of their file, where 10 comes after 2."""
    is_file = isinstance(sample.source, Path)
    return sample.id if is_file else sample.id.rpartition("row-")[0]


def classes_found(path: Path, found: Found, *, keep_order: bool) -> tuple[str, ...]:
    """The names of the classes found, sorted unless their order is that of an .npz file."""
    names = tuple(found.class_names) if keep_order else tuple(sorted(found.class_names))
    only = f"one class only, {names[0]!r}" if names else "no class"
    check(
        len(names) >= 2,
        f"{path} has {only}; label noise needs two: add the others, or name all of them in "
        f"{CLASSES_FILE}, one in each line.",
    )
    return names


def _refuse_other_kind(path: Path, said: Kind) -> None:
    """Refuse data that were read as one kind and look like another."""
    seen = kind_of(path)
    dealt = " --scene.partition.kind iid" if seen in ("folder", "npz") else ""
    check(
        seen == said,
        f'{path} holds no images that are laid out as "{said}" needs them; it looks like "{seen}": '
        f"name that kind (for `fedsieve run`: --data.source {seen}{dealt}).",
    )


def _refuse_unknown(samples: Sequence[Sample], classes: Sequence[str]) -> None:
    known = set(classes)
    for sample in samples:
        if sample.label not in known:
            raise FedsieveError(
                f"{sample.id!r} is of class {sample.label!r}, which is not among the classes "
                f"given; {candidates(sample.label, classes)}"
            )


def _refuse_skipped(path: Path, skipped: Sequence[Skipped], strict: bool, kept: int) -> None:
    """Refuse data without any usable image, and with `strict` any that had to be left out."""
    first = f" (the first is {skipped[0].id!r}: {skipped[0].reason})" if skipped else ""
    check(
        kept > 0,
        f"{path} holds no image that can be used, {len(skipped):,} were left out{first}; see to "
        "these, or give another folder.",
    )
    check(
        not (strict and skipped),
        f"{path}: {len(skipped):,} files or rows cannot be used{first}; see to them, or read "
        "without strict, which leaves them out.",
    )


def _by_site(owners: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    names, codes = np.unique(np.array(owners), return_inverse=True)
    return {str(name): np.flatnonzero(codes == code) for code, name in enumerate(names)}


def _decoded(
    samples: Sequence[Sample], reading: Reading, progress: Progress | None
) -> tuple[NDArray[np.uint8], list[Sample], list[Skipped]]:
    """The pixels of all readable samples, these samples, and the others with the reason."""
    skipped: list[Skipped] = []

    def without_unreadable(
        tried: Sequence[Sample], results: Sequence[T | UnreadableError]
    ) -> list[tuple[Sample, T]]:
        good = []
        for sample, result in zip(tried, results, strict=True):
            if isinstance(result, UnreadableError):
                skipped.append(Skipped(sample.id, str(result)))
            else:
                good.append((sample, result))
        return good

    limit = reading.max_pixels
    looks = _in_threads(lambda sample: look_at(sample.source, limit), samples, None)
    seen = without_unreadable(samples, looks)
    if not seen:
        return np.empty((0, 1, 1, 1), np.uint8), [], skipped
    size = reading.size or chosen_size([look for _, look in seen])
    channels = reading.channels
    if channels == "auto":
        channels = 1 if all(look.is_grey for _, look in seen) else 3
    usable = [sample for sample, _ in seen]
    images = np.empty((len(usable), channels, *size), np.uint8)

    def put(row: int) -> int:
        images[row] = decode(usable[row].source, size, channels, limit)
        return row

    rows = _in_threads(put, range(len(usable)), progress)
    good = without_unreadable(usable, rows)
    if len(good) < len(images):
        images = images[[row for _, row in good]]
    return images, [sample for sample, _ in good], skipped


def _in_threads(
    work: Callable[[S], T], items: Sequence[S], progress: Progress | None
) -> list[T | UnreadableError]:
    """The result of `work` for each item, in order; Pillow decodes without Python's lock."""

    def results(start: int) -> list[T | UnreadableError]:
        return [attempt(item) for item in items[start : start + CHUNK]]

    def attempt(item: S) -> T | UnreadableError:
        try:
            return work(item)
        except UnreadableError as error:
            return error

    done: list[T | UnreadableError] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part in pool.map(results, range(0, len(items), CHUNK)):
            done += part
            if progress is not None:
                progress(len(done), len(items))
    return done
