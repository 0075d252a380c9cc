"""`mlxft eval eval.reference=...` on rows to learn: how far a model's predictions are from another's."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Example
from mlxft.evaluation.perplexity import Evaluation, plus_minus, standard_error, summed_up
from mlxft.layouts.cache import TrainingCache
from mlxft.losses import stepped_divergence
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import hidden_states, target_rows, trained_head
from mlxft.training.objectives.common import Reference
from mlxft.training.objectives.sft import Sft


@dataclass(frozen=True)
class Divergence:
    """A model against a reference, over the supervised tokens.

    kl: mean of KL(reference || model) of the predictions at a token, in nats; kl_median, kl_p95: the value
    that half of the tokens, or 95 of 100, are not above. agreement: share of tokens where both find the same
    token likeliest. loss_change: mean of the model's loss less the reference's. *_stderr: standard errors, of
    the tokens' own values: that of a change is of differences, far below those of the two losses.
    """

    kl: float
    kl_stderr: Optional[float]
    kl_median: float
    kl_p95: float
    agreement: float
    agreement_stderr: float
    loss_change: float
    loss_change_stderr: Optional[float]

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        change = f"{self.loss_change:+.4f}{plus_minus(self.loss_change_stderr, 4)}"
        kl = f"{self.kl:.4f}{plus_minus(self.kl_stderr, 4)} nats a token"
        spread = f"median {self.kl_median:.4f}, 95% below {self.kl_p95:.4f}"
        return [
            ("loss change", f"{change} nats a token"),
            ("KL(reference || model)", f"{kl} ({spread})"),
            ("same likeliest token", f"{self.agreement:.4f} ± {self.agreement_stderr:.4f}"),
        ]


def compare(
    view: DecoderView, reference: Reference, batches: Iterable[Sequence[Example]], objective: Sft
) -> tuple[Evaluation, Evaluation, Divergence]:
    """Returns what the model makes of batches of rows, what the reference does, and how far they are apart.

    Logits of the two exist for one chunk of the head at a time. Raises: GuardStop where a loss isn't finite.
    """
    began = time.perf_counter()
    parts = [_batch(view, reference, batch, objective) for batch in batches]
    losses, ref_losses, kl, same = (np.concatenate(column) for column in zip(*parts, strict=True))
    seconds = time.perf_counter() - began
    made, other = summed_up(losses, seconds), summed_up(ref_losses, seconds)
    share = float(same.mean())
    change = losses - ref_losses
    return made, other, Divergence(
        kl=float(kl.mean()),
        kl_stderr=standard_error(kl),
        kl_median=float(np.median(kl)),
        kl_p95=float(np.quantile(kl, 0.95)),
        agreement=share,
        agreement_stderr=math.sqrt(share * (1 - share) / len(same)),
        loss_change=float(change.mean()),
        loss_change_stderr=standard_error(change),
    )  # fmt: skip


def _batch(
    view: DecoderView, reference: Reference, batch: Sequence[Example], objective: Sft
) -> tuple[np.ndarray, ...]:
    """Returns (M,) each: losses, the reference's, KL, whether both find the same token likeliest."""
    counts = objective.counts(batch)
    prepared = objective.prepare(batch, counts)
    inputs = prepared.inputs
    cache = TrainingCache(prepared.layout)

    def rows_of(view: DecoderView) -> mx.array:
        with view.active():
            rows = target_rows(hidden_states(view, inputs["tokens"], cache), inputs)
            mx.eval(rows)
            return rows

    def logits_of(view: DecoderView, rows: mx.array) -> mx.array:
        with view.active():
            head = trained_head(view)
            return head.apply(head.params, rows)

    rows = rows_of(view)
    with reference(view) as other:
        ref_rows = rows_of(other)

    def ref_logits(span: slice) -> mx.array:
        with reference(view) as other:
            return logits_of(other, ref_rows[span])

    found = stepped_divergence(
        lambda span: logits_of(view, rows[span]),
        ref_logits,
        inputs["targets"],
        objective.head.chunk_for(rows.shape[0]),
    )
    number = int(counts["tokens"])  # without what rounds up
    logps, ref_logps, kl, same = (np.array(each)[:number] for each in found)
    return -logps.astype(np.float64), -ref_logps.astype(np.float64), kl.astype(np.float64), same
