"""`mlxft eval` on rows to learn: a model's loss and perplexity, each with its standard error."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np

from mlxft.data.example import Example
from mlxft.errors import GuardStop
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.common import forward_logps
from mlxft.training.objectives.sft import Sft

_HIGHEST_LOSS = 600.0  # of what exp and its standard error have numbers for


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of rows.

    loss: mean of -log p over the supervised tokens, in nats. perplexity: exp(loss). *_stderr: the
    standard errors, from the spread of the tokens' losses as if they were independent; None for one
    token. seconds: the forwards alone.
    """

    loss: float
    loss_stderr: Optional[float]
    perplexity: float
    perplexity_stderr: Optional[float]
    tokens: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Returns every figure by name."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Returns (name, value) as text, for people."""
        return [
            ("loss", f"{self.loss:.4f}{plus_minus(self.loss_stderr, 4)} nats a token"),
            ("perplexity", f"{self.perplexity:,.2f}{plus_minus(self.perplexity_stderr, 2)}"),
            ("tokens", f"{self.tokens:,} supervised"),
            ("seconds", f"{self.seconds:.1f} ({self.tokens / self.seconds:,.0f} tokens/s)"),
        ]


def evaluate(decoder: DecoderView, batches: Iterable[Sequence[Example]], objective: Sft) -> Evaluation:
    """Returns what the model makes of batches of rows; logits exist for one chunk of the head at a time.

    objective: how the rows are forwarded.

    Raises: GuardStop where the loss is not finite.
    """
    began = time.perf_counter()
    losses = [_token_losses(decoder, batch, objective) for batch in batches]
    return summed_up(np.concatenate(losses), time.perf_counter() - began)


def _token_losses(decoder: DecoderView, batch: Sequence[Example], objective: Sft) -> np.ndarray:
    """Returns -log p (M,) float64 of the batch's supervised tokens, row by row."""
    counts = objective.counts(batch)
    prepared = objective.prepare(batch, counts)
    logps = forward_logps(objective.head, decoder, prepared.inputs, prepared.layout)
    return -np.array(logps, dtype=np.float64)[: int(counts["tokens"])]  # without what rounds up


def summed_up(losses: np.ndarray, seconds: float) -> Evaluation:
    """Returns the evaluation of tokens with these losses (M,). Raises: GuardStop where one isn't finite."""
    loss = float(losses.mean())
    if not math.isfinite(loss):
        raise GuardStop(
            f"the loss is not finite: {np.sum(~np.isfinite(losses)):,} of {len(losses):,} tokens have "
            "none. The weights may hold inf or nan, or model.dtype be too narrow for them"
        )
    loss_stderr = standard_error(losses)
    perplexity = math.exp(min(loss, _HIGHEST_LOSS))
    perplexity_stderr = None if loss_stderr is None else perplexity * loss_stderr
    return Evaluation(loss, loss_stderr, perplexity, perplexity_stderr, len(losses), seconds)


def standard_error(values: np.ndarray) -> Optional[float]:
    """Returns the standard error of the mean of values (M,) as if they were independent, None for one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def plus_minus(error: Optional[float], digits: int) -> str:
    """Returns " ± 0.12" for a standard error, nothing for none."""
    return "" if error is None else f" ± {error:,.{digits}f}"
