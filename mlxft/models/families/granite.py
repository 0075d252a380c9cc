"""Granite: embeddings and logits are scaled (the layers scale what they add by themselves)."""

from typing import Optional

import mlx.core as mx

from mlxft.models.decoder import DecoderView, State


class GraniteView(DecoderView):
    """The decoder view of `granite`."""

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the embeddings times `embedding_multiplier`."""
        hidden = self.decoder.embed_tokens(tokens) if given is None else given
        return (hidden * self.decoder.embedding_multiplier,)

    def head(self, params: dict, hidden: mx.array) -> mx.array:
        """Returns the logits (M, V) over `logits_scaling`."""
        return super().head(params, hidden) / self.text.logits_scaling
