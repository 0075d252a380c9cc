"""Which rows of a stream every optimiser step sees; a resume needs to know where one block begins."""

import logging
import math
from dataclasses import asdict
from functools import cached_property
from typing import Any, Mapping, Optional

from mlxft.config.schema import DataConfig
from mlxft.data.batches import BatchOrder, SampleOrder
from mlxft.data.report import DataReport
from mlxft.data.stream import Beginning, RowStream
from mlxft.errors import InputError
from mlxft.training.objectives.common import Row

log = logging.getLogger("mlxft")


class StreamWindows:
    """Rows of a stream in micro-batches and windows, as `Windows` has those that are all known.

    A block of `data.buffer` rows, rounded up to whole steps, is ordered as an epoch of rows is otherwise: a
    pure function of the seed and the block's number. The last block of an epoch is smaller.
    """

    def __init__(self, stream: RowStream, cfg: DataConfig, accumulate: int, seed: int):
        self._stream, self._cfg = stream, cfg
        self._accumulate, self._seed = accumulate, seed
        step = cfg.batch_size * accumulate
        self._size = math.ceil(cfg.buffer / step) * step
        self._begin = Beginning()
        self._load()
        self.sample = self._rows

    def at(self, step: int) -> list[list[Row]]:
        """Returns the micro-batches of the optimiser step `step`, counted from 0 over all epochs."""
        if step < self._begin.step:
            self._begin = Beginning()
            self._load()
        while step >= self._begin.step + self._num_steps:
            self._advance()
        first = (step - self._begin.step) * self._accumulate
        return [[self._rows[i] for i in batch] for batch in self._batches[first : first + self._accumulate]]

    def state(self) -> dict[str, Any]:
        """Returns what a resume has to know beside the step: where the present block begins."""
        return {"stream": asdict(self._begin)}

    def begin(self, state: Mapping[str, Any]) -> None:
        """Goes to the block that a checkpoint's state tells."""
        if "stream" in state:
            self._begin = Beginning(**state["stream"])
            self._load()

    def total_steps(self, max_steps: Optional[int], epochs: float) -> int:
        """Returns `max_steps`; how many steps an epoch has is not known."""
        assert max_steps is not None
        return max_steps

    @property
    def source_sizes(self) -> list[int]:
        """Bytes of each of the stream's parts."""
        return self._stream.sizes()

    @property
    def rows(self) -> list[Row]:
        """The first block's rows and one that is as long as any may be, to plan with."""
        longest = max(self.sample, key=lambda row: row.length)
        return [*self.sample, longest.stretched(self._cfg.max_length)]

    @cached_property
    def order(self) -> SampleOrder:
        """The order of `rows`."""
        lengths = [row.num_tokens for row in self.sample]
        return SampleOrder(lengths, self._cfg.batch_size, self._cfg.shuffle, self._seed)

    @property
    def _num_steps(self) -> int:
        return math.ceil(len(self._batches) / self._accumulate)

    def _advance(self) -> None:
        begin, after = self._begin, self._after
        if after is None:
            self._begin = Beginning(begin.step + self._num_steps, begin.number + 1, begin.epoch + 1, 0)
        else:
            self._begin = Beginning(begin.step + self._num_steps, begin.number + 1, begin.epoch, after)
        self._load()

    def _load(self) -> None:
        """Reads the rows of the block that begins at `_begin`, and puts them in order."""
        begin = self._begin
        self._rows, self._after = self._stream.block(begin.row, self._size)
        if self._after is None:
            self._tell()
        self._batches: list[list[int]] = []
        if self._rows:
            lengths = [row.num_tokens for row in self._rows]
            order = BatchOrder(lengths, self._cfg.batch_size, self._cfg.shuffle, self._seed)
            self._batches = order.epoch(begin.number)
        elif begin.row == 0:
            raise InputError("data.train: nothing to train on in the stream. `mlxft preview` shows why.")

    def _tell(self) -> None:
        """Logs what became of the rows of the epoch that has been read to its end."""
        task, tally = self._stream.task, self._stream.tally
        report = DataReport("stream", "", self._cfg.max_length, task.kind)
        report.add(task, tally)
        for line in [f"{tally.num_rows:,} rows of the stream read to their end", *report.events()]:
            log.info("training rows: %s", line)

