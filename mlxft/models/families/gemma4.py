"""Gemma 4: per-layer inputs, and late layers that attend to the keys and values of earlier ones.

    state = hidden (B, T, H), [per-layer inputs (B, T, layers, W)], [keys, values of each donor still needed]

A donor is the last layer of its kind (sliding or full attention) that has keys and values of its own. Its
keys and values are part of the state from the donor on, so that layers can be run in any ranges and
gradients find their way back to it.
"""

from typing import Optional

import mlx.core as mx

from mlxft.errors import InputError
from mlxft.layouts.cache import TrainingCache
from mlxft.models.decoder import DecoderView, State


class Gemma4View(DecoderView):
    """The decoder view of `gemma4` and `gemma4_text`."""

    layers_are_alike = False

    @property
    def _has_inputs(self) -> bool:
        return bool(self.decoder.hidden_size_per_layer_input)

    def require_new_tokens(self) -> None:
        """Raises InputError if the layers have inputs of their own for each token."""
        if self._has_inputs:
            raise InputError(
                f"model.new_tokens: models of type {self.family!r} look each token up in a second table, "
                "for inputs of every layer, which has no rows for new ones. Use a token that the tokenizer "
                "has to spare, such as <unused0>"
            )

    def _needed(self, start: int) -> list[int]:
        """Returns the layers before `start` whose keys and values a layer from `start` on attends to."""
        sources = enumerate(self.decoder.previous_kvs)
        return sorted({source for layer, source in sources if source < start <= layer})

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the scaled embeddings, and each layer's own inputs, made of tokens and embeddings."""
        decoder = self.decoder
        embedded = decoder.embed_tokens(tokens) if given is None else given
        hidden = embedded * decoder.embed_scale
        if not self._has_inputs:
            return (hidden,)
        inputs = decoder._get_per_layer_inputs(tokens, embedded)
        return hidden, decoder._project_per_layer_inputs(hidden, inputs)

    def run(self, state: State, start: int, stop: int, cache: TrainingCache) -> State:
        """Returns the state after layers [start, stop). Raises: InputError for a layout that is refused."""
        self.require_of(cache)
        hidden, *rest = state
        inputs = rest.pop(0) if self._has_inputs else None
        shared = {donor: (rest[2 * n], rest[2 * n + 1]) for n, donor in enumerate(self._needed(start))}
        windows, sources = self.windows(), self.decoder.previous_kvs
        for index in range(start, stop):
            hidden, keys_values, _ = self.layers[index](
                hidden,
                cache.make_mask(hidden.shape[1], window_size=windows[index]),
                cache,
                per_layer_input=None if inputs is None else inputs[:, :, index],
                shared_kv=shared.get(sources[index]),
                offset=mx.array(cache.offset),
            )
            if index in sources[index + 1 :]:
                shared[index] = keys_values
        kept = [array for donor in self._needed(stop) for array in shared[donor]]
        return (hidden, *([] if inputs is None else [inputs]), *kept)
