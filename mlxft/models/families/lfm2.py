"""LFM2: most layers are short convolutions, which carry their last inputs along the row."""

import mlx.nn as nn

from mlxft.models.decoder import DecoderView


class Lfm2View(DecoderView):
    """The decoder view of `lfm2`."""

    last_norm = "embedding_norm"

    def recurrent(self) -> list[nn.Module]:
        """Returns the convolutions."""
        return [layer.conv for layer in self.layers if not layer.is_attention_layer]
