"""Each row of a batch with its own adapter: layers that know the rows, and a cache that carries them.

    y_b = W x_b + B_k A_k x_b,   k the slot of row b's adapter; slot 0 is the base

All resident adapters of a layer are stacked, ranks filled up with zeros, and a row's is picked while it is
multiplied. Where every row is of the base, the layer is the base's own, called alone.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxft.models.adapter_tensors import LowRank

BASE = 0


class CurrentRows:
    """Which adapter each row of the forward under way has; all of them the base's outside of one."""

    def __init__(self):
        self.slots: tuple[int, ...] = ()

    @contextmanager
    def set_to(self, slots: tuple[int, ...]):
        self.slots = slots
        try:
            yield
        finally:
            self.slots = ()


class RowLinear(nn.Module):
    """A frozen linear layer with a low-rank update for each row of its input, picked by the row's slot.

    lora_a: (N, in, r), lora_b: (N, r, out), scale multiplied in. gains: (N, out) float32 of DoRA, what the
    rows of W + BA are multiplied by, or None.
    """

    def __init__(
        self,
        linear: nn.Module,
        updates: Sequence[Optional[LowRank]],
        gains: Sequence[Optional[mx.array]],
        current: CurrentRows,
    ):
        super().__init__()
        self.linear = linear
        self._current = current
        first = next(low for low in updates if low is not None)
        inputs, outputs = first.a.shape[0], first.b.shape[1]
        rank = max(low.rank for low in updates if low is not None)
        none = LowRank(mx.zeros((inputs, rank)), mx.zeros((rank, outputs)), 1.0)
        wide = [none if low is None else low.widened(rank, 1.0) for low in updates]
        self.lora_a = mx.stack([low.a.astype(mx.float32) for low in wide])
        self.lora_b = mx.stack([low.b.astype(mx.float32) for low in wide])
        self.gains = None
        if any(gain is not None for gain in gains):
            self.gains = mx.stack([mx.ones((outputs,)) if gain is None else gain for gain in gains])
        self._has = [low is not None for low in updates]
        self.freeze()

    def cast(self, dtype: mx.Dtype) -> None:
        """Keeps the factors in the type of the model's activations."""
        self.lora_a, self.lora_b = self.lora_a.astype(dtype), self.lora_b.astype(dtype)
        mx.eval(self.lora_a, self.lora_b, *([] if self.gains is None else [self.gains]))

    def __call__(self, x: mx.array) -> mx.array:
        """Returns (B, T, out) for x (B, T, in)."""
        slots = self._current.slots
        if not any(self._has[slot] for slot in slots):
            return self.linear(x)
        y = self.linear(x)
        bias = self.linear.get("bias") if self.gains is not None else None
        y = y if bias is None else y - bias
        y = y + self._update(x, slots).astype(y.dtype)
        if self.gains is not None:
            y = (y * self.gains[mx.array(slots)][:, None, :]).astype(y.dtype)
        return y if bias is None else y + bias

    def _update(self, x: mx.array, slots: tuple[int, ...]) -> mx.array:
        a, b = self.lora_a.astype(x.dtype), self.lora_b.astype(x.dtype)
        if len(set(slots)) == 1:
            return (x @ a[slots[0]]) @ b[slots[0]]
        picked = mx.array(slots, mx.uint32)
        return (x @ a[picked]) @ b[picked]


class RowSlots:
    """The slots of a batch's rows, as one more of its caches: mlx-lm's batches merge, split and drop it.

    It stands after the layers' own caches and goes through everything that happens to them.
    """

    def __init__(self, slots: Sequence[int] = ()):
        self.slots = tuple(slots)

    nbytes = 0
    state: list = []  # nothing to compute

    @classmethod
    def merge(cls, caches: Sequence["RowSlots"]) -> "RowSlots":
        return cls([slot for cache in caches for slot in cache.slots])

    def extend(self, other: "RowSlots") -> None:
        self.slots += other.slots

    def filter(self, keep: Sequence[int]) -> None:
        self.slots = tuple(self.slots[row] for row in keep)

    def extract(self, row: int) -> "RowSlots":
        return RowSlots([self.slots[row]])

    def prepare(self, **lengths: Any) -> None:
        """Padding is no matter here."""

    def finalize(self) -> None:
        """Padding is no matter here."""


class RowModel:
    """A model for mlx-lm's batches: it takes the rows' slots off the caches before its layers see them."""

    def __init__(self, model: nn.Module, current: CurrentRows):
        self.model, self._current = model, current

    @property
    def layers(self) -> list:
        return self.model.layers

    def new_cache(self) -> list:
        return make_prompt_cache(self.model)

    def __call__(self, tokens: mx.array, cache: list) -> mx.array:
        with self._current.set_to(cache[-1].slots):
            return self.model(tokens, cache=cache[:-1])
