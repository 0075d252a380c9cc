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
    return {**_COMMON, **FAMILIES[family], **overrides}


def random_model(config: dict, seed: int = 0) -> nn.Module:
    """Returns mlx-lm's model for `config` with normal weights, norms near their neutral value."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(config)
    high, low = mx.random.state[0].tolist()
    model = model_class(args_class.from_dict(config))
    mx.random.seed((high << 32) | low)  # building a layer draws from the global generator
    if config.get("tie_word_embeddings") and "lm_head" in model:
        model.sanitize({})  # gemma3_text ties when the checkpoint has no head
    shapes = [(name, value.shape) for name, value in sorted(tree_flatten(model.parameters()))]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = []
    for (name, shape), key in zip(shapes, keys, strict=True):
        noise = mx.random.normal(shape, key=key)
        neutral = 0.0 if config["model_type"].startswith("gemma") else 1.0
        weights.append((name, neutral + 0.1 * noise if "norm" in name else 0.12 * noise))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


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
