"""The low-rank updates of the experts of a layer: expert e gives W_e x + scale * B_e A_e x.

Names and shapes as in mlx-lm: lora_a (E, r, in), lora_b (E, out, r).
"""

import mlx.core as mx
import mlx.nn as nn

from mlxft.backend import backend
from mlxft.models.lora_linear import AdaptedLayer

# MLX's gather_mm on CUDA reads eight numbers at a time, also from rows of fewer, and then ends the program.
_CUDA_VECTOR = 8


class LoRAExperts(AdaptedLayer):
    """mlx-lm's layer of experts, frozen, dense or quantised, plus each expert's trained product of rank r."""

    def __init__(self, linear: nn.Module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.linear = linear

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        if self.scale == 0:
            return y
        chosen = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        a, b = self.lora_a.astype(x.dtype), (self.scale * self.lora_b).astype(x.dtype)
        short = -a.shape[1] % _CUDA_VECTOR if backend() == "cuda" else 0
        if short:
            a, b = mx.pad(a, [(0, 0), (0, short), (0, 0)]), mx.pad(b, [(0, 0), (0, 0), (0, short)])
        u = mx.gather_mm(self.dropped(x), a.swapaxes(-1, -2), **chosen)
        return y + mx.gather_mm(u, b.swapaxes(-1, -2), **chosen)
