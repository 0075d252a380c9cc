"""Attention in blocks of queries against one call, and what it keeps in memory."""

import mlx.core as mx
import pytest

from mlxft.layouts import attention
from mlxft.layouts.attention import LayerAttention, attend
from mlxft.layouts.blocks import in_blocks
from mlxft.layouts.pieces import Layout, Piece, padded
from tests.devices import SLACK, cpu_figures

SCALE = 0.3


def arrays(num_queries, num_keys, rows=2, heads=4, key_heads=2, width=8):
    keys = mx.random.split(mx.random.key(num_queries), 5)
    q, weight = (mx.random.normal((rows, heads, num_queries, width), key=key) for key in keys[:2])
    k, v = (mx.random.normal((rows, key_heads, num_keys, width), key=key) for key in keys[2:4])
    return q, k, v, mx.random.normal((heads,), key=keys[4]), weight


def one_call(q, k, v, *sinks):
    given = sinks[0] if sinks else None
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask="causal", sinks=given)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_queries, num_keys, num_rows", [(20, 20, 6), (20, 20, 5), (7, 19, 3), (9, 9, 1)])
def test_blocks_give_the_outputs_and_gradients_of_one_call(num_queries, num_keys, num_rows, with_sinks):
    """Blocks that divide the queries and blocks that don't, keys before the first query, and sinks."""
    *given, sinks, weight = arrays(num_queries, num_keys)
    given = [*given, sinks] if with_sinks else given

    def blocks(q, k, v, *sinks):
        return in_blocks(one_call, q, k, v, sinks[0] if sinks else None, num_rows)

    def gradients(call):
        every = tuple(range(len(given)))
        return mx.value_and_grad(lambda *args: (call(*args) * weight).sum(), argnums=every)(*given)

    assert mx.abs(blocks(*given) - one_call(*given)).max().item() < 1e-6 * SLACK
    for one, other in zip(gradients(blocks)[1], gradients(one_call)[1], strict=True):
        assert mx.abs(one - other).max().item() < 1e-5 * SLACK


@pytest.mark.parametrize("window", [None, 5])
def test_rows_and_pieces_may_be_longer_than_a_block(window, monkeypatch):
    """Blocks of 4 queries, in a plain row and in a prompt with two branches."""
    pieces = Piece(0, 14, ((0, 14),), 0), Piece(14, 21, ((0, 9), (14, 21)), 9)
    for layout in (padded(21), Layout(21, pieces)):
        q, k, v, _, _ = arrays(21, 21)
        whole = attend(q, k, v, layout, LayerAttention(SCALE, window=window))
        monkeypatch.setattr(attention, "_SCORES_BYTES", dict.fromkeys(("cpu", "metal", "cuda"), 0))
        monkeypatch.setattr(attention, "_FEWEST_ROWS", 4)
        blocks = attend(q, k, v, layout, LayerAttention(SCALE, window=window))
        monkeypatch.undo()
        assert mx.abs(whole - blocks).max().item() < 1e-5 * SLACK


def peak_of_a_backward(length, window=None):
    """Bytes that attention of 4 heads takes beside its arguments."""
    keys = mx.random.split(mx.random.key(0), 3)
    q, k, v = (mx.random.normal((1, 4, length, 8), key=key) for key in keys)
    mx.eval(q, k, v)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    how = LayerAttention(SCALE, window)
    mx.eval(
        mx.grad(lambda q, k, v: attend(q, k, v, padded(length), how).square().sum(), argnums=(0, 1, 2))(
            q, k, v
        )
    )
    return mx.get_peak_memory() - before


@cpu_figures
def test_the_scores_of_all_blocks_never_exist_together():
    """4,096 positions: all scores of 4 heads would be 268 MB, several times; a block's are 8.4 MB."""
    assert peak_of_a_backward(4096) < 80e6


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_rows", [3, 6, 12])
@pytest.mark.parametrize("num_queries, num_keys, window", [(20, 20, 6), (20, 20, 1), (7, 31, 8), (30, 33, 4)])
def test_a_window_in_blocks_has_the_gradients_of_a_mask(
    num_queries, num_keys, window, num_rows, with_sinks, monkeypatch
):
    """Blocks shorter than the window, as long as it and of several; keys before the first query."""
    *given, sinks, weight = arrays(num_queries, num_keys)
    given = [*given, sinks] if with_sinks else given
    row, column = mx.arange(num_queries)[:, None] + (num_keys - num_queries), mx.arange(num_keys)[None]
    mask = (column <= row) & (column > row - window)

    def masked(q, k, v, *sinks):
        return attention._composed(q, k, v, mask, SCALE, sinks[0] if sinks else None)

    def blocks(q, k, v, *sinks):
        how = LayerAttention(SCALE, window, sinks[0] if sinks else None)
        return attention._windowed(q, k, v, how)

    def gradients(call):
        every = tuple(range(len(given)))
        return mx.value_and_grad(lambda *args: (call(*args) * weight).sum(), argnums=every)(*given)

    # As many bytes as that many queries take, of two rows with four heads and two windows.
    taken = num_rows * 4 * 2 * 4 * 2 * window
    monkeypatch.setattr(attention, "_SCORES_BYTES", dict.fromkeys(("cpu", "metal", "cuda"), taken))
    monkeypatch.setattr(attention, "_FEWEST_ROWS", 1)
    assert mx.abs(blocks(*given) - masked(*given)).max().item() < 1e-6 * SLACK
    for one, other in zip(gradients(blocks)[1], gradients(masked)[1], strict=True):
        assert mx.abs(one - other).max().item() < 1e-5 * SLACK


@cpu_figures
def test_the_scores_of_all_windows_never_exist_together():
    """4,096 positions, window 1,024: two windows of scores for each, of 4 heads, would be 134 MB, several
    times; a block's are 8.4 MB."""
    assert peak_of_a_backward(4096, 1024) < 80e6
