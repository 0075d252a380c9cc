"""Pieces of one shape go through one call: the same numbers as one call a piece, fewer calls."""

from itertools import pairwise

import mlx.core as mx
import pytest

from mlxft.layouts import attention
from mlxft.layouts.attention import LayerAttention, attend
from mlxft.layouts.fold import Folding
from mlxft.layouts.pieces import Layout, Piece
from tests.devices import SLACK

SCALE = 0.35


def packed(*lengths) -> Layout:
    edges = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return Layout(edges[-1], tuple(Piece(a, b, ((a, b),), 0) for a, b in pairwise(edges)))


def shared(prompt, *branches) -> Layout:
    """A prompt with its first branch, then the others; the row ends with a piece of its own."""
    first = prompt + branches[0]
    pieces, stop = [Piece(0, first, ((0, first),), 0)], first
    for branch in branches[1:]:
        pieces.append(Piece(stop, stop + branch, ((0, prompt), (stop, stop + branch)), prompt))
        stop += branch
    pieces.append(Piece(stop, stop + 3, ((stop, stop + 3),), 0))
    return Layout(stop + 3, tuple(pieces))


LAYOUTS = {
    "all alike": packed(5, 5, 5),
    "some alike": packed(4, 7, 4, 1, 7),
    "branches": shared(6, 3, 4, 1, 4),
    "two prompts": Layout(
        14,
        (
            Piece(0, 5, ((0, 5),), 0),
            Piece(5, 7, ((0, 3), (5, 7)), 3),
            Piece(7, 12, ((7, 12),), 0),
            Piece(12, 14, ((7, 10), (12, 14)), 3),
        ),
    ),
}


def one_by_one(q, k, v, layout, window):
    """Attention of each piece in a call of its own."""
    outputs = []
    for piece in layout.pieces:
        keys, values = (mx.concatenate([x[:, :, a:b] for a, b in piece.keys], axis=2) for x in (k, v))
        how = LayerAttention(SCALE, window=window)
        outputs.append(attention._attend_one(q[:, :, piece.start : piece.stop], keys, values, how))
    return mx.concatenate(outputs, axis=2)


@pytest.mark.parametrize("long_piece, multiple", [(512, 1), (512, 8), (1, 1)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_folded_or_cut_pieces_give_what_each_gives_alone(name, window, long_piece, multiple, monkeypatch):
    """To the bit where nothing is rounded up; outputs and all three gradients, two rows, grouped heads."""
    monkeypatch.setattr(attention, "shape_multiple", lambda: multiple)
    monkeypatch.setattr(attention, "_LONG_PIECE", long_piece)
    layout = LAYOUTS[name]
    keys = mx.random.split(mx.random.key(1), 4)
    q, weight = (mx.random.normal((2, 4, layout.length, 8), key=key) for key in keys[:2])
    k, v = (mx.random.normal((2, 2, layout.length, 8), key=key) for key in keys[2:])

    def ours(q, k, v):
        return (attend(q, k, v, layout, LayerAttention(SCALE, window=window)) * weight).sum()

    def theirs(q, k, v):
        return (one_by_one(q, k, v, layout, window) * weight).sum()

    close = 0.0 if multiple == 1 and SLACK == 1 else 1e-5 * SLACK
    out = attend(q, k, v, layout, LayerAttention(SCALE, window=window))
    assert mx.abs(out - one_by_one(q, k, v, layout, window)).max().item() <= close
    expected = mx.grad(theirs, argnums=(0, 1, 2))(q, k, v)
    for one, other in zip(mx.grad(ours, argnums=(0, 1, 2))(q, k, v), expected, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-6 * SLACK


def test_pieces_are_grouped_by_queries_and_keys_before():
    """Rounded up to 4, the pieces of 4 and of 3 queries go together; those after a prompt do not."""
    assert [g.pieces for g in Folding(packed(4, 7, 4, 3)).groups] == [(0, 2), (1,), (3,)]
    assert [g.pieces for g in Folding(packed(4, 7, 4, 3), 4).groups] == [(0, 2, 3), (1,)]
    assert [g.pieces for g in Folding(shared(6, 3, 4, 1, 4)).groups] == [(0,), (1, 3), (2,), (4,)]


def test_many_short_pieces_cost_one_attention_call_a_shape(monkeypatch):
    calls = []
    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda *a, **k: calls.append(a[0].shape) or fused(*a, **k)
    )
    monkeypatch.setattr(attention, "shape_multiple", lambda: 1)
    layout = packed(*[5, 9] * 20)
    x = mx.random.normal((1, 2, layout.length, 8), key=mx.random.key(0))
    attend(x, x, x, layout, LayerAttention(SCALE))
    assert sorted(calls) == [(20, 2, 5, 8), (20, 2, 9, 8)]
