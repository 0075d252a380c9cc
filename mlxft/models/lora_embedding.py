"""The low-rank update of an embedding, also where it is the head: both uses have the one update.

    row t: E[t] + scale * A[t] B          logits of h: E h + scale * A (B h)

Names and shapes as in mlx-lm: lora_a (V, r), lora_b (r, H).
"""

import mlx.core as mx
import mlx.nn as nn

from mlxft.models.lora_linear import AdaptedLayer


class LoRAEmbedding(AdaptedLayer):
    """A frozen embedding, dense or quantised, plus `scale` times a trained product of rank r."""

    def __init__(self, embedding: nn.Module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.embedding = embedding

    @property
    def base(self) -> nn.Module:
        """The frozen embedding."""
        return self["embedding"]

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.embedding(tokens)
        if self.scale == 0:
            return rows
        update = self.dropped(self.lora_a[tokens] @ (self.scale * self.lora_b))
        return rows + update.astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the logits (..., V) of x (..., H)."""
        logits = self.embedding.as_linear(x)
        if self.scale == 0:
            return logits
        a, b = self.lora_a.astype(x.dtype), (self.scale * self.lora_b).astype(x.dtype)
        return mx.addmm(logits, self.dropped(x) @ b.T, a.T)
