"""The gated delta rule by chunks against mlx-lm's loop over time and MLX's own, with gradients."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops, normalize_qk

from mlxft.layouts.gated_delta import GatedDelta, gated_delta, in_chunks, inverse
from tests.devices import SLACK


def arrays_of(length, alike=False):
    """Queries, keys, values, log decay and beta, two rows, and a state to start from.

    alike: keys all but the same and kept whole, the triangular systems furthest from the identity.
    """
    keys = mx.random.split(mx.random.key(length), 6)
    q, k = (mx.random.normal((2, length, 2, 16), key=key) for key in keys[:2])
    if alike:
        k = k[:, :1] + 1e-3 * k
    q, k = normalize_qk(q, k, inv_scale=0.25, eps=1e-6)
    v = mx.random.normal((2, length, 4, 8), key=keys[2])
    decay, beta = (
        mx.random.uniform(0.999 if alike else 0.3, 1.0, (2, length, 4), key=key) for key in keys[3:5]
    )
    return q, k, v, mx.log(decay), beta, mx.random.normal((2, 4, 8, 16), key=keys[5])


def scored(rule, arrays):
    """A random sum of outputs and final state, and its gradient with respect to every array."""

    def score(*arrays):
        out, state = rule(*arrays)
        weights = (mx.random.normal(x.shape, key=mx.random.key(n)) for n, x in enumerate((out, state)))
        return sum((x * weight).sum() for x, weight in zip((out, state), weights, strict=True))

    return mx.value_and_grad(score, argnums=tuple(range(len(arrays))))(*arrays)


def with_decay(rule):
    return lambda q, k, v, log_decay, beta, state: rule(q, k, v, mx.exp(log_decay), beta, state)


@pytest.mark.parametrize("theirs", [gated_delta_ops, mx.fast.gated_delta_update])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("length", [1, 16, 33, 48, 64, 65, 150])
def test_chunks_equal_a_loop_over_time(length, alike, theirs):
    """Outputs, final state and all six gradients; rows shorter than, equal to and longer than a chunk."""
    arrays = arrays_of(length, alike)
    for one, other in zip(in_chunks(*arrays), with_decay(theirs)(*arrays), strict=True):
        assert mx.abs(one - other).max().item() <= 1e-5 * SLACK * mx.abs(other).max().item()
    value, gradients = scored(in_chunks, arrays)
    expected, expected_gradients = scored(with_decay(theirs), arrays)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5 * SLACK, abs=1e-4)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-5 * SLACK * mx.abs(other).max().item()


def test_a_row_in_two_parts_goes_on_from_the_state_of_the_first():
    *arrays, state = arrays_of(40)
    out, end = gated_delta(*arrays, state)
    first, middle = gated_delta(*(x[:, :23] for x in arrays), state)
    second, last = gated_delta(*(x[:, 23:] for x in arrays), middle)
    assert mx.abs(mx.concatenate([first, second], axis=1) - out).max().item() < 1e-5 * SLACK
    assert mx.abs(last - end).max().item() < 1e-5 * SLACK


def test_without_a_state_the_rule_starts_from_zero():
    *arrays, state = arrays_of(5)
    for one, other in zip(gated_delta(*arrays), gated_delta(*arrays, mx.zeros_like(state)), strict=True):
        assert mx.array_equal(one, other)


def test_a_decay_too_small_for_float32_forgets_and_leaves_no_nan():
    """exp(-200) is 0 in float32: the step after it starts from nothing, and gradients stay finite."""
    q, k, v, log_decay, beta, state = arrays_of(20)
    log_decay = mx.where(mx.arange(20)[None, :, None] == 9, -200.0, log_decay)
    out, _ = in_chunks(q, k, v, log_decay, beta, state)
    fresh, _ = gated_delta(*(x[:, 9:] for x in (q, k, v, log_decay, beta)))
    assert mx.abs(out[:, 9:] - fresh).max().item() < 1e-5 * SLACK
    _, gradients = scored(in_chunks, (q, k, v, log_decay, beta, state))
    assert all(mx.isfinite(gradient).all() for gradient in gradients)


def test_the_inverse_of_a_triangle_times_the_triangle_is_the_identity():
    lower = mx.tril(mx.random.uniform(-0.3, 0.3, (3, 64, 64), key=mx.random.key(0)), -1)
    product = inverse(lower) @ (mx.eye(64) + lower)
    assert mx.abs(product - mx.eye(64)).max().item() < 1e-4 * SLACK


def test_memory_grows_with_the_row_by_a_state_a_chunk_not_a_step():
    """From 64 to 256 steps 6 MB more, three states among them; a loop over time, a state a step, takes 52."""

    def peak(length):
        arrays = [mx.zeros((1, length, 2, 128))] * 3 + [mx.zeros((1, length, 2))] * 2
        mx.eval(arrays)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(lambda *a: gated_delta(*a)[0].sum(), argnums=(0, 1, 2, 3, 4))(*arrays))
        return mx.get_peak_memory() - before

    assert peak(256) - peak(64) < 12 * 2**20


def test_it_stands_for_mlx_lms_function_with_its_arguments():
    """decay = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b)."""
    q, k, v, a, b, state = arrays_of(6)
    a_log, bias = mx.array([0.1, -0.3, 0.5, 0.0]), mx.array([0.2, 0.0, -1.0, 1.0])
    out, end = GatedDelta(None)(q, k, v, a, b, a_log, bias, state, use_kernel=False)
    expected, expected_end = gated_delta_ops(q, k, v, compute_g(a_log, a, bias), nn.sigmoid(b), state)
    assert mx.abs(out - expected).max().item() < 1e-5 * SLACK
    assert mx.abs(end - expected_end).max().item() < 1e-5 * SLACK


def test_what_it_does_not_do_is_left_to_the_original_without_its_kernel():
    calls = []
    rule = GatedDelta(lambda *arrays, **how: calls.append(how))
    q, k, v, a, b, state = arrays_of(3)
    a_log = bias = mx.zeros(4)
    rule(q, k, v, a, b, a_log, bias, state, mx.ones((2, 3), mx.bool_), use_kernel=True)
    rule(q, k, v, a, b, a_log, bias, state, lower_bound=-5.0)
    rule(q, k, v, mx.expand_dims(a, -1), b, a_log, bias, state)
    assert calls == [{"use_kernel": False}, {"use_kernel": False, "lower_bound": -5.0}, {"use_kernel": False}]
