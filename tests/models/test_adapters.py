import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import load_adapter, read_adapter, save_adapter
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import LoRALinear
from tests.tiny_models import make_model

PARITY = Path(__file__).parents[1] / "parity"
LLAMA = PARITY / "models" / "llama_untied"
TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def adapted(folder, cfg):
    """Returns the model with an adapter whose B is no longer zero."""
    model = load_model(folder)
    apply_adapter(model, cfg)
    values = [(name, 0.05 * mx.random.normal(array.shape, key=mx.random.key(number)))
              for number, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))]
    model.update(tree_unflatten(values))
    return model


def relative_difference(ours, theirs):
    return (mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item()


def edit_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder, name, change):
    """Rewrites the tensors of a copy of an adapter; `change` gets the dict of tensors."""
    tensors = dict(mx.load(str(folder / name)))
    mx.eval(tensors)
    change(tensors)
    mx.save_safetensors(str(folder / name), tensors)


@pytest.mark.parametrize("cfg", [
    AdapterConfig(),
    AdapterConfig(rank=3, alpha=5.0, layers="last 2"),
    AdapterConfig(rank=4, targets=["model.layers.1.self_attn.q_proj", "model.layers.2.mlp.*"]),
    AdapterConfig(targets=["v_proj", "lm_head"], layers="last 3"),
    AdapterConfig(kind="full"),
], ids=["all", "last_2", "picked", "with_head", "full"])
def test_stock_mlx_lm_gives_the_same_logits_from_base_and_folder(folder, tmp_path, cfg):
    model = adapted(folder, cfg)
    save_adapter(tmp_path, model, cfg, str(folder))
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path))
    expected = model(TOKENS)
    assert relative_difference(theirs(TOKENS), expected) < 1e-6
    ours = load_model(folder)
    load_adapter(ours, tmp_path)
    assert mx.array_equal(ours(TOKENS), expected)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


@pytest.mark.parametrize("family, quantize", [("qwen3", None), ("gemma3_text", None), ("llama", 4)])
def test_other_families_and_quantised_bases_give_stock_mlx_lm_the_same_logits(tmp_path, family, quantize):
    base = make_model(tmp_path / "base", family, quantize=quantize)
    cfg = AdapterConfig(rank=4, layers="last 2")
    model = adapted(base, cfg)
    save_adapter(tmp_path / "adapter", model, cfg, str(base))
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))
    # a dense float32 base and a quantised product differ by rounding
    assert relative_difference(theirs(TOKENS), model(TOKENS)) < (1e-5 if quantize else 1e-6)


def test_an_adapter_that_stock_mlx_lm_wrote_is_read(folder, tmp_path):
    from mlx_lm.tuner.utils import linear_to_lora_layers

    theirs, _ = mlx_lm.load(str(folder))
    theirs.freeze()
    parameters = {"rank": 5, "scale": 3.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
    linear_to_lora_layers(theirs, 2, parameters)
    trained = {name: 0.1 * mx.random.normal(a.shape, key=mx.random.key(i))
               for i, (name, a) in enumerate(tree_flatten(theirs.trainable_parameters()))}
    theirs.load_weights(list(trained.items()), strict=False)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), trained)
    (tmp_path / "adapter_config.json").write_text(json.dumps(
        {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}))
    ours = load_model(folder)
    load_adapter(ours, tmp_path)
    assert relative_difference(ours(TOKENS), theirs(TOKENS)) < 1e-6
    assert {layer.scale for layer in ours.modules() if isinstance(layer, LoRALinear)} == {3.0}


def test_different_ranks_and_scales_are_saved_as_the_same_function(folder, tmp_path):
    cfg = AdapterConfig(rank=4, alpha=8.0, targets=["q_proj", "k_proj"])
    model = adapted(folder, cfg)
    uneven = model.layers[2].self_attn.q_proj
    uneven.lora_a, uneven.lora_b, uneven.scale = uneven.lora_a[:, :2], uneven.lora_b[:2], 0.3
    save_adapter(tmp_path, model, cfg, str(folder))
    theirs, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path))
    assert relative_difference(theirs(TOKENS), model(TOKENS)) < 1e-6


def test_saving_again_replaces_what_is_there(folder, tmp_path):
    for rank in (2, 6):
        model = adapted(folder, AdapterConfig(rank=rank))
        save_adapter(tmp_path, model, AdapterConfig(rank=rank), str(folder))
    assert {low.rank for low in read_adapter(tmp_path).layers.values()} == {6}


def test_a_write_that_fails_leaves_the_old_adapter_intact(folder, tmp_path):
    cfg = AdapterConfig(rank=2)
    save_adapter(tmp_path, adapted(folder, cfg), cfg, str(folder))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / ".partial-adapters.safetensors").mkdir()  # the tensors cannot be written there
    with pytest.raises((OSError, RuntimeError)):
        save_adapter(tmp_path, adapted(folder, AdapterConfig(rank=6)), AdapterConfig(rank=6), str(folder))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# PEFT, against the reference numbers in tests/parity.

def test_a_peft_adapter_gives_pefts_logits():
    reference = np.load(PARITY / "lora_llama_untied.npz")
    model = load_model(LLAMA)
    tokens, real = mx.array(reference["sft.input_ids"]), reference["sft.attention_mask"] == 1

    def worst(name):
        expected = reference[f"sft.{name}_logits"]
        return np.abs(np.array(model(tokens)) - expected)[real].max() / np.abs(expected).max()

    assert worst("base") < 1e-5
    paths = load_adapter(model, LLAMA / "adapter")
    assert len(paths) == 21 and {m.scale for m in model.modules() if isinstance(m, LoRALinear)} == {2.0}
    assert worst("adapter") < 1e-5


def test_a_peft_adapter_saved_again_gives_stock_mlx_lm_the_same_logits(tmp_path):
    model = load_model(LLAMA)
    cfg = AdapterConfig(init_from=str(LLAMA / "adapter"))
    report = apply_adapter(model, cfg)
    assert (report.rank, report.alpha) == (4, 8.0)
    save_adapter(tmp_path, model, cfg, str(LLAMA))
    theirs, _ = mlx_lm.load(str(LLAMA), adapter_path=str(tmp_path))
    assert relative_difference(theirs(TOKENS), model(TOKENS)) < 1e-6


@pytest.fixture
def peft(tmp_path):
    shutil.copytree(LLAMA / "adapter", tmp_path / "peft")
    return tmp_path / "peft"


def test_rank_and_alpha_patterns_and_rslora_give_each_layer_its_own_scale(peft):
    def cut(tensors):
        for name in list(tensors):
            if "layers.1.self_attn.q_proj" in name:
                tensors[name] = tensors[name][:2] if "lora_A" in name else tensors[name][:, :2]

    edit_weights(peft, "adapter_model.safetensors", cut)
    edit_config(peft, rank_pattern={"layers.1.self_attn.q_proj": 2},
                alpha_pattern={r".*\.0\.mlp\.up_proj": 12})
    scales = {path: low.scale for path, low in read_adapter(peft).layers.items()}
    assert scales.pop("model.layers.1.self_attn.q_proj") == 8 / 2
    assert scales.pop("model.layers.0.mlp.up_proj") == 12 / 4
    assert set(scales.values()) == {8 / 4}
    edit_config(peft, use_rslora=True)
    scales = {path: low.scale for path, low in read_adapter(peft).layers.items()}
    assert scales["model.layers.0.mlp.up_proj"] == 12 / 4 ** 0.5
    assert scales["model.layers.1.self_attn.q_proj"] == 8 / 2 ** 0.5


def test_uneven_ranks_and_scales_are_trained_as_they_are_saved(peft, tmp_path):
    edit_config(peft, alpha_pattern={"q_proj": 2})
    plain, even = load_model(LLAMA), load_model(LLAMA)
    load_adapter(plain, peft)
    cfg = AdapterConfig(init_from=str(peft))
    report = apply_adapter(even, cfg)
    assert (report.rank, report.alpha) == (4, 8.0)
    assert relative_difference(even(TOKENS), plain(TOKENS)) < 1e-6
    save_adapter(tmp_path / "saved", even, cfg, str(LLAMA))
    saved = mx.load(str(tmp_path / "saved" / "adapters.safetensors"))
    trained = dict(tree_flatten(even.trainable_parameters()))
    assert saved.keys() == trained.keys()
    assert all(mx.array_equal(saved[name], trained[name]).item() for name in saved)


@pytest.mark.parametrize("setting", [
    {"bias": "all"}, {"layer_replication": [[0, 2]]},
    {"trainable_token_indices": [1]}, {"peft_type": "IA3"}, {"init_lora_weights": "pissa_niter_4"}])
def test_what_peft_can_do_and_this_cannot_is_refused_by_name(peft, setting):
    edit_config(peft, **setting)
    [(key, value)] = setting.items()
    named = f"adapter_config.json: {key}.*{value if isinstance(value, str) else ''}"
    with pytest.raises(InputError, match=named):
        read_adapter(peft)


# What is wrong is named, in both layouts.

@pytest.fixture
def mlxlm(folder, tmp_path):
    cfg = AdapterConfig(rank=2, targets=["q_proj"])
    save_adapter(tmp_path / "mlxlm", adapted(folder, cfg), cfg, str(folder))
    return tmp_path / "mlxlm"


def refused(model_folder, adapter_folder):
    with pytest.raises(InputError) as error:
        load_adapter(load_model(model_folder), adapter_folder)
    return str(error.value)


def test_an_unknown_tensor_is_named(folder, mlxlm):
    edit_weights(mlxlm, "adapters.safetensors", lambda t: t.update({"model.lora_typo": mx.zeros((2, 3))}))
    assert "not the tensors of a linear layer's LoRA: model.lora_typo (2, 3)" in refused(folder, mlxlm)


def test_a_layer_that_the_model_lacks_is_named(folder, mlxlm):
    edit_weights(mlxlm, "adapters.safetensors", lambda t: t.update(
        {"model.layers.9.self_attn.q_proj.lora_a": mx.zeros((64, 2)),
         "model.layers.9.self_attn.q_proj.lora_b": mx.zeros((2, 64))}))
    text = refused(folder, mlxlm)
    assert "1 x no such linear layer in the model: model.layers.9.self_attn.q_proj (lora_a (64, 2)" in text


def test_a_missing_layer_and_a_missing_half_are_named(folder, mlxlm):
    def remove(*names):
        return lambda t: [t.pop(f"model.layers.3.self_attn.q_proj.{name}") for name in names]

    edit_weights(mlxlm, "adapters.safetensors", remove("lora_b"))
    assert "missing tensors: model.layers.3.self_attn.q_proj.lora_b" in refused(folder, mlxlm)
    edit_weights(mlxlm, "adapters.safetensors", remove("lora_a"))
    expected = "missing in the adapter, though its configuration names them: model.layers.3.self_attn.q_proj"
    assert expected in refused(folder, mlxlm)


def test_layers_that_the_configuration_does_not_name_are_named(folder, mlxlm):
    """Other libraries put no layer where keys match nothing, and drop the tensors without a word."""
    parameters = json.loads((mlxlm / "adapter_config.json").read_text())["lora_parameters"]
    edit_config(mlxlm, lora_parameters=parameters | {"keys": ["auto"]})
    said = refused(folder, mlxlm)
    assert "in the adapter, though its configuration does not name them: model.layers." in said


def test_a_wrong_shape_is_named(tmp_path, mlxlm):
    wider = make_model(tmp_path / "wider", "llama", hidden_size=96)
    assert "model.layers.0.self_attn.q_proj 64 to 64 instead of 96 to 64" in refused(wider, mlxlm)


def test_a_rank_that_is_not_the_configurations_is_named(folder, mlxlm, peft):
    config = json.loads((mlxlm / "adapter_config.json").read_text())
    edit_config(mlxlm, lora_parameters={**config["lora_parameters"], "rank": 4})
    assert "lora_a (64, 2) and lora_b (2, 64), but adapter_config.json says rank 4" in refused(folder, mlxlm)
    edit_config(peft, r=16)
    assert "but adapter_config.json says rank 16" in refused(LLAMA, peft)


def test_missing_tensors_of_a_peft_adapter_are_named(peft):
    edit_weights(peft, "adapter_model.safetensors",
                 lambda t: [t.pop(name) for name in list(t) if "layers.2.mlp.gate_proj" in name])
    assert "names them: model.layers.2.mlp.gate_proj" in refused(LLAMA, peft)


def test_peft_names_of_a_wrapped_text_model_find_their_blocks(peft, tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace("model.layers", "model.language_model.layers", 1)] = tensors.pop(name)

    plain = load_model(LLAMA)
    load_adapter(plain, peft)
    edit_weights(peft, "adapter_model.safetensors", rename)
    renamed = load_model(LLAMA)
    load_adapter(renamed, peft)
    assert mx.array_equal(renamed(TOKENS), plain(TOKENS))


def test_a_full_adapter_of_another_model_is_refused_by_name(folder, tmp_path):
    cfg = AdapterConfig(kind="full")
    save_adapter(tmp_path / "full", adapted(folder, cfg), cfg, str(folder))
    other = make_model(tmp_path / "other", "llama", hidden_size=96)
    text = refused(other, tmp_path / "full")
    assert "39 x wrong shape: " in text and text.endswith(", and 27 more")
    assert "model.layers.0.self_attn.v_proj.weight (32, 64) instead of (32, 96)" in text


def with_a_nan(weights):
    name = max(weights)
    weights[name] = mx.full(weights[name].shape, mx.nan)


@pytest.mark.parametrize("damage, message", [
    (lambda f: shutil.rmtree(f), "cannot be read: No such file or directory"),
    (lambda f: (f / "adapters.safetensors").unlink(), "has no adapter: expected adapters.safetensors"),
    (lambda f: (f / "adapter_config.json").unlink(), "has adapters.safetensors but no adapter_config.json"),
    (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json:1: not valid JSON"),
    (lambda f: edit_config(f, lora_parameters={"rank": 2}), "adapter_config.json: scale is None, expected"),
    (lambda f: edit_config(f, fine_tune_type="vera"), "fine_tune_type 'vera' is not supported"),
    (lambda f: edit_config(f, fine_tune_type="dora"), "missing tensors: model.layers.0.self_attn.q_proj.m"),
    (lambda f: (f / "adapters.safetensors").write_bytes((f / "adapters.safetensors").read_bytes()[:-9]),
     "adapters.safetensors was cut short"),
    (lambda f: edit_weights(f, "adapters.safetensors", with_a_nan), "lora_b has values that are not finite"),
])
def test_a_damaged_adapter_folder_says_which_file_and_why(folder, mlxlm, damage, message):
    damage(mlxlm)
    assert message in refused(folder, mlxlm)
