"""Attention by pieces: causal calls without a mask array, linear in memory for sliding windows too.

Shapes: B rows, N query heads, K key heads, Q queries, S keys, D head width, W window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import mlx.core as mx

from mlxft.backend import backend, shape_multiple
from mlxft.layouts.blocks import in_blocks
from mlxft.layouts.fold import folding
from mlxft.layouts.pieces import Layout, Span

# cuDNN's backward is linear in memory only for query counts that are multiples of this (MLX 0.32.4,
# H200: 8,191 queries 30.6 ms and 6.8 GB, padded to 8,192 3.7 ms and 0.34 GB).
FAST_MULTIPLE = 128
FAST_HEAD_WIDTH = 128

# Of one block of queries. Small enough to stay near a CPU's caches, large enough to fill a GPU.
_SCORES_BYTES = {"cpu": 2**23, "metal": 2**28, "cuda": 2**30}
_FEWEST_ROWS = 32
_MOST_FUSED_ROWS = 32_768  # one fused call over 131,072 runs out of an H200's memory

# Pieces this long on average fill a device one by one; shorter ones are put into calls together.
_LONG_PIECE = 512


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends to what it sees.

    scale: of the scores. window: a query sees at most that many positions, itself included; None: all.
    sinks: (N,), scores that every query has beside those of its keys. repeatable: same bits every time,
    also where the backend's own backward is not.
    """

    scale: float
    window: Optional[int] = None
    sinks: Optional[mx.array] = None
    repeatable: bool = False


def attend(q, k, v, layout: Layout, how: LayerAttention) -> mx.array:
    """Returns the attention output (B, N, length, D) of queries that see what `layout` lets them.

    q: (B, N, length, D). k, v: (B, K, length, D).
    """
    if len(layout.pieces) == 1 and len(layout.pieces[0].keys) == 1:
        return _attend_one(q, k, v, how)
    if layout.length >= _LONG_PIECE * len(layout.pieces):
        return _attend_each(q, k, v, layout, how)
    folded = folding(layout, shape_multiple())
    groups = zip(folded.queries(q), folded.keys(k), folded.keys(v), strict=True)
    return folded.unfolded([_attend_one(*group, how) for group in groups])


def _attend_each(q, k, v, layout: Layout, how: LayerAttention) -> mx.array:
    """One call a piece.

    Cut and put together along the tokens of (B, length, heads, D), the order that projections have them in:
    whole runs of memory are copied.
    """
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    queries = mx.split(q, [piece.start for piece in layout.pieces[1:]], axis=1)
    keys_of = _gathering([_joined(piece.keys) for piece in layout.pieces])
    outputs = [
        _attend_one(*(x.swapaxes(1, 2) for x in part), how).swapaxes(1, 2)
        for part in zip(queries, keys_of(k), keys_of(v), strict=True)
    ]
    return mx.concatenate(outputs, axis=1).swapaxes(1, 2)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans, those that continue each other made one."""
    joined = [spans[0]]
    for start, stop in spans[1:]:
        if joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


def _gathering(spans_of: list[list[Span]]) -> Callable:
    """Returns x (B, length, K, D) -> what each piece sees, its spans end to end, (B, S, K, D) each.

    With a backward of its own: that of a slice is an array of zeros of the whole length, one a slice.
    """
    edges = sorted({edge for spans in spans_of for span in spans for edge in span})

    @mx.custom_function
    def gathered(x):
        cut = [[x[:, start:stop] for start, stop in spans] for spans in spans_of]
        return [parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1) for parts in cut]

    @gathered.vjp
    def backward(x, d_gathered, _):
        between = zip(edges[:-1], edges[1:], strict=True)
        return mx.concatenate([_summed(d_gathered, spans_of, *span) for span in between], axis=1)

    return gathered


def _summed(d_gathered: list[mx.array], spans_of: list[list[Span]], first: int, last: int) -> mx.array:
    """Returns the sum of what the pieces' gradients hold for [first, last), which no span begins within."""
    total = None
    for d_piece, spans in zip(d_gathered, spans_of, strict=True):
        place = 0
        for start, stop in spans:
            if start <= first and last <= stop:
                own = d_piece[:, place + first - start : place + last - start]
                total = own if total is None else total + own
            place += stop - start
    return total


def _attend_one(q, k, v, how: LayerAttention) -> mx.array:
    """Attention of the last Q of S positions, each seeing itself and what comes before."""
    if how.window is None or how.window >= k.shape[2]:
        return _causal(q, k, v, how)
    return _windowed(q, k, v, how)


def _causal(q, k, v, how: LayerAttention) -> mx.array:
    """Causal attention aligned to the lower right, in one call or, where that takes too much, in blocks."""

    def call(q, k, v, *sinks):
        given = sinks[0] if sinks else None
        if how.repeatable and backend() == "cuda":
            return _composed(q, k, v, _causal_mask(q.shape[2], k.shape[2]), how.scale, given)
        return _fused(q, k, v, how.scale, given)

    most = _most_rows(q, k, how.repeatable)
    if q.shape[2] > most:
        return in_blocks(call, q, k, v, how.sinks, most)
    return call(q, k, v, *(() if how.sinks is None else (how.sinks,)))


def _fused(q, k, v, scale, sinks) -> mx.array:
    extra = -q.shape[2] % FAST_MULTIPLE if _has_linear_backward(q) else 0
    if not extra:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=sinks)
    # The same number of queries and keys at the end keeps the alignment, and no real query sees them.
    pad = [(0, 0), (0, 0), (0, extra), (0, 0)]
    out = mx.fast.scaled_dot_product_attention(
        mx.pad(q, pad), mx.pad(k, pad), mx.pad(v, pad), scale=scale, mask="causal", sinks=sinks
    )
    return out[:, :, : q.shape[2]]


def _has_linear_backward(q: mx.array) -> bool:
    """True where the backend's own backward is linear in memory, given a multiple of queries."""
    return backend() == "cuda" and q.dtype != mx.float32 and q.shape[-1] <= FAST_HEAD_WIDTH


def _most_rows(q, k, repeatable: bool) -> int:
    """Returns how many queries go through one call at most."""
    if _has_linear_backward(q) and not repeatable:
        return _MOST_FUSED_ROWS
    row_bytes = 4 * q.shape[0] * q.shape[1] * k.shape[2]
    return max(_SCORES_BYTES[backend()] // row_bytes, _FEWEST_ROWS)


def scores_bytes() -> int:
    """Returns the most bytes of a block's scores, in float32, where it has more than the fewest rows."""
    return _SCORES_BYTES[backend()]


def _causal_mask(num_queries: int, num_keys: int) -> mx.array:
    row = mx.arange(num_queries)[:, None] + (num_keys - num_queries)
    return mx.arange(num_keys)[None] <= row


def queries_in_windows(rows: int, num_heads: int, window: int) -> int:
    """Returns how many queries with a sliding window go through one call at most, of so many rows."""
    most = max(_SCORES_BYTES[backend()] // (4 * rows * num_heads * 2 * window), _FEWEST_ROWS)
    return most - most % window if most > window else most


def _windowed(q, k, v, how: LayerAttention) -> mx.array:
    """Causal within a sliding window, at once or, where that takes too much, in blocks."""

    def call(q, k, v, *sinks):
        return _in_windows(q, k, v, replace(how, sinks=sinks[0] if sinks else None))

    most = queries_in_windows(q.shape[0], q.shape[1], how.window)
    if q.shape[2] > most:
        return in_blocks(call, q, k, v, how.sinks, most, how.window)
    return _in_windows(q, k, v, how)


def _in_windows(q, k, v, how: LayerAttention) -> mx.array:
    """Every W queries against two windows of keys.

    All but the first W have the same mask (W, 2W) and go through one call.
    """
    window, num_queries, before = how.window, q.shape[2], k.shape[2] - q.shape[2]
    if before > window:  # nobody sees further back
        k, v = k[:, :, before - window :], v[:, :, before - window :]
        before = window
    first = min(window, num_queries)
    out = _first_block(q[:, :, :first], k[:, :, : before + first], v[:, :, : before + first], how)
    if first == num_queries:
        return out
    rest = _later_blocks(q[:, :, first:], k[:, :, before:], v[:, :, before:], how)
    return mx.concatenate([out, rest], axis=2)


def _first_block(q, k, v, how: LayerAttention) -> mx.array:
    if k.shape[2] <= how.window:
        return _causal(q, k, v, how)
    row = mx.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    column = mx.arange(k.shape[2])[None]
    return _masked(q, k, v, (column <= row) & (column > row - how.window), how)


def _later_blocks(q, k, v, how: LayerAttention) -> mx.array:
    """q: (B, N, Q, D), the queries after the first W; k, v: (B, K, W + Q, D), from the block before on."""
    window, rows, num_queries = how.window, q.shape[0], q.shape[2]
    pad = [(0, 0), (0, 0), (0, -num_queries % window), (0, 0)]
    q, k, v = (mx.pad(x, pad) for x in (q, k, v))
    blocks = q.shape[2] // window
    q = _fold(_split(q, window), rows * blocks)
    k, v = (
        _fold(mx.concatenate([s[:, :, :-1], s[:, :, 1:]], axis=3), rows * blocks)
        for s in (_split(k, window), _split(v, window))
    )
    row, column = mx.arange(window)[:, None], mx.arange(2 * window)[None]
    out = _masked(q, k, v, (column > row) & (column <= row + window), how)
    out = out.reshape(rows, blocks, *out.shape[1:]).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, out.shape[1], -1, out.shape[-1])[:, :, :num_queries]


def _split(x: mx.array, window: int) -> mx.array:
    """(B, heads, blocks * W, D) -> (B, heads, blocks, W, D)"""
    return x.reshape(*x.shape[:2], -1, window, x.shape[-1])


def _fold(x: mx.array, rows: int) -> mx.array:
    """(B, heads, blocks, length, D) -> (B * blocks, heads, length, D)"""
    return x.transpose(0, 2, 1, 3, 4).reshape(rows, x.shape[1], *x.shape[3:])


def _masked(q, k, v, mask: mx.array, how: LayerAttention) -> mx.array:
    if how.repeatable and backend() == "cuda":
        return _composed(q, k, v, mask, how.scale, how.sinks)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=how.scale, mask=mask, sinks=how.sinks)


def _composed(q, k, v, mask, scale, sinks) -> mx.array:
    """Attention from products and a softmax, whose backward gives the same bits every time."""
    batch, heads, num_queries, width = q.shape
    groups = k.shape[1]
    q = (q * scale).reshape(batch, groups, heads // groups, num_queries, width)
    scores = (q @ mx.expand_dims(k, 2).swapaxes(-1, -2)).astype(mx.float32)
    scores = mx.where(mask, scores, mx.finfo(mx.float32).min)
    if sinks is None:
        weights = mx.softmax(scores, axis=-1)
    else:
        sink = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, groups, -1, 1, 1), (*scores.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([sink, scores], axis=-1), axis=-1)[..., 1:]
    out = weights.astype(v.dtype) @ mx.expand_dims(v, 2)
    return out.reshape(batch, heads, num_queries, width)
