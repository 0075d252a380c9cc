"""Whether what was exported computes what was trained: the logits of both on the same rows.

difference   max |exported - trained| / max |trained|
lost         |exported - trained| / |trained - base|, root mean squares: the share of the adapter's own
             effect that is gone, of which 0 is all there and 1 is as if it had never been
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxft.config.schema import Config
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.formats import find_form
from mlxft.data.load import load_first
from mlxft.data.sources import first_row, sets_of
from mlxft.errors import GuardStop

EQUAL = 1e-5  # the largest difference, in float32, that is none

_ROWS, _POSITIONS = 4, 48
_OBJECTIVES = {"examples": "sft", "pairs": "dpo", "unpaired": "kto"}

# Read where no rows are given: prose, a question, a list, code.
_TEXTS = (
    "The harbour lies behind a low hill, and in winter the boats are drawn up on the shingle where the old "
    "rope works used to stand. Nobody goes out before the lamp on the mole is lit.",
    "Who are you, and what can you do for me? Please answer in two short sentences, and say first what you "
    "are called and who made you.",
    "To plant a small tree: 1. Dig a hole twice as wide as the roots. 2. Set the tree in it and fill in the "
    "earth. 3. Water it well, and again every week of the first summer.",
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n"
    "    return total / len(numbers)\n\nprint(mean([1, 2, 3, 4]))\n",
)

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Comparison:
    """How the exported logits differ from the trained. lost: None where the adapter does nothing."""

    difference: float
    lost: Optional[float]
    positions: int

    def __str__(self) -> str:
        lost = "" if self.lost is None else f", {_percent(self.lost)} of the adapter's effect"
        return f"at {self.positions} positions they differ by {self.difference:.1e} of the largest{lost}"

    def check(self, limit: float, remedy: str) -> None:
        """Raises GuardStop where the logits differ by more than EQUAL and more than `limit` is lost."""
        lost = math.inf if self.lost is None else self.lost
        if not (self.difference <= EQUAL or lost <= limit):  # what is no number fails both
            most = f"at most {_percent(limit)} may be lost" if limit else f"at most {EQUAL:g} is none"
            raise GuardStop(
                f"the exported logits are not the trained ones: {self}; {most}. Nothing was kept. {remedy}"
            )


def rows_of(config: Config, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Returns the tokens of the first rows of data.valid or data.train; without one, of some sentences.

    Without a tokenizer they are tokens drawn at random. Raises: InputError for rows that cannot be read.
    """
    source = config.data.train if config.data.valid is None else config.data.valid
    if source is not None:
        form = find_form(first_row(source, config.data), config.data.format)
        sets = sets_of(source, config.data)
        rows, _ = load_first(_OBJECTIVES[form.kind], sets, config.data, tokenizer, vocabulary, _ROWS)
        found = [_tokens(row) for row in list(rows)[:_ROWS]]
    elif tokenizer is None:
        found = np.random.default_rng(0).integers(0, vocabulary, (_ROWS, _POSITIONS)).tolist()
    else:
        found = [tokenizer.encode(text) for text in _TEXTS]
    return [list(tokens[:_POSITIONS]) for tokens in found]


def _tokens(row: Example | Pair | Unpaired) -> list[int]:
    if isinstance(row, Example):
        return row.tokens.tolist()
    answer = row.chosen if isinstance(row, Pair) else row.completion
    return np.concatenate([row.prompt, answer]).tolist()


def logits_of(model: nn.Module, rows: Rows) -> np.ndarray:
    """Returns the logits (positions of all rows, V), float32."""
    found = []
    for row in rows:
        logits = model(mx.array([row]))[0].astype(mx.float32)
        mx.eval(logits)
        found.append(np.array(logits))
    return np.concatenate(found)


def compare(exported: np.ndarray, trained: np.ndarray, base: np.ndarray) -> Comparison:
    """Returns how the logits differ, all of them (positions, V)."""
    off = exported - trained
    effect = _rms(trained - base)
    return Comparison(
        difference=float(np.abs(off).max() / np.abs(trained).max()),
        lost=_rms(off) / effect if effect > 0 else None,
        positions=len(trained),
    )


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
