"""The low-rank update of a linear layer: y = W x + scale * B A x, with replayable dropout.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3; names and
shapes as in mlx-lm: lora_a (in, rank), lora_b (rank, out).
"""

import hashlib
import math
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Callable, Iterator, Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.backend import backend
from mlxft.models.frozen_linear import product, transposed_product

_BLOCK = 256  # tokens whose part of a weight's gradient is one product on a GPU

_active: ContextVar[Optional[tuple[mx.array, Optional[mx.array]]]] = ContextVar("dropout", default=None)


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

    The scale is Python state: a compiled function keeps the one it was traced with.
    """
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    scales = [layer.scale for layer in layers]
    try:
        for layer in layers:
            layer.scale = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale


class LoRALinear(nn.Module):
    """A frozen linear layer, dense or quantised, plus `scale` times a trained product of rank r.

    lora_a: (in, r), lora_b: (r, out), both float32. block, slot: the layer's place, which tells its
    dropout masks from those of all others.
    """

    def __init__(self, linear: nn.Module, lora_a: mx.array, lora_b: mx.array, scale: float,
                 dropout: float = 0.0, place: tuple[int, int] = (0, 0)):
        super().__init__()
        self.linear = linear
        self.lora_a = lora_a
        self.lora_b = lora_b
        self.scale = scale
        self.dropout = dropout
        self.block, self.slot = place

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    def __call__(self, x: mx.array) -> mx.array:
        if self.scale == 0:
            return product(self.linear, x)
        # In the type of x: float32 products as thin as these cost more than the layer's own in bfloat16.
        a, b = self.lora_a.astype(x.dtype), (self.scale * self.lora_b).astype(x.dtype)
        y, _ = _with_update(self.linear, self._kept(x), 1 - self.dropout)(_flat(x), a, b)
        return y.reshape(*x.shape[:-1], -1)

    def _kept(self, x: mx.array) -> Optional[mx.array]:
        """Returns which entries of x (..., in) dropout keeps, (T, in); None for all."""
        active = _active.get()
        if active is None or self.dropout == 0:
            return None
        key, shift = active
        place = mask_key(key, self.block if shift is None else self.block + shift, self.slot)
        return _flat(mx.random.bernoulli(1 - self.dropout, x.shape, key=place))

    def _extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, dropout={self.dropout}"


def _flat(x: mx.array) -> mx.array:
    return x.reshape(-1, x.shape[-1])


def _with_update(linear: nn.Module, kept: Optional[mx.array], share: float) -> Callable:
    """Returns (x, a, b) -> (y, u): y = linear(x) + u b with u = z a, where z is what dropout left of x.

    x: (T, in). a: (in, r). b: (r, out). kept: (T, in), or None for all; share: how many are kept, for
    which those that are make up. One function, not its products apart: u is kept for the backward, sums
    go into products, and the gradients of a and b are summed in blocks of tokens.
    """

    def dropped(x):
        return x if kept is None else mx.where(kept, x * (1 / share), 0)

    @mx.custom_function
    def forward(x, a, b):
        u = dropped(x) @ a
        return mx.addmm(product(linear, x), u, b), u

    @forward.vjp
    def backward(primals, cotangents, outputs):
        x, a, b = primals
        d_y, u = cotangents[0], outputs[1]
        d_u, d_x = d_y @ b.T, transposed_product(linear, d_y)
        d_x = mx.addmm(d_x, d_u, a.T) if kept is None else d_x + dropped(d_u @ a.T)
        return d_x, sum_of_products(dropped(x), d_u), sum_of_products(u, d_y)

    return forward


def sum_of_products(x: mx.array, y: mx.array) -> mx.array:
    """Returns x^T y (m, n) of x (T, m) and y (T, n), where m or n is small.

    So few entries keep most of a GPU idle if each is one long sum (H200, 10,240 tokens, 1,024 and 8
    columns: 150 us, in blocks of tokens 50).
    """
    blocks = _num_blocks(x.shape[0])
    if blocks == 1:
        return x.T @ y
    x, y = (each.reshape(blocks, -1, each.shape[-1]) for each in (x, y))
    return (x.swapaxes(1, 2) @ y).sum(axis=0)


def _num_blocks(num_tokens: int) -> int:
    """Returns into how many equal blocks of tokens a sum over them is split: one on a CPU."""
    if backend() == "cpu":
        return 1
    return next(blocks for blocks in range(max(num_tokens // _BLOCK, 1), 0, -1) if num_tokens % blocks == 0)


def mask_key(key: mx.array, block: int | mx.array, slot: int) -> mx.array:
    """Returns the key (2,) of one layer's mask.

    The step's key is hashed first: two steps' keys may differ by as little as two layers' places do.
    """
    block = block.astype(mx.uint32) if isinstance(block, mx.array) else mx.array(block, mx.uint32)
    place = mx.stack([block, mx.array(slot, mx.uint32)])
    return mx.random.split(key, 1)[0] + place


def initial_a(seed: int, path: str, num_inputs: int, rank: int) -> mx.array:
    """Returns lora_a (in, rank), uniform in +- 1 / sqrt(in): a function of its arguments and nothing else."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    bound = 1 / math.sqrt(num_inputs)
    return mx.random.uniform(-bound, bound, (num_inputs, rank), key=mx.random.key(int.from_bytes(digest[:8])))
