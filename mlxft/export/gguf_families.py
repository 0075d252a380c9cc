"""Which model families GGUF files can hold, and how their weights and settings are called there.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md) for keys; the package gguf for tensors' names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxft.errors import InputError
from mlxft.models.gguf_weights import rows_as_halves

Settings = dict[str, Any]  # of a GGUF file, "{arch}." left out of the keys
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How a family is written. arch: llama.cpp's name of it.

    interleaved: whether rows of queries and keys are in pairs (llama.cpp's llama) and not in halves.
    norm_shift: what llama.cpp adds to the weights of norms. settings: what it has beside those of all.
    """

    arch: str
    interleaved: bool = False
    norm_shift: float = 0.0
    settings: Callable[[Config], Settings] = lambda config: {}


def _llama(config: Config) -> Settings:
    _refuse_windows(config)
    return {"rope.dimension_count": head_width(config)}


def _qwen3_moe(config: Config) -> Settings:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise InputError("GGUF's qwen3moe has experts in every block, and this model has some without")
    if not config.get("norm_topk_prob"):
        raise InputError("GGUF's qwen3moe lets experts' shares add up to 1; norm_topk_prob is off here")
    return {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def _gemma3(config: Config) -> Settings:
    period = config.get("sliding_window_pattern", 6)
    if period != 6:
        raise InputError(
            f"GGUF's gemma3 has a window in five of six blocks; sliding_window_pattern is {period} here"
        )
    if config.get("query_pre_attn_scalar", head_width(config)) != head_width(config):
        raise InputError("GGUF's gemma3 scales queries by a head's width; query_pre_attn_scalar differs here")
    return {
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base_swa": float(config.get("rope_local_base_freq", 10000.0)),
    }


FAMILIES = {
    "llama": Family("llama", interleaved=True, settings=_llama),
    "mistral": Family("llama", interleaved=True, settings=_llama),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe", settings=_qwen3_moe),
    "gemma3_text": Family("gemma3", norm_shift=1.0, settings=_gemma3),
    "gemma3": Family("gemma3", norm_shift=1.0, settings=_gemma3),
}


def family_of(config: Config) -> Family:
    """Returns how models of this config.json are written. Raises: InputError for an unknown family."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            f"to=gguf: models of type {kind!r} are not written as GGUF here, only {', '.join(FAMILIES)}. "
            "Export with to=merged; llama.cpp's own converter reads that folder"
        )
    return FAMILIES[kind]


def text_config(config: Config) -> Config:
    """Returns the part of config.json that is of the text model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def head_width(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def settings_of(config: Config, family: Family) -> Settings:
    """Returns a model's settings by their names in GGUF, without the architecture's. Raises: InputError."""
    theta, scaling = _rope(config)
    settings = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads") or config["num_attention_heads"],
        "attention.key_length": head_width(config),
        "attention.value_length": head_width(config),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
        "vocab_size": config["vocab_size"],
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    elif kind not in ("default", "llama3"):
        raise InputError(
            f"to=gguf: positions that are scaled by {kind!r} are not written here; use to=merged"
        )
    return settings | family.settings(config)


def rope_factors(config: Config) -> np.ndarray | None:
    """Returns what each frequency of the positions is divided by (head width / 2,), None where nothing is.

    Source: Llama 3.1's scaling: waves longer than the context it was first trained on are stretched.
    """
    theta, scaling = _rope(config)
    if scaling.get("rope_type", scaling.get("type")) != "llama3":
        return None
    width, factor = head_width(config), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    share = (scaling["original_max_position_embeddings"] / lengths - low) / (high - low)
    share = np.clip(share, 0, 1)  # 1: a short wave, as it was; 0: a long one
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _rope(config: Config) -> tuple[float, Mapping[str, Any]]:
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    return parameters.get("rope_theta", config.get("rope_theta", 10000.0)), scaling


def _refuse_windows(config: Config) -> None:
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise InputError(
            "to=gguf: llama.cpp's llama has no sliding windows, and this model has; use to=merged"
        )


def to_gguf(name: str, weight: np.ndarray, family: Family, config: Config) -> np.ndarray:
    """Returns a model's weight, named as in mlx-lm, as llama.cpp wants it."""
    heads = _heads(name, config) if family.interleaved else None
    if heads:
        return rows_in_pairs(weight, heads)
    return weight + np.float32(family.norm_shift) if _is_norm(name) else weight


def from_gguf(name: str, weight: np.ndarray, family: Family, config: Config) -> np.ndarray:
    """Returns what `to_gguf` was given."""
    heads = _heads(name, config) if family.interleaved else None
    if heads:
        return rows_as_halves(weight, heads)
    return weight - np.float32(family.norm_shift) if _is_norm(name) else weight


def rows_in_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns query or key rows (heads x width, ...) as llama.cpp's llama rotates them, in pairs of rows.

    Row i of a head's first half and row i of its second are rows 2i and 2i + 1.
    """
    heads = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def _heads(name: str, config: Config) -> int | None:
    """Returns how many heads the rows of a projection of queries or keys are of, None for other weights."""
    if ".q_proj." in name:
        return config["num_attention_heads"]
    if ".k_proj." in name:
        return config.get("num_key_value_heads") or config["num_attention_heads"]
    return None


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")
