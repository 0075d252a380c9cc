"""What llama.cpp makes of GGUF exports: run where llama-cpp-python is installed (pytest -m slow)."""


import numpy as np
import pytest

from mlxft.models.adapters import load_adapter
from mlxft.models.gguf_weights import convert
from mlxft.models.load import load_model, load_tokenizer
from tests.export.made import TOKENS, adapter, difference, export, logits
from tests.tiny_gguf import write_gguf
from tests.tiny_models import make_model

pytestmark = pytest.mark.slow
llama_cpp = pytest.importorskip("llama_cpp")

# llama.cpp looks GELU, which Gemma has, up in a table of half precision.
TOLERANCE = {"gemma3_text": 2e-3}

SHAPES = {
    "llama": {},
    "mistral": {"layer_types": None, "sliding_window": None, "attention_bias": False, "mlp_bias": False},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "gemma3_text": {"sliding_window_pattern": 6, "num_hidden_layers": 6, "rope_local_base_freq": 10000.0},
}


def llama_logits(file, lora=None):
    """The logits (T, V) of TOKENS by llama.cpp."""
    how = {"logits_all": True, "verbose": False, "n_ctx": 64, "n_threads": 1, "flash_attn": False}
    how |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(str(file), lora_path=None if lora is None else str(lora), **how)
    model.eval(TOKENS)
    return np.array(model.scores[: len(TOKENS)])


def trained_logits(base, folder):
    model = load_model(base)
    load_adapter(model, folder)
    return logits(model)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {family: make_model(root / family, family, **shape) for family, shape in SHAPES.items()}


@pytest.mark.parametrize("family", SHAPES)
def test_llama_cpp_gives_a_merged_model_the_trained_logits(bases, tmp_path, family):
    base = bases[family]
    trained = adapter(base, tmp_path / "adapter")
    export(f"model.path={base}", f"adapter.init_from={trained}", to="gguf", out=tmp_path / "gguf")
    expected = trained_logits(base, trained)
    found = llama_logits(tmp_path / "gguf" / "model.gguf")
    assert difference(found, expected) < TOLERANCE.get(family, 1e-5)


@pytest.mark.parametrize("family", SHAPES)
def test_llama_cpp_gives_an_adapter_on_its_base_the_trained_logits(bases, tmp_path, family):
    base = bases[family]
    targets = {"targets": ["q_proj", "*.up_proj"]} if family == "qwen3_moe" else {}
    trained = adapter(base, tmp_path / "adapter", **targets)
    untrained = adapter(base, tmp_path / "nothing", size=0.0)
    keys = {"to": "gguf", "dtype": "float32"}
    export(f"model.path={base}", f"adapter.init_from={untrained}", out=tmp_path / "base", **keys)
    keys = {"to": "gguf", "gguf": "adapter"}
    export(f"model.path={base}", f"adapter.init_from={trained}", out=tmp_path / "lora", **keys)
    found = llama_logits(tmp_path / "base" / "model.gguf", tmp_path / "lora" / "adapter.gguf")
    assert difference(found, trained_logits(base, trained)) < TOLERANCE.get(family, 1e-5)


def test_llama_cpp_cuts_text_into_the_same_tokens(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    convert(write_gguf(tmp_path / "base.gguf"), base)
    trained = adapter(base, tmp_path / "adapter")
    export(f"model.path={base}", f"adapter.init_from={trained}", to="gguf", out=tmp_path / "gguf")
    model = llama_cpp.Llama(str(tmp_path / "gguf" / "model.gguf"), vocab_only=True, verbose=False)
    tokenizer = load_tokenizer(base)
    for text in ("Hi there, Hi!", "<|im_start|>user\nHi<|im_end|>", "12 ü €\n\n  x"):
        assert model.tokenize(text.encode(), special=True) == tokenizer.encode(text)
