"""What tests of evaluation share: a tiny model that speaks in letters, a random adapter."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Example
from mlxft.models import load
from mlxft.models.adapters import save_adapter
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import LoRALinear
from tests.tiny_models import END_ID, SPECIAL_TOKENS, make_model

LETTERS = [byte + len(SPECIAL_TOKENS) for byte in range(ord("a"), ord("z") + 1)]


def make_speaker(folder: Path, stops_like: int | None = None) -> Path:
    """Writes a tiny model whose likeliest token is always a letter, or the end token.

    stops_like: a letter's id; where it would be likely the end token is three times as likely.
    """
    make_model(folder, "llama")
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file).items())
    head = np.array(weights["lm_head.weight"])
    silent = np.ones(len(head), dtype=bool)
    silent[LETTERS] = False
    head[silent] = 0.0  # a logit of 0 loses against the highest of 26 letters
    if stops_like is not None:
        head[END_ID] = 3 * head[stops_like]
    weights["lm_head.weight"] = mx.array(head)
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    return folder


def make_adapter(folder: Path, model_folder: Path, seed: int = 0, size: float = 0.3) -> Path:
    """Writes a random LoRA adapter of rank 4 and scale 2 for the model."""
    model, _ = load(str(model_folder))
    config = AdapterConfig(rank=4, alpha=8.0)
    apply_adapter(model, config, seed)
    randomise(model, seed, size)
    save_adapter(folder, model, config, str(model_folder))
    return folder


def randomise(model: nn.Module, seed: int, size: float) -> None:
    """Replaces the updates' second factors, which start at zero."""
    random = np.random.default_rng(seed)

    def drawn(path, value):
        if not path.endswith("lora_b"):
            return value
        return mx.array(random.normal(0, size, value.shape).astype(np.float32))

    model.update(tree_map_with_path(drawn, model.trainable_parameters()))


def merged(model_folder: Path, adapter_model: nn.Module) -> nn.Module:
    """Returns the plain model with W + scale (A B)^T written into its weights."""
    model, _ = load(str(model_folder))
    plain = dict(model.named_modules())
    for path, module in adapter_model.named_modules():
        if isinstance(module, LoRALinear):
            weight = plain[path].weight
            plain[path].weight = weight + module.scale * (module.lora_a @ module.lora_b).T
    return model


def examples(rows):
    for number, line in enumerate(rows.read_text().splitlines(), 1):
        row = json.loads(line)
        mask = np.array(row["completion_mask"], dtype=bool)
        yield Example(np.array(row["input_ids"], dtype=np.int32), mask, f"{rows}:{number}")


def alone(model, each):
    """Returns (log p, whether every token is the likeliest) by the model's own forward."""
    logits = model(mx.array(each.row)[None])[0, len(each.context) - 1 : -1]
    logits = np.array(logits.astype(mx.float32), np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    logps = logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))
    greedy = (logits.argmax(axis=-1) == each.tokens).all()
    return logps[np.arange(len(each.tokens)), each.tokens].sum(), greedy
