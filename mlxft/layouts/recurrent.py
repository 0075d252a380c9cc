"""Recurrent layers by pieces: a packed row starts afresh, a branch goes on from its prompt's final state.

A recurrent layer carries a state along the row (a convolution's last inputs, a matrix of keys and values).
The row is cut into runs: where a piece begins, and where a prompt that another piece continues ends. The
layer is called run by run, the unmodified code of mlx-lm each time; runs of one length that start alike go
through one call. States stay in the graph of this forward and are gone with it.

Shapes: B rows, T positions, H width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Optional

import mlx.core as mx

from mlxft.layouts.pieces import Layout


@dataclass(frozen=True)
class Run:
    """Positions [start, stop) of the row. after: number of the run whose final state it starts from."""

    start: int
    stop: int
    after: Optional[int]


class TrainingSSMCache:
    """The states of one call of a recurrent layer: those to start from, then those it ended with."""

    lengths = None  # nothing is padded on the left, and what pads on the right is read by nobody
    left_padding = None

    def __init__(self, states: Optional[list[mx.array]] = None):
        self.states = dict(enumerate(states or []))

    def __getitem__(self, number: int) -> Optional[mx.array]:
        return self.states.get(number)

    def __setitem__(self, number: int, state: mx.array) -> None:
        self.states[number] = state

    def advance(self, num_positions: int) -> None:
        """Called by layers after each forward; where the row stands is the layout's to know."""

    def signature(self) -> str:
        """Returns a name that serving caches refuse: nothing here may outlive a forward."""
        return "train:states"


def runs(layout: Layout) -> tuple[Run, ...]:
    """Returns the runs of a row, each after the run it starts from.

    Raises: ValueError for a piece that sees what is not the whole past of a position.
    """
    ends = {piece.keys[-2][1] for piece in layout.pieces if len(piece.keys) > 1}
    starts = {piece.start: piece for piece in layout.pieces}
    edges = sorted({*starts, *ends, layout.length})
    made: list[Run] = []
    for start, stop in pairwise(edges):
        piece = starts.get(start)
        if piece is None:  # a prompt ended here: its own piece goes on
            after = len(made) - 1
        elif len(piece.keys) == 1:
            after = None
        else:
            _check_past(layout, piece.keys[:-1])
            after = next(n for n, run in enumerate(made) if run.stop == piece.keys[-2][1])
        made.append(Run(start, stop, after))
    return tuple(made)


def _check_past(layout: Layout, seen: tuple[tuple[int, int], ...]) -> None:
    end = seen[-1][1]
    owner = next(piece for piece in layout.pieces if piece.start < end <= piece.stop)
    if seen != (*owner.keys[:-1], (owner.start, end)):
        raise ValueError(f"a recurrent layer has no state for a piece that sees {seen}")


def by_runs(call: Callable, x: mx.array, layout: Layout, multiple: int = 1) -> mx.array:
    """Returns a recurrent layer's output (B, T, H) for x (B, T, H), each piece from where it starts.

    call(x, mask, cache): the layer. multiple: runs that nobody continues are rounded up to it in length,
    so that more of them are alike.
    """
    todo = runs(layout)
    parts = mx.split(x, [run.start for run in todo[1:]], axis=1)
    continued = {run.after for run in todo}
    outputs: list[mx.array] = [None] * len(todo)
    states: dict[int, list[mx.array]] = {}
    waiting = list(range(len(todo)))
    while waiting:
        ready = [n for n in waiting if todo[n].after is None or todo[n].after in states]
        for length, numbers in _alike(todo, ready, continued, multiple).items():
            starts = [states.get(todo[n].after) for n in numbers]
            made, ended = _one_call(call, [parts[n] for n in numbers], starts, length[0])
            for place, number in enumerate(numbers):
                outputs[number] = made[place][:, : todo[number].stop - todo[number].start]
                if number in continued:
                    states[number] = [state[place] for state in ended]
        waiting = [n for n in waiting if n not in ready]
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)


def _alike(todo, ready, continued, multiple: int) -> dict[tuple[int, bool], list[int]]:
    """Returns the runs that are ready, by the length to call them with and whether they start afresh."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for number in ready:
        length = todo[number].stop - todo[number].start
        if number not in continued:
            length = -(-length // multiple) * multiple
        groups.setdefault((length, todo[number].after is None), []).append(number)
    return groups


def _one_call(call: Callable, parts: list[mx.array], starts: list, length: int):
    """Returns the parts' outputs, and for each state of the layer the parts' final ones."""
    padded = [mx.pad(part, [(0, 0), (0, length - part.shape[1]), (0, 0)]) for part in parts]
    first = None if starts[0] is None else [mx.concatenate(states) for states in zip(*starts, strict=True)]
    cache = TrainingSSMCache(first)
    made = call(mx.concatenate(padded), None, cache)
    ended = [mx.split(cache.states[n], len(parts)) for n in sorted(cache.states)]
    return mx.split(made, len(parts)), ended
