"""Tables that a spreadsheet cannot take for formulas, and that come back as they were."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsieve.data.own.tables import read_rows, write_rows
from fedsieve.errors import FedsieveError

SIGNS = "=+-@\t\r\n'\ufeff,;|\" \0ab＝"
CELL = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text(SIGNS, max_size=5)
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[CELL] * width), min_size=1, max_size=4)
)


@settings(max_examples=60, deadline=None)
@given(TABLES)
def test_what_is_read_is_what_was_written(tmp_path_factory, rows):
    file = tmp_path_factory.getbasetemp() / "round-trip.csv"
    write_rows(file, rows[0], rows[1:])
    header, body = read_rows(file)
    assert [header, *body] == rows


@settings(max_examples=60, deadline=None)
@given(TABLES)
def test_no_cell_of_a_file_starts_like_a_formula(tmp_path_factory, rows):
    file = tmp_path_factory.getbasetemp() / "formulas.csv"
    write_rows(file, rows[0], rows[1:])
    with file.open(encoding="utf-8", newline="") as stream:
        cells = [cell for row in csv.reader(stream) for cell in row]
    assert not any(cell[:1] in tuple("=+-@\t\r＝＋－＠") for cell in cells if cell)


def test_the_escape_is_an_apostrophe(tmp_path: Path):
    file = tmp_path / "t.csv"
    write_rows(file, ["id"], [["=1+1"], ["-x"], ["'quoted"], ["it's"], ["'"]])
    lines = file.read_bytes().decode().split("\r\n")
    assert lines == ['"id"', "'=1+1", "'-x", "''quoted", "it's", "''", ""]


def test_an_apostrophe_of_ones_own_stays(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text("path,label\n'tis.png,'cat'\n")
    assert read_rows(file) == (("path", "label"), [("'tis.png", "'cat'")])


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_usual_delimiters_quotes_bom_and_empty_lines(tmp_path: Path, delimiter: str):
    file = tmp_path / "t.csv"
    odd = f'"a{delimiter}b ""c"".png"'
    text = f"\n\ufeffpath{delimiter}label\r\n\r\n{odd}{delimiter}cat\r\n".lstrip("\n")
    file.write_bytes(text.encode())
    assert read_rows(file) == (("path", "label"), [(f'a{delimiter}b "c".png', "cat")])


def test_a_delimiter_in_a_quoted_name_is_not_counted(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text('"a;b;c;d",label\nx,y\n')
    assert read_rows(file) == (("a;b;c;d", "label"), [("x", "y")])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; a table needs a header line"),
        (b"\n\n", "is empty; a table needs a header line"),
        (b"path,label\na,b,c\n", "line 2: this row has 3 cells, but the header has 2"),
        (b"path,label\n\xff,cat\n", "is not a text file in UTF-8"),
        (b'path,label\n"a"b,cat\n', "line 2: this is not a table"),
        (b'path,label\n"a,cat\n', "this is not a table"),
        (b"path,label\n" + b"x" * 200_000 + b",cat\n", "this is not a table"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    with pytest.raises(FedsieveError, match=words):
        read_rows(file)


def test_a_missing_table_is_named(tmp_path: Path):
    with pytest.raises(FedsieveError, match="There is no table"):
        read_rows(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        (["a", "b"], ["1"], "a row has 1 cells, but the header has 2"),
        (["a"], [os.fsdecode(b"\xff")], "not valid text"),
        ([], [], "at least one column"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, header, row, words):
    with pytest.raises(FedsieveError, match=words):
        write_rows(tmp_path / "t.csv", header, [row])
    assert list(tmp_path.iterdir()) == []
