"""Tokenised rows held as a few long arrays, in memory or mapped from a file; a row is made when asked for."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.fingerprint import rows_digest

AnyRow = Example | Pair | Unpaired

# The arrays of each kind of row, in the order that its class takes them.
FIELDS = {
    "examples": ("tokens", "mask"),
    "pairs": ("prompt", "chosen", "rejected", "chosen_mask", "rejected_mask"),
    "unpaired": ("prompt", "completion", "completion_mask"),
}
_TOKENS = {
    "examples": ("tokens",),
    "pairs": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion"),
}


@dataclass(frozen=True)
class Place:
    """Where a row stands: in which of a set's parts, and its number there."""

    part: int
    number: int


@dataclass(frozen=True)
class Block:
    """Rows of one kind, their arrays end to end.

    values: {field: (all its values,)}. starts: {field: (N + 1,)}, where each row's begin. parts, numbers:
    (N,), their places. supervised: (N,) tokens trained on. labels: (N,) bool, of unpaired rows. names: of
    the parts, each with what stands between it and a row's number.
    """

    kind: str
    values: dict[str, np.ndarray]
    starts: dict[str, np.ndarray]
    parts: np.ndarray
    numbers: np.ndarray
    supervised: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, index: int) -> AnyRow:
        """Returns a row whose arrays are views of the block's."""
        where = f"{self.names[self.parts[index]]}{self.numbers[index]}"
        arrays = [self._array(field, index) for field in FIELDS[self.kind]]
        if self.kind == "examples":
            return Example(*arrays, where)
        if self.kind == "pairs":
            return Pair(*arrays, where)
        return Unpaired(*arrays, bool(self.labels[index]), where)

    def lengths(self, field: str) -> np.ndarray:
        """Returns the number of values (N,) that each row has of a field."""
        return np.diff(self.starts[field])

    def _array(self, field: str, index: int) -> np.ndarray:
        starts = self.starts[field]
        return self.values[field][starts[index] : starts[index + 1]]


def block_of(kind: str, rows: Sequence[AnyRow], places: Sequence[Place]) -> Block:
    """Returns a block of these rows; its parts have no names yet."""
    values, starts = {}, {}
    for field in FIELDS[kind]:
        arrays = [getattr(row, field) for row in rows]
        of = bool if field.endswith("mask") else np.int32
        values[field] = np.concatenate(arrays) if arrays else np.zeros(0, of)
        starts[field] = np.array([0, *accumulate(map(len, arrays))], np.int32)
    return Block(
        kind,
        values,
        starts,
        np.array([place.part for place in places], np.int32),
        np.array([place.number for place in places], np.int64),
        np.array([row.num_supervised for row in rows], np.int32),
        np.array([getattr(row, "label", False) for row in rows], bool),
    )


class TokenRows(Sequence):
    """Rows of one kind in order, each made when it is asked for. set_sizes: how many each set has of them."""

    def __init__(self, blocks: Iterable[Block], set_sizes: Sequence[int] = ()):
        self.set_sizes = tuple(set_sizes)
        self.blocks = [block for block in blocks if len(block)]
        self._starts = [0, *accumulate(map(len, self.blocks))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        block = bisect_right(self._starts, place) - 1
        return self.blocks[block].row(place - self._starts[block])

    def __iter__(self) -> Iterator[AnyRow]:
        return (block.row(index) for block in self.blocks for index in range(len(block)))

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """Tokens of each row (N,), a pair's prompt counted once."""
        return self._joined(lambda block: sum(block.lengths(field) for field in _TOKENS[block.kind]))

    @cached_property
    def length(self) -> np.ndarray:
        """Tokens of each row (N,), of a pair those of the prompt with its longer answer."""

        def of(block: Block) -> np.ndarray:
            first, *answers = (block.lengths(field) for field in _TOKENS[block.kind])
            return first + np.max(answers, axis=0) if answers else first

        return self._joined(of)

    @cached_property
    def num_supervised(self) -> np.ndarray:
        """Tokens of each row (N,) that are trained on."""
        return self._joined(lambda block: block.supervised)

    @cached_property
    def digest(self) -> str:
        """A digest of what the rows hold and of their order."""
        return rows_digest(self)

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts; 0 for rows that are whole."""
        return sum(len(block.values["prompt"]) for block in self.blocks if "prompt" in block.values)

    @property
    def num_wanted(self) -> int:
        """Rows with the label true."""
        return sum(int(block.labels.sum()) for block in self.blocks)

    def _joined(self, of: Any) -> np.ndarray:
        return np.concatenate([of(block) for block in self.blocks] or [np.zeros(0)]).astype(np.int64)


def sizes_of(rows: Sequence[AnyRow], name: str) -> np.ndarray:
    """Returns a size of each row (N,) by the name it has there: num_tokens, length or num_supervised."""
    if isinstance(rows, TokenRows):
        return getattr(rows, name)
    return np.array([getattr(row, name) for row in rows], np.int64)
