"""What objectives share: a window's counts, a micro-batch ready to run, targets' log-probabilities.

What each term is divided by depends only on masks, so a window's counts are known before its first
forward, and every micro-batch's terms come already divided. Gradients then simply add.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Protocol

import mlx.core as mx
import numpy as np

from mlxft.layouts.arrange import Arrangement, Arranger
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import Layout
from mlxft.losses import Head, linear_logps
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import hidden_states, target_rows, trained_head

Row = Any  # what the objective trains on: an Example, a Pair or an Unpaired
Counts = dict[str, float]
Inputs = dict[str, mx.array]
Metrics = dict[str, mx.array]

# Enters the reference policy, given the view of the one in training, and gives the view to score with.
Reference = Callable[[DecoderView], AbstractContextManager[DecoderView]]


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
    """One micro-batch ready to be run: its arrays, and how its rows are arranged in them."""

    inputs: Inputs
    arranged: Arrangement

    @property
    def layout(self) -> Layout:
        """The layout that the arrays are in."""
        return self.arranged.layout

    @property
    def num_positions(self) -> int:
        """The positions forwarded."""
        return self.arranged.num_positions


class Objective(Protocol):
    """What is minimised, as the loop, validation and the gradients see it.

    head, arranger: how its rows are forwarded.
    """

    head: HeadPlan
    arranger: Arranger

    def begin(
        self, batches: Sequence[Sequence[Row]], view: DecoderView
    ) -> tuple[list[Sequence[Row]], Counts]:
        """Returns a window's micro-batches with all they need, and the window's counts.

        counts has "tokens", the supervised ones, and whatever the terms are divided by.
        """

    def prepare(self, rows: Sequence[Row], counts: Counts) -> Prepared:
        """Returns a micro-batch whose weights are one over the window's counts."""

    def loss(self, logps: mx.array, inputs: Inputs) -> tuple[mx.array, Metrics]:
        """Returns the micro-batch's share of the window's loss and metrics.

        logps: the log-probabilities (M,) of the inputs' "targets". Sums over a window's micro-batches are
        the window's values.
        """

    def token_weights(self, inputs: Inputs) -> Optional[mx.array]:
        """Returns what each target's -log p counts (M,) if the loss is their sum, None if it is not."""


@dataclass
class Targets:
    """The tokens of a micro-batch that are scored, collected row by row.

    index: flat positions that predict them; tokens: what they are. Further columns, one value a
    target, are added by name; whatever rounds up their number has 0 in all of them.
    """

    arranged: Arrangement
    index: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, row: int, tokens: np.ndarray, mask: np.ndarray, /, **columns: Any) -> None:
        """Adds the masked tokens (L,) of the logical row; a column is a number, or one for each token."""
        at = np.flatnonzero(mask[1:])
        self.index.append(self.arranged.places[row][at])
        self.tokens.append(tokens[1:][at])
        for name, value in columns.items():
            array = np.broadcast_to(value, mask.shape)[1:][at]
            self.columns.setdefault(name, []).append(array)

    def inputs(self, multiple: int) -> Inputs:
        """Returns the arrays of a forward: "tokens" (B, T), "index" and "targets" (M,), and each column (M,).

        M is rounded up to `multiple`, at least one: a GPU compiles a program for each new shape.
        """
        columns = {"index": (self.index, np.int32), "targets": (self.tokens, np.int32)}
        columns |= {name: (parts, np.float32) for name, parts in self.columns.items()}
        rounded = {
            name: _rounded_up(np.concatenate(parts).astype(dtype), multiple)
            for name, (parts, dtype) in columns.items()
        }
        return {"tokens": mx.array(self.arranged.tokens)} | {n: mx.array(a) for n, a in rounded.items()}


def _rounded_up(array: np.ndarray, multiple: int) -> np.ndarray:
    extra = -len(array) % multiple if len(array) else multiple
    return np.pad(array, (0, extra))


def target_logps(plan: HeadPlan, head: Head, hidden: mx.array, inputs: Inputs) -> mx.array:
    """Returns the log-probability (M,) of each of the inputs' targets, for hidden (B, T, H)."""
    rows = target_rows(hidden, inputs)
    return linear_logps(rows, head, inputs["targets"], plan.chunk_for(rows.shape[0]))


def forward_logps(plan: HeadPlan, view: DecoderView, inputs: Inputs, layout: Layout) -> mx.array:
    """Returns the log-probability (M,) of each of the inputs' targets under the view's model, not trained."""
    with view.active():
        hidden = hidden_states(view, inputs["tokens"], TrainingCache(layout))
        return target_logps(plan, trained_head(view), hidden, inputs)


def with_ref_logps(objective: Any, rows: Sequence[Row], view: DecoderView) -> Sequence[Row]:
    """Returns the rows with their reference log-probabilities, all computed where one has none yet.

    objective: one with `reference_logps`.
    """
    if all(row.ref_logps is not None for row in rows):
        return rows
    scored = objective.reference_logps(view, rows)
    return [replace(row, ref_logps=tuple(both)) for row, both in zip(rows, scored, strict=True)]


def added_up(counts: Sequence[Counts]) -> Counts:
    """Returns the sum of each count over micro-batches."""
    return {name: sum(each[name] for each in counts) for name in counts[0]}
