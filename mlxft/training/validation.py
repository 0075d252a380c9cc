"""Validation: the same rows in the same order every time, without dropout, without changing anything."""

from typing import Any, Sequence

from mlxft.data.batches import BatchOrder
from mlxft.data.example import Example
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView
from mlxft.segmented.gradients import hidden_states, trained_head
from mlxft.training.objectives import Sft


def fixed_batches(examples: Sequence[Example], batch_size: int) -> list[list[Example]]:
    """Returns the rows in batches of neighbours by length, each row once, the last batch smaller."""
    by_length = sorted(examples, key=lambda example: len(example.tokens))
    order = BatchOrder([len(example.tokens) for example in by_length], batch_size, shuffle=False, seed=0)
    return [[by_length[i] for i in rows] for rows in order.epoch(0)]


def validate(view: DecoderView, objective: Sft, batches: Sequence[Sequence[Example]]) -> dict[str, Any]:
    """Returns {"loss": mean over all supervised tokens, in nats, "tokens": their number}."""
    counts = {"tokens": sum(objective.counts(batch)["tokens"] for batch in batches)}
    loss = 0.0
    with view.active():
        for batch in batches:
            prepared = objective.prepare(batch, counts)
            hidden = hidden_states(view, prepared.inputs["tokens"], TrainingCache(prepared.layout))
            part, _ = objective.loss(trained_head(view), hidden, prepared.inputs)
            loss += part.item()
    return {"loss": loss, "tokens": counts["tokens"]}
