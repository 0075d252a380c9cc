"""Exports in PEFT's layout: read back they give the trained logits; their files say what PEFT reads."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlxft.errors import InputError
from mlxft.models.adapters import load_adapter, save_peft_adapter
from mlxft.models.load import load_model
from tests.export.made import LLAMA, PARITY, adapter, difference, export, logits, moved
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen3", "gemma3", "qwen3_moe")
    return {family: make_model(root / family, family, num_hidden_layers=2) for family in families}


def config_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_the_parity_adapter_exported_and_read_back_gives_pefts_stored_logits(tmp_path):
    export(f"model.path={LLAMA}", f"adapter.init_from={LLAMA / 'adapter'}", to="peft", out=tmp_path / "peft")
    model = load_model(LLAMA)
    load_adapter(model, tmp_path / "peft")
    reference = np.load(PARITY / "lora_llama_untied.npz")
    real = reference["sft.attention_mask"] == 1
    found = np.array(model(mx.array(reference["sft.input_ids"])))
    assert difference(found[real], reference["sft.adapter_logits"][real]) < 1e-5


def test_the_parity_adapter_is_written_tensor_for_tensor_as_peft_wrote_it(tmp_path):
    export(f"model.path={LLAMA}", f"adapter.init_from={LLAMA / 'adapter'}", to="peft", out=tmp_path / "peft")
    ours = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    theirs = mx.load(str(LLAMA / "adapter" / "adapter_model.safetensors"))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]).item() for name in ours)
    assert (config_of(tmp_path / "peft")["r"], config_of(tmp_path / "peft")["lora_alpha"]) == (4, 8)


def test_layers_of_other_ranks_and_scales_stand_in_patterns(folders, tmp_path):
    model = moved(folders["llama"], rank=4, alpha=8.0, targets=["q_proj", "k_proj"])
    uneven = model.model.layers[1].self_attn.q_proj
    uneven.lora_a, uneven.lora_b, uneven.scale = uneven.lora_a[:, :2], uneven.lora_b[:2], 0.25
    save_peft_adapter(tmp_path, model, "owner/base")
    config, path = config_of(tmp_path), "model.layers.1.self_attn.q_proj"
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({path: 2}, {path: 0.25 * 2})
    again = load_model(folders["llama"])
    load_adapter(again, tmp_path)
    assert difference(logits(again), logits(model)) < 1e-6


def test_ranks_that_only_fill_up_are_left_out(folders, tmp_path):
    """mlx-lm's layout has one rank: smaller ones are filled up with zeros, which PEFT's needs not."""
    model = moved(folders["llama"], rank=4, targets=["q_proj"])
    filled = model.model.layers[0].self_attn.q_proj
    keep = mx.array([1, 0, 1, 0])
    filled.lora_a, filled.lora_b = filled.lora_a * keep, filled.lora_b * keep[:, None]
    expected = logits(model)
    save_peft_adapter(tmp_path, model, "owner/base")
    assert config_of(tmp_path)["rank_pattern"] == {"model.layers.0.self_attn.q_proj": 2}
    again = load_model(folders["llama"])
    load_adapter(again, tmp_path)
    assert difference(logits(again), expected) < 1e-6


def test_a_rank_stabilised_scale_is_written_as_alpha_over_rank(folders, tmp_path):
    model = moved(folders["llama"], rank=9, alpha=18.0, rslora=True, targets=["q_proj"])
    save_peft_adapter(tmp_path, model, "owner/base")
    config = config_of(tmp_path)
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (False, 9, 18 / 3 * 9)


def test_a_tied_embeddings_update_is_the_heads_too_and_says_so(folders, tmp_path, caplog):
    model = moved(folders["qwen3"], targets=["q_proj", "embed_tokens"])
    save_peft_adapter(tmp_path, model, "owner/base")
    assert config_of(tmp_path)["ensure_weight_tying"] is True
    assert "model.embed_tokens is the head too" in caplog.text and "adds it twice" in caplog.text
    tensors = mx.load(str(tmp_path / "adapter_model.safetensors"))
    embedding, head = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
    assert mx.array_equal(tensors[f"{head}.lora_A.weight"], tensors[f"{embedding}.lora_embedding_B"].T)
    assert mx.array_equal(tensors[f"{head}.lora_B.weight"], tensors[f"{embedding}.lora_embedding_A"].T)
    again = load_model(folders["qwen3"])
    load_adapter(again, tmp_path)
    assert difference(logits(again), logits(model)) < 1e-6


def test_a_head_that_has_another_update_than_its_embedding_is_refused_where_they_are_one(folders, tmp_path):
    save_peft_adapter(tmp_path, moved(folders["qwen3"], targets=["embed_tokens"]), "owner/base")
    file = str(tmp_path / "adapter_model.safetensors")
    tensors = dict(mx.load(file))
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors["base_model.model.lm_head.lora_A.weight"] + 1
    mx.save_safetensors(file, tensors)
    with pytest.raises(InputError, match="changes the embedding and leaves the head as it was, or the other"):
        load_adapter(load_model(folders["qwen3"]), tmp_path)


@pytest.mark.parametrize("family, settings, message", [
    ("qwen3_moe", {"targets": ["*switch_mlp.up_proj"]}, "no updates of experts in one array.*to=merged"),
    ("llama", {"kind": "full", "rank": None}, "holds whole weights, not an adapter.*to=merged"),
], ids=["experts", "full"])  # fmt: skip
def test_what_pefts_layout_has_no_word_for_is_refused_and_leaves_nothing(
    folders, tmp_path, family, settings, message
):
    trained = adapter(folders[family], tmp_path / "adapter", **settings)
    with pytest.raises(InputError, match=message):
        export(f"adapter.init_from={trained}", to="peft", out=tmp_path / "new" / "peft")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_several_adapters_with_weights_are_exported_as_their_sum(folders, tmp_path):
    one = adapter(folders["llama"], tmp_path / "one", 1, rank=2, targets=["q_proj"])
    two = adapter(folders["llama"], tmp_path / "two", 2, rank=3, targets=["q_proj", "v_proj"])
    both = f"adapter.init_from=[{one},{two}]"
    export(both, "adapter.init_weights=[0.5,-2]", to="peft", out=tmp_path / "sum")
    expected = load_model(folders["llama"])
    load_adapter(expected, [one, two], weights=[0.5, -2.0])
    found = load_model(folders["llama"])
    load_adapter(found, tmp_path / "sum")
    assert difference(logits(found), logits(expected)) < 1e-6
    config = config_of(tmp_path / "sum")
    assert set(config["rank_pattern"].values()) | {config["r"]} == {5, 3}
