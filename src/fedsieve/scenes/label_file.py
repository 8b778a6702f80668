"""Labels from a file: what people wrote down, one label per sample."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsieve.errors import FedsieveError, check
from fedsieve.scenes.partition import IntArray


def read_labels(
    path: Path,
    *,
    num_samples: int,
    num_classes: int,
    column: str | None = None,
    class_names: Sequence[str] | None = None,
) -> IntArray:
    """Read one label per sample, in the order of the data set, from .npy, .npz, .txt or .csv.

    A label is a class index or a class name; in a file where every entry is a class name, names
    win. `column` names the array of an .npz or the column of a .csv with a header line; without
    it an .npz must hold one array, and a .csv one column and no header. Nothing is unpickled.
    """
    readers = {".npy": _read_npy, ".npz": _read_npz, ".txt": _read_txt, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FedsieveError(f"{path}: labels are read from {', '.join(readers)} files only.")
    check(path.is_file(), f"{path}: there is no such label file.")
    check(
        column is None or reader in (_read_npz, _read_csv),
        f"{path}: a column can only be named for .npz and .csv files; remove scene.noise.column.",
    )
    try:
        entries = reader(path, column)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, csv.Error) as error:
        raise FedsieveError(
            f"{path}: the labels cannot be read; save them as plain whole numbers or names."
        ) from error
    check(
        entries.shape == (num_samples,),
        f"{path}: it holds labels of shape {entries.shape}, but {num_samples} are needed.",
    )
    labels = _decode(entries, path, class_names)
    check(
        bool(((labels >= 0) & (labels < num_classes)).all()),
        f"{path}: its labels must lie between 0 and {num_classes - 1}.",
    )
    return labels


def _read_npy(path: Path, column: str | None) -> npt.NDArray[np.generic]:
    return np.asarray(np.load(path, allow_pickle=False))


def _read_npz(path: Path, column: str | None) -> npt.NDArray[np.generic]:
    with np.load(path, allow_pickle=False) as archive:
        name = archive.files[0] if column is None and len(archive.files) == 1 else column
        check(
            name in archive.files,
            f"{path}: set scene.noise.column to one of {', '.join(archive.files)}.",
        )
        return np.asarray(archive[name])


def _read_txt(path: Path, column: str | None) -> npt.NDArray[np.generic]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return np.array([line.strip() for line in lines if line.strip()], dtype=np.str_)


def _read_csv(path: Path, column: str | None) -> npt.NDArray[np.generic]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    position = 0
    if column is not None:
        header, *rows = rows or [[]]
        check(column in header, f"{path}: set scene.noise.column to one of {', '.join(header)}.")
        position = header.index(column)
    check(
        all(len(row) > position for row in rows)
        and (column is not None or all(len(row) == 1 for row in rows)),
        f"{path}: its rows must all have the label column; with several columns,"
        " set scene.noise.column to the name in the header line.",
    )
    return np.array([row[position].strip() for row in rows], dtype=np.str_)


def _decode(
    entries: npt.NDArray[np.generic], path: Path, class_names: Sequence[str] | None
) -> IntArray:
    """Class indices of the entries, which are whole numbers or text."""
    if np.issubdtype(entries.dtype, np.integer):
        return entries.astype(np.int64)
    check(
        np.issubdtype(entries.dtype, np.str_),
        f"{path}: labels must be whole numbers or class names, not {entries.dtype}.",
    )
    words, place = np.unique(entries, return_inverse=True)
    index_of = {name: index for index, name in enumerate(class_names or ())}
    if all(str(word) in index_of for word in words):
        codes = [index_of[str(word)] for word in words]
    else:
        strange = next((str(word) for word in words if not str(word).isdecimal()), None)
        check(
            strange is None,
            f"{path}: {strange!r} is neither a class index nor a class name of this data set.",
        )
        codes = [int(word) for word in words]
    return np.array(codes, dtype=np.int64)[place]
