"""Attention in blocks of queries, for backends whose own backward keeps scores of the whole row.

Each block sees the keys up to its last query, of a sliding window those that its queries can see. In the
backward it is computed once more, and blocks are made to wait for each other: only one block's scores exist
at a time, and those that nobody sees are never made.

Shapes: B rows, N query heads, K key heads, Q queries, S >= Q keys, D head width.
"""

from collections.abc import Callable
from typing import Optional

import mlx.core as mx


def in_blocks(
    attend: Callable, q, k, v, sinks: Optional[mx.array], num_rows: int, window: Optional[int] = None
) -> mx.array:
    """Returns the outputs (B, N, Q, D) of the last Q of S positions.

    attend(q, k, v, *sinks): attention aligned to the lower right, causal or within a sliding `window`.
    num_rows: queries of a block.
    """
    num_queries, before = q.shape[2], k.shape[2] - q.shape[2]
    if window is not None and before >= window:  # nobody sees further back
        k, v = (x[:, :, before + 1 - window :] for x in (k, v))
        before = window - 1
    # Of queries, and of the keys that these see: [start, stop) from the first key on.
    blocks = []
    for start in range(0, num_queries, num_rows):
        stop = min(start + num_rows, num_queries)
        first = 0 if window is None else max(before + start + 1 - window, 0)
        blocks.append((slice(start, stop), slice(first, before + stop)))

    @mx.custom_function
    def forward(q, k, v, *sinks):
        outputs: list[mx.array] = []
        for queries, keys in blocks:
            block = q[:, :, queries]
            if outputs:
                block = mx.depends(block, outputs[-1])
            outputs.append(attend(block, k[:, :, keys], v[:, :, keys], *sinks))
        return mx.concatenate(outputs, axis=2)

    @forward.vjp
    def backward(primals, d_out, _):
        q, k, v, *sinks = primals
        d_q, d_k, d_v, d_sinks = [], _FromTheEnd(), _FromTheEnd(), None
        for queries, keys in reversed(blocks):
            block = q[:, :, queries]
            if d_q:
                block = mx.depends(block, [d_q[-1], *d_k.parts, *d_v.parts])
            _, (own, *of_keys) = mx.vjp(
                attend, [block, k[:, :, keys], v[:, :, keys], *sinks], [d_out[:, :, queries]]
            )
            d_q.append(own)
            d_k.add(of_keys[0], keys)
            d_v.add(of_keys[1], keys)
            if sinks:
                d_sinks = of_keys[2] if d_sinks is None else d_sinks + of_keys[2]
        of_sinks = () if d_sinks is None else (d_sinks,)
        return mx.concatenate(d_q[::-1], axis=2), d_k.whole(), d_v.whole(), *of_sinks

    return forward(q, k, v, *(() if sinks is None else (sinks,)))


class _FromTheEnd:
    """The sum of arrays (B, K, s, D) that belong to ranges of keys, later ranges first.

    Each begins and ends no later than the one before it. What lies behind its end is complete and kept as it
    is: nothing is added or copied twice.
    """

    def __init__(self):
        self._open: Optional[tuple[mx.array, int]] = None  # with its first key
        self._complete: list[mx.array] = []

    @property
    def parts(self) -> list[mx.array]:
        """What there is: to be waited for."""
        return [*self._complete[-1:], *([self._open[0]] if self._open else [])]

    def add(self, part: mx.array, keys: slice) -> None:
        """Adds the gradient of some keys."""
        if self._open is not None:
            later, first = self._open
            common = keys.stop - first
            self._complete.append(later[:, :, common:])
            alone = first - keys.start
            both = part[:, :, alone:] + later[:, :, :common]
            part = mx.concatenate([part[:, :, :alone], both], axis=2) if alone else both
        self._open = part, keys.start

    def whole(self) -> mx.array:
        """Returns the sum for all keys, from the first that any range has."""
        return mx.concatenate([self._open[0], *self._complete[::-1]], axis=2)
