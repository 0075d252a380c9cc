"""Some rows of a set at a time, from how they stand in the file to tokens that fit, with what became of each.

What is made depends on nothing but the rows and the task, so chunks may be made in any process.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlxft.data.encode import RowEncoder
from mlxft.data.example import Example
from mlxft.data.files import Raw
from mlxft.data.formats import ChatRow, CompletionRow, Form, check_same, type_row
from mlxft.data.pairs import fit_pair, split_pair, split_unpaired
from mlxft.data.preferences import PairRow, UnpairedRow, type_pair, type_unpaired
from mlxft.data.rows import AnyRow, Block, Place, block_of
from mlxft.data.sources import Part, Row, no_rows, row_of
from mlxft.data.template import has_chat_template
from mlxft.data.truncate import Limit, fit
from mlxft.errors import InputError

PLACES_KEPT = 1000  # of rows that were cut or dropped; the others are only counted

CHUNK_ROWS = 512
_CHUNK_BYTES = 1 << 20

RawRow = tuple[Place, Raw]


@dataclass(frozen=True)
class Task:
    """How the rows of a set are made.

    kind: what they become. wanted: data.format. first: where the row is by which `form` was found. names:
    of the set's parts, with what stands before a row's number. skips: a faulty row is counted and passed
    over.
    """

    kind: str
    form: Form
    wanted: str
    first: str
    names: tuple[str, ...]
    columns: dict[str, str]
    limit: Limit
    vocab_size: int
    train_on: str
    skips: bool

    def where(self, place: Place) -> str:
        """Returns a row's place as it is told."""
        return f"{self.names[place.part]}{place.number}"


@dataclass
class Tally:
    """What became of rows, in numbers that add up.

    dropped, truncated: {reason: rows}. dropped_at, truncated_at: {where: reason}, skipped_at: {where: what is
    wrong}, each of the first rows only.
    """

    num_rows: int = 0
    num_skipped: int = 0
    num_unended: int = 0
    num_identical: int = 0
    num_tools_unread: int = 0
    num_untemplated: int = 0
    dropped: Counter = field(default_factory=Counter)
    truncated: Counter = field(default_factory=Counter)
    dropped_at: dict[Place, str] = field(default_factory=dict)
    truncated_at: dict[Place, str] = field(default_factory=dict)
    skipped_at: dict[Place, str] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        """Adds what became of later rows."""
        for name in (each.name for each in fields(self) if each.name.startswith("num_")):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.truncated.update(other.truncated)
        for name in ("dropped_at", "truncated_at", "skipped_at"):
            mine = getattr(self, name)
            for place, reason in getattr(other, name).items():
                if len(mine) < PLACES_KEPT:
                    mine[place] = reason

    def keeps(self, fitted: Any, place: Place) -> bool:
        """Notes what a row lost; tells whether any of it is left. fitted: has `lost` and `dropped`."""
        if fitted.dropped:
            self.dropped[fitted.dropped] += 1
            self.dropped_at[place] = fitted.dropped
        elif fitted.lost:
            self.truncated[fitted.lost] += 1
            self.truncated_at[place] = fitted.lost
        return not fitted.dropped

    def skip(self, place: Place, error: InputError) -> None:
        """Counts a faulty row."""
        self.num_skipped += 1
        self.skipped_at[place] = str(error)


def chunks_of(parts: Sequence[Part], size: int = CHUNK_ROWS) -> Iterator[list[RawRow]]:
    """Yields the rows of a set, `size` at a time or fewer. Raises InputError for a part that has none."""
    chunk: list[RawRow] = []
    num_bytes = 0
    try:
        for index, part in enumerate(parts):
            number = 0
            for number, raw in part.rows():
                chunk.append((Place(index, number), raw))
                num_bytes += size_of(raw)
                if len(chunk) == size or num_bytes >= _CHUNK_BYTES:
                    yield chunk
                    chunk, num_bytes = [], 0
            if not number:
                raise InputError(no_rows(part.name))
    except InputError:
        if chunk:
            yield chunk  # a fault in these comes before this one
        raise
    if chunk:
        yield chunk


def size_of(raw: Any) -> int:
    """Returns about how many bytes of text a row is."""
    if isinstance(raw, (bytes, str)):
        return len(raw)
    if isinstance(raw, dict):
        return sum(map(size_of, raw.values()))
    return sum(map(size_of, raw)) if isinstance(raw, list) else 8


class ChunkEncoder:
    """Makes rows of a task with a tokenizer (None: only rows of tokens)."""

    def __init__(self, task: Task, tokenizer: Any):
        self._task = task
        self._tokenizer = tokenizer
        self._encoder = RowEncoder(tokenizer, task.vocab_size, task.train_on)

    def __call__(self, raws: Sequence[RawRow]) -> tuple[Block, Tally]:
        """Returns the rows that are left, in order, and what became of all.

        Raises:
            InputError: the first row that is wrong, unless the task skips such.
        """
        places = [place for place, _ in raws]
        steps = {"examples": self._examples, "pairs": self._pairs, "unpaired": self._unpaired}
        tally = Tally(num_rows=len(raws))
        before = self._encoder.num_unended
        typed = [_outcome(self._typed, place, raw) for place, raw in raws]
        fitted = steps[self._task.kind](typed)
        rows: list[AnyRow] = []
        kept: list[Place] = []
        for place, outcome in zip(places, fitted, strict=True):
            if isinstance(outcome, InputError):
                if not self._task.skips:
                    raise outcome
                tally.skip(place, outcome)
            elif tally.keeps(outcome[1], place):
                rows.append(outcome[0])
                kept.append(place)
        tally.num_unended = self._encoder.num_unended - before
        self._count_unread(typed, tally)
        if self._task.kind == "pairs":
            tally.num_identical = sum(row.is_identical for row in rows)
        return block_of(self._task.kind, rows, kept), tally

    def _count_unread(self, typed: list[Any], tally: Tally) -> None:
        """Counts rows with tools that the chat template doesn't know, and text that it isn't put around."""
        for row in typed:
            answer = getattr(row, "chosen", getattr(row, "answer", row))
            if isinstance(answer, ChatRow) and answer.tools:
                tally.num_tools_unread += not self._encoder.reads_tools
            elif isinstance(answer, CompletionRow):
                tally.num_untemplated += has_chat_template(self._tokenizer)

    def _typed(self, place: Place, raw: Raw) -> Any:
        task = self._task
        row: Row = row_of(raw, task.where(place), task.columns)
        check_same(row, task.form, task.wanted, task.first)
        if task.kind == "examples":
            return type_row(row, task.form.format, task.vocab_size)
        make = type_pair if task.kind == "pairs" else type_unpaired
        return make(row, task.form, task.vocab_size)

    def _examples(self, typed: list[Any]) -> list[Any]:
        encoded = iter(self._encoder.encode_all(_right(typed)))

        def made(row: Any) -> tuple[Example, Any]:
            tokens, mask = _value(next(encoded))
            fitted = fit(tokens, mask, self._task.limit, row.where)
            return Example(fitted.tokens, fitted.mask, row.where), fitted

        return _each(typed, made)

    def _pairs(self, typed: list[Any]) -> list[Any]:
        answers = [answer for row in _right(typed) for answer in (row.chosen, row.rejected)]
        encoded = iter(self._encoder.encode_all(answers))

        def made(row: PairRow) -> tuple[AnyRow, Any]:
            chosen, rejected = next(encoded), next(encoded)
            fitted = fit_pair(split_pair(_value(chosen), _value(rejected), row.where), self._task.limit)
            return fitted.pair, fitted

        return _each(typed, made)

    def _unpaired(self, typed: list[Any]) -> list[Any]:
        encoded = iter(self._encoder.encode_all([row.answer for row in _right(typed)]))

        def made(row: UnpairedRow) -> tuple[AnyRow, Any]:
            tokens, mask = _value(next(encoded))
            fitted = fit(tokens, mask, self._task.limit, row.where)
            if fitted.dropped:
                return Example(fitted.tokens, fitted.mask, row.where), fitted
            return split_unpaired(fitted.tokens, fitted.mask, row.label, row.where), fitted

        return _each(typed, made)


def _outcome(make: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what `make` makes, or the InputError it raises: only the first row's is told."""
    try:
        return make(*arguments)
    except InputError as error:
        return error


def _each(typed: list[Any], made: Callable[[Any], Any]) -> list[Any]:
    return [row if isinstance(row, InputError) else _outcome(made, row) for row in typed]


def _right(typed: list[Any]) -> list[Any]:
    return [row for row in typed if not isinstance(row, InputError)]


def _value(encoded: Any) -> Any:
    if isinstance(encoded, InputError):
        raise encoded
    return encoded
