"""Families whose layers cannot follow a layout: they train padded, in one piece, or not at all."""

from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.errors import InputError
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView, State

_POSITIONS_ADDED = "positions are added to the embeddings, counted from the start of the row"
_OWN_ROPE = "their attention keeps its rotary embedding under a name of its own"
_SCALED = "their attention scales queries by the position in the row"

# By the name of mlx-lm's code: why rows can neither be packed nor share a prompt.
PADDED_ONLY = {
    "gemma2": "their attention caps its scores by hand",
    "gpt2": _POSITIONS_ADDED,
    "gpt_bigcode": _POSITIONS_ADDED,
    "jamba": "their recurrent layers take states and masks in a way of their own",
    "kimi_linear": "their attention adds up scores with a mask of the size of the row",
    "llama4": f"{_SCALED}, in chunks of the row",
    "ministral3": _SCALED,
    "nemotron_h": "their layers are of four kinds, only two of which take a cache",
    "plamo": _OWN_ROPE,
    "qwen": _OWN_ROPE,
}
# By the same: why they cannot be trained.
UNTRAINABLE = {
    "kimi_k3": "mlx-lm's code for them mixes residuals in a GPU kernel that has no gradient",
    "muse_spark": "mlx-lm's code for them runs in GPU kernels that have no gradient",
    "talkie": "mlx-lm's code for them has no head apart from the model",
}


class WholeView(DecoderView):
    """Runs all layers at once, through the model's own code; knows the padded layout only."""

    in_parts = False

    def __init__(self, model: nn.Module):
        super().__init__(model)
        reason = PADDED_ONLY[self.code]
        self.refused = {"packed": reason, "prefix_shared": reason}

    def _find_decoder(self) -> nn.Module:
        names = ("model", "transformer", "backbone")
        return next(getattr(self.text, name) for name in names if hasattr(self.text, name))

    @property
    def embedding(self) -> nn.Module:
        names = ("embed_tokens", "wte", "embeddings")
        return next(getattr(self.decoder, name) for name in names if hasattr(self.decoder, name))

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers

    def windows(self) -> list[Optional[int]]:
        """Returns None for each layer: the model's own code knows."""
        return [None] * self.num_layers

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the tokens. Raises: InputError for embeddings in their place."""
        if given is not None:
            raise InputError(f"models of type {self.family!r} cannot be given embeddings for tokens")
        return (tokens,)

    def run(self, state: State, start: int, stop: int, cache: TrainingCache) -> State:
        """Returns the hidden states after the last norm.

        Raises: InputError for any layout but the padded one, and for less than all layers.
        """
        if start == stop:
            return state
        self.require_of(cache)
        if (start, stop) != (0, self.num_layers):
            self.require("padded", gradient="checkpoint")
        return (self.decoder(state[0]),)

    def finish(self, state: State) -> mx.array:
        """Returns the hidden states (B, T, H) that the head reads."""
        return state[0]

    def lowest_trainable(self) -> int:
        """Returns 0: a backward reaches everything."""
        return 0
