"""`mlxft eval` on labelled answers: whether an adapter raised desirable ones and lowered the others."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np

from mlxft.data.example import Unpaired
from mlxft.errors import GuardStop
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.unpaired import Kto


@dataclass(frozen=True)
class UnpairedEvaluation:
    """What a model makes of answers with a label; log-probabilities in nats.

    desirable: answers with the label true, undesirable: the others; None where there are none of them, and
    all but logps_* without an adapter. logps_*: mean over answers of the mean log-probability a token.
    log_ratio_*: mean over answers of log p(answer) with the adapter - log p(answer) without it; margin: the
    first less the second. desirable_raised, undesirable_lowered: share of answers whose log ratio is above,
    or below, 0. accuracy: share of all answers that are one of these, with its standard error.
    """

    accuracy: Optional[float]
    accuracy_stderr: Optional[float]
    desirable_raised: Optional[float]
    undesirable_lowered: Optional[float]
    margin: Optional[float]
    log_ratio_desirable: Optional[float]
    log_ratio_undesirable: Optional[float]
    logps_desirable: Optional[float]
    logps_undesirable: Optional[float]
    desirable: int
    undesirable: int
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        lines = []
        if self.accuracy is not None:
            kinds = _both(self.desirable_raised, self.undesirable_lowered, ".3f", ("raised", "lowered"))
            ratios = _both(self.log_ratio_desirable, self.log_ratio_undesirable, "+.3f")
            lines.append(("accuracy", f"{self.accuracy:.3f} ± {self.accuracy_stderr:.3f} ({kinds})"))
            lines.append(("log ratio to the base", f"{ratios} nats an answer"))
        if self.margin is not None:
            lines.append(("margin", f"{self.margin:+.3f} nats an answer"))
        answers = f"{self.desirable:,} desirable and {self.undesirable:,} undesirable answers"
        return lines + [
            ("log p a token", _both(self.logps_desirable, self.logps_undesirable, ".3f")),
            ("tokens", f"{self.tokens:,} in {answers}"),
            ("seconds", f"{self.seconds:.1f}"),
        ]


def _both(good: Optional[float], bad: Optional[float], digits: str, verbs: tuple[str, str] = ("", "")) -> str:
    named = (("desirable", good, verbs[0]), ("undesirable", bad, verbs[1]))
    texts = [f"{name} {verb} {value:{digits}}" for name, value, verb in named if value is not None]
    return ", ".join(texts).replace("  ", " ")


def answer_logps(view: DecoderView, objective: Kto, batches: Iterable[Sequence[Unpaired]]) -> np.ndarray:
    """Returns log p (N,) float64 of whole answers, batch by batch.

    Raises: GuardStop where one is not finite.
    """
    logps = [objective.answer_logps(view, batch, mismatched=False) for batch in batches]
    logps = np.concatenate(logps).astype(np.float64)
    if not np.isfinite(logps).all():
        raise GuardStop(
            f"the log-probabilities of {np.sum(~np.isfinite(logps)):,} of {len(logps):,} answers are not "
            "finite. The weights may hold inf or nan, or model.dtype be too narrow for them"
        )
    return logps


def compare(
    logps: np.ndarray, base_logps: Optional[np.ndarray], rows: Sequence[Unpaired], seconds: float
) -> UnpairedEvaluation:
    """Returns the evaluation of rows with these log-probabilities (N,).

    base_logps: those without the adapter, None where there is none. seconds: of the forwards.
    """
    good = np.array([row.label for row in rows])
    counts = np.array([row.num_supervised for row in rows])
    ratios = None if base_logps is None else logps - base_logps
    desirable, undesirable = (_mean(ratios, which) for which in (good, ~good))
    right = None if ratios is None else np.where(good, ratios > 0, ratios < 0)
    share = None if right is None else float(right.mean())
    return UnpairedEvaluation(
        accuracy=share,
        accuracy_stderr=None if share is None else math.sqrt(share * (1 - share) / len(rows)),
        desirable_raised=_mean(right, good),
        undesirable_lowered=_mean(right, ~good),
        margin=None if desirable is None or undesirable is None else desirable - undesirable,
        log_ratio_desirable=desirable,
        log_ratio_undesirable=undesirable,
        logps_desirable=_mean(logps / counts, good),
        logps_undesirable=_mean(logps / counts, ~good),
        desirable=int(good.sum()),
        undesirable=int((~good).sum()),
        tokens=int(counts.sum()),
        seconds=seconds,
    )


def _mean(values: Optional[np.ndarray], which: np.ndarray) -> Optional[float]:
    return None if values is None or not which.any() else float(values[which].mean())
