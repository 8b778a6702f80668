"""Labels from files: numbers and names, and files that cannot be trusted."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from fedsieve.errors import FedsieveError
from fedsieve.scenes.label_file import read_labels

NAMES = ("cat", "dog", "eel")
EXPECTED = [2, 0, 1, 1]


def read(path, **options):
    return read_labels(path, num_samples=4, num_classes=3, **options)


def test_arrays(tmp_path):
    np.save(tmp_path / "a.npy", np.array(EXPECTED, dtype=np.int16))
    np.save(tmp_path / "b.npy", np.array([NAMES[c] for c in EXPECTED]))
    np.savez(tmp_path / "one.npz", anything=np.array(EXPECTED))
    np.savez(tmp_path / "two.npz", aggregate=np.array(EXPECTED), worst=np.zeros(4, int))
    assert read(tmp_path / "a.npy").tolist() == EXPECTED
    assert read(tmp_path / "b.npy", class_names=NAMES).tolist() == EXPECTED
    assert read(tmp_path / "one.npz").tolist() == EXPECTED
    assert read(tmp_path / "two.npz", column="aggregate").tolist() == EXPECTED
    with pytest.raises(FedsieveError, match="column to one of aggregate, worst"):
        read(tmp_path / "two.npz")
    with pytest.raises(FedsieveError, match="column to one of aggregate, worst"):
        read(tmp_path / "two.npz", column="best")


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("a.txt", "2\n0\n1\n1\n", None),
        ("b.txt", " eel\ncat\n\ndog \ndog", None),
        ("a.csv", "2\n0\n1\n1\n", None),
        ("b.csv", 'id,label\n7,eel\n8,cat\n9,"dog"\n10,dog\n', "label"),
        ("c.CSV", "label,id\n2,7\n0,8\n1,9\n1,0\n", "label"),
    ],
)
def test_text(tmp_path, name, text, column):
    path = tmp_path / name
    path.write_text(text)
    assert read(path, column=column, class_names=NAMES).tolist() == EXPECTED


def test_names_win_where_every_entry_is_a_name(tmp_path):
    path = tmp_path / "digits.txt"
    path.write_text("3\n1\n2\n2\n")
    assert read(path, class_names=("1", "2", "3")).tolist() == EXPECTED


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.pt", "1", "read from .npy, .npz, .txt, .csv files only"),
        ("a.txt", "0\n1\n", r"shape \(2,\), but 4 are needed"),
        ("a.txt", "0\n1\n2\n3\n", "between 0 and 2"),
        ("a.txt", "0\n1\n2\n-1\n", "'-1' is neither"),
        ("a.txt", "cat\ndog\neel\nelk\n", "'cat' is neither|'elk' is neither"),
        ("a.csv", "1,2\n0,1\n1,1\n2,2\n", "several columns"),
        ("a.csv", "0\n1,1\n1\n2\n", "several columns"),
        ("a.npy", "not an array", "cannot be read"),
        ("a.npz", "not an archive", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, match):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(FedsieveError, match=match):
        read(path)


def test_bad_columns_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("id,label\n1,2\n3\n")
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "a.txt").write_text("0\n0\n0\n0\n")
    with pytest.raises(FedsieveError, match="column to one of id, label"):
        read(tmp_path / "a.csv", column="truth")
    with pytest.raises(FedsieveError, match="must all have the label column"):
        read(tmp_path / "a.csv", column="label")
    with pytest.raises(FedsieveError, match="column to one of"):
        read(tmp_path / "b.csv", column="label")
    with pytest.raises(FedsieveError, match=r"remove scene\.noise\.column"):
        read(tmp_path / "a.txt", column="label")
    with pytest.raises(FedsieveError, match="no such label file"):
        read(tmp_path / "none.txt")


def test_other_types_are_refused(tmp_path):
    np.save(tmp_path / "float.npy", np.zeros(4))
    with pytest.raises(FedsieveError, match="not float64"):
        read(tmp_path / "float.npy")


def test_nothing_is_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    np.save(tmp_path / "a.npy", np.array([Trap()] * 4, dtype=object), allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(pickle.dumps(Trap()))
    for name in ("a.npy", "b.npy"):
        with pytest.raises(FedsieveError, match="cannot be read"):
            read(tmp_path / name)
