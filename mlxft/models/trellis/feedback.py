"""Trellis codes that spare what a layer's inputs use most: each block makes up for the errors before it.

With H = E[x x^T] of the layer's inputs, what quantising does to the outputs is tr((W - Q) H (W - Q)^T).
Blocks of columns are encoded one after the other, and the error of each is taken back as far as the columns
to its right can: LDLQ, with blocks in the place of columns, of "QuIP: 2-Bit Quantization of Large Language
Models With Guarantees" (arXiv:2307.13304).
"""

import mlx.core as mx
import numpy as np

from mlxft.models.trellis.encode import (
    fitted_scales,
    in_scales,
    quantize,
    starting_scales,
    tail_biting_states,
)
from mlxft.models.trellis.format import check_geometry, codebook, pack

_DAMPING = 0.01  # of H's mean diagonal, added to it: few inputs leave directions empty


def quantize_with_feedback(
    weight: mx.array, hessian: np.ndarray, bits: int, block: int = 256
) -> tuple[mx.array, mx.array]:
    """Returns codes and scales as `quantize` does, for inputs with hessian (width, width) float64.

    Raises: InputError as `quantize` does.
    """
    check_geometry(weight.shape[1], bits, block)
    mean = np.trace(hessian) / len(hessian)
    if not mean > 0:  # inputs that are all zero say nothing
        return quantize(weight, bits, block)
    damped = hessian + _DAMPING * mean * np.eye(len(hessian))
    onward = np.linalg.cholesky(np.linalg.inv(damped)).T  # upper: H^-1 = onward^T onward
    original = np.array(weight.astype(mx.float32))
    scales = starting_scales(original, bits)
    left, states = original.copy(), []
    for first in range(0, original.shape[1], block):
        some = slice(first, first + block)
        found = tail_biting_states(in_scales(left[:, some], scales), bits)
        error = left[:, some] - codebook()[found] * scales[:, None]
        carried = np.linalg.solve(onward[some, some].T, error.T).T
        left[:, first + block :] -= carried @ onward[some, first + block :]
        states.append(found)
    codes = np.concatenate([pack(found, bits) for found in states], axis=1)
    values = codebook()[np.concatenate(states, axis=1)]
    return mx.array(codes), fitted_scales(original, values, scales, damped)
