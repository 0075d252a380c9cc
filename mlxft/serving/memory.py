"""What answers take in memory beside the model: keys and values of every position, and fixed states."""

from dataclasses import dataclass
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

_STEP = 256  # positions that a cache grows by
_ROOM = 1.5  # a cache that grows exists twice for a moment; activations


@dataclass(frozen=True)
class CachePlan:
    """Bytes of one row: per_token with the positions it has at most (None: all), and what is always there."""

    grows: tuple[tuple[int, Optional[int]], ...]
    fixed_bytes: int

    def row_bytes(self, length: int) -> int:
        """Returns what a row of `length` tokens takes, with room for its growth."""
        rounded = -(-length // _STEP) * _STEP
        kept = sum(each * (rounded if most is None else min(rounded, most)) for each, most in self.grows)
        return int(_ROOM * (kept + self.fixed_bytes))


def plan_cache(model: nn.Module) -> CachePlan:
    """Returns the plan of a model, from the caches that it makes for one token."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    grows: list[tuple[int, Optional[int]]] = []
    fixed = 0
    for cache in _flat(caches):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            most = getattr(cache, "max_size", None)
            grows.append(((keys.nbytes + values.nbytes) // keys.shape[2], most))
        else:
            fixed += cache.nbytes
    return CachePlan(tuple(grows), fixed)


def _flat(caches: Any) -> list[Any]:
    return [one for cache in caches for one in (_flat(cache.caches) if hasattr(cache, "caches") else [cache])]
