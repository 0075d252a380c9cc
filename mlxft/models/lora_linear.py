"""The low-rank update of a linear layer: y = W x + scale * B A x, with replayable dropout.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", equation 3; names and
shapes as in mlx-lm: lora_a (in, rank), lora_b (rank, out).
"""

import hashlib
import math
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Iterator, Optional

import mlx.core as mx
import mlx.nn as nn

_active: ContextVar[Optional[tuple[mx.array, Optional[mx.array]]]] = ContextVar("dropout", default=None)


@contextmanager
def dropout_keys(key: Optional[mx.array], block: Optional[mx.array] = None) -> Iterator[None]:
    """Turns adapter dropout on within the block of code, its masks drawn from `key`; None turns it off.

    The same key gives the same masks, whatever the global generator does. Enter it around the whole of
    `mx.value_and_grad` or `mx.vjp` (a checkpoint runs its function again while they work), and inside
    `mx.compile` with the key as an input. `block`: () replaces the number of the decoder block, as an
    input of a compiled function that serves blocks alike.
    """
    token = _active.set(None if key is None else (key, block))
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
        y = self.linear(x)
        if self.scale == 0:
            return y
        update = (self._dropped(x) @ self.lora_a) @ self.lora_b
        return y + (self.scale * update).astype(x.dtype)

    def _dropped(self, x: mx.array) -> mx.array:
        active = _active.get()
        if active is None or self.dropout == 0:
            return x
        key, block = active
        keep = 1 - self.dropout
        place = mask_key(key, self.block if block is None else block, self.slot)
        return mx.where(mx.random.bernoulli(keep, x.shape, key=place), x * (1 / keep), 0)

    def _extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}, dropout={self.dropout}"


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


def dimensions(linear: nn.Module) -> tuple[int, int]:
    """Returns (inputs, outputs) of a dense or quantised linear layer."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs
