"""Gemma, the first: scaled embeddings."""

from typing import Optional

import mlx.core as mx

from mlxft.models.decoder import DecoderView, State


class GemmaView(DecoderView):
    """The decoder view of `gemma`."""

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the embeddings times sqrt(H)."""
        hidden = self.decoder.embed_tokens(tokens) if given is None else given
        return (hidden * self.decoder.args.hidden_size**0.5,)
