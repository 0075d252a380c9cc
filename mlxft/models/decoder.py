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
from mlxft.layouts.cache import TrainingCache
from mlxft.layouts.install import layouts_installed
from mlxft.layouts.pieces import padded

State = tuple[mx.array, ...]

# Largest difference of logits over the largest logit, by the type of the weights. The view runs the
# same modules, so only the order of sums in attention differs.
_TOLERANCE = {mx.float32: 1e-4, mx.bfloat16: 5e-2, mx.float16: 1e-2}


class DecoderView:
    """Runs models whose layers are called as `layer(hidden, mask, cache)`, one after the other.

    A family that differs overrides `embed`, `windows` or `run` in a file of `models/families`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.text = getattr(model, "language_model", model)
        self.decoder = getattr(self.text, "model", None)
        missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(self.decoder, name)]
        if missing:
            raise InputError(
                f"models of type {model_type(model)!r} cannot be trained yet: "
                f"their code has no {', '.join(missing)} where others have it"
            )

    @property
    def layers(self) -> list[nn.Module]:
        return self.decoder.layers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def windows(self) -> list[Optional[int]]:
        """Returns each layer's sliding window in positions, None for full attention."""
        size = getattr(self.decoder, "sliding_window", None)
        return [size if getattr(layer, "use_sliding", False) else None for layer in self.layers]

    def embed(self, tokens: mx.array, given: Optional[mx.array] = None) -> State:
        """Returns the state before layer 0. given: (B, T, H) embeddings to use in place of the tokens'."""
        return (self.decoder.embed_tokens(tokens) if given is None else given,)

    def run(self, state: State, start: int, stop: int, cache: TrainingCache) -> State:
        """Returns the state after layers [start, stop)."""
        hidden = state[0]
        for layer, window in zip(self.layers[start:stop], self.windows()[start:stop]):
            hidden = layer(hidden, cache.make_mask(hidden.shape[1], window_size=window), cache)
        return (hidden,)

    def finish(self, state: State) -> mx.array:
        """Returns the hidden states (B, T, H) that the head reads."""
        return self.decoder.norm(state[0])

    @property
    def head_module(self) -> nn.Module:
        """The module that makes logits: the head, or the embedding where they are tied."""
        return self.text.lm_head if "lm_head" in self.text else self.decoder.embed_tokens

    @property
    def is_tied(self) -> bool:
        return "lm_head" not in self.text

    def head(self, params: dict, hidden: mx.array) -> mx.array:
        """Returns the logits (M, V) of hidden (M, H); `params` replace the head's trainable arrays."""
        module = self.head_module
        if params:
            module.update(params)
        return module.as_linear(hidden) if self.is_tied else module(hidden)

    def lowest_trainable(self) -> int:
        """Returns the first layer that a backward has to reach: num_layers if only the head trains."""
        if self.decoder.embed_tokens.trainable_parameters():
            return 0
        for index, layer in enumerate(self.layers):
            if _has_arrays(layer.trainable_parameters()):
                return index
        return self.num_layers

    def active(self):
        """Within this context attention follows the layout of the training cache it is given."""
        return layouts_installed(self.layers)

    @contextmanager
    def window_lowered(self, size: int):
        """Within the block sliding windows are `size` positions, in the view and in the model itself."""
        before = self.decoder.sliding_window
        self.decoder.sliding_window = size
        try:
            yield
        finally:
            self.decoder.sliding_window = before


def _has_arrays(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_has_arrays(value) for value in tree.values())
    if isinstance(tree, list):
        return any(_has_arrays(value) for value in tree)
    return isinstance(tree, mx.array)


def model_type(model: nn.Module) -> str:
    """Returns the family's name as the checkpoint's config.json has it."""
    return getattr(model, "model_type", None) or getattr(model.args, "model_type", type(model).__module__)


def view(model: nn.Module) -> DecoderView:
    """Returns the checked decoder view of `model`.

    Raises: InputError naming the family where its parts do not give the model's own logits.
    """
    from mlxft.models.families import VIEWS

    made = VIEWS.get(model_type(model), DecoderView)(model)
    check(made)
    return made


def check(made: DecoderView, length: int = 12, window: int = 5) -> None:
    """Compares the view's logits with the model's own on random tokens, also with a short window.

    Raises: InputError if they differ by more than the weights' type explains.
    """
    vocabulary = made.decoder.embed_tokens.weight.shape[0]
    tokens = mx.random.randint(0, vocabulary, (2, length), key=mx.random.key(0))
    _compare(made, tokens, "plainly")
    if any(size is not None for size in made.windows()):
        with made.window_lowered(window):
            _compare(made, tokens, f"with a sliding window of {window}")


def _compare(made: DecoderView, tokens: mx.array, how: str) -> None:
    own = made.model(tokens).astype(mx.float32)
    cache = TrainingCache(padded(tokens.shape[1]))
    with made.active():
        state = made.run(made.embed(tokens), 0, made.num_layers, cache)
        logits = made.head({}, made.finish(state)).astype(mx.float32)
    difference = (mx.abs(logits - own).max() / mx.maximum(mx.abs(own).max(), 1e-6)).item()
    limit = _TOLERANCE[made.finish(state).dtype]
    if not difference <= limit:
        raise InputError(
            f"models of type {model_type(made.model)!r} cannot be trained yet: run layer by layer ({how}) "
            f"this one's logits differ by {difference:.1e} of the largest (at most {limit:.0e} is rounding)"
        )
