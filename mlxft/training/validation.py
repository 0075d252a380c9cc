"""Validation: the same rows in the same order every time, without dropout, without changing anything."""

from typing import Any, Sequence

from mlxft.data.batches import BatchOrder
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import head_loss, hidden_states, trained_head
from mlxft.training.objectives.common import Objective, Row


def fixed_batches(rows: Sequence[Row], batch_size: int) -> list[list[Row]]:
    """Returns the rows in batches of neighbours by length, each row once, the last batch smaller."""
    by_length = sorted(rows, key=lambda row: row.num_tokens)
    order = BatchOrder([row.num_tokens for row in by_length], batch_size, shuffle=False, seed=0)
    return [[by_length[i] for i in batch] for batch in order.epoch(0)]


def validate(view: DecoderView, objective: Objective, batches: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Returns {"loss", "tokens"} over all rows together, and the objective's own metrics."""
    batches, counts = objective.begin(batches, view)
    total: dict[str, float] = {"loss": 0.0}
    with view.active():
        for batch in batches:
            prepared = objective.prepare(batch, counts)
            hidden = hidden_states(view, prepared.inputs["tokens"], TrainingCache(prepared.layout))
            loss, metrics = head_loss(objective, trained_head(view), hidden, prepared.inputs)
            for name, value in ({"loss": loss} | metrics).items():
                total[name] = total.get(name, 0.0) + value.item()
    return total | {"tokens": int(counts["tokens"])}
