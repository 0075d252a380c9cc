"""Rows that are read and tokenised as they are needed, some thousand at a time, from any place on.

A stream is cut into blocks of rows that are left after cutting and dropping. A block begins at a place in the
source that can be written down, so going on from there needs no rows before it to be tokenised again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlxft.data.chunks import ChunkEncoder, Tally, Task, chunks_of
from mlxft.data.rows import AnyRow, Place
from mlxft.data.sources import Part


@dataclass(frozen=True)
class Beginning:
    """Where a block begins.

    step: the first optimiser step that takes from it. number: of the block, over all epochs. row: how many
    rows of the source come before it.
    """

    step: int = 0
    number: int = 0
    epoch: int = 0
    row: int = 0


class RowStream:
    """The rows of a task's parts, over and over.

    tally: what became of the rows of the epoch so far.
    """

    def __init__(self, task: Task, parts: list[Part], tokenizer: Any):
        self._parts = parts
        self._encode = ChunkEncoder(task, tokenizer)
        self._next: tuple[int, Iterator[tuple[AnyRow, int]]] | None = None  # the row it is at
        self.task = task
        self.tally = Tally()

    def sizes(self) -> list[int]:
        """Returns how many bytes each part has, by which a change is noticed."""
        return [part.num_bytes() for part in self._parts]

    def block(self, first: int, size: int) -> tuple[list[AnyRow], int | None]:
        """Returns `size` rows of those after the source's first `first`, and how many of it they end after.

        The end of the source ends a block too, which may be empty then; what is returned second is None.

        Raises: InputError for a row that is wrong.
        """
        following = self._next[1] if self._next and self._next[0] == first else self._rows(first)
        rows: list[AnyRow] = []
        for row, after in following:
            rows.append(row)
            if len(rows) == size:
                self._next = (after, following)
                return rows, after
        self._next = None
        return rows, None

    def _rows(self, skipped: int) -> Iterator[tuple[AnyRow, int]]:
        """Yields each row that is left, with how many rows of the source it ends after."""
        self.tally = Tally()
        before = 0
        for chunk in chunks_of(self._parts):
            if before + len(chunk) > skipped:
                rest = chunk[max(skipped - before, 0) :]
                first = before + len(chunk) - len(rest)
                block, more = self._encode(rest)
                self.tally.add(more)
                after = {place: first + index + 1 for index, (place, _) in enumerate(rest)}
                named = replace(block, names=self.task.names)
                for index in range(len(named)):
                    place = Place(int(named.parts[index]), int(named.numbers[index]))
                    yield named.row(index), after[place]
            before += len(chunk)
