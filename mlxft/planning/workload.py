"""What a run forwards at once, in numbers: rows, their length, tokens that are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxft.training.objectives.common import Objective, Row
from mlxft.training.windows import Windows


@dataclass(frozen=True)
class Workload:
    """A micro-batch: as it is forwarded, and as data.batch_size and data.max_length count it.

    length: positions of a row. targets: tokens of all rows whose logits are needed. batch_size: rows of the
    data, of which a pair is one and forwards two. max_length: tokens of the longest of them, a prompt with
    its longer answer.

    Rows that stand end to end count as rows of their mean length: each attends only to itself.
    """

    rows: int
    length: int
    targets: int
    batch_size: int
    max_length: int

    @property
    def positions(self) -> int:
        """Positions forwarded."""
        return self.rows * self.length

    def at(self, length: int, rows: int = 0) -> "Workload":
        """Returns it with rows of another length, or another number of them, as large a share trained on."""
        rows = rows or self.rows
        targets = max(round(self.targets * rows * length / self.positions), 1)
        return Workload(rows, length, targets, self.batch_size_of(rows), self.max_length_of(length))

    def batch_size_of(self, rows: int) -> int:
        """Returns the data.batch_size that forwards at most so many rows like these; 0: none."""
        return rows * self.batch_size // self.rows

    def max_length_of(self, length: int) -> int:
        """Returns the data.max_length with which rows like these forward at most so many positions; 0: none.

        Longer rows have longer answers too; but where one is cut, its prompt gives way, which a pair whose
        answers share it forwards once.
        """
        in_proportion = 1 + (self.max_length - 1) * length // self.length
        return max(min(in_proportion, self.max_length - self.length + length), 0)

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        return f"{rows} of {self.length:,} positions, {self.targets:,} trained on"


def workload(objective: Objective, batch: Sequence[Row]) -> Workload:
    """Returns what a micro-batch of these rows is."""
    bare: list[Any] = [
        replace(row, ref_logps=(0.0, 0.0)) if hasattr(row, "ref_logps") else row for row in batch
    ]
    counts = objective.counts(bare) | {"kl": 0.0}
    prepared = objective.prepare(bare, counts)
    rows = len(bare) if objective.arranger.layout != "padded" else prepared.inputs["tokens"].shape[0]
    length = -(-prepared.num_positions // rows)
    longest = max(row.length for row in batch)
    return Workload(rows, length, prepared.inputs["index"].shape[0], len(batch), longest)


def longest_batch(windows: Windows) -> list[Row]:
    """Returns the rows of the largest micro-batch that there can be."""
    return [windows.rows[place] for place in windows.order.longest()]


def median_batch(windows: Windows) -> list[Row]:
    """Returns the rows of the micro-batch of the first epoch that half of all are no larger than."""
    batches = [[windows.rows[place] for place in batch] for batch in windows.order.epoch(0)]
    batches.sort(key=lambda batch: len(batch) * max(row.num_tokens for row in batch))
    return batches[len(batches) // 2]
