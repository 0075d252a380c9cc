"""Objectives as the loop sees them: what to count, what to feed the forward, what the loss is.

What each term is divided by depends only on masks, so a window's counts are known before its first
forward, and every micro-batch's terms come already divided. Gradients then simply add.
"""

from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Batch
from mlxft.layouts.pieces import Layout, padded
from mlxft.losses import Head, linear_logps, sft_loss

Counts = dict[str, int]
Inputs = dict[str, mx.array]


@dataclass(frozen=True)
class HeadPlan:
    """How the head is run. kind: auto, full or chunked. chunk: supervised tokens at once."""

    kind: str = "auto"
    chunk: int = 1024

    def chunk_for(self, num_targets: int) -> Optional[int]:
        """Returns the chunk to use for that many targets; None makes all logits at once."""
        if self.kind == "full" or (self.kind == "auto" and num_targets <= self.chunk):
            return None
        return self.chunk


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning: the mean over all supervised tokens of the window of -log p."""

    head: HeadPlan = HeadPlan()
    name = "sft"

    def counts(self, batch: Batch) -> Counts:
        """Returns what the batch adds to the divisors of the window."""
        return {"tokens": batch.num_supervised}

    def inputs(self, batch: Batch, counts: Counts, multiple: int = 1) -> tuple[Inputs, Layout]:
        """Returns the arrays of one forward and backward, and the layout they are in.

        tokens: (B, T - 1). index: (M,) the flat positions that predict a supervised token; targets:
        (M,); weights: (M,) float32, one over the window's count. M is rounded up to `multiple` with
        weight 0, which bounds the number of shapes where each new one costs a compilation.
        """
        supervised = np.flatnonzero(batch.mask[:, 1:])
        extra = -len(supervised) % multiple if len(supervised) else multiple  # nothing at all has no shape
        index = np.pad(supervised, (0, extra))
        weights = np.pad(np.full(len(supervised), 1.0 / max(counts["tokens"], 1), np.float32), (0, extra))
        arrays = {
            "tokens": mx.array(batch.tokens[:, :-1]),
            "index": mx.array(index.astype(np.int32)),
            "targets": mx.array(batch.tokens[:, 1:].reshape(-1)[index]),
            "weights": mx.array(weights),
        }
        return arrays, padded(batch.tokens.shape[1] - 1)

    def loss(self, head: Head, hidden: mx.array, inputs: Inputs) -> tuple[mx.array, dict[str, mx.array]]:
        """Returns the batch's share of the window's loss, and of its other metrics.

        hidden: (B, T - 1, H). Sums over a window's micro-batches are the window's values.
        """
        rows = hidden.reshape(-1, hidden.shape[-1])[inputs["index"]]
        logps = linear_logps(rows, head, inputs["targets"], self.head.chunk_for(rows.shape[0]))
        loss = (sft_loss(logps[None], inputs["weights"][None] > 0) * inputs["weights"][None]).sum()
        return loss, {}


def build(config: Any) -> Sft:
    """Returns the objective that `trainer.objective` names, with the head as `head` says."""
    return OBJECTIVES[config.trainer.objective](HeadPlan(config.head.kind, config.head.chunk))


OBJECTIVES = {"sft": Sft}
