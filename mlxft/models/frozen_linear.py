"""Products with a frozen linear layer's weight, dense or quantised, and with its transpose.

    forward      y = x W^T + bias        (T, in) -> (T, out)
    backward     dx = dy W               (T, out) -> (T, in)
"""

import mlx.core as mx
import mlx.nn as nn


def product(linear: nn.Module, x: mx.array) -> mx.array:
    """Returns the layer's output (..., out) for x (..., in)."""
    return linear(x)


def transposed_product(linear: nn.Module, d_y: mx.array) -> mx.array:
    """Returns the gradient (..., in) of the layer's input for that of its output, d_y (..., out)."""
    if isinstance(linear, nn.QuantizedLinear):
        return mx.quantized_matmul(
            d_y,
            linear["weight"],
            scales=linear["scales"],
            biases=linear.get("biases"),
            transpose=False,
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    return d_y @ linear["weight"]


def dimensions(linear: nn.Module) -> tuple[int, int]:
    """Returns (inputs, outputs) of a dense or quantised linear layer."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs
