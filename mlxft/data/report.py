"""What became of a set's rows on the way to training, in numbers and in sentences."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxft.config.schema import DataConfig
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.errors import InputError


@dataclass
class DataReport:
    """What became of a set's rows.

    dropped, truncated: {reason: rows}. dropped_at, truncated_at: {"file:line": reason}. num_examples: rows
    that are left, of whatever kind. num_tokens, num_supervised: of these, after cutting; a pair's prompt is
    counted once. num_prompt: tokens of the prompts of pairs and unpaired rows. max_length, median_length: of
    a row in tokens, of a pair with its longer answer. num_identical: pairs of equal answers. num_wanted:
    answers with the label true. num_unended: answers without an end token.
    """

    source: str
    format: str
    limit: int
    kind: str = "examples"
    num_rows: int = 0
    num_examples: int = 0
    dropped: dict[str, int] = field(default_factory=Counter)
    truncated: dict[str, int] = field(default_factory=Counter)
    dropped_at: dict[str, str] = field(default_factory=dict)
    truncated_at: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0
    num_supervised: int = 0
    num_prompt: int = 0
    max_length: int = 0
    median_length: float = 0.0
    num_identical: int = 0
    num_wanted: int = 0
    num_unended: int = 0

    def keeps(self, fitted: Any, where: str) -> bool:
        """Notes what a row lost; tells whether any of it is left. fitted: has `lost` and `dropped`."""
        if fitted.dropped:
            self.dropped[fitted.dropped] += 1
            self.dropped_at[where] = fitted.dropped
        elif fitted.lost:
            self.truncated[fitted.lost] += 1
            self.truncated_at[where] = fitted.lost
        return not fitted.dropped

    def close(self, rows: Sequence[Example | Pair | Unpaired], cfg: DataConfig) -> None:
        """Adds up the sizes of the rows that are left. Raises InputError if there are none."""
        if not rows:
            raise InputError(
                f"{self.source}: nothing to train on in {_rows(self.num_rows)}: {_counts(self.dropped)}. "
                f"Check the masks, data.max_length={cfg.max_length} and data.truncate={cfg.truncate}."
            )
        lengths = np.array([row.num_tokens for row in rows])
        self.num_examples = len(rows)
        self.num_supervised = sum(row.num_supervised for row in rows)
        if self.kind != "examples":
            self.num_prompt = sum(len(row.prompt) for row in rows)
        if self.kind == "pairs":
            self.num_identical = sum(row.is_identical for row in rows)
        if self.kind == "unpaired":
            self.num_wanted = sum(row.label for row in rows)
        self.num_tokens = int(lengths.sum())
        longest = np.array([row.length for row in rows])
        self.max_length = int(longest.max())
        self.median_length = float(np.median(longest))

    def lines(self) -> list[str]:
        """Returns the report as short sentences, sizes in the first two; what did not happen is left out."""
        lines = self._sizes()
        if self.truncated:
            lines.append(
                f"cut to {self.limit:,} tokens (data.max_length): {_rows(sum(self.truncated.values()))}, "
                f"which lost {_counts(self.truncated)}"
            )
        if self.dropped:
            lines.append(f"dropped: {_rows(sum(self.dropped.values()))}: {_counts(self.dropped)}")
        if self.num_identical:
            lines.append(
                f"pairs whose chosen and rejected are the same: {self.num_identical:,}; "
                "they teach no preference"
            )
        if self.num_unended:
            lines.append(
                f"answers that this chat template ends with no token: {self.num_unended:,}; "
                "they do not teach the model where to stop"
            )
        return lines

    def _sizes(self) -> list[str]:
        share = 100 * self.num_supervised / max(self.num_tokens, 1)
        size = f"{self.source}: {_rows(self.num_rows)} of {self.format}, {self.num_tokens:,} tokens"
        spread = f"median {self.median_length:,.0f}, longest {self.max_length:,} tokens"
        if self.kind == "pairs":
            return [
                f"{size} ({self.num_prompt:,} in prompts, counted once a pair), "
                f"{self.num_supervised:,} of them trained on ({share:.0f}%)",
                f"lengths of a prompt with its longer answer: {spread}",
            ]
        lines = [f"{size}, {self.num_supervised:,} of them trained on ({share:.0f}%)", f"lengths: {spread}"]
        if self.kind == "unpaired":
            lines[0] += (
                f"; labelled true: {self.num_wanted:,}, false: {self.num_examples - self.num_wanted:,}"
            )
        return lines


def source_name(source: Any) -> str:
    """Returns what a report calls a file or several."""
    names = [source] if isinstance(source, str) or not hasattr(source, "__len__") else list(source)
    return str(names[0]) if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())
