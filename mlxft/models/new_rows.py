"""Tables of a vocabulary with rows of their own for new tokens: only the rows are trained.

    row of t           E[t] of a token that the table has, N[t - first] of a new one
    logits of h        those of the table, with N h (and its bias) at the places of the new ones

A table is an embedding, which may be the head too, or a head; dense, quantised or with a low-rank update of
its own. Its vocabulary may be padded: then some rows, or all, stand in place of the table's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxft.errors import InputError
from mlxft.models.dequantise import is_quantised
from mlxft.models.lora_linear import AdaptedLayer, KeptBase

ROWS, BIAS = "new_rows", "new_bias"


@dataclass(frozen=True)
class Start:
    """What new rows begin as: rows (N, H), and the biases (N,) of a head that has some. float32."""

    rows: mx.array
    bias: Optional[mx.array] = None


class NewRows(nn.Module):
    """What embeddings and heads with new rows share.

    first: the first new token, the others follow it. new_rows: (N, H), new_bias: (N,); both float32.
    """

    def __init__(self, table: nn.Module, first: int, start: Start):
        super().__init__()
        self.table = table
        self.first = first
        self.new_rows = start.rows
        if start.bias is not None:
            self.new_bias = start.bias
        self.kept_base = KeptBase(self.own())

    def own(self) -> dict[str, mx.array]:
        """Returns the arrays of the new rows by name, as they are now."""
        return {name: self[name] for name in (ROWS, BIAS) if name in self}

    @property
    def stop(self) -> int:
        """The number after the last new token's."""
        return self.first + self.new_rows.shape[0]

    @property
    def table_size(self) -> int:
        """How many tokens the table has."""
        table = self.table.base if isinstance(self.table, AdaptedLayer) else self.table
        return table.weight.shape[0]

    @property
    def size(self) -> int:
        """How many tokens there are in all."""
        return max(self.table_size, self.stop)

    def joined(self, of_table: mx.array, of_rows: mx.array, axis: int = -1) -> mx.array:
        """Returns what there is of the table's tokens and of the new ones as one, in the table's type."""
        of_rows = of_rows.astype(of_table.dtype)
        if self.first == self.table_size:
            return mx.concatenate([of_table, of_rows], axis=axis)
        before, _, after = mx.split(of_table, [self.first, min(self.stop, self.table_size)], axis=axis)
        return mx.concatenate([before, of_rows, after], axis=axis)

    def _logits(self, of_table: mx.array, x: mx.array) -> mx.array:
        new = x @ self.new_rows.astype(x.dtype).T
        if BIAS in self:
            new = new + self.new_bias.astype(x.dtype)
        return self.joined(of_table, new)

    def completed(self, name: str, array: mx.array) -> mx.array:
        """Returns rows, or biases, of the first new tokens with what those of the others began as."""
        if array.shape[1:] != self[name].shape[1:]:
            return array  # which is told by its shape
        return mx.concatenate([array, self.kept_base.arrays[name][array.shape[0] :].astype(array.dtype)])

    def in_one(self, name: str) -> mx.array:
        """Returns a dense table's array, "weight" or "bias", with the new tokens' in it."""
        return self.joined(self.table[name], self[{"weight": ROWS, "bias": BIAS}[name]], axis=0)

    def as_one(self) -> nn.Module:
        """Returns the table with all rows in its array. It has to be dense, any update merged into it."""
        if isinstance(self.table, AdaptedLayer):
            raise ValueError("the table has a low-rank update; merge that first")
        self.table.update({name: self.in_one(name) for name in ("weight", "bias") if name in self.table})
        return self.table


class EmbeddingWithNewRows(NewRows):
    """An embedding with rows of its own for new tokens, in both of its uses."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Returns the rows (..., H) of tokens (...)."""
        is_new = (tokens >= self.first) & (tokens < self.stop)
        rows = self.table(mx.where(is_new, 0, tokens))
        new = self.new_rows[mx.where(is_new, tokens - self.first, 0)].astype(rows.dtype)
        return mx.where(is_new[..., None], new, rows)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the logits (..., V) of x (..., H)."""
        return self._logits(self.table.as_linear(x), x)


class HeadWithNewRows(NewRows):
    """A head with rows of its own for new tokens."""

    def __call__(self, x: mx.array) -> mx.array:
        """Returns the logits (..., V) of x (..., H)."""
        return self._logits(self.table(x), x)


def mean_rows(table: nn.Module, pieces: Iterable[Sequence[int]]) -> Start:
    """Returns for each new token the mean of its pieces' rows in the table, an embedding or a head.

    Source: Gee et al. 2022, "Fast Vocabulary Transfer for Language Model Compression", arXiv 2402.09977, for
    embeddings. In a head it also leaves what there was about as likely as it was: exp(mean of logits) <=
    mean of exp(logits), so no new token gets more than the mean probability of its pieces.
    """
    pieces = [mx.array(list(each)) for each in pieces]
    rows = mx.stack([_rows(table, each).mean(axis=0) for each in pieces])
    if "bias" not in table:
        return Start(rows)
    return Start(rows, mx.stack([table["bias"][each].astype(mx.float32).mean() for each in pieces]))


def _rows(table: nn.Module, places: mx.array) -> mx.array:
    """Returns some rows (n, H) of an embedding's or a head's weight in float32."""
    weight = table["weight"][places]
    if is_quantised(table):
        packing = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}
        biases = table["biases"][places] if "biases" in table else None
        weight = mx.dequantize(weight, table["scales"][places], biases, **packing)
    return weight.astype(mx.float32)


def make_one(model: nn.Module, paths: Optional[Iterable[str]] = None) -> None:
    """Makes dense tables and their new rows plain layers with one array each, in place.

    paths: of modules that they are, or are in; None for all there are. Raises: InputError for quantised ones.
    """
    paths = None if paths is None else list(paths)
    for path, module in list(model.named_modules()):
        inside = paths is None or any(f"{path}.".startswith(f"{whole}.") for whole in paths)
        if isinstance(module, NewRows) and inside:
            if is_quantised(module.table):
                raise InputError(f"{path} is quantised, and has no weights that could be replaced or trained")
            model.update_modules(tree_unflatten([(path, module.as_one())]))


def train_new_rows(model: nn.Module) -> None:
    """Makes new rows trainable, whatever else is."""
    for module in model.modules():
        if isinstance(module, NewRows):
            module.unfreeze(recurse=False, keys=list(module.own()))
