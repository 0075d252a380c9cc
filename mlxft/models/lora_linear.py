"""The low-rank update of a linear layer: y = W x + scale * B A x, with replayable dropout.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3; names and
shapes as in mlx-lm: lora_a (in, rank), lora_b (rank, out).
"""

import hashlib
import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Callable, Iterable, Iterator, Optional, Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxft.models.frozen_linear import product, transposed_product

_active: ContextVar[Optional[tuple[mx.array, Optional[mx.array]]]] = ContextVar("dropout", default=None)
_pending: ContextVar[Optional["_PendingOutputs"]] = ContextVar("pending", default=None)

# Layers of one module that read the same input, in the order they are called in.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("w1", "w3"),
)


@contextmanager
def dropout_keys(key: Optional[mx.array], shift: Optional[mx.array] = None) -> Iterator[None]:
    """Turns adapter dropout on within the block of code, its masks drawn from `key`; None turns it off.

    The same key gives the same masks, whatever the global generator does. Enter it around the whole of
    `mx.value_and_grad` or `mx.vjp` (a checkpoint runs its function again while they work), and inside
    `mx.compile` with the key as an input. shift: () uint32, how many decoder blocks further up the masks
    are those of; an input of a compiled function that serves all blocks of one kind.
    """
    token = _active.set(None if key is None else (key, shift))
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Within the block of code `model` computes what its base does; each layer then has its own scale back.

    Modules that are trained whole have their base's arrays meanwhile. The scale is Python state: a compiled
    function keeps the one it was traced with.
    """
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    whole = [module for module in model.modules() if getattr(module, "kept_base", None) is not None]
    scales = [layer.scale for layer in layers]
    trained = [{name: module[name] for name in module.kept_base.arrays} for module in whole]
    try:
        for layer in layers:
            layer.scale = 0.0
        for module in whole:
            module.update(module.kept_base.arrays)
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale
        for module, arrays in zip(whole, trained, strict=True):
            module.update(arrays)


@dataclass(frozen=True)
class KeptBase:
    """The base's arrays of a module that is trained whole, by name, on it as `kept_base`.

    An object of its own: a module takes arrays in a dictionary for parameters.
    """

    arrays: dict[str, mx.array]


class AdaptedLayer(nn.Module):
    """A frozen layer with a trained low-rank update: what all kinds of them share.

    lora_a, lora_b: float32, with the rank r in axis 1 of lora_a. block, slot: the layer's place, which tells
    its dropout masks from those of all others.
    """

    def __init__(self, lora_a: mx.array, lora_b: mx.array, scale: float, dropout: float = 0.0,
                 place: tuple[int, int] = (0, 0)):
        super().__init__()
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.scale = scale
        self.dropout = dropout
        self.block, self.slot = place

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    @property
    def base(self) -> nn.Module:
        """The frozen layer."""
        return self["linear"]

    def kept(self, x: mx.array) -> Optional[mx.array]:
        """Returns which entries of x dropout keeps, in its shape; None for all."""
        active = _active.get()
        if active is None or self.dropout == 0:
            return None
        key, shift = active
        place = mask_key(key, self.block if shift is None else self.block + shift, self.slot)
        return mx.random.bernoulli(1 - self.dropout, x.shape, key=place)

    def dropped(self, x: mx.array) -> mx.array:
        """Returns x after dropout: what is kept makes up for what is not."""
        kept = self.kept(x)
        return x if kept is None else mx.where(kept, x * (1 / (1 - self.dropout)), 0)

    def _extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, dropout={self.dropout}"


class LoRALinear(AdaptedLayer):
    """A frozen linear layer, dense or quantised, plus `scale` times a trained product of rank r.

    lora_a: (in, r), lora_b: (r, out). siblings: layers, this one among them, that may be called with the same
    input.
    """

    siblings: Optional["Siblings"] = None

    def __init__(self, linear: nn.Module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        if self.scale == 0:
            return product(self.linear, x)
        pending, kept = _pending.get(), self.kept(x)
        if kept is None and pending is not None and self.siblings is not None:
            return pending.output(self, x)
        return with_updates([self], x, kept)[0]


@dataclass(frozen=True)
class Siblings:
    """Adapted layers of one module that it calls with the same input, one after the other.

    An object of its own: a module takes layers in a tuple for parts of itself.
    """

    layers: tuple[LoRALinear, ...]


def set_siblings(modules: Iterable[nn.Module]) -> None:
    """Tells the adapted layers inside each of `modules` which of them may be called with the same input."""
    for module in modules:
        for names in _SIBLINGS:
            layers = tuple(module[name] for name in names if isinstance(module.get(name), LoRALinear))
            for layer in layers if len(layers) > 1 else ():
                layer.siblings = Siblings(layers)


@contextmanager
def thin_products_joined() -> Iterator[None]:
    """Within the block layers called with the same input make their thin products as one; may be nested."""
    token = _pending.set(_pending.get() or _PendingOutputs())
    try:
        yield
    finally:
        _pending.reset(token)


class _PendingOutputs:
    """Outputs that the first of some siblings to be called made for the others, until those are called."""

    def __init__(self):
        self.x: Optional[mx.array] = None
        self.waiting: dict[int, tuple[mx.array, mx.array, mx.array]] = {}

    def output(self, layer: LoRALinear, x: mx.array) -> mx.array:
        """Returns layer(x), made now for all its siblings or when one of them was called."""
        if not self._holds(layer, x):
            layers = [each for each in layer.siblings.layers if each.scale != 0]
            outputs = zip(layers, with_updates(layers, x), strict=True)
            self.waiting = {id(each): (each.lora_a, each.lora_b, y) for each, y in outputs}
            self.x = x
        *_, y = self.waiting.pop(id(layer))
        if not self.waiting:
            self.x = None
        return y

    def _holds(self, layer: LoRALinear, x: mx.array) -> bool:
        if x is not self.x or id(layer) not in self.waiting:
            return False
        a, b, _ = self.waiting[id(layer)]  # the arrays may be others by now
        return a is layer.lora_a and b is layer.lora_b


def with_updates(
    layers: list[AdaptedLayer], x: mx.array, kept: Optional[mx.array] = None, bias: bool = True
) -> list[mx.array]:
    """Returns W x + scale * B A x of each layer, (..., out), for x (..., in), its bias added.

    kept: (..., in), of dropout, for a layer by itself.
    """
    # In the type of x: float32 products as thin as these cost more than the layers' own in bfloat16.
    a = [layer.lora_a.astype(x.dtype) for layer in layers]
    b = [(layer.scale * layer.lora_b).astype(x.dtype) for layer in layers]
    linears = [layer.linear for layer in layers]
    kept = None if kept is None else _flat(kept)
    *outputs, _ = _products(linears, kept, 1 - layers[0].dropout, bias)(_flat(x), *a, *b)
    return [y.reshape(*x.shape[:-1], -1) for y in outputs]


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])


def _products(linears: list[nn.Module], kept: Optional[mx.array], share: float, bias: bool) -> Callable:
    """Returns (x, *a, *b) -> (*y, u): y_i = linear_i(x) + u_i b_i with u = z a, where z is x after dropout.

    x: (T, in). a_i: (in, r_i), b_i: (r_i, out_i), as many as linears; u: (T, r), r_i columns each. kept:
    (T, in), or None for all; share: how many are kept, for which those that are make up. One function,
    not its products apart: u is kept for the backward, sums go into products, and x is read once for all.
    """

    def dropped(x):
        return x if kept is None else mx.where(kept, x * (1 / share), 0)

    @mx.custom_function
    def forward(x, *thin):
        a, b = thin[: len(linears)], thin[len(linears) :]
        u = dropped(x) @ _side_by_side(a)
        return *(
            mx.addmm(product(linear, x, bias), *pair)
            for linear, *pair in zip(linears, _columns(u, a), b, strict=True)
        ), u

    @forward.vjp
    def backward(primals, cotangents, outputs):
        x, a, b = primals[0], primals[1 : 1 + len(linears)], primals[1 + len(linears) :]
        *d_outputs, _ = cotangents
        d_u = _side_by_side([d_y @ each.T for d_y, each in zip(d_outputs, b, strict=True)])
        d_x = None
        for linear, d_y in zip(linears, d_outputs, strict=True):
            d_x = transposed_product(linear, d_y, d_x)
        back = _side_by_side(a).T
        d_x = mx.addmm(d_x, d_u, back) if kept is None else d_x + dropped(d_u @ back)
        d_a = _columns(dropped(x).T @ d_u, a)
        d_b = [u.T @ d_y for u, d_y in zip(_columns(outputs[-1], a), d_outputs, strict=True)]
        return d_x, *d_a, *d_b

    return forward


def _side_by_side(thin: Sequence[mx.array]) -> mx.array:
    return thin[0] if len(thin) == 1 else mx.concatenate(thin, axis=1)


def _columns(joined: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """Returns joined (T, r) cut into as many columns as each of `like` has."""
    if len(like) == 1:
        return [joined]
    return mx.split(joined, list(accumulate(each.shape[1] for each in like))[:-1], axis=1)


def mask_key(key: mx.array, block: int | mx.array, slot: int) -> mx.array:
    """Returns the key (2,) of one layer's mask.

    The step's key is hashed first: two steps' keys may differ by as little as two layers' places do.
    """
    block = block.astype(mx.uint32) if isinstance(block, mx.array) else mx.array(block, mx.uint32)
    place = mx.stack([block, mx.array(slot, mx.uint32)])
    return mx.random.split(key, 1)[0] + place


def initial_a(seed: int, path: str, num_inputs: int, shape: Sequence[int]) -> mx.array:
    """Returns lora_a, uniform in +- 1 / sqrt(num_inputs): a function of its arguments and nothing else."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    bound = 1 / math.sqrt(num_inputs)
    return mx.random.uniform(-bound, bound, shape, key=mx.random.key(int.from_bytes(digest[:8])))
