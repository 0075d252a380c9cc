"""Recurrent layers by pieces: where a row is cut, and what each run starts from."""

import mlx.core as mx
import pytest

from mlxft.layouts.pieces import Layout, Piece, padded
from mlxft.layouts.recurrent import Run, TrainingSSMCache, by_runs, runs
from tests.devices import SLACK

# A prompt of 6 with branches of 3, 4 and 4, another of 2 with branches of 1 and 4, and a row of its own.
SHARED = Layout(
    29,
    (
        Piece(0, 9, ((0, 9),), 0),
        Piece(9, 13, ((0, 6), (9, 13)), 6),
        Piece(13, 17, ((0, 6), (13, 17)), 6),
        Piece(17, 20, ((17, 20),), 0),
        Piece(20, 24, ((17, 19), (20, 24)), 2),
        Piece(24, 29, ((24, 29),), 0),
    ),
)
LOGICAL = [
    [*range(9)],
    [*range(6), *range(9, 13)],
    [*range(6), *range(13, 17)],
    [*range(17, 20)],
    [17, 18, *range(20, 24)],
    [*range(24, 29)],
]


class Smoothing:
    """A recurrent layer of two states: y[t] = decay * y[t - 1] + x[t] + x[t - 2]."""

    def __init__(self):
        self.decay = mx.array([0.9, 0.5, -0.7])
        self.calls = []

    def __call__(self, x, mask, cache):
        self.calls.append(x.shape)
        assert mask is None
        before = cache[0] if cache is not None and cache[0] is not None else mx.zeros((x.shape[0], 2, 3))
        y = cache[1] if cache is not None and cache[1] is not None else mx.zeros((x.shape[0], 3))
        seen = mx.concatenate([before, x], axis=1)
        outputs = []
        for t in range(x.shape[1]):
            y = self.decay * y + x[:, t] + seen[:, t]
            outputs.append(y)
        if cache is not None:
            cache[0], cache[1] = seen[:, -2:], y
            cache.advance(x.shape[1])
        return mx.stack(outputs, axis=1)


def test_a_row_is_cut_where_pieces_begin_and_where_prompts_end():
    assert runs(SHARED) == (
        Run(0, 6, None), Run(6, 9, 0), Run(9, 13, 0), Run(13, 17, 0),
        Run(17, 19, None), Run(19, 20, 4), Run(20, 24, 4), Run(24, 29, None),
    )  # fmt: skip
    assert runs(padded(5)) == (Run(0, 5, None),)


def test_a_branch_of_a_branch_starts_where_its_own_past_ends():
    tree = Layout(
        9,
        (
            Piece(0, 4, ((0, 4),), 0),
            Piece(4, 7, ((0, 2), (4, 7)), 2),
            Piece(7, 9, ((0, 2), (4, 6), (7, 9)), 4),
        ),
    )
    assert runs(tree) == (Run(0, 2, None), Run(2, 4, 0), Run(4, 6, 0), Run(6, 7, 2), Run(7, 9, 2))


def test_a_piece_that_sees_less_than_a_whole_past_has_no_state_to_start_from():
    odd = Layout(6, (Piece(0, 4, ((0, 4),), 0), Piece(4, 6, ((1, 3), (4, 6)), 2)))
    with pytest.raises(ValueError, match="no state for a piece that sees"):
        runs(odd)


@pytest.mark.parametrize("multiple", [1, 4])
def test_every_logical_row_gets_what_it_gets_alone(multiple):
    """Outputs and gradients; a prompt's gradient is the sum over its branches."""
    x, weight = (mx.random.normal((2, 29, 3), key=mx.random.key(n)) for n in range(2))
    layer = Smoothing()

    def together(x):
        return (by_runs(layer, x, SHARED, multiple) * weight).sum()

    def alone(x):
        total, seen = 0, set()
        for places in LOGICAL:
            row = mx.array(places)
            new = mx.array([place not in seen for place in places])  # a prompt's own outputs count once
            total += (layer(x[:, row], None, None) * weight[:, row] * new[:, None]).sum()
            seen.update(places)
        return total

    (value, gradient), (expected, expected_gradient) = (
        mx.value_and_grad(score)(x) for score in (together, alone)
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-5 * SLACK)
    assert mx.abs(gradient - expected_gradient).max().item() < 1e-5 * SLACK


def test_runs_of_one_length_that_start_alike_go_through_one_call():
    """Six runs that start afresh or after a prompt, of lengths 6, 2, 5 and then 3, 4, 4, 1, 4."""
    x = mx.random.normal((1, 29, 3), key=mx.random.key(0))
    layer = Smoothing()
    by_runs(layer, x, SHARED)
    assert layer.calls == [(1, 6, 3), (1, 2, 3), (1, 5, 3), (1, 3, 3), (3, 4, 3), (1, 1, 3)]
    layer.calls.clear()
    by_runs(layer, x, SHARED, 8)  # what ends a row is rounded up, a prompt's final state is not
    assert layer.calls == [(1, 6, 3), (1, 2, 3), (1, 8, 3), (5, 8, 3)]


def test_serving_caches_can_tell_a_training_cache():
    assert TrainingSSMCache().signature().startswith("train:")
