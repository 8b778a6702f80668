"""Which files belong to the data, what they are labelled, and whose they are.

Nothing here opens an image. Hidden files are passed over in silence. Links to folders are not
followed, so there are no loops, and a link to a file counts only if the file lies inside the data
folder.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedsieve.data.own.names import CLASSES_FILE, class_name, id_of, some
from fedsieve.data.own.reading import ONE_SITE, Kind, KindOrAuto, Skipped
from fedsieve.data.own.tables import read_rows
from fedsieve.data.sources.npz import (
    classes_in,
    images_in,
    labels_in,
    numbered_classes,
    read_arrays,
)
from fedsieve.errors import FedsieveError, check

IMAGE_ENDINGS = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".tif", ".tiff", ".bmp", ".dib", ".webp", ".gif"}
    | {".ppm", ".pgm", ".pbm", ".pnm"}
)
TABLE_NAMES = ("labels.csv", "labels.tsv")
"""The names under which a table is found in a folder; one of another name is given by its path."""
TABLE_ENDINGS = (".csv", ".tsv", ".txt")
SYSTEM_NAMES = frozenset({"thumbs.db", "desktop.ini", "__macosx"})

PATH_COLUMNS = ("path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "class", "target", "y")
SITE_COLUMNS = ("site", "client")

SPLIT_NAMES = frozenset({"train", "test"})

CLOSED = "a folder that you may not open"
LINK_TO_FOLDER = "a link to a folder, which is not followed"
LINK_ASTRAY = "a link that leads nowhere or out of the data folder"


@dataclass(frozen=True)
class Sample:
    """One image with the name of its given class."""

    id: str
    source: Path | NDArray[np.uint8]
    """An image file, or the pixels (channels, height, width) of a row of an .npz file."""
    label: str
    site: str


@dataclass
class Found:
    """What was found below a root."""

    samples: list[Sample] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    class_names: dict[str, None] = field(default_factory=dict)
    """Those of empty class folders too. Their order means something in an .npz file only."""

    def skip(self, path: str, reason: str) -> None:
        self.skipped.append(Skipped(id_of(path), reason))

    def add(self, other: Found) -> None:
        self.samples += other.samples
        self.skipped += other.skipped
        self.class_names |= other.class_names


def kind_of(path: Path, said: KindOrAuto = "auto") -> Kind:
    """The layout of the data at `path`: the one that was `said`, or told from names alone.

    Two splits, or sites that hold two each, are no data that can be read as one.
    """
    check(path.exists(), f"There is nothing at {path}; give the folder or file of your data.")
    if path.is_dir() and (said == "sites" or (said == "auto" and table_in(path) is None)):
        _refuse_splits(path, said)
    return _kind_by_names(path) if said == "auto" else said


def split_of(path: Path, said: KindOrAuto = "auto") -> tuple[Path, Path] | None:
    """The folders train and test of `path` where both hold data: then these are its two splits.

    A table beside them says itself which images count.
    """
    if said in ("auto", "table") and table_in_open(path) is not None:
        return None
    train, test = path / "train", path / "test"
    return (train, test) if _holds_data(train) and _holds_data(test) else None


def _holds_data(folder: Path) -> bool:
    """Whether a folder is a data set of its own, and not that of a class that is called so.

    One that is there and may not be opened is taken for one: who reads it then is told.
    """
    try:
        is_there = folder.is_dir()
    except PermissionError:
        return False
    try:
        return is_there and bool(_kind_by_names(folder))
    except FedsieveError:
        return False
    except PermissionError:
        return True


def _refuse_splits(path: Path, said: KindOrAuto) -> None:
    """Refuse a split, unless its two folders are `said` to be sites and hold none themselves, and
    sites that are split."""
    split = split_of(path, said)
    if split is not None:
        may_be_sites = _kind_by_names(split[0]) != "sites"
        check(said == "sites" and may_be_sites, _on_split(path, may_be_sites=may_be_sites))
        return
    for site in subfolders(path):
        check(
            split_of(site) is None,
            f"{site} holds a split into train and test, which are no classes; put the split above "
            f"the sites: {path / 'train' / site.name} and {path / 'test' / site.name}, and so for "
            "each site.",
        )


def _on_split(path: Path, *, may_be_sites: bool) -> str:
    or_sites = ', or name the kind "sites" if you mean it' if may_be_sites else ""
    return (
        f"{path} holds a split into train and test, which are no sites: give {path / 'train'} "
        f"(`fedsieve audit` also takes --test {path / 'test'}; only training takes both from "
        f"here){or_sites}."
    )


def _kind_by_names(path: Path) -> Kind:
    """The layout of the data at `path` as far as names tell it."""
    if path.is_file():
        ending = path.suffix.lower()
        check(
            ending in (".npz", *TABLE_ENDINGS),
            f"{path} is neither a table ({', '.join(TABLE_ENDINGS)}) nor an .npz file; give one "
            "of these, or a folder.",
        )
        return "npz" if ending == ".npz" else "table"
    if table_in(path) is not None:
        return "table"
    folders = subfolders(path)
    has_classes = any(_has_images(f) for f in folders if table_in_open(f) is None)
    has_sites = bool(npz_files(path)) or any(_is_site(folder) for folder in folders)
    links = (entry for entry in _listed(path) if entry.is_symlink())
    has_links = LINK_TO_FOLDER in map(_not_followed, links)
    but_links = ", and links to folders are not followed" if has_links else ""
    check(
        has_classes or has_sites,
        f"{path} holds no images where they were looked for{but_links}: make a folder of images "
        "for each class, or labels.csv with the columns path and label, or a folder of such a kind "
        "(or an .npz file) for each site.",
    )
    check(
        not (has_classes and has_sites),
        f"{path} has images both in its folders and in folders below these (or in .npz files): "
        'name the kind, "folder" if its folders are classes and "sites" if they are sites.',
    )
    check(
        not (has_sites and {folder.name for folder in folders} >= SPLIT_NAMES),
        _on_split(path, may_be_sites=True),
    )
    return "folder" if has_classes else "sites"


@dataclass(frozen=True)
class Part:
    """A piece of the data that is read in one way: all of it, or that of one site."""

    kind: Literal["folder", "table", "npz"]
    place: Path
    """The folder, the table, or the .npz file."""
    below: str = ""
    """What every id of this part starts with, as a path: empty, or the site's folder and "/"."""
    site: str | None = None
    """Whose it is; None where that is not said by a folder."""


def parts_of(path: Path, kind: Kind) -> list[Part]:
    """The pieces of data of a `kind`: one, or one for each site."""
    if kind == "npz":
        check(path.is_file(), f"{path} is not a file; give the path of the .npz file.")
        return [Part("npz", path)]
    if kind == "table":
        table = path if path.is_file() else table_in(path)
        if table is None:
            raise FedsieveError(
                f"There is no table in {path}; give its path, or call it {TABLE_NAMES[0]}."
            )
        return [Part("table", table)]
    check(path.is_dir(), f"{path} is not a folder; give the folder of your data.")
    return [Part("folder", path)] if kind == "folder" else _sites(path)


def _sites(root: Path) -> list[Part]:
    """A part for each folder, and for each .npz file, which carries its site's name."""
    parts: dict[str, Part] = {}
    for place in (*subfolders(root), *npz_files(root)):
        name = place.name if place.is_dir() else place.stem
        site = _checked_name(name, str(root))
        check(
            site not in parts, f"{root} has two sites called {site!r}; rename or move one of them."
        )
        if place.is_file():
            parts[site] = Part("npz", place, f"{name}/", site)
        elif (table := table_in_open(place)) is not None:
            parts[site] = Part("table", table, f"{name}/", site)
        else:
            parts[site] = Part("folder", place, f"{name}/", site)
    check(bool(parts), f"{root} holds no site; make a folder or an .npz file for each.")
    return list(parts.values())


def root_of(path: Path) -> Path:
    """The folder that ids are relative to: the data folder, or that of the table or .npz file."""
    return path if path.is_dir() else path.parent


def refuse_inside(data: Path, out: Path) -> None:
    """Refuse to write to `out` where a folder of data would then hold what is no data of it: the
    next one to read it would take that for a class or a site."""
    check(
        not data.is_dir() or not out.resolve().is_relative_to(data.resolve()),
        f"{out} lies in the data, which are only read; give a place outside {data} with --out.",
    )


def found_at(path: Path, kind: Kind, names: Sequence[str] | None) -> dict[Part, Found]:
    """What each piece of data of a `kind` holds; ids are relative to `root_of(path)`.

    `names` are the classes where they are known, for labels that are written as numbers.
    """
    root = root_of(path)
    found_in = {part: _samples_of(root, part, names) for part in parts_of(path, kind)}
    _refuse_nested(found_in, names or ())
    return found_in


def _refuse_nested(found_in: Mapping[Part, Found], names: Collection[str]) -> None:
    """Refuse a site whose class folders lie one folder too deep: all would be one class.

    Images in deeper folders belong to the class of the upper one, so only names can tell: those of
    the deeper folders are classes at sites that have no class of the upper one's name.
    """
    for part, found in found_in.items():
        if part.kind != "folder" or part.site is None or not found.class_names:
            continue
        for folder in filter(_may_open, subfolders(part.place)):
            label = class_name(folder.name)
            inner = {class_name(deeper.name) for deeper in subfolders(folder)}
            if not inner or label in names:
                continue
            others = [f.class_names for f in found_in.values() if label not in f.class_names]
            nested = sorted(inner & {name for names_there in others for name in names_there})
            check(
                not nested,
                f"{folder} holds folders that are classes at other sites ({some(nested, 3)}); move "
                f"them up into {part.place}, or name all classes in {CLASSES_FILE} if {label!r} "
                "is one.",
            )


def _samples_of(root: Path, part: Part, names: Sequence[str] | None) -> Found:
    found = Found()
    if part.kind == "folder" and part.site is not None and not _may_open(part.place):
        found.skip(part.below.rstrip("/"), CLOSED)
        return found
    if part.kind == "npz":
        _add_npz(found, part, names)
    elif part.kind == "table":
        _add_table(found, root, part)
    else:
        _add_folder(found, root, part)
    if part.site is not None and not found.samples:
        found.skip(part.below.rstrip("/"), "a site without images")
    return found


def table_in(folder: Path) -> Path | None:
    """The table of a folder, where it has one."""
    places = (folder / name for name in TABLE_NAMES)
    return next((file for file in places if is_file_inside(file, folder)), None)


def table_in_open(folder: Path) -> Path | None:
    """The table of a folder, where it has one and may be opened."""
    try:
        return table_in(folder)
    except PermissionError:
        return None


def npz_files(folder: Path) -> list[Path]:
    """The .npz files of a folder, by name."""
    return [
        Path(entry.path)
        for entry in _listed(folder)
        if entry.name.lower().endswith(".npz") and entry.is_file(follow_symlinks=False)
    ]


def subfolders(folder: Path) -> list[Path]:
    """The folders of a folder, by name; hidden ones and links are left out."""
    return [Path(entry.path) for entry in _listed(folder) if entry.is_dir(follow_symlinks=False)]


def lies_inside(file: Path, root: Path) -> bool:
    """Whether `file`, with every link followed, exists and lies below `root`."""
    try:
        real = os.path.realpath(file, strict=True)
    except (OSError, ValueError):  # a loop of links, a name that cannot be
        return False
    return Path(real).is_relative_to(os.path.realpath(root))


def is_file_inside(file: Path, root: Path) -> bool:
    """Whether there is such a file; one that a link fetches from outside `root` is refused."""
    if not file.is_file():
        return False
    check(
        lies_inside(file, root),
        f"{file} is a link that leads out of {root}; replace it by the file itself.",
    )
    return True


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder in the order of their names, without hidden and system files."""
    with os.scandir(folder) as entries:
        return sorted(
            (e for e in entries if e.name[0] != "." and e.name.lower() not in SYSTEM_NAMES),
            key=lambda entry: entry.name,
        )


def _may_open(folder: Path) -> bool:
    try:
        with os.scandir(folder):
            return True
    except PermissionError:
        return False


def _is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_ENDINGS  # noqa: PTH122 (called per file)


def _has_images(folder: Path) -> bool:
    """Whether a folder holds images itself, as that of a class does."""
    try:
        return any(
            _is_image_name(e.name) for e in _listed(folder) if not e.is_dir(follow_symlinks=False)
        )
    except PermissionError:
        return False


def _is_site(folder: Path) -> bool:
    """Whether a folder holds a table, or folders with images, as that of a site does."""
    try:
        return table_in(folder) is not None or any(map(_has_images, subfolders(folder)))
    except PermissionError:
        return False


def _add_folder(found: Found, root: Path, part: Part) -> None:
    """Add the images of one folder per class; the class is the name of its folder."""
    for entry in _listed(part.place):
        path = part.below + entry.name
        if entry.is_dir(follow_symlinks=False):
            label = _checked_name(entry.name, str(part.place))
            found.class_names[label] = None
            for inner, file in _images_below(found, root, path):
                found.samples.append(Sample(id_of(inner), file, label, part.site or ONE_SITE))
        else:
            _skip_misplaced(found, entry, path)


def misplaced_beside_sites(root: Path) -> Found:
    """What lies beside the folders of sites, and was perhaps meant to be read."""
    found = Found()
    for entry in _listed(root):
        if entry.is_symlink() and entry.name.lower().endswith(".npz"):
            found.skip(entry.name, "a link to an .npz file, which is not followed")
        elif not entry.is_dir(follow_symlinks=False):
            _skip_misplaced(found, entry, entry.name)
    return found


def _skip_misplaced(found: Found, entry: os.DirEntry[str], path: str) -> None:
    """List an entry beside folders of classes or sites if it may have been meant to be read."""
    if entry.is_symlink() and (reason := _not_followed(entry)) is not None:
        found.skip(path, reason)
    elif _is_image_name(entry.name):
        found.skip(path, "not in the folder of a class")


def _not_followed(link: os.DirEntry[str]) -> str | None:
    """Why a link is passed over, or None where it leads to a file."""
    try:
        if link.is_dir():
            return LINK_TO_FOLDER
        return None if link.is_file() else LINK_ASTRAY
    except OSError:  # a loop of links, or a place that may not be seen
        return LINK_ASTRAY


def _images_below(found: Found, root: Path, top: str) -> Iterator[tuple[str, Path]]:
    """Path below the root and file of every image in the folder `top` and those below it."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        try:
            entries = _listed(root / folder)
        except PermissionError:
            found.skip(folder, CLOSED)
            continue
        for entry in entries:
            path, file = f"{folder}/{entry.name}", Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(path)
                continue
            reason = _unusable(entry, file, root)
            if reason is None:
                yield path, file
            else:
                found.skip(path, reason)


def _unusable(entry: os.DirEntry[str], file: Path, root: Path) -> str | None:
    """Why an entry that is no folder cannot be an image of the data, or None."""
    if entry.is_symlink():
        if not lies_inside(file, root):
            return LINK_ASTRAY
        if file.is_dir():
            return LINK_TO_FOLDER
    if not _is_image_name(entry.name):
        return "not an image file"
    return None if entry.is_file() else "not a plain file"


@dataclass(frozen=True)
class Row:
    """A row of a table with what it says."""

    cells: tuple[str, ...]
    path: str
    """Below the root."""
    file: Path | None
    """None where there is no such file."""
    label: str
    """Empty where there is none."""
    site: str


@dataclass(frozen=True)
class Table:
    """A table of images and labels."""

    header: tuple[str, ...]
    label_at: int
    """The column of the labels."""
    rows: list[Row]


def read_table(root: Path, part: Part) -> Table:
    """The table of a part; its paths are relative to its folder and cannot leave it.

    An image that is listed again with another label is refused.
    """
    header, rows = read_rows(part.place)
    path_at = _needed(header, PATH_COLUMNS, part.place)
    label_at = _needed(header, LABEL_COLUMNS, part.place)
    site_at = None if part.site is not None else _column(header, SITE_COLUMNS)
    read: list[Row] = []
    said: dict[str, tuple[str, str]] = {}
    for number, cells in enumerate(rows, start=1):
        where = f"{part.place}, row {number}"
        path, file = _row_path(root, part.below, cells[path_at], where)
        label = _checked_name(cells[label_at], where) if cells[label_at].strip() else ""
        site = part.site or ONE_SITE
        if site_at is not None:
            site = _checked_name(cells[site_at], where)
        check(
            said.setdefault(path, (label, site)) == (label, site),
            f"{where}: {cells[path_at]!r} is listed again with another label or site; list it "
            "once.",
        )
        read.append(Row(cells, path, file, label, site))
    return Table(header, label_at, read)


def _add_table(found: Found, root: Path, part: Part) -> None:
    seen: set[str] = set()
    for row in read_table(root, part).rows:
        if row.path in seen:
            found.skip(row.path, "listed more than once")
        elif not row.label:
            found.skip(row.path, "without a label")
        elif row.file is None:
            found.skip(row.path, "there is no such file")
        else:
            found.class_names[row.label] = None
            found.samples.append(Sample(id_of(row.path), row.file, row.label, row.site))
        seen.add(row.path)


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    """Where the column with the first of the `names` stands."""
    words = [word.strip().lower() for word in header]
    return next((words.index(name) for name in names if name in words), None)


def _needed(header: Sequence[str], names: Sequence[str], table: Path) -> int:
    at = _column(header, names)
    if at is None:
        raise FedsieveError(
            f"{table} has no column {' or '.join(names)} in its header line; add one (a table "
            "starts with a header such as path,label)."
        )
    return at


def _row_path(root: Path, below: str, text: str, where: str) -> tuple[str, Path | None]:
    """The path below the root that a row names, and its file where there is one.

    A path that would leave the data folder is refused. One as Windows writes it is understood.
    """
    first = ""
    for form in (text, text.strip(), PureWindowsPath(text.strip()).as_posix()):
        parts = PurePosixPath(form).parts
        check(
            bool(parts) and ".." not in parts and not PureWindowsPath(form).root,
            f"{where}: {text!r} is not a path inside the folder of the table; write it relative "
            "to that folder, without '..'.",
        )
        path = below + "/".join(parts)
        file = root / path
        if os.path.lexists(file):
            check(
                lies_inside(file, root),
                f"{where}: {text!r} is a link that leads nowhere or out of the data folder; "
                "replace it by the file itself.",
            )
            return path, file if file.is_file() else None
        first = first or path
    return first, None


@dataclass(frozen=True)
class Rows:
    """The images of an .npz file and the names of their classes."""

    images: NDArray[np.uint8]
    """(n, channels, height, width)"""
    labels: list[str]
    classes: tuple[str, ...]
    """The file's own list, or the one that numbers point into; empty where labels are names."""


def read_npz(file: Path, names: Sequence[str] | None) -> Rows:
    """The images `x` and labels `y` of an .npz file; labels are class names, or numbers from 0.

    A number stands for a name in the file's own list `classes`, else in `names`; else for itself.
    """
    arrays = read_arrays(file)
    images = images_in(file, arrays, "x")
    classes = tuple(_checked_name(n, f"{file}, classes") for n in classes_in(file, arrays) or ())
    if "y" in arrays and arrays["y"].dtype.kind == "U":
        labels = [_checked_name(str(name), f"{file}, y") for name in arrays["y"].ravel()]
    else:
        numbers = labels_in(file, arrays, "y")
        classes = classes or tuple(names or numbered_classes(file, numbers))
        check(
            int(numbers.max()) < len(classes),
            f"{file}: y reaches {numbers.max()}, but there are only {len(classes)} classes, "
            "numbered from 0; name them all.",
        )
        labels = [classes[number] for number in numbers]
    check(
        len(images) == len(labels),
        f"{file}: x holds {len(images)} images, but y {len(labels)} labels.",
    )
    return Rows(images, labels, classes)


def _add_npz(found: Found, part: Part, names: Sequence[str] | None) -> None:
    rows = read_npz(part.place, names)
    found.class_names.update(dict.fromkeys((*rows.classes, *sorted(set(rows.labels)))))
    found.samples += [
        Sample(f"{id_of(part.below)}row-{row}", pixels, label, part.site or ONE_SITE)
        for row, (pixels, label) in enumerate(zip(rows.images, rows.labels, strict=True))
    ]


def _checked_name(text: str, where: str) -> str:
    """The name of a class or site, refused if it is empty or holds what no line of text can."""
    name = class_name(text)
    check(name != "", f"{where}: the name of a class or site is missing; fill it in.")
    check(
        not any(unicodedata.category(character) == "Cc" for character in name),
        f"{where}: the name {name!r} holds a control character; rename it.",
    )
    return name
