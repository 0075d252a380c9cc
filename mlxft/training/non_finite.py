"""Where the first value that is not finite comes from, when a step had to be skipped."""

from collections.abc import Sequence
from typing import Any, Optional

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView
from mlxft.training.objectives.common import Objective, Prepared, Row, forward_logps


def first_non_finite(
    view: DecoderView, objective: Objective, batches: Sequence[Sequence[Row]], gradients: Any
) -> str:
    """Returns, in words, the first place with a value that is not finite: going forward, then backward.

    batches: the window's. gradients: what it gave, a tree. Dropout is off.
    """
    batches, counts = objective.begin(batches, view)
    for batch in batches:
        prepared = objective.prepare(batch, counts)
        place = _in_forward(view, objective, prepared)
        if place:
            rows = _names(batch)
            return f"In the forward of {rows} the first values that are not finite come out of {place}"
    spoilt = [name for name, array in tree_flatten(gradients) if not _is_finite(array)]
    if spoilt:  # the backward reaches the last layers first
        last = spoilt[-1]
        return f"The forward is finite, {len(spoilt)} gradients are not; the backward came to {last} first"
    return "Without dropout the forward is finite, and so are the gradients: their sum of squares is not"


def _in_forward(view: DecoderView, objective: Objective, prepared: Prepared) -> Optional[str]:
    cache, tokens = TrainingCache(prepared.layout), prepared.inputs["tokens"]
    with view.active():
        if view.in_parts:
            state = view.embed(tokens)
            if not _is_finite(*state):
                return "the embedding"
            for index in range(view.num_layers):
                state = view.run(state, index, index + 1, cache)
                if not _is_finite(*state):
                    return f"layer {index} of {view.num_layers} (counted from 0)"
            if not _is_finite(view.finish(state)):
                return "the last norm"
    logps = forward_logps(objective.head, view, prepared.inputs, prepared.layout)
    return None if _is_finite(logps) else "the head"


def _is_finite(*arrays: mx.array) -> bool:
    return all(mx.isfinite(array).all().item() for array in arrays)


def _names(batch: Sequence[Row]) -> str:
    first, *rest = [row.where or "a row" for row in batch]
    return f"{first} and {len(rest)} more" if rest else first
