"""`mlxft eval` on pairs: how often, and by how much, the chosen answer is likelier than the rejected one."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx
import numpy as np

from mlxft.data.example import Pair
from mlxft.errors import GuardStop
from mlxft.losses import log_odds_ratio
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.preference import PairObjective


@dataclass(frozen=True)
class PreferenceEvaluation:
    """What a model makes of pairs; log-probabilities in nats.

    accuracy: share of pairs whose chosen answer has the higher mean log-probability a token, with its
    standard error; accuracy_of_sums: the same by the whole answers' log-probabilities; a pair that has one
    answer twice is never right. margin: mean of log p(chosen) - log p(rejected) of whole answers. log_odds:
    mean log odds ratio, of means a token, as ORPO's `log_odds_chosen`. logps_*: mean over pairs of the mean
    log-probability a token.
    """

    accuracy: float
    accuracy_stderr: float
    accuracy_of_sums: float
    margin: float
    log_odds: float
    logps_chosen: float
    logps_rejected: float
    pairs: int
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, float]:
        """Returns every figure by name."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        return [
            ("accuracy", f"{self.accuracy:.3f} ± {self.accuracy_stderr:.3f} (mean log p a token)"),
            ("accuracy of sums", f"{self.accuracy_of_sums:.3f} (log p of whole answers)"),
            ("margin", f"{self.margin:+.3f} nats an answer"),
            ("log odds", f"{self.log_odds:+.3f}"),
            ("log p a token", f"chosen {self.logps_chosen:.3f}, rejected {self.logps_rejected:.3f}"),
            ("tokens", f"{self.tokens:,} in the answers of {self.pairs:,} pairs"),
            ("seconds", f"{self.seconds:.1f}"),
        ]


def evaluate_pairs(
    view: DecoderView, objective: PairObjective, batches: Iterable[Sequence[Pair]]
) -> PreferenceEvaluation:
    """Returns what the model makes of the pairs, each prompt forwarded as the objective's layout says.

    Raises: GuardStop where a log-probability is not finite.
    """
    began = time.perf_counter()
    sums, counts, differ = [], [], []
    for batch in batches:
        sums.append(objective.answer_logps(view, batch))
        counts += [[pair.chosen_mask.sum(), pair.rejected_mask.sum()] for pair in batch]
        differ += [not pair.is_identical for pair in batch]
    sums, counts = np.concatenate(sums).astype(np.float64), np.array(counts)
    if not np.isfinite(sums).all():
        raise GuardStop(
            f"the log-probabilities of {np.sum(~np.isfinite(sums).all(axis=1)):,} of {len(sums):,} pairs are "
            "not finite. The weights may hold inf or nan, or model.dtype be too narrow for them"
        )
    means = sums / counts
    right, right_by_sums = (np.array(differ) & (each[:, 0] > each[:, 1]) for each in (means, sums))
    odds = np.array(log_odds_ratio(*(mx.array(column.astype(np.float32)) for column in means.T)))
    return PreferenceEvaluation(
        accuracy=float(right.mean()),
        accuracy_stderr=math.sqrt(right.mean() * (1 - right.mean()) / len(right)),
        accuracy_of_sums=float(right_by_sums.mean()),
        margin=float((sums[:, 0] - sums[:, 1]).mean()),
        log_odds=float(odds.mean()),
        logps_chosen=float(means[:, 0].mean()),
        logps_rejected=float(means[:, 1].mean()),
        pairs=len(sums),
        tokens=int(counts.sum()),
        seconds=time.perf_counter() - began,
    )
