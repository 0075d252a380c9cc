"""A digest of rows: the same as long as what they hold and their order are."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from mlxft.data.example import Example, Pair, Unpaired


def rows_digest(rows: Sequence[Example | Pair | Unpaired]) -> str:
    """Returns a digest of every array and label of every row, in order; not of where rows came from."""
    digest = hashlib.sha256()
    for row in rows:
        for field in fields(row):
            value = getattr(row, field.name)
            if isinstance(value, np.ndarray):
                digest.update(len(value).to_bytes(8, "little") + value.tobytes())
            elif isinstance(value, bool):
                digest.update(bytes([value]))
    return digest.hexdigest()
