"""Random models of a few kilobytes, written to disk as real model folders for the tests.

    folder = make_model(tmp_path / "model", "llama")
    folder = make_model(tmp_path / "model", "qwen3", seed=1, num_hidden_layers=2)

A folder has config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
chat_template.jinja: mlx-lm, transformers and mlxft load it like any other.
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Padding is a token of its own and has id 0, so that a loss that counts padding shows.
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
PAD_ID, START_ID, END_ID = 0, 1, 2
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # one token a byte: byte b has id b + 3

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "float32",
}

FAMILIES = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    # Blocks 0 and 2 see a window of 8 positions, blocks 1 and 3 everything.
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
}

_LLAMA_LIKE = {
    "rms_norm_eps": 1e-6,
    "rms_norm_epsilon": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "mlp_bias": True,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
_GATED_DELTA = {
    "rms_norm_eps": 1e-2,  # outputs near zero are normalised too: with less, rounding grows a hundredfold
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}

# Every other family whose decoder view is tested. Windows are of 8 positions, in every other block.
MORE_FAMILIES = {
    "mistral": {
        **_LLAMA_LIKE,
        "model_type": "mistral",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    },
    "qwen2": {**_LLAMA_LIKE, "model_type": "qwen2"},
    "qwen3_moe": {**_LLAMA_LIKE, **_EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "gemma3": {"model_type": "gemma3", "text_config": {**_COMMON, **FAMILIES["gemma3_text"]}},
    # Blocks 0 to 3 have keys and values of their own; 4 uses those of 2, 5 those of 3.
    "gemma4_text": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 5.0,
    },
    "gemma4": {"model_type": "gemma4"},  # filled in below
    "qwen3_5": {
        **_LLAMA_LIKE,
        **_GATED_DELTA,
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe"},
    "qwen3_next": {**_LLAMA_LIKE, **_GATED_DELTA, **_EXPERTS, "model_type": "qwen3_next"},
    "olmo2": {**_LLAMA_LIKE, "model_type": "olmo2"},
    "olmo3": {
        **_LLAMA_LIKE,
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    },
    "phi3": {**_LLAMA_LIKE, "model_type": "phi3"},
    "smollm3": {**_LLAMA_LIKE, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite": {
        **_LLAMA_LIKE,
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "glm4": {**_LLAMA_LIKE, "model_type": "glm4", "partial_rotary_factor": 0.5},
    "gemma": {"model_type": "gemma", "rms_norm_eps": 1e-6},
    # Blocks 1 and 3 attend; 0 and 2 are convolutions over three positions.
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
        "rope_theta": 10000.0,
    },
    "starcoder2": {**_LLAMA_LIKE, "model_type": "starcoder2", "norm_epsilon": 1e-5},
}
MORE_FAMILIES["gemma4"]["text_config"] = {**_COMMON, **MORE_FAMILIES["gemma4_text"]}
MORE_FAMILIES["qwen3_5_moe"]["text_config"] = {**_COMMON, **MORE_FAMILIES["qwen3_5"], **_EXPERTS}

_GPT = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "n_inner": 96,
    "n_positions": 512,
    "n_ctx": 512,
    "layer_norm_epsilon": 1e-5,
}
# MLX's CUDA backend cannot launch the gradient of 64 x 96 experts for fewer than 64 choices; a run there has
# 128 positions and more.
_EXPERT_WIDTH = 32
_LLAMA_4_TEXT = {
    **_COMMON,
    **_LLAMA_LIKE,
    "model_type": "llama4_text",
    "intermediate_size": _EXPERT_WIDTH,
    "attention_chunk_size": 512,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
}

# Families that mlxft runs as a whole, padded.
PADDED_FAMILIES = {
    "gemma2": {"model_type": "gemma2", "rms_norm_eps": 1e-6},
    "gpt2": {**_GPT, "model_type": "gpt2"},
    "gpt_bigcode": {**_GPT, "model_type": "gpt_bigcode", "num_key_value_heads": None},
    "jamba": {
        **_LLAMA_LIKE,
        "model_type": "jamba",
        "intermediate_size": _EXPERT_WIDTH,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": {
        **_LLAMA_LIKE,
        "model_type": "kimi_linear",
        "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 2, "head_dim": 16},
        "model_max_length": 512,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "llama4": {"model_type": "llama4", "text_config": _LLAMA_4_TEXT},
    "ministral3": {
        **_LLAMA_LIKE,
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
            "rope_type": "default",
        },
    },
    "nemotron_h": {
        **_LLAMA_LIKE,
        "model_type": "nemotron_h",
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "plamo": {**_LLAMA_LIKE, "model_type": "plamo", "n_shared_head": 2},
    "qwen": {**_LLAMA_LIKE, "model_type": "qwen", "kv_channels": 16, "layer_norm_epsilon": 1e-6},
}


def make_model(folder: Path, family: str, seed: int = 0, quantize: int | None = None, **overrides) -> Path:
    """Writes a random model of `family` into `folder` and returns the folder.

    The same arguments give the same bytes; MLX's global generator is left alone. `quantize`: bits
    of an affine quantisation in groups of 32. `overrides`: keys of config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(family, **overrides)
    model = random_model(config, seed)
    if quantize:
        nn.quantize(model, group_size=32, bits=quantize)
        config["quantization"] = {"group_size": 32, "bits": quantize}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())),
                        metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    return folder


def model_config(family: str, **overrides) -> dict:
    """Returns the content of config.json."""
    return {**_COMMON, **(FAMILIES | MORE_FAMILIES | PADDED_FAMILIES)[family], **overrides}


def random_model(config: dict, seed: int = 0) -> nn.Module:
    """Returns mlx-lm's model for `config` with normal weights, norms near their neutral value."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    high, low = mx.random.state[0].tolist()
    model = model_class(args_class.from_dict(config))
    mx.random.seed((high << 32) | low)  # building a layer draws from the global generator
    text = getattr(model, "language_model", model)
    if config.get("text_config", config).get("tie_word_embeddings") and "lm_head" in text:
        text.sanitize({})  # gemma3_text ties when the checkpoint has no head
    shapes = [(name, value.shape) for name, value in sorted(tree_flatten(model.parameters()))]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = []
    for (name, shape), key in zip(shapes, keys, strict=True):
        neutral, size = _spread(name, config["model_type"])
        weights.append((name, neutral + size * mx.random.normal(shape, key=key)))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def _spread(name: str, family: str) -> tuple[float, float]:
    """Returns mean and standard deviation of a weight: far from uniform logits, steady gradients."""
    if "norm" in name or "layer_scalar" in name:
        if family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):
            return 0.35, 0.1  # its attention has no other scale
        adds_one = family.startswith("gemma") and not family.startswith("gemma4")
        return (0.0 if adds_one else 1.0), 0.1
    return 0.0, 0.5 if "conv1d" in name else 0.12


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token a byte, ChatML's turns and no beginning-of-text token."""
    alphabet = list(bytes_to_unicode().items())
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {character: byte + len(SPECIAL_TOKENS) for byte, character in alphabet}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD_ID],
        "eos_token": SPECIAL_TOKENS[END_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": _COMMON["max_position_embeddings"],
    }, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
