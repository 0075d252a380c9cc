"""Recurrent layers by pieces: where a row is cut, what a run starts from, the gated delta rule's gradient."""

import mlx.core as mx
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops, normalize_qk

from mlxft.layouts.pieces import Layout, Piece, padded
from mlxft.layouts.recurrent import GatedDelta, Run, TrainingSSMCache, by_runs, gated_delta, runs

SLACK = 1 if mx.default_device().type == mx.DeviceType.cpu else 10

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


def rule_arrays(length):
    """Queries, keys, values, decay and beta of the gated delta rule, two rows, and a state to start from."""
    keys = mx.random.split(mx.random.key(length), 6)
    q, k = (mx.random.normal((2, length, 2, 16), key=key) for key in keys[:2])
    q, k = normalize_qk(q, k, inv_scale=0.25, eps=1e-6)
    v = mx.random.normal((2, length, 4, 8), key=keys[2])
    decay, beta = (mx.random.uniform(0.3, 1.0, (2, length, 4), key=key) for key in keys[3:5])
    return q, k, v, decay, beta, mx.random.normal((2, 4, 8, 16), key=keys[5])


@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_the_gated_delta_rule_equals_mlx_lms_loop_over_time(length):
    """Outputs, final state and all six gradients, also where the loop is cut into blocks of 64 steps."""
    arrays = rule_arrays(length)
    out_weight = mx.random.normal((2, length, 4, 8), key=mx.random.key(1))
    state_weight = mx.random.normal((2, 4, 8, 16), key=mx.random.key(2))

    def scored(rule):
        def score(*arrays):
            out, state = rule(*arrays)
            return (out * out_weight).sum() + (state * state_weight).sum()

        return mx.value_and_grad(score, argnums=tuple(range(6)))(*arrays)

    value, gradients = scored(gated_delta)
    expected, expected_gradients = scored(gated_delta_ops)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5 * SLACK, abs=1e-4)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-5 * SLACK * mx.abs(other).max().item()


def test_without_a_state_the_gated_delta_rule_starts_from_zero():
    *arrays, state = rule_arrays(5)
    for one, other in zip(gated_delta(*arrays), gated_delta(*arrays, mx.zeros_like(state)), strict=True):
        assert mx.array_equal(one, other)


def test_what_the_differentiable_rule_does_not_do_is_left_to_the_original():
    """Masks, bounded gates and a gate for each entry of a key; the original's kernel has no gradient."""
    calls = []
    rule = GatedDelta(lambda *arrays, **how: calls.append(how))
    q, k, v, decay, beta, state = rule_arrays(3)
    a_log = bias = mx.zeros(4)
    rule(q, k, v, decay, beta, a_log, bias, state, mx.ones((2, 3), mx.bool_), use_kernel=True)
    rule(q, k, v, decay, beta, a_log, bias, state, lower_bound=-5.0)
    rule(q, k, v, mx.expand_dims(decay, -1), beta, a_log, bias, state)
    assert calls == [{"use_kernel": False}, {"use_kernel": False, "lower_bound": -5.0}, {"use_kernel": False}]
