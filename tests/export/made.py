"""What the tests of exports share: adapters that have moved from their start, and exporting them."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxft.config import compose
from mlxft.config.schema import AdapterConfig
from mlxft.export.command import Exported
from mlxft.export.command import export as export_composed
from mlxft.models.adapters import save_adapter
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import AdaptedLayer

PARITY = Path(__file__).resolve().parents[1] / "parity"
LLAMA = PARITY / "models" / "llama_untied"
TOKENS = [5, 80, 7, 200, 31, 9, 44, 101, 6, 17, 90, 12, 3, 250, 8]


def moved(folder: Path, seed: int = 0, size: float = 0.05, **settings) -> nn.Module:
    """Returns the model with an adapter that has moved from its start, all but what fills ranks up."""
    model = load_model(folder)
    apply_adapter(model, AdapterConfig(**{"rank": 3} | settings), seed)
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    used = [mx.any(layer.lora_a != 0, axis=0) for layer in layers]
    arrays = tree_flatten(model.trainable_parameters())
    for (name, array), key in zip(arrays, mx.random.split(mx.random.key(seed), len(arrays)), strict=True):
        model.load_weights([(name, array + size * mx.random.normal(array.shape, key=key))], strict=False)
    for layer, columns in zip(layers, used, strict=True):
        if layer.lora_a.ndim == 2:
            layer.lora_a, layer.lora_b = layer.lora_a * columns, layer.lora_b * columns[:, None]
    mx.eval(model.parameters())
    return model


def adapter(model_folder: Path, folder: Path, seed: int = 0, size: float = 0.05, **settings) -> Path:
    """Saves such an adapter as training does and returns its folder."""
    model = moved(model_folder, seed, size, **settings)
    save_adapter(folder, model, AdapterConfig(**{"rank": 3} | settings), str(model_folder))
    return folder


def export(*overrides: str, **keys) -> Exported:
    """Exports as the command does; keys: a, b=1 for a=..., b=1."""
    composed = compose([*overrides, *(f"{name}={value}" for name, value in keys.items())], command="export")
    return export_composed(composed.config, composed.own)


def logits(model: nn.Module, tokens=TOKENS) -> np.ndarray:
    """Returns the logits (T, V) of one row."""
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference over the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
