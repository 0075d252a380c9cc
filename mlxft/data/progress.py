"""A bar that follows rows being tokenised, where a person watches and it takes more than a moment."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlxft.data.chunks import RawRow, Tally, size_of
from mlxft.data.rows import Block

_MOMENT_S = 1.5


class Bar:
    """A progress bar on standard error. total: bytes of the rows' text, None where that is not known."""

    def __init__(self, name: str, total: int | None):
        from rich.console import Console

        console = Console(stderr=True)
        self._console = console if console.is_terminal else None
        self._name, self._total = name.rpartition("/")[2] or name, total  # a line has no room for a path
        self._taken = 0
        self._bar: Any = None

    def counted(self, chunks: Iterable[Sequence[RawRow]]) -> Iterator[Sequence[RawRow]]:
        """Yields the chunks, and counts what is in them."""
        for chunk in chunks:
            self._taken += sum(size_of(raw) + 1 for _, raw in chunk)
            yield chunk

    def followed(self, made: Iterable[tuple[Block, Tally]]) -> Iterator[tuple[Block, Tally]]:
        """Yields what is made of the chunks and moves the bar."""
        began, num_rows = time.monotonic(), 0
        try:
            for block, tally in made:
                num_rows += tally.num_rows
                if self._console and time.monotonic() - began > _MOMENT_S:
                    self._move(num_rows)
                yield block, tally
        finally:
            if self._bar is not None:
                self._bar.stop()

    def _move(self, num_rows: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=self._total)
            self._bar.start()
        description = f"tokenising {self._name}: {num_rows:,} rows"
        self._bar.update(self._bar.task_ids[0], completed=self._taken, description=description)
