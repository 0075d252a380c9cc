"""One training row as tokens with a mask, and a batch of them; plain numpy, no model needed."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Example:
    """A row ready for training.

    tokens: (T,) int32. mask: (T,) bool, true where the token itself is a target (it is predicted
    from the position before it, so `mask[0]` never counts). where: "file:line" it came from.
    """

    tokens: np.ndarray
    mask: np.ndarray
    where: str

    @property
    def num_supervised(self) -> int:
        return int(self.mask[1:].sum())


@dataclass(frozen=True)
class Batch:
    """Rows side by side, padded at the end.

    tokens: (B, T) int32. mask: (B, T) bool as in `Example`, false on padding. lengths: (B,) int32,
    the rows' own lengths. The forward sees T - 1 positions: the last token only is a target.
    """

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray

    @property
    def num_supervised(self) -> int:
        return int(self.mask[:, 1:].sum())

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)
