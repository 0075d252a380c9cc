"""Causal attention in blocks of queries, for backends whose own backward keeps scores of the whole row.

Each block sees the keys up to its last query. In the backward it is computed once more, and blocks are
made to wait for each other: only one block's scores exist at a time, and half of all are never made.

Shapes: B rows, N query heads, K key heads, Q queries, S >= Q keys, D head width.
"""

from collections.abc import Callable
from typing import Optional

import mlx.core as mx


def causal_in_blocks(attend: Callable, q, k, v, sinks: Optional[mx.array], num_rows: int) -> mx.array:
    """Returns the outputs (B, N, Q, D) of the last Q of S positions.

    attend(q, k, v, *sinks): causal attention aligned to the lower right. num_rows: queries of a block.
    """
    num_queries, before = q.shape[2], k.shape[2] - q.shape[2]
    spans = [(start, min(start + num_rows, num_queries)) for start in range(0, num_queries, num_rows)]

    @mx.custom_function
    def forward(q, k, v, *sinks):
        outputs: list[mx.array] = []
        for start, stop in spans:
            block = q[:, :, start:stop]
            if outputs:
                block = mx.depends(block, outputs[-1])
            outputs.append(attend(block, k[:, :, : before + stop], v[:, :, : before + stop], *sinks))
        return mx.concatenate(outputs, axis=2)

    @forward.vjp
    def backward(primals, d_out, _):
        q, k, v, *sinks = primals
        d_q, totals = [], []
        for start, stop in reversed(spans):  # the last block sees all keys
            seen = before + stop
            block = q[:, :, start:stop]
            if totals:
                block = mx.depends(block, [d_q[0], *totals])
            _, (own, *shared) = mx.vjp(
                attend, [block, k[:, :, :seen], v[:, :, :seen], *sinks], [d_out[:, :, start:stop]]
            )
            d_q.insert(0, own)
            totals = [_added(*pair) for pair in zip(totals, shared, strict=True)] if totals else shared
        return mx.concatenate(d_q, axis=2), *totals

    return forward(q, k, v, *(() if sinks is None else (sinks,)))


def _added(total: mx.array, part: mx.array) -> mx.array:
    """Adds what fewer keys (B, K, S', D) got to what all (B, K, S, D) did; sinks (N,) are always all."""
    if part.ndim < 4 or part.shape[2] == total.shape[2]:
        return total + part
    seen = part.shape[2]
    return mx.concatenate([total[:, :, :seen] + part, total[:, :, seen:]], axis=2)
