"""Turns a GGUF file into a model folder with bfloat16 safetensors and a tokenizer.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md) for names and types.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxft.errors import InputError
from mlxft.models.gguf_families import FAMILIES, from_gguf, rope_factors
from mlxft.models.gguf_vocabulary import Unconvertible, tokenizer_of

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_GEMMA_3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# The model_type of each architecture that is read, by llama.cpp's name of it.
_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
          "gemma3": "gemma3_text"}  # fmt: skip
_CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
            "gemma3_text": "Gemma3"}  # fmt: skip

# Llama 3's ways to stretch positions, one of which a file's table of factors has to be.
_LLAMA_3 = [
    {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}
    for factor in (8.0, 32.0)
]  # fmt: skip
_FACTORS = "rope_freqs.weight"


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` into `folder`: config, weights in bfloat16, tokenizer, chat template.

    Raises: InputError naming the file and what in it can't be converted.
    """
    import mlx.core as mx

    reader = _open(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _config(fields, {tensor.name: tensor.data for tensor in reader.tensors})
        weights = _weights(reader, config)
        tokenizer, tokenizer_config = tokenizer_of(fields), _tokenizer_config(fields, config)
    except KeyError as error:
        raise InputError(f"{gguf}: the field {error} is missing") from error
    except Unconvertible as error:
        raise InputError(f"{gguf}: {error}") from error
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer.json", tokenizer, indent=None)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    if template := fields.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _open(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError("converting a GGUF file takes the package gguf: pip install gguf") from error
    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(f"{path} is no readable GGUF file: {error}") from error


def _weights(reader: "GGUFReader", config: dict[str, Any]) -> dict[str, "mx.array"]:
    import gguf
    import mlx.core as mx

    family, weights = FAMILIES[config["model_type"]], {}
    for tensor in reader.tensors:
        if tensor.name == _FACTORS:
            continue  # the configuration says it
        try:
            dense = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise Unconvertible(f"{tensor.name} has type {kind}, which can't be unpacked") from error
        name = _name(tensor.name, config["model_type"])
        weight = mx.array(from_gguf(name, dense, family, config)).astype(mx.bfloat16)
        mx.eval(weight)  # so that no more than one float32 copy exists at a time
        weights[name] = weight
    return dict(sorted(weights.items()))


def _name(gguf_name: str, model_type: str) -> str:
    """Returns mlx-lm's name: model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight."""
    parts = _BLOCK | (_GEMMA_3 if model_type == "gemma3_text" else {})
    stem, _, suffix = gguf_name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in _TOP:
            return f"{_TOP[stem]}.{suffix}"
        kind, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if kind == "blk" and layer.isdigit() and part in parts:
            return f"model.layers.{layer}.{parts[part]}.{suffix}"
    raise Unconvertible(f"the tensor {gguf_name} has no counterpart in a model of type {model_type}")


def _config(fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    arch = fields["general.architecture"]
    if arch not in _TYPES:
        raise Unconvertible(
            f"models of architecture {arch!r} are not read from GGUF here, only {', '.join(_TYPES)}. Give "
            "the folder or the hub id of the model that the file was made from"
        )
    said = {name.removeprefix(f"{arch}."): value for name, value in fields.items()
            if name.startswith(f"{arch}.")}  # fmt: skip

    def of(name: str) -> Any:
        if name not in said:
            raise KeyError(f"{arch}.{name}")
        return said[name]

    kind, num_heads, width = _TYPES[arch], of("attention.head_count"), of("embedding_length")
    config = {
        "architectures": [f"{_CLASSES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": said.get("attention.key_length", said.get("rope.dimension_count", width // num_heads)),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": _as_written(of("attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(said.get("rope.freq_base", 10000.0)),
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma3_text" else "silu",
        "attention_bias": kind == "qwen2",
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
    }
    config["rope_scaling"] = _scaling(said, config, tensors.get(_FACTORS))
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = fields.get(f"tokenizer.ggml.{theirs}_token_id")
    return config | _OWN.get(kind, lambda of, said, config: {})(of, said, config)


def _scaling(said: dict[str, Any], config: dict[str, Any], factors: np.ndarray | None) -> dict | None:
    """Returns how positions are stretched, None where they are not."""
    kind = said.get("rope.scaling.type", "none")
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": _as_written(said["rope.scaling.factor"])}
    if kind != "none":
        raise Unconvertible(f"position scaling of type {kind!r} cannot be converted")
    if factors is None:
        return None
    for scaling in _LLAMA_3:
        expected = rope_factors(config | {"rope_scaling": scaling})
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4):
            return scaling
    raise Unconvertible(f"the factors in {_FACTORS} are none of Llama 3's, and no others can be converted")


def _experts(of: Callable[[str], Any], said: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": of("expert_count"),
        "num_experts_per_tok": of("expert_used_count"),
        "moe_intermediate_size": of("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _windows(of: Callable[[str], Any], said: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    if config["num_hidden_layers"] == 62:
        raise Unconvertible(
            "Gemma 3 of 62 blocks (27B) scales queries in a way that the file does not say. Give the folder "
            "or the hub id of the model that it was made from"
        )
    return {
        "sliding_window": of("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": _as_written(said.get("rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": config["head_dim"],
    }


_OWN = {"qwen3_moe": _experts, "gemma3_text": _windows}


def _as_written(value: float) -> float:
    """Returns the shortest decimal that is `value` in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer_config(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fields.get("tokenizer.ggml.add_bos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = fields.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    return config


def _write_json(path: Path, content: dict[str, Any], indent: int | None = 1) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
