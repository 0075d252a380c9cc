"""What became of a set's rows on the way to training, in numbers and in sentences."""

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

from mlxft.config.schema import DataConfig
from mlxft.data.chunks import Tally, Task
from mlxft.data.rows import TokenRows
from mlxft.errors import InputError

_SKIPPED_SHOWN = 5
_NAMES = {"pairs": "pair", "unpaired": "labelled answer"}  # of a row, by what rows become


@dataclass
class DataReport:
    """What became of a set's rows.

    dropped, truncated: {reason: rows}. dropped_at, truncated_at: {"file:line": reason}, skipped_at:
    {"file:line": what is wrong}, of the first rows only. num_examples: rows that are left, of whatever kind.
    num_tokens, num_supervised: of these, after cutting; a pair's prompt is counted once. num_prompt: tokens
    of the prompts of pairs and unpaired rows. max_length, median_length: of a row in tokens, of a pair with
    its longer answer. num_identical: pairs of equal answers. num_wanted: answers with the label true.
    num_unended: answers without an end token. num_skipped: faulty rows that were passed over.
    num_tools_unread: rows with tools that the chat template doesn't write. num_untemplated: rows of text, of
    a model that has a chat template.
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
    skipped_at: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0
    num_supervised: int = 0
    num_prompt: int = 0
    max_length: int = 0
    median_length: float = 0.0
    num_identical: int = 0
    num_wanted: int = 0
    num_unended: int = 0
    num_skipped: int = 0
    num_tools_unread: int = 0
    num_untemplated: int = 0

    def add(self, task: Task, tally: Tally) -> None:
        """Adds what became of a set's rows."""
        if task.form.format not in self.format.split(" and "):
            self.format = " and ".join(filter(None, (self.format, task.form.format)))
        for name in (each.name for each in fields(tally) if each.name.startswith("num_")):
            setattr(self, name, getattr(self, name) + getattr(tally, name))
        self.dropped.update(tally.dropped)
        self.truncated.update(tally.truncated)
        for name in ("dropped_at", "truncated_at", "skipped_at"):
            told = {task.where(place): reason for place, reason in getattr(tally, name).items()}
            getattr(self, name).update(told)

    def close(self, rows: TokenRows, cfg: DataConfig) -> None:
        """Adds up the sizes of the rows that are left. Raises InputError if there are none."""
        if not rows:
            reasons = dict(self.dropped)
            if self.num_skipped:
                reasons["faulty"] = self.num_skipped
            first = next(iter(self.skipped_at.values()), "")
            raise InputError(
                f"{self.source}: nothing to train on in {_rows(self.num_rows)}: {_counts(reasons)}. "
                f"Check the masks, data.max_length={cfg.max_length} and data.truncate={cfg.truncate}."
                f"{' The first faulty row: ' * bool(first)}{first}"
            )
        self.num_examples = len(rows)
        self.num_supervised = int(rows.num_supervised.sum())
        self.num_prompt = rows.num_prompt
        self.num_wanted = rows.num_wanted
        self.num_tokens = int(rows.num_tokens.sum())
        self.max_length = int(rows.length.max())
        self.median_length = float(np.median(rows.length))

    def lines(self) -> list[str]:
        """Returns the report as short sentences, sizes in the first two; what did not happen is left out."""
        return self._sizes() + self.events()

    def events(self) -> list[str]:
        """Returns what became of rows that could not stay as they are, as short sentences."""
        lines = []
        if self.truncated:
            lines.append(
                f"cut to {self.limit:,} tokens (data.max_length): {_rows(sum(self.truncated.values()))}, "
                f"which lost {_counts(self.truncated)}"
            )
        if self.dropped:
            lines.append(f"dropped: {_rows(sum(self.dropped.values()))}: {_counts(self.dropped)}")
        if self.num_skipped:
            lines.append(f"faulty and passed over (data.on_bad_row): {_rows(self.num_skipped)}")
            lines += [f"  {error}" for error in list(self.skipped_at.values())[:_SKIPPED_SHOWN]]
            if self.num_skipped > _SKIPPED_SHOWN:
                lines.append(f"  ... and {self.num_skipped - _SKIPPED_SHOWN:,} more")
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
        if self.num_tools_unread:
            lines.append(
                f"rows with tools, which this chat template does not write: {self.num_tools_unread:,}; the "
                "model learns their answers without having been told of the tools"
            )
        if self.num_untemplated:
            lines.append(
                f"rows of plain text: {self.num_untemplated:,}; the model's chat template is not put around "
                "them. Give prompts and answers as messages for a model that is to chat"
            )
        return lines

    def _named(self) -> str:
        """Returns how many rows there are and what they are: 3 pairs, 1 text, 2 rows of messages."""
        name = _NAMES.get(self.kind) or ("text" if self.format == "text" else None)
        if name is None:
            return f"{_rows(self.num_rows)} of {self.format}"
        of_tokens = " of tokens" if self.format == "tokens" else ""
        return f"{self.num_rows:,} {name}{'s' * (self.num_rows != 1)}{of_tokens}"

    def _sizes(self) -> list[str]:
        share = 100 * self.num_supervised / max(self.num_tokens, 1)
        size = f"{self.source}: {self._named()}, {self.num_tokens:,} tokens"
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


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def _counts(reasons: dict[str, int]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in reasons.items())
