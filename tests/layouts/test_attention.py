"""Attention by pieces against attention with a boolean mask over the whole row."""

import mlx.core as mx
import numpy as np
import pytest

from mlxft.layouts.attention import LayerAttention, _causal_mask, _composed, attend
from mlxft.layouts.pieces import Layout, Piece, padded
from tests.devices import SLACK

SCALE = 0.35


def arrays(length, rows=2, heads=4, key_heads=2, width=8):
    keys = mx.random.split(mx.random.key(length), 3)
    return [
        mx.random.normal((rows, count, length, width), key=key)
        for count, key in zip((heads, key_heads, key_heads), keys, strict=True)
    ]


def masked_attention(q, k, v, allowed: np.ndarray):
    repeats = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    scores = mx.where(mx.array(allowed), (q @ k.swapaxes(-1, -2)) * SCALE, -1e30)
    return mx.softmax(scores, axis=-1) @ v


def causal(length, window=None):
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    return (j <= i) & (i - j < (window or length))


def shared_prompt(prompt, chosen, rejected, window=None):
    """The layout of [prompt; chosen; rejected] and what it must allow, by logical positions."""
    first = prompt + chosen
    length = first + rejected
    layout = Layout(
        length,
        (Piece(0, first, ((0, first),), 0), Piece(first, length, ((0, prompt), (first, length)), prompt)),
    )
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    allowed = (j <= i) & ((i < first) | (j < prompt) | (j >= first))
    logical = np.where(np.arange(length) < first, np.arange(length), np.arange(length) - chosen)
    return layout, allowed & (logical[:, None] - logical[None] < (window or length))


@pytest.mark.parametrize(
    "length, window", [(20, None), (20, 5), (20, 7), (23, 8), (9, 9), (10, 9), (5, 2), (7, 1)]
)
def test_windows_in_blocks_equal_a_mask(length, window):
    """Rows shorter than, equal to and no multiple of the window; outputs and all three gradients."""
    q, k, v = arrays(length)
    weight = mx.random.normal(q.shape, key=mx.random.key(9))

    def ours(q, k, v):
        return (attend(q, k, v, padded(length), LayerAttention(SCALE, window=window)) * weight).sum()

    def plain(q, k, v):
        return (masked_attention(q, k, v, causal(length, window)) * weight).sum()

    value, gradients = mx.value_and_grad(ours, argnums=(0, 1, 2))(q, k, v)
    expected, expected_gradients = mx.value_and_grad(plain, argnums=(0, 1, 2))(q, k, v)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5 * SLACK)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert mx.abs(one - other).max().item() < 1e-5 * SLACK


@pytest.mark.parametrize("window", [None, 3, 4, 10, 12])
def test_a_branch_sees_the_prompt_and_itself_at_logical_distances(window):
    layout, allowed = shared_prompt(9, 6, 8, window)
    q, k, v = arrays(layout.length, rows=1)
    out = attend(q, k, v, layout, LayerAttention(SCALE, window=window))
    assert mx.abs(out - masked_attention(q, k, v, allowed)).max().item() < 1e-5 * SLACK


@pytest.mark.parametrize("num_queries", [7, 4])
def test_the_composed_form_equals_the_fused_one(num_queries):
    """What `trainer.deterministic` uses on CUDA, with more keys than queries too."""
    q, k, v = arrays(7)
    q = q[:, :, 7 - num_queries :]
    fused = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal")
    composed = _composed(q, k, v, _causal_mask(num_queries, 7), SCALE, None)
    assert mx.abs(composed - fused).max().item() < 1e-5 * SLACK


def test_sinks_take_their_share_of_the_weight():
    """With a sink of the same score as the only key, half of the weight goes to it."""
    q = k = mx.zeros((1, 2, 1, 4))
    v = mx.ones((1, 2, 1, 4))
    out = _composed(q, k, v, mx.array([[True]]), 1.0, mx.zeros(2))
    assert out.flatten().tolist() == [0.5] * 8


def test_memory_of_a_window_grows_with_the_row_not_its_square():
    """Window 16: four times the row, four to six times the memory (a mask of the row would be 16 times)."""

    def peak(length):
        q, k, v = arrays(length, rows=1, heads=1, key_heads=1)
        mx.eval(q, k, v)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(attend(q, k, v, padded(length), LayerAttention(SCALE, window=16)))
        return mx.get_peak_memory() - before

    assert peak(4096) < 6 * peak(1024)


def test_pieces_must_cover_the_row_in_order():
    with pytest.raises(ValueError, match="cover"):
        Layout(5, (Piece(0, 4, ((0, 4),), 0),))
    with pytest.raises(ValueError, match="its own"):
        Layout(4, (Piece(0, 4, ((0, 3),), 0),))
