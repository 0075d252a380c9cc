"""Makes mlx-lm's unmodified modules use layouts, for as long as a `with` block lasts.

Attention: the name `scaled_dot_product_attention` in the Python module that defines an attention class (a
cache with `attend` attends, anything else takes the original), and the attention's `rope` (offsets that are
`Positions` are one value a position). Recurrent layers: their class's call (a cache with `recur` runs them
by pieces), and the name `gated_delta_update`, which gets a gradient.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxft.backend import backend
from mlxft.layouts.cache import Positions
from mlxft.layouts.gated_delta import GatedDelta
from mlxft.layouts.pieces import Layout

_ATTEND = "scaled_dot_product_attention"
_GATED_DELTA = "gated_delta_update"


@contextmanager
def layouts_installed(layers: list[nn.Module], recurrent: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Within the block the attentions of `layers`, and `recurrent`, follow training caches; may be nested."""
    attentions = attention_modules(layers)
    recurrent = list(recurrent)
    with ExitStack() as stack:
        for source in {_source(attention) for attention in attentions}:
            stack.enter_context(_replaced(source, _ATTEND, _Dispatcher))
        for attention in attentions:
            if getattr(attention, "rope", None) is not None:
                stack.enter_context(_replaced(attention, "rope", _PieceRope))
        for kind in {type(layer) for layer in recurrent}:
            stack.enter_context(_replaced(kind, "__call__", _by_pieces))
        for source in {_source(module) for layer in layers for module in layer.modules()}:
            if hasattr(source, _GATED_DELTA):
                stack.enter_context(_replaced(source, _GATED_DELTA, GatedDelta))
        yield


def attention_modules(layers: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules inside `layers` whose class attends through the module-level name."""
    return [
        module
        for layer in layers
        for _, module in layer.named_modules()
        if hasattr(module, "rope") and hasattr(_source(module), _ATTEND)
    ]


def _source(module: nn.Module) -> Any:
    """Returns the Python module that defines the class."""
    return sys.modules[type(module).__module__]


@contextmanager
def _replaced(owner: Any, name: str, wrap) -> Iterator[None]:
    """Within the block `owner.name` is wrapped, if it isn't yet; after it the very same object is back."""
    original = getattr(owner, name)
    if getattr(original, "follows_layouts", False):
        yield
        return
    wrapped = wrap(original)
    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Dispatcher:
    follows_layouts = True

    def __init__(self, original):
        self.original = original

    def __call__(self, queries, keys, values, cache=None, scale=1.0, mask=None, sinks=None, **rest):
        if hasattr(cache, "attend"):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        if sinks is not None:
            rest["sinks"] = sinks
        return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)


def _by_pieces(original):
    def call(self, x, mask=None, cache=None):
        if hasattr(cache, "recur"):
            return cache.recur(partial(original, self), x)
        return original(self, x, mask, cache)

    call.follows_layouts = True
    return call


class _PieceRope(nn.Module):
    """RoPE whose offset may be one position a token; its inner one stays out of the parameter tree."""

    follows_layouts = True

    def __init__(self, inner: nn.Module):
        super().__init__()
        self._inner = inner  # names with an underscore are no parameters

    def __call__(self, x: mx.array, offset=0) -> mx.array:
        if isinstance(offset, Positions):
            if not isinstance(self._inner, _by_offset_alone()) or self._is_narrow(x):
                return self._piece_by_piece(x, offset.layout)
            offset = mx.array(offset)
        if isinstance(offset, mx.array) and offset.shape == (x.shape[-2],):
            return self._token_by_token(x, offset)
        return self._inner(x, offset=offset)

    def _is_narrow(self, x: mx.array) -> bool:
        """MLX 0.32.4 launches CUDA blocks 64 tokens deep at most, and deeper ones for fewer than 32 dims."""
        return backend() == "cuda" and getattr(self._inner, "dims", x.shape[-1]) < 32

    def _token_by_token(self, x: mx.array, positions: mx.array) -> mx.array:
        """One call for all pieces: each position of (B, N, T, D) as a row of its own, with its own offset."""
        rows, heads, length, width = x.shape
        tokens = x.transpose(2, 0, 1, 3).reshape(length * rows, heads, 1, width)
        turned = self._inner(tokens, offset=mx.repeat(positions, rows))
        return turned.reshape(length, rows, heads, width).transpose(1, 2, 0, 3)

    def _piece_by_piece(self, x: mx.array, layout: Layout) -> mx.array:
        parts = mx.split(x, [piece.start for piece in layout.pieces[1:]], axis=-2)
        turned = [
            self._inner(part, offset=piece.position) for part, piece in zip(parts, layout.pieces, strict=True)
        ]
        return turned[0] if len(turned) == 1 else mx.concatenate(turned, axis=-2)


def _by_offset_alone() -> tuple[type, ...]:
    """The kinds of RoPE that turn a token by its position, whatever the length of the row it stands in."""
    from mlx_lm.models import rope_utils

    names = ("Llama3RoPE", "ProportionalRoPE", "SuScaledRoPE", "YarnRoPE")
    return (nn.RoPE, *(getattr(rope_utils, name) for name in names))
