"""Preference objectives on pairs: dpo, orpo, cpo and simpo, one forward for both answers of every pair.

    loss = sum over pairs of term / pairs  +  nll_weight * sum over tokens of -log p / tokens

Both divisors are the window's. The second sum is over the chosen answers' tokens, or for ORPO with
`nll_scope` full over their prompts' too.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Optional

import mlx.core as mx
import numpy as np

from mlxft.data.example import Pair
from mlxft.layouts.arrange import Arranger, Group
from mlxft.losses import (
    cpo_loss,
    cpo_metrics,
    dpo_loss,
    dpo_metrics,
    orpo_loss,
    orpo_metrics,
    row_sums,
    simpo_loss,
)
from mlxft.losses.log_probabilities import token_means
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
class LossSettings:
    """What the configuration's `loss` says, each objective's own defaults filled in.

    nll_weight: of the fine-tuning term on the chosen answers; 0 leaves it out. nll_scope: "response",
    or "full" for the prompt's tokens too.
    """

    beta: float
    variant: str = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.0
    nll_weight: float = 0.0
    nll_scope: str = "response"


@dataclass(frozen=True)
class _Answers:
    """Log-probabilities of a micro-batch's answers, (P,) each: sums over tokens, their counts, references."""

    chosen: mx.array
    rejected: mx.array
    chosen_counts: mx.array
    rejected_counts: mx.array
    ref_chosen: Optional[mx.array] = None
    ref_rejected: Optional[mx.array] = None

    @property
    def chosen_means(self) -> mx.array:
        return token_means(self.chosen, self.chosen_counts)

    @property
    def rejected_means(self) -> mx.array:
        return token_means(self.rejected, self.rejected_counts)


@dataclass(frozen=True)
class PairObjective(ABC):
    """What the objectives on pairs share; each adds its term per pair and its metrics."""

    head: HeadPlan
    arranger: Arranger
    settings: LossSettings
    reference: Optional[Reference] = None
    needs_reference: ClassVar[bool] = False

    @abstractmethod
    def terms(self, answers: _Answers) -> tuple[mx.array, Metrics]:
        """Returns each pair's loss (P,) and its metrics, (P,) each."""

    def counts(self, pairs: Sequence[Pair]) -> Counts:
        """Returns a micro-batch's pairs, supervised tokens, and tokens of the fine-tuning term."""
        chosen = sum(int(pair.chosen_mask.sum()) for pair in pairs)
        rejected = sum(int(pair.rejected_mask.sum()) for pair in pairs)
        nll = sum(int(self._nll_mask(pair)[1:].sum()) for pair in pairs)
        return {"pairs": len(pairs), "tokens": chosen + rejected, "nll_tokens": nll}

    def begin(self, batches: Sequence[Sequence[Pair]], view: DecoderView):
        """Returns the micro-batches, with reference log-probabilities if they are needed, and the counts."""
        if self.needs_reference:
            batches = [with_ref_logps(self, pairs, view) for pairs in batches]
        return batches, added_up([self.counts(batch) for batch in batches])

    def reference_logps(self, view: DecoderView, pairs: Sequence[Pair]) -> np.ndarray:
        """Returns the reference's log-probabilities (P, 2) float32 of chosen and rejected answers."""
        with self.reference(view) as reference:
            return self.answer_logps(reference, pairs)

    def answer_logps(self, view: DecoderView, pairs: Sequence[Pair]) -> np.ndarray:
        """Returns the summed log-probabilities (P, 2) float32 of chosen and rejected answers under a view."""
        answers_only = replace(self, settings=replace(self.settings, nll_weight=0.0))
        bare = [replace(pair, ref_logps=(0.0, 0.0)) for pair in pairs]
        prepared = answers_only.prepare(bare, answers_only.counts(bare))
        logps = forward_logps(self.head, view, prepared.inputs, prepared.layout)
        return np.array(self.row_logps(logps, prepared.inputs)).reshape(-1, 2)

    def prepare(self, pairs: Sequence[Pair], counts: Counts) -> Prepared:
        """Returns the micro-batch: rows are chosen, rejected, chosen, ... in the order of the pairs.

        Inputs beside those of a forward: row (M,), whose answer a target is of, -1 for none; nll_weights
        (M,); pair_weights (P,); accuracy_weights (P,), 0 for one answer twice; answer_counts (2P,);
        ref_logps (2P,) where a reference is needed.
        """
        arranged = self.arranger([Group(pair.prompt, (pair.chosen, pair.rejected)) for pair in pairs])
        targets = Targets(arranged)
        nll_weight = self.settings.nll_weight / max(counts["nll_tokens"], 1)
        for number, pair in enumerate(pairs):
            nll, row = self._nll_mask(pair), 2 * number
            answer = _after_prompt(pair, pair.chosen_mask)
            targets.add(
                row,
                np.concatenate([pair.prompt, pair.chosen]),
                answer | nll,
                row=np.where(answer, row + 1, 0),
                nll_weights=nll_weight * nll,
            )
            answer = _after_prompt(pair, pair.rejected_mask)
            targets.add(
                row + 1, np.concatenate([pair.prompt, pair.rejected]), answer, row=row + 2, nll_weights=0
            )
        inputs = targets.inputs(self.arranger.multiple)
        inputs["row"] = inputs["row"].astype(mx.int32) - 1  # what rounds up the targets is of no row
        inputs |= self._per_pair(pairs, counts)
        return Prepared(inputs, arranged)

    def _per_pair(self, pairs: Sequence[Pair], counts: Counts) -> Inputs:
        answer_counts = [mask.sum() for pair in pairs for mask in (pair.chosen_mask, pair.rejected_mask)]
        # Rounding makes either of two equal answers the likelier where their forwards differ in shape.
        differ = [not pair.is_identical for pair in pairs]
        weight = 1.0 / max(counts["pairs"], 1)
        inputs = {
            "pair_weights": mx.full(len(pairs), weight),
            "accuracy_weights": mx.array(weight * np.array(differ, np.float32)),
            "answer_counts": mx.array(np.array(answer_counts, np.float32)),
        }
        if self.needs_reference:
            inputs["ref_logps"] = mx.array(
                np.array([pair.ref_logps for pair in pairs], np.float32).reshape(-1)
            )
        return inputs

    def _nll_mask(self, pair: Pair) -> np.ndarray:
        """(P + C,): the tokens of the chosen row that the fine-tuning term is over."""
        if not self.settings.nll_weight:
            return np.zeros(len(pair.prompt) + len(pair.chosen), bool)
        if self.settings.nll_scope == "full":
            return np.ones(len(pair.prompt) + len(pair.chosen), bool)
        return _after_prompt(pair, pair.chosen_mask)

    def row_logps(self, logps: mx.array, inputs: Inputs) -> mx.array:
        """Returns the summed log-probability (2P,) of each answer from those of the targets (M,)."""
        return row_sums(logps, inputs["row"], inputs["answer_counts"].shape[0])

    def token_weights(self, inputs: Inputs) -> None:
        """Returns None: what a target counts depends on the others' log-probabilities."""
        return None

    def loss(self, logps: mx.array, inputs: Inputs) -> tuple[mx.array, Metrics]:
        """Returns the micro-batch's share of the window's loss and metrics."""
        sums, counts = self.row_logps(logps, inputs), inputs["answer_counts"]
        refs = inputs.get("ref_logps")
        both = (refs[0::2], refs[1::2]) if refs is not None else (None, None)
        terms, metrics = self.terms(_Answers(sums[0::2], sums[1::2], counts[0::2], counts[1::2], *both))
        weights = {"rewards/accuracies": inputs["accuracy_weights"]}
        weighted = {
            name: (value * weights.get(name, inputs["pair_weights"])).sum() for name, value in metrics.items()
        }
        loss = (terms * inputs["pair_weights"]).sum()
        if self.settings.nll_weight:
            nll = -(logps * inputs["nll_weights"]).sum()
            loss = loss + nll
            weighted["nll_loss"] = mx.stop_gradient(nll) / self.settings.nll_weight
        return loss, weighted


class Dpo(PairObjective):
    """The objective `dpo`: answers against a reference, in the variant that `loss.variant` names."""

    needs_reference = True

    def terms(self, answers: _Answers) -> tuple[mx.array, Metrics]:
        """Returns `dpo_loss` and `dpo_metrics`."""
        beta = self.settings.beta
        logps = (answers.chosen, answers.rejected, answers.ref_chosen, answers.ref_rejected)
        terms = dpo_loss(
            *logps,
            answers.chosen_counts,
            answers.rejected_counts,
            beta,
            self.settings.variant,
            self.settings.label_smoothing,
        )
        return terms, dpo_metrics(*logps, beta)


class Orpo(PairObjective):
    """The objective `orpo`: beta times the odds-ratio term, beside the chosen rows' own loss."""

    def terms(self, answers: _Answers) -> tuple[mx.array, Metrics]:
        """Returns beta times `orpo_loss`, and `orpo_metrics`."""
        beta = self.settings.beta
        means = (answers.chosen_means, answers.rejected_means)
        return beta * orpo_loss(*means), orpo_metrics(*means, beta)


class Cpo(PairObjective):
    """The objective `cpo`: DPO's term without a reference, beside the chosen answers' own loss."""

    def terms(self, answers: _Answers) -> tuple[mx.array, Metrics]:
        """Returns `cpo_loss` and `cpo_metrics` of sums."""
        logps, beta = (answers.chosen, answers.rejected), self.settings.beta
        return cpo_loss(*logps, beta, self.settings.label_smoothing), cpo_metrics(*logps, beta)


class Simpo(PairObjective):
    """The objective `simpo`: mean log-probabilities that must lead by `loss.gamma`."""

    def terms(self, answers: _Answers) -> tuple[mx.array, Metrics]:
        """Returns `simpo_loss` and `cpo_metrics` of means."""
        means, beta = (answers.chosen_means, answers.rejected_means), self.settings.beta
        return simpo_loss(*means, beta, self.settings.gamma), cpo_metrics(*means, beta)


def _after_prompt(pair: Pair, mask: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(len(pair.prompt), bool), mask])
