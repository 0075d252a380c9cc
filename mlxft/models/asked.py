"""What a model's own forward asks of its caches: the sliding window of each layer.

Models hand `window_size` to a cache's `make_mask` and the mask to the layers. Running their forward with
caches that note it down, nothing evaluated, tells each layer's window, whatever the family calls it; with
caches that hand on a shorter one, the model itself shows what its windows do.
"""

from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.layouts.cache import Window


class _Stateless:
    """Stands in for any cache of mlx-lm's, before the first position; keeps nothing."""

    offset = 0
    lengths = None
    left_padding = None

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        return keys, values

    def __getitem__(self, number: int) -> None:
        return None

    def __setitem__(self, number: int, state: Any) -> None:
        """A recurrent layer's state: forgotten."""

    def advance(self, num_positions: int) -> None:
        """Nothing moves."""


class _Asking(_Stateless):
    def __init__(self):
        self.masks: list[Any] = []

    def make_mask(self, num_queries: int, **asked: Any) -> Optional[Window]:
        # Attention layers name what they want; recurrent ones only want to know what is padding.
        return Window(asked.get("window_size")) if asked else None

    def attend(self, q, k, v, scale: float, mask: Any, sinks=None) -> mx.array:
        self.masks.append(mask)
        return mx.zeros((*q.shape[:3], v.shape[-1]), q.dtype)


class _Lowering(_Stateless):
    def __init__(self, size: int):
        self.size = size

    def make_mask(self, num_queries: int, **asked: Any):
        from mlx_lm.models.base import create_causal_mask

        if not asked:
            return None
        if asked.get("window_size"):
            return create_causal_mask(num_queries, window_size=self.size)
        return create_causal_mask(num_queries) if asked.get("return_array") else "causal"


def windows_asked(model: nn.Module, num_layers: int) -> list[Optional[int]]:
    """Returns each layer's window in positions, None for all; to be called while layouts are installed.

    Raises: ValueError for a layer that masks in a way of its own.
    """
    caches = [_Asking() for _ in range(num_layers)]
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    windows = []
    for number, cache in enumerate(caches):
        foreign = [mask for mask in cache.masks if not isinstance(mask, Window)]
        sizes = {mask.size for mask in cache.masks if isinstance(mask, Window)}
        if foreign or len(sizes) > 1:
            raise ValueError(f"layer {number} masks its attention in a way of its own")
        windows.append(sizes.pop() if sizes else None)
    return windows


def logits_with_windows(model: nn.Module, tokens: mx.array, num_layers: int, size: int) -> mx.array:
    """Returns the logits that the model's own code gives with every sliding window `size` positions."""
    return model(tokens, cache=[_Lowering(size) for _ in range(num_layers)])
