"""DoRA of a linear layer: the rows of the adapted weight keep a trained length m of their own.

    V = W + scale * B A          y = (m / |V|) (V x) + bias,    |V| of each row, without gradient

Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", equations 5 and 11; the name m and the
dropout on the update only are mlx-lm's.
"""

import mlx.core as mx
import mlx.nn as nn

from mlxft.models.frozen_linear import product, squared_rows
from mlxft.models.lora_linear import AdaptedLayer, with_updates


class DoRALinear(AdaptedLayer):
    """A frozen linear layer, dense or quantised, with a low-rank update and trained lengths of its rows.

    lora_a: (in, r), lora_b: (r, out). m: (out,) float32, at first the base's lengths. base_squares: (out,),
    those squared, frozen.
    """

    def __init__(self, linear: nn.Module, *args, m: mx.array | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.linear = linear
        self.base_squares = squared_rows(linear)
        self.m = mx.sqrt(self.base_squares) if m is None else m
        self.freeze(recurse=False, keys="base_squares")

    def __call__(self, x: mx.array) -> mx.array:
        if self.scale == 0:
            return product(self.linear, x)
        (y,) = with_updates([self], x, self.kept(x), bias=False)
        # In float32: a half-precision ratio near 1 would not see m change by less than a few thousandths.
        y = (y * (self.m / self.lengths(x.dtype))).astype(x.dtype)
        return y + self.linear["bias"] if "bias" in self.linear else y

    def lengths(self, dtype: mx.Dtype) -> mx.array:
        """Returns |V| (out,) float32, through which no gradient flows; products are made in `dtype`.

        |w + d|^2 = w w + 2 w d + d d for each row: neither V nor W is made.
        """
        a, b = mx.stop_gradient(self.lora_a), mx.stop_gradient(self.scale * self.lora_b)
        w_d = (product(self.linear, a.T.astype(dtype), bias=False).astype(mx.float32) * b).sum(axis=0)
        d_d = (b * ((a.T @ a) @ b)).sum(axis=0)
        squares = self.base_squares + 2 * w_d + d_d
        return mx.stop_gradient(mx.sqrt(mx.maximum(squares, 1e-12)))  # of rows of zeros too
