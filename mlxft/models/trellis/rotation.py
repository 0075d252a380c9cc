"""A random rotation of a layer's inputs, which makes weights look normally distributed, as the code expects.

    y = W x = (W R^T)(R x),   R = H diag(signs)

H is orthogonal: Hadamard matrices of `size` along the diagonal, where size is the largest power of two that
divides the width. A row's outliers are spread over `size` weights. See "QuIP#: Even Better LLM Quantization
with Hadamard Incoherence and Lattice Codebooks" (arXiv:2402.04396).
"""

from functools import lru_cache

import mlx.core as mx
import numpy as np

_MOST_SIZE = 8192  # that MLX's transform takes in float32 on a GPU


def rotated(x: mx.array, seed: int) -> mx.array:
    """Returns R x for each vector of x (..., width)."""
    width = x.shape[-1]
    return _transformed(x * _signs(width, seed).astype(x.dtype), width)


def rotated_back(x: mx.array, seed: int) -> mx.array:
    """Returns R^T x for each vector of x (..., width)."""
    width = x.shape[-1]
    return _transformed(x, width) * _signs(width, seed).astype(x.dtype)


def hadamard_size(width: int) -> int:
    """Returns the largest power of two that divides `width`, as far as MLX's transform goes."""
    return min(width & -width, _MOST_SIZE)


def _transformed(x: mx.array, width: int) -> mx.array:
    size = hadamard_size(width)  # MLX's transform is wrong for other sizes, but for 12, 20 and 28 times these
    cut = x.reshape(*x.shape[:-1], width // size, size)
    return mx.hadamard_transform(cut).reshape(x.shape)


@lru_cache(maxsize=64)
def _signs(width: int, seed: int) -> mx.array:
    """Returns (width,) float32 of 1 and -1: the lowest bits of MurmurHash3's finaliser of seed + index."""
    mixed = np.arange(width, dtype=np.uint64) + np.uint64(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = ((mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return mx.array(1 - 2 * (mixed & np.uint64(1)).astype(np.float32))
