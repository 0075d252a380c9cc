"""Merged models: mlx-lm loads them, what nothing changed is as it was, and rounding is measured."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.errors import GuardStop, InputError
from mlxft.export import merged as merged_module
from mlxft.export.merging import merged_weight
from mlxft.models.adapter_tensors import LowRank
from mlxft.models.adapters import load_adapter, read_adapter
from mlxft.models.load import load_model
from tests.export.made import LLAMA, PARITY, adapter, difference, export, logits
from tests.tiny_models import make_model, model_config, random_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    families = ("llama", "qwen3", "gemma3", "gemma3_text", "qwen3_moe", "qwen3_5")
    made = {family: make_model(root / family, family, num_hidden_layers=2) for family in families}
    return made | {"llama in 4 bits": make_model(root / "q4", "llama", quantize=4, num_hidden_layers=2)}


def tensors(folder):
    files = folder.glob("*.safetensors")
    return {name: array for file in files for name, array in mx.load(str(file)).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def trained(base, folder):
    model = load_model(base)
    load_adapter(model, folder)
    return logits(model)


def test_the_parity_adapter_merged_gives_the_stored_logits_through_stock_mlx_lm(tmp_path):
    export(f"model.path={LLAMA}", f"adapter.init_from={LLAMA / 'adapter'}", to="merged", out=tmp_path / "m")
    model, _ = mlx_lm.load(str(tmp_path / "m"))
    reference = np.load(PARITY / "lora_llama_untied.npz")
    real = reference["sft.attention_mask"] == 1
    found = np.array(model(mx.array(reference["sft.input_ids"])))
    for stored in ("adapter", "merged"):
        assert difference(found[real], reference[f"sft.{stored}_logits"][real]) < 1e-5


@pytest.mark.parametrize("family, settings", [
    ("llama", {}),
    ("llama", {"kind": "dora"}),
    ("llama", {"kind": "full", "rank": None}),
    ("llama", {"targets": ["q_proj", "embed_tokens", "lm_head"]}),
    ("qwen3", {"targets": ["q_proj", "embed_tokens"]}),
    ("qwen3", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "*norm"]}),
    ("gemma3", {"targets": ["q_proj"]}),
    ("gemma3_text", {}),
    ("qwen3_moe", {"targets": ["*switch_mlp.*", "q_proj"]}),
    ("qwen3_5", {"targets": ["q_proj", "in_proj_qkv", "up_proj"]}),
], ids=str)  # fmt: skip
def test_stock_mlx_lm_gives_a_merged_model_the_trained_logits(folders, tmp_path, family, settings):
    base = folders[family]
    made = adapter(base, tmp_path / "adapter", **settings)
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "merged")
    theirs, _ = mlx_lm.load(str(tmp_path / "merged"))
    if settings.get("kind") == "full":
        expected = load_model(base)
        load_adapter(expected, made)
        expected = logits(expected)
    else:
        expected = trained(base, made)
    assert difference(logits(theirs), expected) < 1e-5


def test_what_nothing_changed_keeps_its_name_and_its_bits(folders, tmp_path):
    base = folders["llama"]
    made = adapter(base, tmp_path / "adapter", targets=["q_proj"], layers="last 1")
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "merged")
    before, after = tensors(base), tensors(tmp_path / "merged")
    changed = {name for name in before if not mx.array_equal(before[name], after[name]).item()}
    assert before.keys() == after.keys() and changed == {"model.layers.1.self_attn.q_proj.weight"}
    assert config_of(base) == config_of(tmp_path / "merged")
    kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert all((tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes() for name in kept)


def test_a_checkpoint_with_a_tensor_for_each_expert_keeps_them(folders, tmp_path):
    """As the hub has them; mlx-lm stacks them when it loads."""
    base = tmp_path / "base"
    stacked = tensors(make_model(base, "qwen3_moe", num_hidden_layers=2))
    single = {}
    for name, array in stacked.items():
        if ".switch_mlp." in name:
            single |= {name.replace("switch_mlp", f"experts.{e}"): part for e, part in enumerate(array)}
        else:
            single[name] = array
    mx.save_safetensors(str(base / "model.safetensors"), single)
    made = adapter(base, tmp_path / "adapter", targets=["*switch_mlp.up_proj"])
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "merged")
    after = tensors(tmp_path / "merged")
    assert after.keys() == single.keys()
    changed = {name for name in single if not mx.array_equal(single[name], after[name]).item()}
    assert changed == {name for name in single if ".experts." in name and ".up_proj." in name}
    theirs, _ = mlx_lm.load(str(tmp_path / "merged"))
    assert difference(logits(theirs), trained(base, made)) < 1e-5


def test_weights_beyond_a_shards_size_are_written_in_shards_with_an_index(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(merged_module, "MAX_SHARD_BYTES", 100_000)
    made = adapter(folders["llama"], tmp_path / "adapter")
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "merged")
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        assert name in mx.load(str(tmp_path / "merged" / file))
    assert max((tmp_path / "merged" / file).stat().st_size for file in files) < 110_000
    theirs, _ = mlx_lm.load(str(tmp_path / "merged"))
    assert difference(logits(theirs), trained(folders["llama"], made)) < 1e-5


# What the formulas give, by hand.

def test_a_merged_weight_is_that_of_the_formula_in_float64():
    random = np.random.default_rng(0)
    w, a, b = (random.normal(size=size) for size in ((5, 4), (4, 2), (2, 5)))
    m = random.normal(size=5) ** 2 + 1
    low = LowRank(mx.array(a), mx.array(b), 0.5)
    v = w + 0.5 * (a @ b).T
    assert np.abs(np.array(merged_weight(mx.array(w), low)) - v).max() < 1e-6
    dora = LowRank(mx.array(a), mx.array(b), 0.5, mx.array(m))
    expected = m[:, None] / np.linalg.norm(v, axis=1, keepdims=True) * v
    assert np.abs(np.array(merged_weight(mx.array(w), dora)) - expected).max() < 1e-6


def test_the_rounding_that_is_told_is_that_of_the_written_weight(folders, tmp_path):
    """|written - merged| / |merged - base| of one layer, in float64 from the files."""
    base = folders["llama"]
    made = adapter(base, tmp_path / "adapter", targets=["q_proj"], layers="last 1")
    done = export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m", dtype="bfloat16")
    path = "model.layers.1.self_attn.q_proj"
    low = read_adapter(made).layers[path]
    own = low.scale * (np.array(low.a, np.float64) @ np.array(low.b, np.float64)).T
    weight = np.array(tensors(base)[f"{path}.weight"], np.float64) + own
    written = np.array(tensors(tmp_path / "m")[f"{path}.weight"].astype(mx.float32), np.float64)
    expected = np.linalg.norm(written - weight) / np.linalg.norm(own)
    assert done.record["rounding"] == {path: pytest.approx(expected, rel=1e-3)}
    assert 1e-3 < expected < 1


# Quantised bases.

def test_changed_layers_of_a_quantised_base_become_dense_and_the_others_stay_packed(folders, tmp_path):
    base = folders["llama in 4 bits"]
    made = adapter(base, tmp_path / "adapter", targets=["q_proj"], layers="last 1")
    done = export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m")
    path = "model.layers.1.self_attn.q_proj"
    before, after = tensors(base), tensors(tmp_path / "m")
    assert before.keys() - after.keys() == {f"{path}.scales", f"{path}.biases"}
    assert after[f"{path}.weight"].shape == (64, 64) and after[f"{path}.weight"].dtype == mx.float32
    others = [name for name in after if not name.startswith(path)]
    assert all(mx.array_equal(before[name], after[name]).item() for name in others)
    assert config_of(tmp_path / "m")["quantization"] == config_of(base)["quantization"] | {path: False}
    theirs, _ = mlx_lm.load(str(tmp_path / "m"))
    assert difference(logits(theirs), trained(base, made)) < 1e-5
    assert done.record["logits"]["difference"] < 1e-5


def test_quantising_again_loses_some_of_the_adapter_and_says_how_much(folders, tmp_path):
    base = folders["llama in 4 bits"]
    made = adapter(base, tmp_path / "adapter", size=0.01)
    done = export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m", quantization="same")
    after = tensors(tmp_path / "m")
    assert {name: array.shape for name, array in after.items()} == {
        name: array.shape for name, array in tensors(base).items()
    }
    assert config_of(tmp_path / "m") == config_of(base)
    base_model, theirs = load_model(base), mlx_lm.load(str(tmp_path / "m"))[0]
    path = "model.layers.0.self_attn.q_proj"
    low = read_adapter(made).layers[path]
    own = low.scale * (low.a @ low.b).T
    packed = theirs.model.layers[0].self_attn.q_proj
    written = mx.dequantize(packed.weight, packed.scales, packed.biases, group_size=32, bits=4)
    kept = base_model.model.layers[0].self_attn.q_proj.weight
    expected = mx.linalg.norm(written - kept - own) / mx.linalg.norm(own)
    assert done.record["rounding"][path] == pytest.approx(expected.item(), rel=1e-2)
    assert done.record["logits"]["lost"] > 0.05
    said = dict(done.lines)
    assert "of the adapter's effect" in said["logits"]
    assert "at most" in said["rounding of the adapter's change"]


def test_a_quantised_base_can_be_made_dense_as_a_whole(folders, tmp_path):
    base = folders["llama in 4 bits"]
    made = adapter(base, tmp_path / "adapter")
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m", quantization="none", dtype="float32")
    assert not [name for name in tensors(tmp_path / "m") if name.endswith((".scales", ".biases"))]
    assert "quantization" not in config_of(tmp_path / "m")
    theirs, _ = mlx_lm.load(str(tmp_path / "m"))
    assert difference(logits(theirs), trained(base, made)) < 1e-5


def test_a_whole_module_of_a_quantised_base_is_written_dense(folders, tmp_path):
    base = folders["llama in 4 bits"]
    made = adapter(base, tmp_path / "adapter", targets=["q_proj"], modules_to_save=["lm_head"])
    export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m")
    assert config_of(tmp_path / "m")["quantization"]["lm_head"] is False
    theirs, _ = mlx_lm.load(str(tmp_path / "m"))
    assert difference(logits(theirs), trained(base, made)) < 1e-5


@pytest.mark.parametrize("quantization", ["mixed", "same", "none"])
def test_a_base_in_mxfp4_is_merged_into_too(tmp_path, quantization):
    base = make_model(tmp_path / "base", "llama", num_hidden_layers=2)
    how = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    config = model_config("llama", num_hidden_layers=2)
    model = random_model(config)
    nn.quantize(model, **how)
    mx.save_safetensors(str(base / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (base / "config.json").write_text(json.dumps(config | {"quantization": how}))
    made = adapter(base, tmp_path / "adapter", size=0.02, layers="last 1")
    done = export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m", quantization=quantization)
    theirs, _ = mlx_lm.load(str(tmp_path / "m"))
    assert (difference(logits(theirs), trained(base, made)) < 1e-5) == (quantization != "same")
    assert (done.record["logits"]["lost"] < 1e-4) == (quantization != "same")


# What ends without an export.

def test_logits_that_are_too_far_from_the_trained_ones_leave_nothing(folders, tmp_path):
    made = adapter(folders["llama"], tmp_path / "adapter", size=0.001)
    with pytest.raises(GuardStop, match="not the trained ones.*at most 0.01%.*Nothing was kept.*dtype="):
        export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m", dtype="bfloat16", limit=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_weights_that_mlx_lm_turns_round_when_it_loads_them_are_named(tmp_path):
    """gpt2's checkpoints on the hub have them the other way round, under shorter names."""
    base = make_model(tmp_path / "base", "gpt2")
    turned = {}
    for name, array in tensors(base).items():
        is_turned = name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and array.ndim == 2
        turned[name.removeprefix("model.")] = array.T if is_turned else array
    mx.save_safetensors(str(base / "model.safetensors"), turned)
    made = adapter(base, tmp_path / "adapter", targets=["c_attn"])
    with pytest.raises(InputError, match="has 4 of the changed weights under other names.*c_attn.*to=peft"):
        export(f"adapter.init_from={made}", to="merged", out=tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
