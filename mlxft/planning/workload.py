"""What a run forwards at once, in numbers: rows, their length, tokens that are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxft.training.objectives.common import Objective, Row
from mlxft.training.windows import Windows


@dataclass(frozen=True)
class Workload:
    """A micro-batch. length: positions of a row. targets: tokens of all rows whose logits are needed.

    Rows that stand end to end count as rows of their mean length: each attends only to itself.
    """

    rows: int
    length: int
    targets: int

    @property
    def positions(self) -> int:
        """Positions forwarded."""
        return self.rows * self.length

    def at(self, length: int, rows: int = 0) -> "Workload":
        """Returns it with rows of another length, or another number of them, as large a share trained on."""
        rows = rows or self.rows
        return Workload(rows, length, max(round(self.targets * rows * length / self.positions), 1))

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
    return Workload(rows, length, prepared.inputs["index"].shape[0])


def longest_batch(windows: Windows) -> list[Row]:
    """Returns the rows of the largest micro-batch that there can be."""
    return [windows.rows[place] for place in windows.order.longest()]


def median_batch(windows: Windows) -> list[Row]:
    """Returns the rows of the micro-batch of the first epoch that half of all are no larger than."""
    batches = [[windows.rows[place] for place in batch] for batch in windows.order.epoch(0)]
    batches.sort(key=lambda batch: len(batch) * max(row.num_tokens for row in batch))
    return batches[len(batches) // 2]
