"""From a data file to examples: reads, checks, encodes and fits every row, and reports on them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxft.config.schema import DataConfig
from mlxft.data.chat import ChatEncoder
from mlxft.data.example import Example
from mlxft.data.formats import (
    ChatRow,
    CompletionRow,
    TextRow,
    TokenRow,
    TypedRow,
    check_columns,
    find_format,
    type_row,
)
from mlxft.data.plain_text import TextEncoder
from mlxft.data.sources import read_rows
from mlxft.data.truncate import Limit, fit
from mlxft.errors import InputError

TRAIN_ON = ("assistant", "last_assistant", "all")


@dataclass
class DataReport:
    """What became of a set's rows.

    dropped, truncated: {reason: rows}. num_tokens, num_supervised: of the examples, after cutting.
    max_length, median_length: of the examples, in tokens. num_unended: answers without an end token.
    """

    source: str
    format: str
    limit: int
    num_rows: int = 0
    num_examples: int = 0
    dropped: dict[str, int] = field(default_factory=Counter)
    truncated: dict[str, int] = field(default_factory=Counter)
    num_tokens: int = 0
    num_supervised: int = 0
    max_length: int = 0
    median_length: float = 0.0
    num_unended: int = 0

    def lines(self) -> list[str]:
        """Returns the report as short sentences; what did not happen is not mentioned."""
        share = 100 * self.num_supervised / max(self.num_tokens, 1)
        lines = [
            f"{self.source}: {_rows(self.num_rows)} of {self.format}, {self.num_tokens:,} tokens, "
            f"{self.num_supervised:,} of them trained on ({share:.0f}%)",
            f"lengths: median {self.median_length:,.0f}, longest {self.max_length:,} tokens",
        ]
        if self.truncated:
            lines.append(
                f"cut to {self.limit:,} tokens (data.max_length): {_rows(sum(self.truncated.values()))}, "
                f"which lost {_counts(self.truncated)}"
            )
        if self.dropped:
            lines.append(f"dropped: {_rows(sum(self.dropped.values()))}: {_counts(self.dropped)}")
        if self.num_unended:
            lines.append(
                f"answers that this chat template ends with no token: {self.num_unended:,}; "
                "they do not teach the model where to stop"
            )
        return lines


def load_examples(
    source: Any, cfg: DataConfig, tokenizer: Any, vocab_size: int
) -> tuple[list[Example], DataReport]:
    """Returns the examples of a data set in the order of its rows, and what became of the rows.

    source: a file of JSON lines, several, or "bundled:NAME". tokenizer: mlx-lm's or transformers'; may be
    None for rows of tokens. vocab_size: ids from 0 to vocab_size - 1 are valid.

    Raises:
        InputError: a row or a key is wrong (with file and line, or the key), or no row can be trained on.
    """
    if cfg.train_on not in TRAIN_ON:
        raise InputError(f"data.train_on={cfg.train_on}: must be one of {', '.join(TRAIN_ON)}.")
    columns = dict(cfg.columns or {})
    check_columns(columns)
    limit = Limit(cfg.max_length, cfg.truncate, getattr(tokenizer, "bos_token_id", None))
    rows = read_rows(source, columns)
    format = find_format(next(iter(rows)), cfg.format)
    encoder = _RowEncoder(tokenizer, vocab_size, cfg.train_on)
    report = DataReport(_source_name(source), format, cfg.max_length, num_rows=len(rows))
    examples = []
    for row in rows:
        tokens, mask = encoder.encode(type_row(row, format, vocab_size))
        fitted = fit(tokens, mask, limit, row.where)
        if fitted.dropped:
            report.dropped[fitted.dropped] += 1
            continue
        if fitted.lost:
            report.truncated[fitted.lost] += 1
        examples.append(Example(fitted.tokens, fitted.mask, row.where))
    if not examples:
        raise InputError(
            f"{report.source}: nothing to train on in {_rows(report.num_rows)}: {_counts(report.dropped)}. "
            f"Check the masks, data.max_length={cfg.max_length} and data.truncate={cfg.truncate}."
        )
    _add_sizes(report, examples)
    report.num_unended = encoder.num_unended
    return examples, report


class _RowEncoder:
    """Encodes rows of every format; the encoders are made when the first row asks for them."""

    def __init__(self, tokenizer: Any, vocab_size: int, train_on: str):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._train_on = train_on
        self._chat: ChatEncoder | None = None
        self._text: TextEncoder | None = None
        self.num_unended = 0

    def encode(self, row: TypedRow) -> tuple[np.ndarray, np.ndarray]:
        """Returns (tokens (T,) int32, mask (T,) bool)."""
        if isinstance(row, TokenRow):  # ids and mask are what the file says, whatever train_on
            return np.array(row.tokens, dtype=np.int32), np.array(row.mask, dtype=bool)
        if self._tokenizer is None:
            raise InputError(
                f"{row.where}: text needs a tokenizer; only rows of tokens (data.format=tokens) do without."
            )
        tokens, mask = self._encode_words(row)
        highest = int(tokens.max())
        if highest >= self._vocab_size:
            raise InputError(
                f"{row.where}: the tokenizer gives token {highest}, and the model's vocabulary ends at "
                f"{self._vocab_size - 1}. This tokenizer is not the model's."
            )
        return tokens, mask

    def _encode_words(self, row: ChatRow | CompletionRow | TextRow) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(row, ChatRow):
            self._chat = self._chat or ChatEncoder(self._tokenizer)
            chat = self._chat.encode(row, self._train_on)
            self.num_unended += chat.num_unended
            return chat.tokens, chat.mask
        self._text = self._text or TextEncoder(self._tokenizer)
        if isinstance(row, CompletionRow):
            return self._text.encode_completion(row, self._train_on)
        return self._text.encode_text(row)


def _add_sizes(report: DataReport, examples: list[Example]) -> None:
    lengths = np.array([len(example.tokens) for example in examples])
    report.num_examples = len(examples)
    report.num_tokens = int(lengths.sum())
    report.num_supervised = sum(example.num_supervised for example in examples)
    report.max_length = int(lengths.max())
    report.median_length = float(np.median(lengths))


def _source_name(source: Any) -> str:
    names = [source] if isinstance(source, str) or not hasattr(source, "__len__") else list(source)
    return str(names[0]) if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())
