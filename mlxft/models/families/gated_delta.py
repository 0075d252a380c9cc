"""Qwen3.5 and Qwen3-Next: three of four layers carry a state along the row (gated delta rule)."""

import mlx.nn as nn

from mlxft.models.decoder import DecoderView


class GatedDeltaView(DecoderView):
    """The decoder view of `qwen3_5`, `qwen3_5_moe` and `qwen3_next`."""

    def recurrent(self) -> list[nn.Module]:
        """Returns the gated delta modules; their convolution's last inputs are part of the state."""
        return [layer.linear_attn for layer in self.layers if layer.is_linear]
