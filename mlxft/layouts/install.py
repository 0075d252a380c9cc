"""Makes mlx-lm's unmodified attention modules use layouts, for as long as a `with` block lasts.

Two hooks: the name `scaled_dot_product_attention` in the Python module that defines an attention
class (a cache with `attend` attends, anything else takes the original), and the attention's `rope`
(offsets that are `Positions` are applied piece by piece).
"""

import sys
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from mlxft.layouts.cache import Positions

_NAME = "scaled_dot_product_attention"


@contextmanager
def layouts_installed(layers: list[nn.Module]):
    """Within the block the attentions of `layers` follow training caches; may be nested."""
    attentions = attention_modules(layers)
    sources = {sys.modules[type(attention).__module__] for attention in attentions}
    replaced = [
        (source, getattr(source, _NAME))
        for source in sources
        if not isinstance(getattr(source, _NAME), _Dispatcher)
    ]
    roped = [
        (attention, attention.rope)
        for attention in attentions
        if getattr(attention, "rope", None) is not None and not isinstance(attention.rope, _PieceRope)
    ]
    try:
        for source, original in replaced:
            setattr(source, _NAME, _Dispatcher(original))
        for attention, rope in roped:
            attention.rope = _PieceRope(rope)
        yield
    finally:
        for source, original in replaced:
            setattr(source, _NAME, original)
        for attention, rope in roped:
            attention.rope = rope


def attention_modules(layers: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules inside `layers` whose class attends through the module-level name."""
    return [
        module
        for layer in layers
        for _, module in layer.named_modules()
        if hasattr(module, "rope") and hasattr(sys.modules[type(module).__module__], _NAME)
    ]


class _Dispatcher:
    def __init__(self, original):
        self.original = original

    def __call__(self, queries, keys, values, cache=None, scale=1.0, mask=None, sinks=None, **rest):
        if hasattr(cache, "attend"):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        if sinks is not None:
            rest["sinks"] = sinks
        return self.original(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)


class _PieceRope(nn.Module):
    """RoPE whose offset may be `Positions`; its inner one stays out of the parameter tree."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self._inner = inner  # names with an underscore are no parameters

    def __call__(self, x: mx.array, offset=0) -> mx.array:
        if not isinstance(offset, Positions):
            return self._inner(x, offset=offset)
        parts = [
            self._inner(x[..., piece.start : piece.stop, :], offset=piece.position)
            for piece in offset.layout.pieces
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)
