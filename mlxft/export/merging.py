"""What a layer's weight is with its update in it.

    LoRA        W + scale * B A                     embedding  E + scale * A B
    DoRA        m / |V| * V,  V = W + scale * B A   experts    W_e + scale * B_e A_e

Whole modules and whole models have theirs already.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.errors import InputError
from mlxft.models.adapter_tensors import Adapter, LowRank
from mlxft.models.dequantise import dense, is_quantised
from mlxft.models.fitting import Fitted
from mlxft.models.new_rows import BIAS, ROWS, NewRows
from mlxft.models.targets import LinearLayer


class Change:
    """One array that the merged model has another value of. expert: of one for all, the one that is meant."""

    def __init__(self, array: mx.array):
        self._array = array

    def merged(self, expert: Optional[int] = None) -> mx.array:
        """Returns its value in float32."""
        return (self._array if expert is None else self._array[expert]).astype(mx.float32)


class Update(Change):
    """The weight of a layer with a low-rank update."""

    def __init__(self, layer: LinearLayer, low: LowRank):
        self._layer = layer
        self._low = low

    def merged(self, expert: Optional[int] = None) -> mx.array:
        low = self._low
        if expert is not None:
            low = LowRank(low.a[expert : expert + 1], low.b[expert : expert + 1], low.scale)
            return merged_weight(self.base(expert)[None], low)[0]
        return merged_weight(self.base(), low, self._layer.is_embedding)

    def base(self, expert: Optional[int] = None) -> mx.array:
        """Returns what the base has, in float32."""
        if expert is not None and not is_quantised(self._layer.module):
            return self._layer.module.weight[expert].astype(mx.float32)
        weight = dense_weight(self._layer.module)
        return weight if expert is None else weight[expert]


@dataclass
class Changes:
    """All that differs from the base, by the model's own names of its arrays ("model.norm.weight")."""

    by_name: dict[str, Change] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """The paths of the modules that have a changed array."""
        return {name.rpartition(".")[0] for name in self.by_name}


def changes_of(fitted: Fitted | Adapter) -> Changes:
    """Returns what an adapter changes: one that is fitted to a model, or whole weights by name."""
    if isinstance(fitted, Adapter):
        return Changes({name: Change(array) for name, array in fitted.weights.items()})
    by_name: dict[str, Change] = {name: Change(array) for name, array in fitted.whole.items()}
    return Changes(by_name | {f"{layer.path}.weight": Update(layer, low) for layer, low in fitted.updates})


def in_tables(changes: Changes, model: nn.Module) -> Changes:
    """Returns the changes with new rows as part of the tables that they belong to.

    model: with new rows, as it is stored otherwise; rows that nothing changes are what they began as.
    """
    by_name = dict(changes.by_name)
    for path, module in model.named_modules():
        if not isinstance(module, NewRows):
            continue
        update, rows, bias = (by_name.pop(f"{path}.{own}", None) for own in ("table.weight", ROWS, BIAS))
        if f"{path}.weight" in by_name:  # trained whole: its rows are in it
            continue
        table = update.merged() if update else dense_weight(module.table)
        new = rows.merged() if rows else module.new_rows
        by_name[f"{path}.weight"] = Change(module.joined(table, new, axis=0))
        if BIAS in module:
            new = bias.merged() if bias else module.new_bias
            by_name[f"{path}.bias"] = Change(module.joined(module.table.bias, new))
    return Changes(by_name)


@dataclass(frozen=True)
class Weight:
    """One of a merged model's arrays: its name in mlx-lm, its shape dense, and what makes it, float32."""

    name: str
    shape: tuple[int, ...]
    made: Callable[[], mx.array]


def merged_weights(stored: nn.Module, changes: Changes) -> Iterator[Weight]:
    """Yields all weights of the model `stored` as they are with the changes, packed ones dense."""
    for path, module in stored.named_modules():
        for own, array in module.items():
            if not isinstance(array, mx.array) or own.startswith("_"):
                continue
            name, shape = f"{path}.{own}", tuple(array.shape)
            made = partial(array.astype, mx.float32)
            if is_quantised(module):
                if own in ("scales", "biases"):
                    continue
                if own == "weight":
                    shape = (*shape[:-1], shape[-1] * 32 // module.bits)
                    made = partial(dense_weight, module)
            if name in changes.by_name:
                made = changes.by_name[name].merged
            yield Weight(name, shape, made)


def dense_weight(module: nn.Module) -> mx.array:
    """Returns a layer's weight in float32, a packed one unpacked. Raises: InputError if it cannot be."""
    if not is_quantised(module):
        return module.weight.astype(mx.float32)
    made = dense(module, mx.float32)
    if made is None:
        raise InputError(
            f"a layer of kind {type(module).__name__} cannot be made dense, so nothing can be "
            "merged into it; export with to=peft"
        )
    return made.weight


def merged_weight(weight: mx.array, low: LowRank, is_embedding: bool = False) -> mx.array:
    """Returns the weight with its update, in float32.

    weight: (out, in), of an embedding (V, H), of experts (E, out, in).
    """
    a, b = low.a.astype(mx.float32), low.scale * low.b.astype(mx.float32)
    # On the CPU: a GPU may multiply float32 with fewer digits.
    if a.ndim == 3:
        return weight + mx.matmul(b, a, stream=mx.cpu)
    update = mx.matmul(a, b, stream=mx.cpu)
    merged = weight + (update if is_embedding else update.T)
    if low.m is None:
        return merged
    lengths = mx.maximum(mx.sqrt(mx.square(merged).sum(axis=1, keepdims=True)), 1e-6)
    return merged * (low.m.astype(mx.float32)[:, None] / lengths)
