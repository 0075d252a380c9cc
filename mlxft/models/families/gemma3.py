"""Gemma 3: scaled embeddings; every layer but each sixth looks through a sliding window."""

from typing import Optional

import mlx.core as mx

from mlxft.models.decoder import DecoderView, State


class Gemma3View(DecoderView):
    """The decoder view of `gemma3` and `gemma3_text`."""

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the embeddings times sqrt(H), rounded to bfloat16 as the released models were trained."""
        hidden = self.decoder.embed_tokens(tokens) if given is None else given
        scale = mx.array(self.decoder.args.hidden_size**0.5, mx.bfloat16)
        return (hidden * scale.astype(hidden.dtype),)
