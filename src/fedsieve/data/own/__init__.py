"""People's own image data: folders, tables, .npz files, and one of these per site."""

from fedsieve.data.own.corrected import Correction, Verdict, apply_verdicts, read_verdicts
from fedsieve.data.own.dataset import as_dataset, read_splits
from fedsieve.data.own.export import export_digits
from fedsieve.data.own.read import read_own
from fedsieve.data.own.reading import OwnData, Reading, Skipped
from fedsieve.data.own.thumbs import thumbnail

__all__ = [
    "Correction",
    "OwnData",
    "Reading",
    "Skipped",
    "Verdict",
    "apply_verdicts",
    "as_dataset",
    "export_digits",
    "read_own",
    "read_splits",
    "read_verdicts",
    "thumbnail",
]
