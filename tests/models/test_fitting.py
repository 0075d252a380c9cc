"""Adapters under the names of other libraries, and several added up."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import load_adapter, read_adapter, save_adapter, save_peft_adapter
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from tests.tiny_models import make_model

TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen3", "gemma3", "qwen3_moe")
    return {family: make_model(root / family, family, num_hidden_layers=2) for family in families}


def moved(folder, seed=0, **settings):
    """The model with an adapter that has moved from its start."""
    model = load_model(folder)
    apply_adapter(model, AdapterConfig(**{"rank": 3} | settings), seed)
    arrays = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(seed), len(arrays))
    for (name, array), key in zip(arrays, keys, strict=True):
        moved = array + 0.05 * mx.random.normal(array.shape, key=key)
        model.load_weights([(name, moved)], strict=False)
    mx.eval(model.parameters())
    return model


def saved(folder, path, seed=0, **settings):
    cfg = AdapterConfig(**{"rank": 3} | settings)
    save_adapter(path, moved(folder, seed, **settings), cfg, str(folder))
    return str(path)


def difference(found, expected):
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


def shapes(file):
    return {name: array.shape for name, array in mx.load(str(file)).items()}


# PEFT's layout, names and shapes as PEFT gives them.

def test_a_dora_adapter_has_pefts_names_and_shapes(folders, tmp_path):
    model = moved(folders["llama"], kind="dora", targets=["k_proj"], layers="last 1")
    save_peft_adapter(tmp_path, model, "owner/base")
    stem = "base_model.model.model.layers.1.self_attn.k_proj"
    assert shapes(tmp_path / "adapter_model.safetensors") == {
        f"{stem}.lora_A.weight": (3, 64),
        f"{stem}.lora_B.weight": (32, 3),
        f"{stem}.lora_magnitude_vector": (32,),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["use_dora"], config["r"], config["lora_alpha"]) == (True, 3, 6)
    assert config["target_modules"] == ["model.layers.1.self_attn.k_proj"]
    assert config["base_model_name_or_path"] == "owner/base" and config["modules_to_save"] is None


def test_a_dora_adapter_has_mlx_lms_names_and_shapes(folders, tmp_path):
    saved(folders["llama"], tmp_path, kind="dora", targets=["k_proj"], layers="last 1")
    stem = "model.layers.1.self_attn.k_proj"
    assert shapes(tmp_path / "adapters.safetensors") == {
        f"{stem}.lora_a": (64, 3),
        f"{stem}.lora_b": (3, 32),
        f"{stem}.m": (32,),
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "dora" and config["lora_parameters"]["keys"] == ["self_attn.k_proj"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_stock_mlx_lm_gives_a_dora_adapter_the_same_logits(folders, tmp_path, family):
    import mlx_lm

    model = moved(folders[family], kind="dora", alpha=3.0)
    save_adapter(tmp_path, model, AdapterConfig(kind="dora"), str(folders[family]))
    theirs, _ = mlx_lm.load(str(folders[family]), adapter_path=str(tmp_path))
    assert difference(theirs(TOKENS), model(TOKENS)) < 1e-5


@pytest.mark.parametrize("family, settings", [
    ("llama", {"kind": "dora", "layers": "last 1"}),
    ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
    ("llama", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "*norm"]}),
    ("qwen3", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("qwen3", {"rslora": True, "rank": 9}),
    ("qwen3", {"targets": ["q_proj", "embed_tokens"]}),
    ("gemma3", {"targets": ["q_proj"], "modules_to_save": ["norm"]}),
], ids=str)
def test_an_adapter_in_pefts_layout_gives_the_same_logits(folders, tmp_path, family, settings):
    model = moved(folders[family], **settings)
    save_peft_adapter(tmp_path, model, str(folders[family]))
    again = load_model(folders[family])
    load_adapter(again, tmp_path)
    assert difference(again(TOKENS), model(TOKENS)) < 1e-6


def test_a_wrapped_text_models_paths_are_those_of_transformers(folders, tmp_path):
    model = moved(folders["gemma3"], targets=["q_proj"], layers="last 1", modules_to_save=["norm"])
    save_peft_adapter(tmp_path, model, "owner/base")
    assert set(mx.load(str(tmp_path / "adapter_model.safetensors"))) == {
        "base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.language_model.layers.3.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.language_model.norm.weight",
    }


def test_an_embeddings_update_has_pefts_names_and_shapes(folders, tmp_path):
    save_peft_adapter(tmp_path, moved(folders["llama"], targets=["embed_tokens"]), "owner/base")
    tensors = mx.load(str(tmp_path / "adapter_model.safetensors"))
    stem = "base_model.model.model.embed_tokens"
    assert {name: array.shape for name, array in tensors.items()} == {
        f"{stem}.lora_embedding_A": (3, 259),
        f"{stem}.lora_embedding_B": (64, 3),
    }


def test_an_embedding_that_peft_saved_with_its_update_has_to_be_the_models(folders, tmp_path):
    """PEFT writes the base of an adapted embedding beside the update."""
    model = moved(folders["llama"], targets=["embed_tokens"])
    save_peft_adapter(tmp_path, model, "owner/base")
    file = str(tmp_path / "adapter_model.safetensors")
    tensors = dict(mx.load(file))
    name, base = "base_model.model.model.embed_tokens.base_layer.weight", model.model.embed_tokens.base.weight
    mx.save_safetensors(file, tensors | {name: base.astype(mx.bfloat16)})
    again = load_model(folders["llama"])
    load_adapter(again, tmp_path)
    assert difference(again(TOKENS), model(TOKENS)) < 1e-6
    for other in (base[:-1], base + 1):
        mx.save_safetensors(file, tensors | {name: other})
        with pytest.raises(InputError, match="was trained on another embedding than the model has"):
            load_adapter(load_model(folders["llama"]), tmp_path)


def test_a_tied_embedding_saved_whole_is_in_pefts_layout_twice_and_read_once(folders, tmp_path):
    model = moved(folders["qwen3"], targets=["q_proj"], modules_to_save=["embed_tokens"])
    save_peft_adapter(tmp_path, model, "owner/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    file = str(tmp_path / "adapter_model.safetensors")
    tensors = dict(mx.load(file))
    del tensors["base_model.model.lm_head.weight"]
    mx.save_safetensors(file, tensors)
    with pytest.raises(InputError, match="changes the embedding and leaves the head as it was"):
        load_adapter(load_model(folders["qwen3"]), tmp_path)


@pytest.mark.parametrize("family, targets, message", [
    ("qwen3_moe", ["*switch_mlp.up_proj"], "no updates of experts in one array"),
])
def test_what_pefts_layout_has_no_word_for_is_not_written(folders, tmp_path, family, targets, message):
    with pytest.raises(InputError, match=message):
        save_peft_adapter(tmp_path / "adapter", moved(folders[family], targets=targets), "owner/base")
    assert not (tmp_path / "adapter").exists()


# Several adapters.

def test_the_sum_of_adapters_is_the_sum_of_their_updates_in_float64(folders, tmp_path):
    """W + 0.7 s1 B1 A1 - 0.5 s2 B2 A2, of other ranks, scales and layers, as one weight."""
    one = saved(folders["llama"], tmp_path / "one", 1, rank=2, alpha=3.0, targets=["q_proj", "v_proj"])
    two = saved(folders["llama"], tmp_path / "two", 2, rank=5, alpha=4.0, targets=["q_proj"], layers="last 1")
    summed = load_model(folders["llama"])
    load_adapter(summed, [one, two], weights=[0.7, -0.5])
    merged = load_model(folders["llama"])
    for folder, weight in ((one, 0.7), (two, -0.5)):
        for path, low in read_adapter(folder).layers.items():
            block, name = int(path.split(".")[2]), path.rpartition(".")[2]
            linear = merged.layers[block].self_attn[name]
            update = np.array(low.a, np.float64) @ np.array(low.b, np.float64)
            sum_of_both = np.array(linear.weight, np.float64) + weight * low.scale * update.T
            linear.weight = mx.array(sum_of_both.astype(np.float32))
    assert difference(summed(TOKENS), merged(TOKENS)) < 1e-5
    assert summed.layers[1].self_attn.q_proj.rank == 7 and summed.layers[1].self_attn.v_proj.rank == 2


def test_a_sum_can_be_trained_on_and_is_saved_as_one(folders, tmp_path):
    one = saved(folders["llama"], tmp_path / "one", 1, rank=2, targets=["q_proj"])
    two = saved(folders["llama"], tmp_path / "two", 2, rank=5, targets=["v_proj"])
    cfg = AdapterConfig(init_from=[one, two])
    model = load_model(folders["llama"])
    report = apply_adapter(model, cfg)
    assert (report.rank, len(report.targets)) == (5, 4)
    save_adapter(tmp_path / "sum", model, cfg, str(folders["llama"]))
    again, added = load_model(folders["llama"]), load_model(folders["llama"])
    load_adapter(again, tmp_path / "sum")
    load_adapter(added, [one, two])
    assert difference(again(TOKENS), added(TOKENS)) < 1e-6


def test_experts_and_embeddings_add_up_too(folders, tmp_path):
    targets = ["embed_tokens", "*switch_mlp.up_proj"]
    parts = [saved(folders["qwen3_moe"], tmp_path / f"{n}", n, rank=n, targets=targets) for n in (2, 3)]
    twice, doubled = load_model(folders["qwen3_moe"]), load_model(folders["qwen3_moe"])
    load_adapter(twice, [parts[0], parts[0]])
    load_adapter(doubled, parts[0], weights=[2.0])
    assert difference(twice(TOKENS), doubled(TOKENS)) < 1e-6
    both = load_model(folders["qwen3_moe"])
    load_adapter(both, parts)
    assert both.model.embed_tokens.rank == both.layers[0].mlp.switch_mlp.up_proj.rank == 5


def test_of_whole_modules_the_differences_to_the_base_add_up(folders, tmp_path):
    settings = {"targets": ["q_proj"], "modules_to_save": ["norm"]}
    one, two = (saved(folders["llama"], tmp_path / f"{n}", n, **settings) for n in (1, 2))
    model = load_model(folders["llama"])
    base = model.model.norm.weight
    load_adapter(model, [one, two], weights=[0.5, 2.0])
    norms = [read_adapter(folder).weights["model.norm.weight"] for folder in (one, two)]
    expected = base + 0.5 * (norms[0] - base) + 2.0 * (norms[1] - base)
    assert mx.allclose(model.model.norm.weight, expected, rtol=1e-5)


@pytest.mark.parametrize("kind, message", [
    ("dora", "is of kind dora; only LoRA adapters can be added up"),
    ("full", "holds whole weights, which cannot be added up or weighed"),
])
def test_only_lora_adapters_add_up(folders, tmp_path, kind, message):
    one = saved(folders["llama"], tmp_path / "one", targets=["q_proj"])
    settings = {"rank": None} if kind == "full" else {}
    other = saved(folders["llama"], tmp_path / "other", kind=kind, **settings)
    with pytest.raises(InputError, match=message):
        load_adapter(load_model(folders["llama"]), [one, other])


@pytest.mark.parametrize("cfg, message", [
    ({"kind": "lora"}, "adapter.kind=lora contradicts .* is of kind dora; use adapter.kind=dora"),
    ({"kind": "full"}, "adapter.kind=full contradicts .* of kind dora; use adapter.kind=dora"),
])
def test_a_dora_adapter_is_taken_over_by_dora_and_nothing_else(folders, tmp_path, cfg, message):
    folder = saved(folders["llama"], tmp_path, kind="dora")
    model = load_model(folders["llama"])
    apply_adapter(model, AdapterConfig(kind="dora", init_from=folder))
    expected = load_model(folders["llama"])
    load_adapter(expected, folder)
    assert mx.array_equal(model(TOKENS), expected(TOKENS))
    with pytest.raises(InputError, match=message):
        apply_adapter(load_model(folders["llama"]), AdapterConfig(init_from=folder, **cfg))


def test_lengths_of_another_size_are_named(folders, tmp_path):
    folder = saved(folders["llama"], tmp_path, kind="dora", targets=["k_proj"])
    file = str(tmp_path / "adapters.safetensors")
    tensors = dict(mx.load(file))
    mx.save_safetensors(file, tensors | {"model.layers.0.self_attn.k_proj.m": mx.ones(31)})
    with pytest.raises(InputError, match=r"layers.0.self_attn.k_proj \(31,\) lengths of rows instead of 32"):
        load_adapter(load_model(folders["llama"]), folder)
