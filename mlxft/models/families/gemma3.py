"""Gemma 3: scaled embeddings, and every layer but each sixth looks through a sliding window."""

from contextlib import contextmanager
from typing import Optional

import mlx.core as mx

from mlxft.models.decoder import DecoderView, State


class Gemma3View(DecoderView):
    """The decoder view of `gemma3` and `gemma3_text`."""

    def windows(self) -> list[Optional[int]]:
        """Returns the window of each layer; the last of every `sliding_window_pattern` layers has none."""
        pattern = self.decoder.sliding_window_pattern
        return [
            None if index % pattern == pattern - 1 else self.decoder.window_size
            for index in range(self.num_layers)
        ]

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the embeddings times sqrt(H), rounded to bfloat16 as the released models were trained."""
        hidden = self.decoder.embed_tokens(tokens) if given is None else given
        scale = mx.array(self.decoder.args.hidden_size**0.5, mx.bfloat16)
        return (hidden * scale.astype(hidden.dtype),)

    @contextmanager
    def window_lowered(self, size: int):
        """Within the block sliding windows are `size` positions."""
        before = self.decoder.window_size
        self.decoder.window_size = size
        try:
            yield
        finally:
            self.decoder.window_size = before
