"""Validation: the same rows in the same order every time, without dropout, without changing anything."""

from typing import Any, Sequence

from mlxft.data.batches import BatchOrder, collate
from mlxft.data.example import Batch, Example
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import hidden_states, trained_head
from mlxft.training.objectives import Sft


def fixed_batches(
    examples: Sequence[Example], batch_size: int, pad_id: int, multiple: int = 1
) -> list[Batch]:
    """Returns the rows in batches of neighbours by length, each row once, the last batch smaller."""
    by_length = sorted(examples, key=lambda example: len(example.tokens))
    order = BatchOrder([len(example.tokens) for example in by_length], batch_size, shuffle=False, seed=0)
    return [collate([by_length[i] for i in rows], pad_id, multiple) for rows in order.epoch(0)]


def validate(
    view: DecoderView, objective: Sft, batches: Sequence[Batch], multiple: int = 1
) -> dict[str, Any]:
    """Returns {"loss": mean over all supervised tokens, in nats, "tokens": their number}."""
    counts = {"tokens": sum(batch.num_supervised for batch in batches)}
    loss = 0.0
    with view.active():
        for batch in batches:
            inputs, layout = objective.inputs(batch, counts, multiple)
            hidden = hidden_states(view, inputs["tokens"], TrainingCache(layout))
            part, _ = objective.loss(trained_head(view), hidden, inputs)
            loss += part.item()
    return {"loss": loss, "tokens": counts["tokens"]}
