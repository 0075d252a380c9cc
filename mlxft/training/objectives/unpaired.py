"""The objective `kto`: answers marked good or bad one by one, against a reference.

Its KL is how far the policy is from the reference on answers that do not belong to their prompts: row i's
prompt with row i + 1's answer, in the order of the data. One value a window, without gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Unpaired
from mlxft.layouts.arrange import Arranger, Group
from mlxft.losses import kto_kl, kto_loss, kto_metrics, row_sums
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.common import (
    Counts,
    HeadPlan,
    Inputs,
    Metrics,
    Prepared,
    Reference,
    Targets,
    added_up,
    forward_logps,
    with_ref_logps,
)


@dataclass(frozen=True)
class KtoSettings:
    """What the configuration's `loss` says for kto."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class Kto:
    """The objective `kto`, on `Unpaired` rows that know the answer they are mismatched with."""

    head: HeadPlan
    arranger: Arranger
    settings: KtoSettings
    reference: Optional[Reference] = None

    def counts(self, rows: Sequence[Unpaired]) -> Counts:
        """Returns a micro-batch's rows, good and bad ones, and supervised tokens."""
        good = sum(row.label for row in rows)
        tokens = sum(int(row.completion_mask.sum()) for row in rows)
        return {"rows": len(rows), "good": good, "bad": len(rows) - good, "tokens": tokens}

    def begin(self, batches: Sequence[Sequence[Unpaired]], view: DecoderView):
        """Returns the micro-batches with reference log-probabilities, and the counts with the window's KL."""
        batches = [with_ref_logps(self, rows, view) for rows in batches]
        counts = added_up([self.counts(rows) for rows in batches])
        total = 0.0
        for rows in batches:
            policy = self.answer_logps(view, rows, mismatched=True)
            refs = np.array([row.ref_logps[1] for row in rows], np.float32)
            total += kto_kl(mx.array(policy), mx.array(refs)).sum().item()
        return batches, counts | {"kl": max(total / counts["rows"], 0.0)}

    def reference_logps(self, view: DecoderView, rows: Sequence[Unpaired]) -> np.ndarray:
        """Returns the reference's log-probabilities (B, 2) of each row's own and mismatched answer."""
        with self.reference(view) as reference:
            own, other = (self.answer_logps(reference, rows, mismatched) for mismatched in (False, True))
        return np.stack([own, other], axis=1)

    def answer_logps(self, view: DecoderView, rows: Sequence[Unpaired], mismatched: bool) -> np.ndarray:
        """Returns the summed log-probabilities (B,) of the rows' answers, or of the mismatched ones."""
        inputs, arranged = self._forward(rows, mismatched)
        logps = forward_logps(self.head, view, inputs, arranged.layout)
        return np.array(row_sums(logps, inputs["row"], len(rows)))

    def prepare(self, rows: Sequence[Unpaired], counts: Counts) -> Prepared:
        """Returns the micro-batch.

        Inputs beside those of a forward: row (M,), whose answer a target is of, -1 for none; labels,
        weights, good_weights, bad_weights, ref_logps (B,); kl ().
        """
        inputs, arranged = self._forward(rows, mismatched=False)
        labels = np.array([row.label for row in rows])
        per_row = {
            "weights": np.full(len(rows), 1.0 / counts["rows"]),
            "good_weights": labels / max(counts["good"], 1),
            "bad_weights": ~labels / max(counts["bad"], 1),
            "ref_logps": [row.ref_logps[0] for row in rows],
            "kl": counts["kl"],
        }
        inputs |= {name: mx.array(np.asarray(value, np.float32)) for name, value in per_row.items()}
        return Prepared(inputs | {"labels": mx.array(labels)}, arranged)

    def _forward(self, rows: Sequence[Unpaired], mismatched: bool):
        answers = [
            (row.other, row.other_mask) if mismatched else (row.completion, row.completion_mask)
            for row in rows
        ]
        arranged = self.arranger([Group(row.prompt, (a,)) for row, (a, _) in zip(rows, answers, strict=True)])
        targets = Targets(arranged)
        for number, (row, (answer, mask)) in enumerate(zip(rows, answers, strict=True)):
            mask = np.concatenate([np.zeros(len(row.prompt), bool), mask])
            targets.add(number, np.concatenate([row.prompt, answer]), mask, row=number + 1)
        inputs = targets.inputs(self.arranger.multiple)
        inputs["row"] = inputs["row"].astype(mx.int32) - 1  # what rounds up the targets is of no row
        return inputs, arranged

    def token_weights(self, inputs: Inputs) -> None:
        """Returns None: what a target counts depends on the others' log-probabilities."""
        return None

    def loss(self, logps: mx.array, inputs: Inputs) -> tuple[mx.array, Metrics]:
        """Returns the micro-batch's share of the window's loss and metrics."""
        logps = row_sums(logps, inputs["row"], inputs["weights"].shape[0])
        refs, labels, kl, settings = inputs["ref_logps"], inputs["labels"], inputs["kl"], self.settings
        terms = kto_loss(
            logps, refs, labels, kl, settings.beta, settings.desirable_weight, settings.undesirable_weight
        )
        weights = {
            "chosen": inputs["good_weights"],
            "rejected": inputs["bad_weights"],
            "accuracies": inputs["weights"],
        }
        metrics = {
            name: (value * weights[name.partition("/")[2]]).sum()
            for name, value in kto_metrics(logps, refs, labels, settings.beta).items()
        }
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        metrics["kl"] = kl * inputs["weights"].sum()
        return (terms * inputs["weights"]).sum(), metrics


def mismatch(rows: Sequence[Unpaired], max_length: int) -> list[Unpaired]:
    """Returns the rows, each knowing the next one's answer, the last one the first's.

    max_length: tokens of a prompt with the other's answer, whose end is cut where it is too long.
    """
    after = [*rows[1:], *rows[:1]]
    rooms = [max(max_length - len(row.prompt), 1) for row in rows]
    return [
        replace(row, other=other.completion[:room], other_mask=other.completion_mask[:room])
        for row, other, room in zip(rows, after, rooms, strict=True)
    ]
