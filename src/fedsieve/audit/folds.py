"""Which samples are left out together: folds that a site can draw by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedsieve.errors import check

Labels = NDArray[np.int64]


def deal(ids: Sequence[str], labels: Labels, parts: int, key: str) -> Labels:
    """(n,) which of `parts` each sample belongs to, 0 … parts − 1.

    Class after class, in the order of a hash of the key and the id, samples are dealt round the
    table. So parts differ by at most one sample, and by at most one of each class, and a sample's
    place depends on the key and on the set of samples, not on the order in which they are listed.
    """
    check(parts >= 1, f"Samples are dealt to at least 1 part, not {parts}.")
    check(len(set(ids)) == len(ids), "Two samples have the same id; give them different ones.")
    secret = hashlib.blake2b(key.encode(), digest_size=16).digest()
    order = sorted(
        range(len(ids)),
        key=lambda i: (labels[i], hashlib.blake2b(ids[i].encode(), key=secret).digest()),
    )
    part = np.empty(len(ids), dtype=np.int64)
    part[order] = np.arange(len(ids)) % parts
    return part
