"""One training row as tokens with a mask; plain numpy, no model needed."""

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
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        return int(self.mask[1:].sum())
