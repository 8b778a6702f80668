"""CSV files that are safe to open in a spreadsheet, and that are read as they were written.

A spreadsheet takes a cell that starts with =, +, -, @, a tab or a carriage return for a formula. So
such a cell is written with an apostrophe before it, as is one that starts with an apostrophe; on
reading, an apostrophe before one of these signs goes away again. What is read is what was written.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from fedsieve.errors import FedsieveError, check
from fedsieve.files import write_atomically
from fedsieve.formulas import ESCAPED_STARTS

DELIMITERS = ",;\t|"


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table with commas in UTF-8, whole or not at all; every row is as long as the header.

    A cell with a lone surrogate (which stands for a byte that is no UTF-8) is refused.
    """
    check(bool(header), f"{path}: a table needs at least one column.")
    text = io.StringIO(newline="")
    # Quotes round every name in the header keep a delimiter inside a name from being counted.
    csv.writer(text, quoting=csv.QUOTE_ALL).writerow([_escaped(path, name) for name in header])
    writer = csv.writer(text)
    for row in rows:
        check(
            len(row) == len(header),
            f"{path}: a row has {len(row)} cells, but the header has {len(header)}.",
        )
        writer.writerow([_escaped(path, cell) for cell in row])
    write_atomically(path, text.getvalue().encode())


def read_rows(path: Path) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The header and the rows of a table in UTF-8 with commas, semicolons, tabs or bars.

    The delimiter is the one that the header line has most of. Empty lines are left out; every other
    row must be as long as the header.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FedsieveError(f"{path} is not a text file in UTF-8; save it as such.") from None
    except FileNotFoundError:
        raise FedsieveError(f"There is no table {path}; give the path of one.") from None
    except IsADirectoryError:
        raise FedsieveError(f"{path} is a folder; give the path of a table.") from None
    delimiter = delimiter_of(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[str, ...]] = []
    try:
        for cells in filter(None, reader):
            row = tuple(_unescaped(cell) for cell in cells)
            width = len(rows[0]) if rows else len(row)
            check(
                len(row) == width,
                f"{path}, line {reader.line_num}: this row has {len(row)} cells, but the header "
                f"has {width}; put a cell that holds {delimiter!r} in double quotes.",
            )
            rows.append(row)
    except csv.Error as error:
        raise FedsieveError(
            f"{path}, line {reader.line_num}: this is not a table ({error}); save it as CSV again."
        ) from None
    check(bool(rows), f"{path} is empty; a table needs a header line.")
    return rows[0], rows[1:]


def read_columns(path: Path, names: Sequence[str], needed_by: str) -> list[tuple[str, ...]]:
    """The cells of these columns in each row of a table, which may have others too.

    `needed_by` says in an error whose columns they are, such as "verdicts need".
    """
    header, rows = read_rows(path)
    missing = [name for name in names if name not in header]
    check(
        not missing,
        f"{path} has no column {' or '.join(missing)}; {needed_by} {', '.join(names)}.",
    )
    places = [header.index(name) for name in names]
    return [tuple(row[place] for place in places) for row in rows]


def delimiter_of(text: str) -> str:
    """The delimiter that the first line with content has most of, outside quotes; else a comma."""
    first = next((line for line in io.StringIO(text) if line.strip()), "")
    counts = dict.fromkeys(DELIMITERS, 0)
    is_quoted = False
    for character in first:
        is_quoted ^= character == '"'
        if character in counts and not is_quoted:
            counts[character] += 1
    return max(counts, key=counts.__getitem__)


def _escaped(path: Path, cell: str) -> str:
    check(
        not any("\ud800" <= character <= "\udfff" for character in cell),
        f"{path}: the cell {cell!r} is not valid text; write ids and names as they were read.",
    )
    return "'" + cell if cell.startswith(ESCAPED_STARTS) else cell


def _unescaped(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell.startswith(ESCAPED_STARTS, 1) else cell
