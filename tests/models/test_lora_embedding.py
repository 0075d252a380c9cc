"""The low-rank update of an embedding, and of one that is the head too."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRAEmbedding as TheirLoRAEmbedding

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.decoder import view
from mlxft.models.load import stored_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_embedding import LoRAEmbedding
from mlxft.models.lora_linear import adapter_disabled, dropout_keys
from tests.tiny_models import make_model, model_config, random_model

TOKENS = mx.array([[3, 1, 3, 0], [9, 3, 2, 2]])


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def embedding(quantised=False):
    made = nn.Embedding(10, 32)
    made.weight = normal(1, 10, 32)
    return nn.QuantizedEmbedding.from_embedding(made, group_size=32, bits=4) if quantised else made


@pytest.mark.parametrize("quantised", [False, True])
def test_both_uses_are_those_of_mlx_lms_layer(quantised):
    base = embedding(quantised)
    layer = LoRAEmbedding(base, normal(2, 10, 3), normal(3, 3, 32), 1.5)
    theirs = TheirLoRAEmbedding.from_base(base, r=3, scale=1.5)
    assert {name: array.shape for name, array in theirs.items() if "lora" in name} == {
        "lora_a": layer.lora_a.shape,
        "lora_b": layer.lora_b.shape,
    }
    theirs.lora_a, theirs.lora_b = layer.lora_a, layer.lora_b
    x = normal(4, 5, 32)
    assert mx.allclose(layer(TOKENS), theirs(TOKENS), rtol=1e-5, atol=1e-5)
    assert mx.allclose(layer.as_linear(x), theirs.as_linear(x), rtol=1e-5, atol=1e-5)
    with adapter_disabled(layer):
        assert mx.array_equal(layer(TOKENS), base(TOKENS))
        assert mx.array_equal(layer.as_linear(x), base.as_linear(x))


def test_dropout_is_replayed_by_its_key_and_keeps_the_type():
    layer = LoRAEmbedding(embedding(), normal(2, 10, 3), normal(3, 3, 32), 1.5, dropout=0.5)
    layer.embedding.weight = layer.embedding.weight.astype(mx.bfloat16)
    with dropout_keys(mx.random.key(1)):
        assert mx.array_equal(layer(TOKENS), layer(TOKENS))
        assert not mx.array_equal(layer(TOKENS)[0, 0], layer(TOKENS)[0, 2])  # one token at two places
    assert layer(TOKENS).dtype == layer.as_linear(layer(TOKENS)).dtype == mx.bfloat16


def test_a_tied_head_and_its_embedding_share_one_update_and_both_uses_have_gradients():
    """dA = scale dW B^T and dB = scale A^T dW, where dW is the whole weight's gradient, of both uses."""
    loss_of = lambda model: mx.square(model(TOKENS)).mean()  # noqa: E731
    whole = random_model(model_config("qwen3"))
    weight_name = "model.embed_tokens.weight"
    adapted = random_model(model_config("qwen3"))
    apply_adapter(adapted, AdapterConfig(targets=["embed_tokens"], rank=3, alpha=6.0))
    assert [name for name, _ in tree_flatten(adapted.trainable_parameters())] == [
        "model.embed_tokens.lora_a",
        "model.embed_tokens.lora_b",
    ]
    layer = adapted.model.embed_tokens
    layer.lora_b = 0.1 * normal(7, *layer.lora_b.shape)
    embedding = whole.model.embed_tokens
    embedding.weight = embedding.weight + 2.0 * layer.lora_a @ layer.lora_b
    assert mx.allclose(adapted(TOKENS), whole(TOKENS), rtol=1e-4, atol=1e-4)

    ours = dict(tree_flatten(nn.value_and_grad(adapted, loss_of)(adapted)[1]))
    d_w = np.array(dict(tree_flatten(nn.value_and_grad(whole, loss_of)(whole)[1]))[weight_name], np.float64)
    expected_a = 2.0 * d_w @ np.array(layer.lora_b, np.float64).T
    expected_b = 2.0 * np.array(layer.lora_a, np.float64).T @ d_w
    for name, expected in (("lora_a", expected_a), ("lora_b", expected_b)):
        found = np.array(ours[f"model.embed_tokens.{name}"])
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_view_of_an_adapted_embedding_knows_its_vocabulary_and_that_it_trains():
    made = view(random_model(model_config("qwen3")))
    apply_adapter(made.model, AdapterConfig(targets=["embed_tokens"]))
    assert made.vocabulary == 259
    assert made.embedding_trains and made.lowest_trainable() == 0


@pytest.mark.parametrize("bits", [None, 4])
def test_dora_of_an_embedding_is_refused_by_name(tmp_path, bits):
    model = stored_model(make_model(tmp_path, "qwen3", quantize=bits))[0]  # packed where it is stored so
    with pytest.raises(InputError, match="adapter.kind=dora: model.embed_tokens is an embedding"):
        apply_adapter(model, AdapterConfig(kind="dora", targets=["embed_tokens"]))
