import json
import shutil
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import mlxft.models
from mlxft.backend import backend
from mlxft.errors import InputError
from mlxft.models.dequantise import is_quantised
from mlxft.models.load import load, load_model, load_tokenizer, vocabulary_size
from tests.tiny_models import END_ID, FAMILIES, make_model, model_config, random_model

TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])


@pytest.fixture
def folder(tmp_path):
    return make_model(tmp_path / "model", "llama")


def edit_config(folder, *removed, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


def edit_weights(folder, change):
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(file, weights)


def refused(folder, **arguments):
    with pytest.raises(InputError) as error:
        load(str(folder), **arguments)
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_and_tokenizer_are_those_of_mlx_lm(tmp_path, family):
    folder = make_model(tmp_path, family)
    model, tokenizer = load(str(folder))
    theirs, their_tokenizer = mlx_lm.load(str(folder))
    assert type(model) is type(theirs)
    assert mx.array_equal(model(TOKENS), theirs(TOKENS))
    assert tokenizer.encode("<|im_start|>user\nHi") == their_tokenizer.encode("<|im_start|>user\nHi")
    assert tokenizer.eos_token_ids == {END_ID}
    assert len(tree_flatten(model.trainable_parameters())) == len(tree_flatten(model.parameters()))
    assert "sanitize" not in vars(model) and "load_weights" not in vars(model)


def test_the_package_offers_load_and_stays_cheap_to_import():
    assert mlxft.models.load is load
    code = "import sys, mlxft.models; sys.exit(any(m in sys.modules for m in ('mlx.core', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def dtypes(folder, dtype):
    return {array.dtype for _, array in tree_flatten(load_model(folder, dtype).parameters())}


def test_dtype_auto_is_float32_on_a_cpu_and_the_checkpoints_own_elsewhere(folder):
    edit_weights(folder, lambda w: w.update({name: a.astype(mx.bfloat16) for name, a in w.items()}))
    assert dtypes(folder, "auto") == {mx.float32 if backend() == "cpu" else mx.bfloat16}
    for name in ("float32", "bfloat16", "float16"):
        assert dtypes(folder, name) == {getattr(mx, name)}


def test_a_dtype_that_does_not_exist_is_refused(folder):
    assert refused(folder, dtype="int8") == "model.dtype=int8 is none of auto, float32, bfloat16, float16"


def test_a_quantised_base_is_dense_on_a_cpu_with_the_same_logits(tmp_path):
    folder = make_model(tmp_path, "qwen3", quantize=4)
    model, _ = load(str(folder))
    theirs, _ = mlx_lm.load(str(folder))
    assert any(is_quantised(module) for module in model.modules()) == (backend() != "cpu")
    assert mx.allclose(model(TOKENS), theirs(TOKENS), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_in_shards_is_loaded_whole(folder):
    expected = load_model(folder)(TOKENS)
    weights = sorted(mx.load(str(folder / "model.safetensors")).items())
    for number, part in enumerate((weights[:9], weights[9:]), 1):
        mx.save_safetensors(str(folder / f"model-0000{number}-of-00002.safetensors"), dict(part))
    (folder / "model.safetensors").unlink()
    assert mx.array_equal(load_model(folder)(TOKENS), expected)


def test_the_text_part_of_a_picture_model_is_loaded_and_the_rest_left_out(tmp_path, caplog):
    folder = make_model(tmp_path, "gemma3_text")
    expected = load_model(folder)(TOKENS)
    text = model_config("gemma3_text")
    edit_weights(folder, lambda w: w.update(
        {f"language_model.{name}": w.pop(name) for name in list(w)}
        | {name: mx.zeros((2, 2)) for name in ("vision_tower.weight", "multi_modal_projector.weight")}))
    edit_config(folder, model_type="gemma3", text_config=text)
    with caplog.at_level("INFO", "mlxft"):
        model = load_model(folder)
    assert mx.array_equal(model(TOKENS), expected)
    assert "2 tensors left out, not part of the text model: multi_modal_projector.weight" in caplog.text


def test_an_extra_a_missing_and_a_misshapen_tensor_are_named(folder):
    def change(weights):
        weights["model.layers.0.self_attn.sinks"] = mx.zeros((4,))
        weights.pop("model.layers.2.mlp.up_proj.weight")
        weights["model.norm.weight"] = mx.zeros((32,))

    edit_weights(folder, change)
    text = refused(folder)
    assert text.splitlines()[1:] == [
        "  1 tensor missing from the checkpoint: model.layers.2.mlp.up_proj.weight",
        "  1 tensor in the checkpoint, but not in the model: model.layers.0.self_attn.sinks",
        "  1 tensor of the wrong shape: model.norm.weight (32,) instead of (64,)",
    ]


def test_a_head_that_mlx_lm_would_drop_in_silence_is_an_error(folder):
    edit_config(folder, "tie_word_embeddings")  # mlx-lm's default for llama is tied
    assert '"tie_word_embeddings": false' in refused(folder)


def test_a_truncated_file_is_named(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    short = f"{len(whole) - 100:,} bytes of {len(whole):,}"
    assert refused(folder) == f"{file} was cut short: {short}; fetch it again"


@pytest.mark.parametrize("content, message", [
    ('{\n "model_type": "llama",\n', "config.json:3: not valid JSON"),
    ("[1]", "config.json: expected an object {...}, found list"),
    ('{"hidden_size": 4}', "config.json: model_type is None"),
    ('{"model_type": "../evil"}', "config.json: model_type is '../evil'"),
    ('{"model_type": "lama"}', "models of type 'lama' are not supported by mlx-lm (near it: llama"),
    ('{"model_type": "base"}', "models of type 'base' are not supported by mlx-lm"),
    ('{"model_type": "llama"}', "TypeError: ModelArgs.__init__() missing"),
])
def test_a_configuration_that_cannot_be_used_says_why(folder, content, message):
    (folder / "config.json").write_text(content)
    assert message in refused(folder)


def test_code_that_comes_with_a_model_is_never_run(folder, tmp_path):
    evil = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: pass\nModel = ModelArgs = Evil\n"
    (folder / "evil.py").write_text(evil)
    edit_config(folder, model_file="evil.py")
    assert "never runs code that comes with a checkpoint" in refused(folder)
    edit_config(folder, "model_file", auto_map={"AutoTokenizer": "evil.Evil"})
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    refused(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_tokenizer_is_refused_unless_none_is_asked_for(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused(folder)
    assert load(str(folder), tokenizer_required=False)[1] is None


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    assert f"{folder / 'tokenizer.json'}:1: not valid JSON" in refused(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    assert f"the tokenizer in {folder} cannot be loaded" in refused(folder)


def test_the_end_tokens_of_generation_config_are_the_tokenizers(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load(str(folder))[1].eos_token_ids == load_tokenizer(folder).eos_token_ids == {2, 7}


def test_the_vocabulary_is_the_text_models(folder):
    assert vocabulary_size(folder) == 259
    edit_config(folder, "vocab_size", text_config={"vocab_size": 300})
    assert vocabulary_size(folder) == 300
    edit_config(folder, "text_config")
    with pytest.raises(InputError, match="config.json: vocab_size is None"):
        vocabulary_size(folder)


def test_a_rotary_table_in_an_old_checkpoint_is_no_problem(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda w: w.update({name: mx.zeros((8,))}))
    load(str(folder))


def test_loading_needs_only_the_config_the_weights_and_the_tokenizer(folder, tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path / "bare")
    model, tokenizer = load(str(tmp_path / "bare"))
    assert mx.array_equal(model(TOKENS), random_model(model_config("llama"))(TOKENS))
    assert tokenizer.encode("Hi") == [72 + 3, 105 + 3]
