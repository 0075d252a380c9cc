"""The decoder view: any of mlx-lm's models run in parts, with its modules unmodified.

    state = view.embed(tokens)            (B, T) -> (hidden (B, T, H), ...)
    state = view.run(state, a, b, cache)  layers a .. b - 1
    hidden = view.finish(state)           (B, T, H), after the last norm
    logits = view.head(params, hidden)    (M, H) -> (M, V)

The state is a tuple of arrays: the hidden array first, then whatever a family carries across layers.
"""

from contextlib import contextmanager
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.errors import InputError
from mlxft.layouts.arrange import LAYOUTS
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.install import layouts_installed
from mlxft.models.asked import windows_asked
from mlxft.models.check import check, halves_agree
from mlxft.models.frozen_linear import quantised_at_dense_speed
from mlxft.models.lora_linear import thin_products_joined
from mlxft.models.new_rows import NewRows

__all__ = ["DecoderView", "State", "model_type", "unchecked_view", "view"]

State = tuple[mx.array, ...]

_HALVES = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class DecoderView:
    """Runs models whose layers are called as `layer(hidden, mask, cache)`, one after the other.

    A family that differs overrides `embed`, `run`, `head` or `recurrent` in a file of `models/families`.

    refused: the layouts that this model cannot be trained in, each with the reason.
    """

    in_parts = True  # False for families that only run as a whole: no checkpointing, no segments
    layers_are_alike = True  # False where `run` treats layers of one kind by their number
    last_norm = "norm"  # the name of the norm after the last layer

    def __init__(self, model: nn.Module):
        self.model = model
        self.text = getattr(model, "language_model", model)
        self.refused: dict[str, str] = {}
        self._windows: Optional[list[Optional[int]]] = None
        self._lowered: Optional[int] = None
        self.decoder = self._find_decoder()

    def _find_decoder(self) -> nn.Module:
        decoder = getattr(self.text, "model", None)
        missing = [name for name in ("embed_tokens", "layers", self.last_norm) if not hasattr(decoder, name)]
        if missing:
            raise InputError(
                f"models of type {self.family!r} cannot be trained yet: "
                f"their code has no {', '.join(missing)} where others have it"
            )
        return decoder

    @property
    def family(self) -> str:
        """The name of the model's family, as its config.json has it."""
        return model_type(self.model)

    @property
    def code(self) -> str:
        """The name of mlx-lm's module with the code of the text model."""
        return _code(self.model)

    @property
    def embedding(self) -> nn.Module:
        """The layer that turns tokens into embeddings."""
        return self.decoder.embed_tokens

    @property
    def vocabulary(self) -> int:
        """How many tokens there are embeddings for."""
        embedding = self.embedding
        if isinstance(embedding, NewRows):
            return embedding.size
        return getattr(embedding, "base", embedding).weight.shape[0]

    @property
    def layers(self) -> list[nn.Module]:
        return self.decoder.layers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layouts(self) -> frozenset[str]:
        """The layouts that this model can be trained in."""
        return frozenset(LAYOUTS) - self.refused.keys()

    def require(self, layout: str, gradient: str = "whole") -> None:
        """Raises InputError, naming the family and the reason, if the model cannot be trained so."""
        if layout in self.refused:
            raise InputError(
                f"trainer.layout={layout}: models of type {self.family!r} cannot be trained so: "
                f"{self.refused[layout]}. Use trainer.layout={' or '.join(sorted(self.layouts))}"
            )
        if gradient != "whole" and not self.in_parts:
            raise InputError(
                f"trainer.gradient={gradient}: models of type {self.family!r} run only as a whole. "
                "Use trainer.gradient=whole"
            )

    def require_noise(self) -> None:
        """Raises InputError if the model cannot be given other embeddings than its tokens'."""
        if not self.in_parts:
            raise InputError(
                f"trainer.neftune_alpha: models of type {self.family!r} run only as a whole, from tokens to "
                "logits, and there is no place for noise on their embeddings. Leave it out"
            )

    def require_new_tokens(self) -> None:
        """Raises InputError if tokens are looked up in other tables than the embedding too."""

    def require_of(self, cache: TrainingCache) -> None:
        """Raises InputError if the model cannot be trained in the layout of `cache`."""
        if self.refused and not cache.layout.is_plain:
            shared = any(len(piece.keys) > 1 for piece in cache.layout.pieces)
            self.require("prefix_shared" if shared else "packed")

    def windows(self) -> list[Optional[int]]:
        """Returns each layer's sliding window in positions, None for full attention."""
        if self._windows is None:
            with self.active():
                self._windows = windows_asked(self.model, self.num_layers)
        if self._lowered is None:
            return self._windows
        return [None if size is None else self._lowered for size in self._windows]

    def recurrent(self) -> list[nn.Module]:
        """Returns the modules that carry a state along the row, called as `module(x, mask, cache)`."""
        return []

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the state before layer 0. given: (B, T, H) embeddings to use in place of the tokens'."""
        return (self.decoder.embed_tokens(tokens) if given is None else given,)

    def run(self, state: State, start: int, stop: int, cache: TrainingCache) -> State:
        """Returns the state after layers [start, stop). Raises: InputError for a layout that is refused."""
        self.require_of(cache)
        hidden = state[0]
        for layer, window in zip(self.layers[start:stop], self.windows()[start:stop], strict=True):
            hidden = layer(hidden, cache.make_mask(hidden.shape[1], window_size=window), cache)
        return (hidden,)

    def has_halves(self, index: int) -> bool:
        """True if the layer is attention, then an MLP, each added to what enters it, and nothing else."""
        names = {name for name, value in self.layers[index].items() if isinstance(value, nn.Module)}
        return self.layers_are_alike and names == _HALVES and halves_agree(self, index)

    def run_half(self, hidden: mx.array, index: int, half: str, cache: TrainingCache) -> mx.array:
        """Returns the hidden states (B, T, H) after one half of a layer: "attention" or "mlp"."""
        layer = self.layers[index]
        if half == "mlp":
            return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        mask = cache.make_mask(hidden.shape[1], window_size=self.windows()[index])
        return hidden + layer.self_attn(layer.input_layernorm(hidden), mask, cache)

    def finish(self, state: State) -> mx.array:
        """Returns the hidden states (B, T, H) that the head reads."""
        return self.decoder[self.last_norm](state[0])

    @property
    def head_module(self) -> nn.Module:
        """The module that makes logits: the head, or the embedding where they are tied."""
        return self.embedding if self.is_tied else self.text.lm_head

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head too."""
        return "lm_head" not in self.text

    def head(self, params: dict, hidden: mx.array) -> mx.array:
        """Returns the logits (M, V) of hidden (M, H), capped softly where the model does.

        `params` replace the head's trainable arrays.
        """
        module = self.head_module
        if params:
            module.update(params)
        logits = module.as_linear(hidden) if self.is_tied else module(hidden)
        cap = getattr(self.text, "final_logit_softcapping", None)
        return logits if cap is None else mx.tanh(logits / cap) * cap

    @property
    def embedding_trains(self) -> bool:
        """True if anything below the first layer is trained."""
        trained, above = self.decoder.trainable_parameters(), ("layers", self.last_norm)
        return any(_has_arrays(value) for name, value in trained.items() if name not in above)

    def lowest_trainable(self) -> int:
        """Returns the first layer that a backward has to reach: num_layers if only the head trains."""
        if self.embedding_trains:
            return 0
        for index, layer in enumerate(self.layers):
            if _has_arrays(layer.trainable_parameters()):
                return index
        return self.num_layers

    @contextmanager
    def active(self):
        """Within the block attention and recurrent layers follow the layout of their training cache.

        Quantised layers multiply many rows as dense ones do; adapted ones that share an input read it once.
        """
        with layouts_installed(self.layers, self.recurrent()), quantised_at_dense_speed():
            with thin_products_joined():
                yield

    @contextmanager
    def window_lowered(self, size: int):
        """Within the block the view's sliding windows are `size` positions."""
        before, self._lowered = self._lowered, size
        try:
            yield
        finally:
            self._lowered = before


def _has_arrays(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_has_arrays(value) for value in tree.values())
    if isinstance(tree, list):
        return any(_has_arrays(value) for value in tree)
    return isinstance(tree, mx.array)


def model_type(model: nn.Module) -> str:
    """Returns the family's name as the checkpoint's config.json has it."""
    return getattr(model, "model_type", None) or getattr(model.args, "model_type", type(model).__module__)


def _code(model: nn.Module) -> str:
    return type(getattr(model, "language_model", model)).__module__.rpartition(".")[2]


def view(model: nn.Module) -> DecoderView:
    """Returns the checked decoder view of `model`.

    Raises: InputError naming the family where its parts do not give the model's own logits.
    """
    made = unchecked_view(model)
    check(made)
    return made


def unchecked_view(model: nn.Module) -> DecoderView:
    """Returns the decoder view of `model`, whose weights need not have been read.

    Raises: InputError for a family that cannot be trained.
    """
    from mlxft.models.families import UNTRAINABLE, VIEWS

    code = _code(model)
    if code in UNTRAINABLE:
        raise InputError(f"models of type {model_type(model)!r} cannot be trained: {UNTRAINABLE[code]}")
    return VIEWS.get(code, DecoderView)(model)
