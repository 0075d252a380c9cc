"""Modules trained whole beside low-rank updates."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import load_adapter, save_adapter
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import adapter_disabled
from mlxft.models.whole_modules import select_modules
from mlxft.segmented.kinds import kind_of
from tests.tiny_models import make_model, model_config, random_model

TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])


def trained(model, **settings):
    """The model with an adapter and whole modules, all moved from their start."""
    report = apply_adapter(model, AdapterConfig(rank=2, targets=["q_proj"], **settings))
    for number, (name, array) in enumerate(tree_flatten(model.trainable_parameters())):
        moved = array + 0.05 * mx.random.normal(array.shape, key=mx.random.key(number))
        model.load_weights([(name, moved)], strict=False)
    return report


@pytest.mark.parametrize("names, expected", [
    (["norm"], ["model.norm"]),
    (["model.norm", "lm_head"], ["model.norm", "lm_head"]),
    (["*layernorm"], ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]),
    (["model.layers.0.mlp", "up_proj"], ["model.layers.0.mlp"]),  # the second is inside it
])
def test_names_are_last_names_whole_paths_or_patterns(names, expected):
    model = random_model(model_config("llama", num_hidden_layers=1))
    assert sorted(select_modules(model, names)) == sorted(expected)


@pytest.mark.parametrize("family, names, message", [
    ("llama", ["nrom"], "adapter.modules_to_save: 'nrom' matches no module. There are: .*norm"),
    ("qwen3", ["lm_head"], "has no lm_head: its embedding is its head too. Name that: embed_tokens"),
    ("llama", ["self_attn"], r"self_attn has a low-rank update too, at .*q_proj"),
    ("llama", ["q_proj"], r"q_proj has a low-rank update too"),
])
def test_what_cannot_be_trained_whole_is_refused_by_name(family, names, message):
    with pytest.raises(InputError, match=message):
        trained(random_model(model_config(family)), modules_to_save=names)


def test_the_report_counts_whole_modules_and_the_base_has_no_more_parameters_for_them():
    model = random_model(model_config("llama"))
    without = apply_adapter(random_model(model_config("llama")), AdapterConfig(rank=2, targets=["q_proj"]))
    report = trained(model, modules_to_save=["norm", "lm_head"])
    assert report.num_total == without.num_total
    assert report.num_trainable == without.num_trainable + 64 + 259 * 64
    assert report.modules == ["lm_head", "model.norm"]
    assert str(report).endswith("whole: lm_head, model.norm")


def test_with_the_adapter_off_a_whole_module_is_its_base_and_then_itself_again():
    base = random_model(model_config("qwen3"))
    model = random_model(model_config("qwen3"))
    trained(model, modules_to_save=["embed_tokens", "*norm"])
    after = model(TOKENS)
    with adapter_disabled(model):
        assert mx.array_equal(model(TOKENS), base(TOKENS))
    assert mx.array_equal(model(TOKENS), after)
    assert not mx.allclose(after, base(TOKENS), rtol=1e-2)


def test_a_tied_embedding_is_one_array_whose_gradient_is_of_both_uses():
    full, model = (random_model(model_config("qwen3")) for _ in range(2))
    apply_adapter(model, AdapterConfig(rank=2, targets=["q_proj"], modules_to_save=["embed_tokens"]))
    loss = lambda m: mx.square(m(TOKENS)).mean()  # noqa: E731
    expected = nn.value_and_grad(full, loss)(full)[1]["model"]["embed_tokens"]["weight"]
    found = nn.value_and_grad(model, loss)(model)[1]["model"]["embed_tokens"]["weight"]
    assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5 * mx.abs(expected).max())
    names = [name for name, _ in tree_flatten(model.trainable_parameters()) if "lora" not in name]
    assert names == ["model.embed_tokens.weight"]


def test_a_quantised_module_is_made_dense_and_gives_the_same():
    model = random_model(model_config("llama"))
    nn.quantize(model, group_size=32, bits=4)
    expected = model(TOKENS)
    cfg = AdapterConfig(rank=2, targets=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    apply_adapter(model, cfg)
    assert type(model.lm_head) is nn.Linear and type(model.model.embed_tokens) is nn.Embedding
    assert type(model.layers[0].mlp.up_proj) is nn.QuantizedLinear
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_layers_whose_norms_are_trained_whole_are_still_of_one_kind():
    model = random_model(model_config("llama"))
    trained(model, modules_to_save=["*layernorm"])
    assert kind_of(model.layers[0]) == kind_of(model.layers[1])


@pytest.mark.parametrize("quantise", [None, 4])
def test_an_adapter_with_whole_modules_is_saved_and_loaded_with_them(tmp_path, quantise):
    folder = make_model(tmp_path / "base", "qwen3", quantize=quantise)
    settings = {"modules_to_save": ["embed_tokens", "*layernorm", "norm"]}
    model = load_model(folder)
    trained(model, **settings)
    cfg = AdapterConfig(rank=2, targets=["q_proj"], **settings)
    save_adapter(tmp_path / "adapter", model, cfg, str(folder))
    saved = mx.load(str(tmp_path / "adapter" / "adapters.safetensors"))
    assert saved.keys() == dict(tree_flatten(model.trainable_parameters())).keys()
    loaded, again = load_model(folder), load_model(folder)
    load_adapter(loaded, tmp_path / "adapter")
    report = apply_adapter(again, AdapterConfig(init_from=str(tmp_path / "adapter")))
    assert mx.array_equal(loaded(TOKENS), model(TOKENS)) and mx.array_equal(again(TOKENS), model(TOKENS))
    assert len(report.modules) == 1 + 4 * 2 + 1
    with adapter_disabled(loaded):
        assert mx.allclose(loaded(TOKENS), load_model(folder)(TOKENS), rtol=1e-5, atol=1e-5)


def saved_with_norm(tmp_path):
    """Saves an adapter with a whole norm as tmp_path / "adapter" and returns its base's folder."""
    folder = make_model(tmp_path / "base", "llama")
    model = load_model(folder)
    trained(model, modules_to_save=["norm"])
    cfg = AdapterConfig(rank=2, targets=["q_proj"], modules_to_save=["norm"])
    save_adapter(tmp_path / "adapter", model, cfg, str(folder))
    return folder


def test_stock_mlx_lm_names_a_whole_module_that_it_does_not_load(tmp_path):
    import mlx_lm

    folder = saved_with_norm(tmp_path)
    with pytest.raises(ValueError, match="model.norm.weight: not an adapter parameter"):
        mlx_lm.load(str(folder), adapter_path=str(tmp_path / "adapter"))


def test_modules_that_contradict_init_from_are_refused(tmp_path):
    folder = saved_with_norm(tmp_path)
    agreeing = AdapterConfig(init_from=str(tmp_path / "adapter"), modules_to_save=["norm"])
    apply_adapter(load_model(folder), agreeing)
    with pytest.raises(InputError, match="adapter.modules_to_save chooses lm_head and contradicts"):
        other = AdapterConfig(init_from=str(tmp_path / "adapter"), modules_to_save=["lm_head"])
        apply_adapter(load_model(folder), other)
