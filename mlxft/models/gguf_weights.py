"""Turns a llama-type GGUF file into a model folder with bfloat16 safetensors and a tokenizer.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md) for names and types.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxft.errors import InputError

if TYPE_CHECKING:
    import mlx.core as mx
    from gguf import GGUFReader

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How text is cut before byte-pair merges, by the name that GGUF files give it.
_PRE_TOKENIZERS = {"smollm": [{"type": "Digits", "individual_digits": True}]}

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` into `folder`: config, weights in bfloat16, tokenizer, chat template.

    Raises: InputError naming the file and what in it can't be converted.
    """
    import mlx.core as mx

    reader = _open(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        weights = _weights(reader, fields)
        config = _config(fields, tied="lm_head.weight" not in weights)
        tokenizer, tokenizer_config = _tokenizer(fields), _tokenizer_config(fields)
    except KeyError as error:
        raise InputError(f"{gguf}: the field {error} is missing") from error
    except _Unconvertible as error:
        raise InputError(f"{gguf}: {error}") from error
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer.json", tokenizer, indent=None)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


class _Unconvertible(Exception):
    """What in the file has no counterpart, as a sentence."""


def _open(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("converting a GGUF file takes the package gguf: pip install gguf") from error
    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path} is no readable GGUF file: {error}") from error


def _weights(reader: "GGUFReader", fields: dict[str, Any]) -> dict[str, "mx.array"]:
    import gguf
    import mlx.core as mx

    if (architecture := fields["general.architecture"]) != "llama":
        raise _Unconvertible(f"architecture {architecture!r} cannot be converted, only 'llama'")
    heads = {"attn_q": fields["llama.attention.head_count"],
             "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        try:
            dense = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise _Unconvertible(f"{tensor.name} has type {kind}, which can't be unpacked") from error
        part = tensor.name.split(".")[-2]
        if part in heads:
            dense = rows_as_halves(dense, heads[part])
        weight = mx.array(dense).astype(mx.bfloat16)
        mx.eval(weight)  # so that no more than one float32 copy exists at a time
        weights[_name(tensor.name)] = weight
    return dict(sorted(weights.items()))


def _name(gguf_name: str) -> str:
    """Returns the Hugging Face name: model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight."""
    stem, dot, suffix = gguf_name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        kind, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if kind == "blk" and layer.isdigit() and part in _BLOCK:
            return f"model.layers.{layer}.{_BLOCK[part]}.{suffix}"
    raise _Unconvertible(f"the tensor {gguf_name} has no counterpart in a llama model")


def rows_as_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns query or key rows (heads x width, ...) in the order that rotates halves of a head.

    GGUF's llama files interleave them: row 2i of a head is row i of its first half, row 2i + 1 row i of
    its second.
    """
    heads = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    if (scaling := fields.get("llama.rope.scaling.type", "none")) != "none":
        raise _Unconvertible(f"position scaling of type {scaling!r} cannot be converted")
    num_heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", width // num_heads),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _as_written(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _as_written(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = fields.get(f"tokenizer.ggml.{theirs}_token_id")
    return config


def _as_written(value: float) -> float:
    """Returns the shortest decimal that is `value` in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of tokenizer.json for a byte-level byte-pair vocabulary."""
    kind, cut = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or cut not in _PRE_TOKENIZERS:
        raise _Unconvertible(f"its tokenizer ({kind}, {cut}) cannot be converted, only "
                             + " and ".join(f"(gpt2, {name})" for name in _PRE_TOKENIZERS))
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    never = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **never, "special": True}
                         for index, type_ in enumerate(types) if type_ == _CONTROL_TOKEN],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_PRE_TOKENIZERS[cut], byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    return config


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 1) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
