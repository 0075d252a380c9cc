"""Objectives as the loop sees them: what to count, what to feed the forward, what the loss is.

What each term is divided by depends only on masks, so a window's counts are known before its first
forward, and every micro-batch's terms come already divided. Gradients then simply add.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Example
from mlxft.layouts.arrange import Arrangement, Arranger, Group
from mlxft.layouts.pieces import Layout
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
class Prepared:
    """One micro-batch ready to be run: its arrays, the layout they are in, the positions forwarded."""

    inputs: Inputs
    layout: Layout
    num_positions: int


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning: the mean over all supervised tokens of the window of -log p."""

    head: HeadPlan = HeadPlan()
    arranger: Arranger = Arranger()
    name = "sft"

    def counts(self, examples: Sequence[Example]) -> Counts:
        """Returns what the micro-batch adds to the divisors of the window."""
        return {"tokens": sum(example.num_supervised for example in examples)}

    def prepare(self, examples: Sequence[Example], counts: Counts) -> Prepared:
        """Returns the micro-batch with weights that are one over the window's count.

        inputs: tokens (B, T); index (M,), the flat positions that predict a supervised token; targets
        (M,); weights (M,) float32.
        """
        nothing = np.zeros(0, np.int32)
        arranged = self.arranger([Group(nothing, (example.tokens,)) for example in examples])
        index, targets = supervised(arranged, [(e.tokens, e.mask) for e in examples])
        weights = np.full(len(index), 1.0 / max(counts["tokens"], 1), np.float32)
        inputs = {
            "tokens": arranged.tokens,
            "index": rounded_up(index, self.arranger.multiple),
            "targets": rounded_up(targets, self.arranger.multiple),
            "weights": rounded_up(weights, self.arranger.multiple),
        }
        arrays = {name: mx.array(array) for name, array in inputs.items()}
        return Prepared(arrays, arranged.layout, arranged.num_positions)

    def loss(self, head: Head, hidden: mx.array, inputs: Inputs) -> tuple[mx.array, dict[str, mx.array]]:
        """Returns the micro-batch's share of the window's loss, and of its other metrics.

        hidden: (B, T, H). Sums over a window's micro-batches are the window's values.
        """
        logps = target_logps(self.head, head, hidden, inputs)
        loss = (sft_loss(logps[None], inputs["weights"][None] > 0) * inputs["weights"][None]).sum()
        return loss, {}


def supervised(
    arranged: Arrangement, rows: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the flat positions (M,) that predict the rows' supervised tokens, and those tokens (M,).

    rows: tokens (L,) and mask (L,) of each logical row of the arrangement, in its order.
    """
    predictors = [np.flatnonzero(mask[1:]) for _, mask in rows]
    index = [places[at] for places, at in zip(arranged.places, predictors, strict=True)]
    targets = [tokens[1:][at] for (tokens, _), at in zip(rows, predictors, strict=True)]
    return np.concatenate(index).astype(np.int32), np.concatenate(targets).astype(np.int32)


def rounded_up(array: np.ndarray, multiple: int) -> np.ndarray:
    """Returns the array with zeros up to a multiple, at least one: an empty array has no program.

    A GPU compiles a program for each new shape; what is added has weight 0.
    """
    extra = -len(array) % multiple if len(array) else multiple
    return np.pad(array, (0, extra))


def target_logps(plan: HeadPlan, head: Head, hidden: mx.array, inputs: Inputs) -> mx.array:
    """Returns the log-probability (M,) of each of the inputs' targets, for hidden (B, T, H)."""
    rows = hidden.reshape(-1, hidden.shape[-1])[inputs["index"]]
    return linear_logps(rows, head, inputs["targets"], plan.chunk_for(rows.shape[0]))


def build(config: Any, multiple: int) -> Sft:
    """Returns the objective, head and layout that the configuration names. multiple: see `Arranger`."""
    plan = HeadPlan(config.head.kind, config.head.chunk)
    return OBJECTIVES[config.trainer.objective](plan, Arranger(config.trainer.layout, multiple))


OBJECTIVES = {"sft": Sft}
