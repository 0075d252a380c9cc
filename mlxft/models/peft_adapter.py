"""PEFT's adapter layout for LoRA: adapter_model.safetensors and adapter_config.json.

Source: PEFT's LoraConfig and its saved names, base_model.model.<module>.lora_A.weight (r, in).
"""

import math
import re
from pathlib import Path

from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.adapter_tensors import Adapter, LowRank, number, paired, read_tensors
from mlxft.models.targets import LinearLayer

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."

# Settings that change what the adapter computes or which tensors it has, with their neutral values.
_UNSUPPORTED = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}

# These start from changed base weights: on the base as published the adapter means something else.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read(folder: Path) -> Adapter:
    """Returns the adapter in `folder`. Raises: InputError naming the file and what is wrong in it."""
    file = folder / CONFIG
    config = audit.read_json(file)
    _check_supported(config, file)
    tensors = {}
    for name, tensor in read_tensors(folder / WEIGHTS).items():
        plain = name.removeprefix(_PREFIX).replace(".default.weight", ".weight")
        tensors[plain] = tensor
    number(config, "r", file)
    number(config, "lora_alpha", file)
    layers = {}
    for path, (a, b) in paired(tensors, (".lora_A.weight", ".lora_B.weight"), folder / WEIGHTS).items():
        rank = _by_pattern(config, "rank_pattern", path, config["r"])
        if a.shape[0] != rank or b.shape[1] != rank:
            raise InputError(f"{folder / WEIGHTS}: {path} has lora_A {tuple(a.shape)} and lora_B "
                             f"{tuple(b.shape)}, but {CONFIG} says rank {rank}")
        alpha = _by_pattern(config, "alpha_pattern", path, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        layers[path] = LowRank(a.T, b.T, scale)
    return Adapter(folder, "lora", layers, chosen=lambda linears: _chosen(linears, config))


def _check_supported(config: dict, file: Path) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise InputError(f"{file}: peft_type {kind!r} is not supported, only LORA")
    for key, neutral in _UNSUPPORTED.items():
        if key in config and config[key] not in neutral:
            raise InputError(f"{file}: {key}={config[key]!r} is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise InputError(f"{file}: init_lora_weights={start!r} changes the base model's weights; save the "
                         "adapter with PEFT's path_initial_model_for_weight_conversion")


def _by_pattern(config: dict, key: str, path: str, default: float) -> float:
    """Returns the value of the first pattern that matches the end of `path`, as PEFT does."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _chosen(linears: list[LinearLayer], config: dict) -> set[str]:
    inside = [layer for layer in linears if layer.block is not None]
    wanted = config.get("target_modules") or []
    only = config.get("layers_to_transform")
    only = [only] if isinstance(only, int) else only
    excluded = config.get("exclude_modules") or []
    return {layer.path for layer in (inside if wanted == "all-linear" else linears)
            if (wanted == "all-linear" or _names(wanted, layer.path)) and not _names(excluded, layer.path)
            and (only is None or layer.block in only)}


def _names(modules: str | list[str], path: str) -> bool:
    """Returns whether PEFT's `target_modules` (a pattern, or ends of paths) name the module at `path`."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == name or path.endswith("." + name) for name in modules)
