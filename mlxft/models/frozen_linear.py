"""Products with a frozen linear layer's weight, dense or quantised, and with its transpose.

    forward      y = x W^T + bias        (T, in) -> (T, out)
    backward     dx = dy W               (T, out) -> (T, in)

For many rows a quantised weight is made dense, used and dropped, once in each direction: a quantised
product unpacks the weight again for every few rows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.backend import backend
from mlxft.models.trellis.linear import TrellisLinear

Quantised = nn.QuantizedLinear | nn.QuantizedEmbedding

# From how many rows on making the weight dense pays; None: never, since nobody has measured it. On a CPU
# affine weights break even at 8 rows, mxfp4 at 24. On an H200, 1,024 to 3,072 in 4 bits: 43 us quantised and
# 51 dense at 512 rows, 71 and 54 at 1,024, 215 and 91 at 4,096.
_DENSE_FROM_ROWS = {"cpu": 32, "cuda": 768, "metal": None}


def product(linear: nn.Module, x: mx.array, bias: bool = True) -> mx.array:
    """Returns the layer's output (..., out) for x (..., in). bias: with the layer's, where it has one."""
    bias = bias and "bias" in linear
    if not _pays(linear, x):
        return linear(x) if bias or "bias" not in linear else _weight_product(linear, x)
    y = x @ _dense_weight(linear, x).T
    return y + linear["bias"] if bias else y


def _weight_product(linear: nn.Module, x: mx.array) -> mx.array:
    if isinstance(linear, TrellisLinear):
        return linear.product(x)
    if not isinstance(linear, Quantised):
        return x @ linear["weight"].T
    arrays = linear["weight"], linear["scales"], linear.get("biases")
    return mx.quantized_matmul(x, *arrays, transpose=True, **_packing(linear))


def squared_rows(linear: nn.Module) -> mx.array:
    """Returns the squared length (out,) float32 of each row of the layer's weight."""
    weight = linear["weight"]
    if isinstance(linear, TrellisLinear):
        weight = linear.dense_weight()
    elif isinstance(linear, Quantised):
        packed = weight, linear["scales"], linear.get("biases")
        weight = mx.dequantize(*packed, **_packing(linear))
    return mx.square(weight.astype(mx.float32)).sum(axis=1)


def transposed_product(linear: nn.Module, d_y: mx.array, onto: Optional[mx.array] = None) -> mx.array:
    """Returns the gradient (..., in) of the layer's input for that of its output, d_y (..., out).

    onto: (..., in), added to it.
    """
    if isinstance(linear, TrellisLinear):
        d_x = linear.transposed_product(d_y)
        return d_x if onto is None else onto + d_x
    if isinstance(linear, Quantised) and not _pays(linear, d_y):
        d_x = mx.quantized_matmul(
            d_y, linear["weight"], linear["scales"], linear.get("biases"), transpose=False, **_packing(linear)
        )
        return d_x if onto is None else onto + d_x
    weight = _dense_weight(linear, d_y) if isinstance(linear, Quantised) else linear["weight"]
    return d_y @ weight if onto is None else mx.addmm(onto, d_y, weight)


def _dense_weight(linear: Quantised, x: mx.array) -> mx.array:
    """Returns the weight (out, in) in the type of x, made no earlier than x: all at once would be large."""
    packed = mx.depends(linear["weight"], x)
    return mx.dequantize(packed, linear["scales"], linear.get("biases"), dtype=x.dtype, **_packing(linear))


def _packing(linear: Quantised) -> dict:
    return {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}


def _pays(linear: nn.Module, x: mx.array) -> bool:
    fewest = _DENSE_FROM_ROWS[backend()]
    if not isinstance(linear, Quantised) or fewest is None or "scales" not in linear._no_grad:
        return False
    return x.size // x.shape[-1] >= fewest


@contextmanager
def quantised_at_dense_speed() -> Iterator[None]:
    """Within the block frozen quantised layers, and embeddings as heads, use `product` for many rows."""
    replaced = [(nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear")]
    originals = [getattr(kind, name) for kind, name in replaced]
    try:
        for (kind, name), original in zip(replaced, originals, strict=True):
            setattr(kind, name, _many_rows_dense(original))
        yield
    finally:
        for (kind, name), original in zip(replaced, originals, strict=True):
            setattr(kind, name, original)


def _many_rows_dense(original: Callable) -> Callable:
    if hasattr(original, "makes_dense"):
        return original

    @wraps(original)
    def call(self, x):
        if not _pays(self, x):
            return original(self, x)
        return _frozen(self)(x)

    call.makes_dense = True
    return call


def _frozen(linear: Quantised) -> Callable:
    """Returns x -> product(linear, x) whose backward makes the weight dense anew in place of keeping it."""

    @mx.custom_function
    def forward(x):
        return product(linear, x)

    @forward.vjp
    def backward(_, d_y, __):
        return transposed_product(linear, d_y)

    return forward


def dimensions(linear: nn.Module) -> tuple[int, int]:
    """Returns (inputs, outputs) of a dense or quantised linear layer; of an embedding (width, tokens)."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, Quantised | TrellisLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs
