"""GGUF files: what is written is read back as it was, under the names and in the order llama.cpp has."""

import json

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlxft.errors import InputError
from mlxft.export.gguf_families import rope_factors, rows_in_pairs
from mlxft.export.gguf_tokenizer import vocabulary
from mlxft.models.adapters import load_adapter
from mlxft.models.gguf_weights import convert
from mlxft.models.load import load_model, load_tokenizer
from tests.export.made import LLAMA, adapter, difference, export, logits
from tests.tiny_gguf import write_gguf
from tests.tiny_models import CHAT_TEMPLATE, END_ID, SPECIAL_TOKENS, VOCAB_SIZE, make_model

SHAPES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma3_text": {"sliding_window_pattern": 6, "num_hidden_layers": 6},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family, **{"num_hidden_layers": 2} | shape)
            for family, shape in SHAPES.items()}  # fmt: skip


def fields(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize("family", SHAPES)
def test_a_merged_model_read_back_gives_the_trained_logits(folders, tmp_path, family):
    made = adapter(folders[family], tmp_path / "adapter")
    done = export(f"adapter.init_from={made}", to="gguf", out=tmp_path / "g")
    assert done.record["logits"]["difference"] < 1e-5
    left = sorted(path.name for path in (tmp_path / "g").iterdir())
    assert left == ["README.md", "manifest.json", "model.gguf"]


@pytest.mark.parametrize("family", SHAPES)
def test_an_adapter_read_back_gives_the_trained_logits(folders, tmp_path, family):
    targets = {"targets": ["q_proj", "k_proj", "*.up_proj"]}
    made = adapter(folders[family], tmp_path / "adapter", **targets)
    done = export(f"adapter.init_from={made}", to="gguf", gguf="adapter", out=tmp_path / "g")
    assert done.record["logits"]["difference"] < 1e-6
    said = fields(tmp_path / "g" / "adapter.gguf")
    assert (said["general.type"], said["adapter.type"]) == ("adapter", "lora")
    assert said["adapter.lora.alpha"] == 6.0


def test_the_existing_reader_of_gguf_files_gives_the_exported_model(tmp_path):
    """A folder made from a GGUF file, its adapter merged into GGUF again, and that made into a folder."""
    base, again = tmp_path / "base", tmp_path / "again"
    base.mkdir()
    again.mkdir()
    convert(write_gguf(tmp_path / "base.gguf", tied=True), base)
    made = adapter(base, tmp_path / "adapter")
    export(f"adapter.init_from={made}", to="gguf", out=tmp_path / "g", dtype="float32")
    convert(tmp_path / "g" / "model.gguf", again)
    expected = load_model(base)
    load_adapter(expected, made)
    assert difference(logits(load_model(again)), logits(expected)) < 2e-2  # the reader rounds to bfloat16
    tokenizers = [json.loads((folder / "tokenizer.json").read_text()) for folder in (base, again)]
    assert tokenizers[0] == tokenizers[1]
    assert (again / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    kept = ("hidden_size", "num_key_value_heads", "rope_theta", "rms_norm_eps", "vocab_size", "head_dim")
    of_base, of_again = (json.loads((folder / "config.json").read_text()) for folder in (base, again))
    assert {key: of_again[key] for key in kept} == {key: of_base[key] for key in kept}


def test_rows_of_queries_are_in_pairs():
    rows = np.arange(8)[:, None]  # two heads of four: halves (0 1) (2 3) and (4 5) (6 7)
    assert rows_in_pairs(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_layers_of_other_scales_have_theirs_in_b(folders, tmp_path):
    """llama.cpp multiplies by alpha / rank, and alpha is one for all."""
    one = adapter(folders["qwen3"], tmp_path / "one", 1, rank=2, alpha=8.0, targets=["q_proj"])
    two = adapter(folders["qwen3"], tmp_path / "two", 2, rank=4, alpha=2.0, targets=["v_proj"])
    done = export(f"adapter.init_from=[{one},{two}]", to="gguf", gguf="adapter", out=tmp_path / "g")
    assert done.record["logits"]["difference"] < 1e-6
    file = tmp_path / "g" / "adapter.gguf"
    alpha = fields(file)["adapter.lora.alpha"]
    b = {name: tensors(file)[f"blk.0.attn_{name}.weight.lora_b"].data for name in "qv"}
    own = {name: mx.load(str(folder / "adapters.safetensors")) for name, folder in (("q", one), ("v", two))}
    for name, rank, scale in (("q", 2, 4.0), ("v", 4, 0.5)):
        expected = np.array(own[name][f"model.layers.0.self_attn.{name}_proj.lora_b"]).T * scale
        assert np.allclose(b[name] * alpha / rank, expected, rtol=1e-6)


def test_matrices_have_the_type_that_is_asked_for_and_vectors_are_float32(folders, tmp_path):
    made = adapter(folders["qwen3"], tmp_path / "adapter")
    export(f"adapter.init_from={made}", to="gguf", out=tmp_path / "g", dtype="float16")
    written = tensors(tmp_path / "g" / "model.gguf").values()
    kinds = {(tensor.tensor_type.name, len(tensor.shape)) for tensor in written}
    assert kinds == {("F16", 2), ("F32", 1)}


def test_llama_3s_frequencies_are_those_of_mlx_lm():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    config = {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    theirs = Llama3RoPE(64, 131072, False, 500000.0, scaling)
    plain = 500000.0 ** (np.arange(0, 64, 2) / 64)
    assert np.allclose(rope_factors(config), np.array(theirs._freqs) / plain, rtol=1e-5)
    assert rope_factors(config | {"rope_scaling": None}) is None


# Tokenizers.

def test_ids_that_no_token_has_are_filled_up_and_special_ones_marked(folders):
    base = folders["llama"]
    made = vocabulary(base, load_tokenizer(base), VOCAB_SIZE + 2)
    assert made["tokens"][:3] == SPECIAL_TOKENS and made["tokens"][-1] == f"[PAD{VOCAB_SIZE + 1}]"
    assert made["token_type"][:4] == [3, 3, 3, 1] and made["token_type"][-2:] == [5, 5]
    assert made["eos_token_id"] == END_ID and "bos_token_id" not in made
    assert made["add_bos_token"] is False and made["chat_template"] == CHAT_TEMPLATE


def rewrite(folder, change):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+")  # fmt: skip


LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")


@pytest.mark.parametrize("pattern, name", [(QWEN, "qwen2"), (LLAMA_3, "llama-bpe")], ids=["qwen2", "llama3"])
def test_how_text_is_cut_has_llama_cpps_name(tmp_path, pattern, name):
    base = make_model(tmp_path / "base", "llama", num_hidden_layers=1)

    def change(content):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
        content["model"]["vocab"]["Hi"] = VOCAB_SIZE
        content["model"]["merges"] = [["H", "i"]]

    rewrite(base, change)
    made = vocabulary(base, load_tokenizer(base), VOCAB_SIZE + 1)
    assert (made["model"], made["pre"], made["merges"]) == ("gpt2", name, ["H i"])


def test_pieces_of_a_byte_fallback_vocabulary_are_scored_by_their_merge(tmp_path):
    base = make_model(tmp_path / "base", "llama", num_hidden_layers=1)
    tokens = ["<pad>", "<0x0A>", "▁", "a", "b", "ab", "▁ab"]

    def change(content):
        content["added_tokens"] = []
        content["pre_tokenizer"], content["normalizer"] = None, {
            "type": "Replace", "pattern": {"String": " "}, "content": "▁"}  # fmt: skip
        content["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "byte_fallback": True,
                             "merges": [["a", "b"], ["▁", "ab"]]}  # fmt: skip

    rewrite(base, change)
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    made = vocabulary(base, load_tokenizer(base), len(tokens))
    assert made["model"] == "llama" and made["add_space_prefix"] is False
    assert made["token_type"] == [1, 6, 1, 1, 1, 1, 1]
    assert made["scores"] == [0, 0, 0, 0, 0, 0, -1] and made["tokens"] == tokens


# What is refused.

def test_a_way_of_cutting_text_that_has_no_name_is_refused(tmp_path):
    base = make_model(tmp_path / "base", "llama", num_hidden_layers=1)

    def change(content):
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]}
        content["model"]["vocab"]["Hi"] = VOCAB_SIZE
        content["model"]["merges"] = [["H", "i"]]

    rewrite(base, change)
    with pytest.raises(InputError, match="how its pre_tokenizer cuts text has no name here"):
        vocabulary(base, load_tokenizer(base), VOCAB_SIZE + 1)


@pytest.mark.parametrize("family, shape, message", [
    ("olmo2", {}, "models of type 'olmo2' are not written as GGUF here, only llama, mistral"),
    ("qwen3_moe", {}, "has experts in every block"),
    ("gemma3_text", {}, "sliding_window_pattern is 2"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "has no sliding windows"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scaled by 'dynamic'"),
], ids=["family", "experts", "windows", "mistral", "positions"])  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(tmp_path, family, shape, message):
    base = make_model(tmp_path / "base", family, num_hidden_layers=2, **shape)
    made = adapter(base, tmp_path / "adapter", targets=["q_proj"])
    with pytest.raises(InputError, match=message):
        export(f"adapter.init_from={made}", to="gguf", out=tmp_path / "g")
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("settings, message", [
    ({"kind": "dora"}, "have no DoRA. Merge it: gguf=model"),
    ({"targets": ["embed_tokens"]}, "have no updates of embeddings"),
    ({"targets": ["q_proj"], "modules_to_save": ["norm"]}, "no whole modules, and this one has model.norm"),
], ids=str)  # fmt: skip
def test_what_llama_cpps_adapters_have_no_word_for_is_refused(folders, tmp_path, settings, message):
    made = adapter(folders["llama"], tmp_path / "adapter", **settings)
    with pytest.raises(InputError, match=message):
        export(f"adapter.init_from={made}", to="gguf", gguf="adapter", out=tmp_path / "g")


def test_the_parity_model_is_written_and_read_back(tmp_path):
    given = (f"model.path={LLAMA}", f"adapter.init_from={LLAMA / 'adapter'}")
    done = export(*given, to="gguf", out=tmp_path / "g")
    assert done.record["logits"]["difference"] < 1e-5
    said = fields(tmp_path / "g" / "model.gguf")
    assert (said["llama.block_count"], said["llama.attention.head_count_kv"]) == (3, 2)
