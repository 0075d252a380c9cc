"""Which rows every optimiser step sees, as a pure function of the step: a resume needs no more."""

import math
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence

import numpy as np

from mlxft.data.batches import BatchOrder
from mlxft.training.objectives.common import Row

# These tell dropout's and the noise's random numbers from those of the row order.
_DROPOUT_STREAM, _NOISE_STREAM = 2, 3


@dataclass(frozen=True)
class Windows:
    """Rows in micro-batches, micro-batches in accumulation windows, one window an optimiser step.

    The last window of an epoch may hold fewer micro-batches.
    """

    rows: Sequence[Row]
    order: BatchOrder
    accumulate: int

    @property
    def _per_epoch(self) -> int:
        return math.ceil(self.order.num_batches / self.accumulate)

    def at(self, step: int) -> list[list[Row]]:
        """Returns the micro-batches of the optimiser step `step`, counted from 0 over all epochs."""
        epoch, window = divmod(step, self._per_epoch)
        batches = self.order.epoch(epoch)[window * self.accumulate : (window + 1) * self.accumulate]
        return [[self.rows[i] for i in batch] for batch in batches]

    def state(self) -> dict[str, Any]:
        """Returns what a resume has to know beside the step: nothing."""
        return {}

    def begin(self, state: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint's state says: nothing."""

    def total_steps(self, max_steps: Optional[int], epochs: float) -> int:
        """Returns the number of optimiser steps of a run: `max_steps`, else those of `epochs`."""
        return max_steps if max_steps is not None else max(1, math.ceil(round(epochs * self._per_epoch, 6)))


def noise_key_data(seed: int, step: int) -> np.ndarray:
    """Returns the random key (2,) uint32 of the noise on a step's embeddings, for all its micro-batches."""
    return np.random.SeedSequence([seed, _NOISE_STREAM, step]).generate_state(2, np.uint32)


def dropout_key_data(seed: int, step: int, micro: int) -> np.ndarray:
    """Returns the random key (2,) uint32 of one micro-batch; the same for every recompute of it."""
    return np.random.SeedSequence([seed, _DROPOUT_STREAM, step, micro]).generate_state(2, np.uint32)
