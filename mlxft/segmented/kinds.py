"""Which layers are alike: one compiled program serves them all, with their arrays as inputs.

Layers are of one kind if nothing but their arrays differs: classes, shapes, types, and all Python state
that tracing would read (scales, windows, flags; a layer's number only where its code reads that). Arrays
that are no parameters, such as a rotary embedding's frequencies, stay constants of the program and have to
be equal too.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxft.models.lora_linear import AdaptedLayer

# Of an adapted layer: which decoder block it is in, an input of the program, and the layers beside it.
_PLACE = {"block", "siblings"}
# Of a module that is trained whole: the base's arrays, which no program reads.
_UNREAD = {"kept_base"}
# What mlx-lm's layers keep their own number under; most read it while they are made and never again.
_NUMBER = "layer_idx"


def kind_of(layer: nn.Module) -> Hashable:
    """Returns what two layers have equal if, and only if, one program serves both."""
    modules = list(_modules(layer))
    ignored = set() if any(_reads(type(module), _NUMBER) for _, module in modules) else {_NUMBER}
    return tuple((path, _state(module, ignored)) for path, module in modules)


def parameters_of(layer: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Returns the layer's parameters: name in the layer, module, name there; alike for all of a kind."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in _modules(layer)
        for name in sorted(module)
        if isinstance(module[name], mx.array) and not name.startswith("_")
    ]


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return iter(sorted(layer.named_modules(), key=lambda item: item[0]))


def _reads(kind: type, name: str) -> bool:
    """Tells whether the class's code, but for the making of its objects, has a name in it."""
    methods = [value for base in kind.__mro__ for key, value in vars(base).items() if key != "__init__"]
    return any(name in method.__code__.co_names for method in methods if hasattr(method, "__code__"))


def _state(module: nn.Module, ignored: set[str]) -> Hashable:
    own = {name: value for name, value in module.items() if not isinstance(value, nn.Module)}
    own |= vars(module)
    left_out = ignored | _UNREAD | (_PLACE if isinstance(module, AdaptedLayer) else set())
    values = [(name, _value(name, own[name])) for name in sorted(own) if name not in left_out]
    return type(module), tuple(values)


def _value(name: str, value: Any) -> Hashable:
    if isinstance(value, mx.array):
        described = tuple(value.shape), str(value.dtype)
        return (*described, _bytes(value)) if name.startswith("_") else described
    if isinstance(value, (list, tuple)):
        return tuple(_value(name, each) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, dict):
        return tuple((key, _value(name, value[key])) for key in sorted(value, key=str))
    if isinstance(value, (int, float, str, bytes, type(None), mx.Dtype)):
        return str(type(value)), str(value)
    return type(value), id(value)  # the same object reads the same


def _bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.astype(mx.float32)
    return np.array(array).tobytes()
