"""A random llama model of a few kilobytes written as a GGUF file, the way converters write them."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from mlx.utils import tree_flatten
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.tiny_models import (
    CHAT_TEMPLATE,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    START_ID,
    model_config,
    random_model,
)

# One token a byte as in tiny_models, and one that merges two of them.
TOKENS = [*SPECIAL_TOKENS, *(bytes_to_unicode()[byte] for byte in range(256)), "Hi"]

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def tiny_llama(tied: bool = False):
    """Returns (config, model): what `write_gguf` writes."""
    config = model_config("llama", tie_word_embeddings=tied, vocab_size=len(TOKENS), num_hidden_layers=2,
                          bos_token_id=START_ID, torch_dtype="bfloat16", rope_theta=100000.0)
    return config, random_model(config)


def write_gguf(path: Path, kind: str = "F32", tied: bool = False, extra_tensor: str | None = None,
               **changed_fields) -> Path:
    """Writes the model with its matrices in the type `kind` (F32, F16, Q4_1, Q8_0) and returns the path."""
    config, model = tiny_llama(tied)
    writer = GGUFWriter(path, changed_fields.get("architecture", "llama"))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed_fields.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * (len(TOKENS) - len(SPECIAL_TOKENS)))
    writer.add_token_merges(["H i"])
    writer.add_bos_token_id(START_ID)
    writer.add_eos_token_id(END_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in tree_flatten(model.parameters()):
        _add(writer, *_as_gguf(name, np.array(array), config), kind)
    if extra_tensor:
        _add(writer, extra_tensor, np.zeros((32, 32), np.float32), "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_gguf(name: str, array: np.ndarray, config: dict) -> tuple[str, np.ndarray]:
    stem = name.removesuffix(".weight")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.weight", array
    _, _, layer, part = stem.split(".", 3)
    heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
    if part in heads:
        array = _interleaved(array, config[heads[part]])
    return f"blk.{layer}.{_NAMES[part]}.weight", array


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns the rows of each head as first half, second half, first half, second half, ..."""
    out, width = np.empty_like(rows), len(rows) // num_heads
    for head in range(num_heads):
        for i in range(width // 2):
            start = head * width
            out[start + 2 * i] = rows[start + i]
            out[start + 2 * i + 1] = rows[start + width // 2 + i]
    return out


def _add(writer: GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    if kind == "F32" or array.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    else:
        type_ = GGMLQuantizationType[kind]
        writer.add_tensor(name, quants.quantize(array, type_), raw_dtype=type_)
