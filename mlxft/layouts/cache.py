"""The stateless cache that a training forward passes to every layer in place of a key-value cache."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import mlx.core as mx
import numpy as np

from mlxft.backend import shape_multiple
from mlxft.layouts.attention import LayerAttention, attend
from mlxft.layouts.pieces import Layout
from mlxft.layouts.recurrent import by_runs


@dataclass(frozen=True)
class Window:
    """What a layer gets as its mask: the number of positions a query sees, None for all."""

    size: Optional[int] = None


@dataclass(frozen=True)
class Positions:
    """What RoPE gets as its offset when a row is more than one run of positions from 0.

    As an array, which some models make of their offset, it is one position a token, (T,).
    """

    layout: Layout

    def __mlx_array__(self) -> mx.array:
        return _positions(self.layout)


class TrainingCache:
    """Hands keys and values on unchanged and attends by the layout's pieces; keeps nothing.

    One object serves all layers of one forward, and a recompute sees what the forward saw.
    """

    def __init__(self, layout: Layout, repeatable: bool = False):
        self.layout = layout
        self.repeatable = repeatable

    @property
    def offset(self):
        """Where positions start: 0, or `Positions` for the wrapped RoPE."""
        return 0 if self.layout.is_plain else Positions(self.layout)

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Returns keys and values as they are: nothing was seen before this forward."""
        return keys, values

    def make_mask(self, num_queries: int, window_size: Optional[int] = None, return_array: bool = False):
        """Returns the layer's window; `attend` turns it into the pieces' masks."""
        return Window(window_size)

    def signature(self) -> str:
        """Returns a name that serving caches refuse: nothing here may outlive a forward."""
        return f"train:{len(self.layout.pieces)}x{self.layout.length}"

    def attend(self, q, k, v, scale: float, mask: Optional[Window], sinks=None) -> mx.array:
        """Returns the attention output (B, N, T, D); called by the dispatcher in `install`."""
        window = mask.size if mask is not None else None
        return attend(q, k, v, self.layout, LayerAttention(scale, window, sinks, self.repeatable))

    def recur(self, call: Callable, x: mx.array) -> mx.array:
        """Returns the output (B, T, H) of a recurrent layer that `call(x, mask, cache)` runs."""
        if self.layout.is_plain:
            return call(x, None, None)
        return by_runs(call, x, self.layout, shape_multiple())


@lru_cache(maxsize=4)
def _positions(layout: Layout) -> mx.array:
    """Returns the position of each token of the row, (T,) int32."""
    parts = [piece.position + np.arange(piece.num_queries, dtype=np.int32) for piece in layout.pieces]
    return mx.array(np.concatenate(parts))
