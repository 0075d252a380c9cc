"""The check of a decoder view at load: its logits are the model's own, in every layout.

A prompt with two branches, one of which forwards a single token, goes through the model's own code row by
row, then through the view in each layout; again with sliding windows shorter than the rows, where the
model has any, since real ones are thousands of positions.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlxft.errors import InputError
from mlxft.layouts.arrange import Arranger, Group
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.pieces import padded
from mlxft.models.asked import logits_with_windows

# Largest difference of logits, root mean square over that of the logits, by the type of the hidden states.
# The view runs the same modules: only sums come in another order, of rows of another length.
TOLERANCE = {mx.float32: 1e-4, mx.bfloat16: 5e-2, mx.float16: 1e-2}

_PROMPT, _BRANCHES, _WINDOW = 6, (2, 7), 4


def check(made) -> None:
    """Compares the view's logits with the model's own; what fails in a layout but padded is refused.

    Raises: InputError naming the family if the padded layout fails, or the model does not run in parts.
    """
    group = _group(made)
    try:
        _compare(made, group, "plainly", made.model)
        if any(size is not None for size in made.windows()):
            with made.window_lowered(_WINDOW):
                _compare(made, group, f"with sliding windows of {_WINDOW}", _with_short_windows(made))
    except InputError:
        raise
    except Exception as error:  # code of a family that nobody here has seen
        raise InputError(
            f"models of type {made.family!r} cannot be trained yet: their code does not run layer by layer "
            f"({type(error).__name__}: {error})"
        ) from error


def halves_agree(made, index: int) -> bool:
    """Returns whether a layer's two halves, one after the other, give what the layer gives."""
    embedded = made.embed(mx.zeros((1, 1), mx.int32))[0]
    hidden = mx.random.normal((1, _PROMPT, embedded.shape[-1]), key=mx.random.key(0)).astype(embedded.dtype)
    cache = TrainingCache(padded(_PROMPT))
    with made.active():
        expected = made.run((hidden,), index, index + 1, cache)[0]
        found = made.run_half(made.run_half(hidden, index, "attention", cache), index, "mlp", cache)
    return _difference(found, expected) <= TOLERANCE.get(found.dtype, TOLERANCE[mx.float32])


def _group(made) -> Group:
    tokens = np.random.default_rng(0).integers(0, made.vocabulary, _PROMPT + sum(_BRANCHES)).astype(np.int32)
    prompt, *branches = np.split(tokens, [_PROMPT, _PROMPT + _BRANCHES[0]])
    return Group(prompt, tuple(branches))


def _with_short_windows(made) -> Callable:
    return lambda tokens: logits_with_windows(made.model, tokens, made.num_layers, _WINDOW)


def _compare(made, group: Group, how: str, own: Callable) -> None:
    """Compares all layouts with `own`, the model's own forward of one row."""
    rows = [np.concatenate([group.prompt, branch])[:-1] for branch in group.branches]
    expected = mx.concatenate([own(mx.array(row[None]))[0] for row in rows])
    if not mx.isfinite(expected).all().item():
        raise InputError(
            "the model's own logits are not finite: its weights hold nan or inf, or model.dtype is too "
            "narrow for them. Take another copy of the model, or model.dtype=float32"
        )
    for layout in ("padded", *sorted(made.layouts - {"padded"})):
        found = _logits(made, group, layout)
        difference = _difference(found, expected)
        limit = TOLERANCE.get(found.dtype, TOLERANCE[mx.float32])
        if difference <= limit:
            continue
        what = f"run {how}, this one's logits differ by {difference:.1e} (at most {limit:.0e} is rounding)"
        if layout == "padded":
            raise InputError(f"models of type {made.family!r} cannot be trained yet: layer by layer, {what}")
        made.refused[layout] = what


def _logits(made, group: Group, layout: str) -> mx.array:
    """Returns the view's logits (M, V) at the logical positions of each row in turn."""
    arranged = Arranger(layout)([group])
    with made.active():
        state = made.embed(mx.array(arranged.tokens))
        state = made.run(state, 0, made.num_layers, TrainingCache(arranged.layout))
        hidden = made.finish(state)
        hidden = hidden.reshape(-1, hidden.shape[-1])[mx.array(np.concatenate(arranged.places))]
        return made.head({}, hidden)


def _difference(found: mx.array, expected: mx.array) -> float:
    """Returns the root mean square of the difference over that of the logits, what softmax drops left out."""
    found, expected = (
        x.astype(mx.float32) - x.astype(mx.float32).mean(-1, keepdims=True) for x in (found, expected)
    )
    return (mx.linalg.norm(found - expected) / mx.maximum(mx.linalg.norm(expected), 1e-6)).item()
