"""Each layer's window as the model itself asks for it, whatever the family calls it."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxft.layouts.install import layouts_installed
from mlxft.models.asked import logits_with_windows, windows_asked
from tests.tiny_models import FAMILIES, MORE_FAMILIES, model_config, random_model

LENGTH = 12


def windows_of(model) -> list:
    with layouts_installed(model.layers):
        return windows_asked(model, len(model.layers))


@pytest.mark.parametrize(
    "family, expected",
    {
        "llama": [None] * 4,
        "mistral": [8, None, 8, None],
        "gemma3_text": [8, None, 8, None],
        "gemma4_text": [8, None, 8, None, 8, None],
        "olmo3": [8, None, 8, None],
        "qwen3_next": [None] * 4,
    }.items(),
)
def test_windows_are_those_that_the_model_asks_for(family, expected):
    assert windows_of(random_model(model_config(family))) == expected


def test_nothing_is_computed_to_find_out(monkeypatch):
    model = random_model(model_config("mistral"))
    monkeypatch.setattr(mx, "eval", lambda *arrays: pytest.fail("evaluated"))
    before = mx.get_active_memory()
    windows_of(model)
    assert mx.get_active_memory() - before < 10_000  # the two tokens


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "olmo3"])
def test_the_models_own_windows_can_be_lowered_and_raised(family):
    """At its own size the logits are its own, below it others, from the row's length on full attention's."""
    model = random_model(model_config(family))
    layers = len(model.layers)
    tokens = mx.random.randint(3, 250, (1, LENGTH), key=mx.random.key(0))

    def differ(one, other):
        return mx.abs(one - other).max().item() > 1e-4

    own = model(tokens)
    assert not differ(logits_with_windows(model, tokens, layers, 8), own)
    assert differ(logits_with_windows(model, tokens, layers, 5), own)
    wide = random_model(model_config(family, sliding_window=LENGTH))
    assert not differ(logits_with_windows(model, tokens, layers, LENGTH), wide(tokens))


def test_a_layer_that_masks_in_a_way_of_its_own_is_told_apart():
    model = random_model(model_config("llama"))
    kind = type(model.model)

    class Chunked(kind):
        def __call__(self, inputs, cache=None, input_embeddings=None):
            hidden = self.embed_tokens(inputs)
            for layer, each in zip(self.layers, cache, strict=True):
                hidden = layer(hidden, mx.ones((2, 2), mx.bool_), each)
            return self.norm(hidden)

    model.model.__class__ = Chunked
    with pytest.raises(ValueError, match="layer 0 masks its attention in a way of its own"):
        windows_of(model)


def test_every_tiny_family_is_covered_by_the_same_two_caches():
    """No family needs code of its own to tell its windows."""
    for family in FAMILIES | MORE_FAMILIES:
        model: nn.Module = random_model(model_config(family))
        assert len(windows_of(model)) == len(model.layers)
