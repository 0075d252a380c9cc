import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxft.errors import InputError
from mlxft.models.targets import linear_layers, num_expert_layers, select
from tests.tiny_models import model_config, random_model

NAMES = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
         "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]


@pytest.fixture
def model():
    return random_model(model_config("llama"))


def chosen(model, *arguments):
    return [layer.path for layer in select(model, *arguments)]


def test_by_default_every_linear_layer_of_every_block_is_chosen_and_the_head_is_not(model):
    assert chosen(model) == [f"model.layers.{i}.{name}" for i in range(4) for name in NAMES]


def test_the_blocks_of_a_wrapped_text_model_are_found():
    text = model_config("gemma3_text")
    model = random_model({"model_type": "gemma3", "text_config": text, "vocab_size": text["vocab_size"]})
    assert chosen(model, ["q_proj"], "last 2") == [
        f"language_model.model.layers.{i}.self_attn.q_proj" for i in (2, 3)]


@pytest.mark.parametrize("pattern, expected", [
    ("q_proj", [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]),
    ("self_attn.[qk]_proj", [f"model.layers.{i}.self_attn.{n}_proj" for i in range(4) for n in "kq"]),
    ("model.layers.3.mlp.*", [f"model.layers.3.{name}" for name in NAMES[:3]]),
    ("lm_head", ["lm_head"]),
])
def test_a_pattern_matches_last_names_paths_in_a_block_and_whole_paths(model, pattern, expected):
    assert chosen(model, pattern) == chosen(model, [pattern]) == expected


def test_a_star_stays_inside_the_blocks(model):
    assert "lm_head" not in chosen(model, "*")


@pytest.mark.parametrize("layers, first", [("all", 0), ("last 1", 3), (3, 1), ("4", 0)])
def test_layers_choose_the_last_blocks(model, layers, first):
    expected = [f"model.layers.{i}.self_attn.o_proj" for i in range(first, 4)]
    assert chosen(model, ["o_proj"], layers) == expected


def test_a_pattern_that_matches_nothing_lists_what_there_is(model):
    with pytest.raises(InputError) as error:
        select(model, ["q_proj", "q_porj"], "last 2")
    text = str(error.value)
    assert "adapter.targets: 'q_porj' matches no linear layer of blocks 2 to 3" in text
    assert text.endswith(f"There are: {', '.join(NAMES)}, lm_head, model.embed_tokens")


def test_a_tied_head_is_no_target():
    with pytest.raises(InputError, match="'lm_head' matches no linear layer"):
        select(random_model(model_config("qwen3")), ["lm_head"])


@pytest.mark.parametrize("layers, message", [
    ("last 5", "has only 4 decoder blocks"), (0, "N from 1 to 4"), ("first 2", "N from 1 to 4"),
    (-1, "N from 1 to 4")])
def test_layers_that_do_not_exist_are_refused(model, layers, message):
    with pytest.raises(InputError, match=message):
        select(model, None, layers)


def test_an_empty_list_of_targets_is_refused(model):
    with pytest.raises(InputError, match="empty list"):
        select(model, [])


def test_slots_do_not_depend_on_what_is_chosen(model):
    every = {layer.path: layer.slot for layer in linear_layers(model)}
    assert [every[f"model.layers.2.{name}"] for name in NAMES] == list(range(7))


def test_expert_layers_are_counted_and_not_taken_for_linear_layers():
    moe = model_config("qwen3", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
                       decoder_sparse_step=1,
                       mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True, num_hidden_layers=2)
    model = random_model(moe)
    assert num_expert_layers(model) == 6  # gate, up and down of two blocks
    assert not any("switch_mlp" in path for path in chosen(model))


def test_a_layer_that_is_already_adapted_counts_as_the_linear_layer_it_wraps(model):
    from mlxft.models.lora_linear import LoRALinear

    before = [(layer.path, layer.slot) for layer in linear_layers(model)]
    attention = model.layers[1].self_attn
    attention.q_proj = LoRALinear(attention.q_proj, mx.zeros((64, 2)), mx.zeros((2, 64)), 1.0)
    after = linear_layers(model)
    assert [(layer.path, layer.slot) for layer in after] == before
    assert all(type(layer.module) is nn.Linear for layer in after)
