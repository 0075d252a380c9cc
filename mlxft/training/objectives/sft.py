"""Supervised fine-tuning: the mean over all supervised tokens of the window of -log p."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Example
from mlxft.layouts.arrange import Arranger, Group
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.common import (
    Counts,
    HeadPlan,
    Inputs,
    Metrics,
    Prepared,
    Targets,
    added_up,
)

_NO_PROMPT = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Sft:
    """The objective `sft`, on `Example` rows."""

    head: HeadPlan = HeadPlan()
    arranger: Arranger = Arranger()

    def counts(self, examples: Sequence[Example]) -> Counts:
        """Returns what a micro-batch adds to the window's counts: its supervised tokens."""
        return {"tokens": sum(example.num_supervised for example in examples)}

    def begin(self, batches: Sequence[Sequence[Example]], view: DecoderView):
        """Returns the micro-batches as they are and the window's supervised tokens."""
        return batches, added_up([self.counts(batch) for batch in batches])

    def prepare(self, examples: Sequence[Example], counts: Counts) -> Prepared:
        """Returns the micro-batch; input "weights" (M,) is one over the window's supervised tokens."""
        arranged = self.arranger([Group(_NO_PROMPT, (example.tokens,)) for example in examples])
        targets = Targets(arranged)
        for row, example in enumerate(examples):
            targets.add(row, example.tokens, example.mask, weights=1.0 / max(counts["tokens"], 1))
        return Prepared(targets.inputs(self.arranger.multiple), arranged)

    def token_weights(self, inputs: Inputs) -> Optional[mx.array]:
        """Returns what each target's -log p (M,) counts; None for a subclass with a loss of its own."""
        return inputs["weights"] if type(self).loss is Sft.loss else None

    def loss(self, logps: mx.array, inputs: Inputs) -> tuple[mx.array, Metrics]:
        """Returns the micro-batch's share of the window's loss; there are no other metrics."""
        return -(inputs["weights"] * logps).sum(), {}
