"""PEFT's adapter layout for LoRA and DoRA: adapter_model.safetensors and adapter_config.json.

    base_model.model.<module>.lora_A.weight (r, in)       .lora_B.weight (out, r)
                             .lora_embedding_A (r, V)     .lora_embedding_B (H, r)
                             .lora_magnitude_vector (out,)
                             .weight                      of a module that is saved whole

Source: PEFT's LoraConfig and the names that its save_pretrained gives.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxft.config.choices import is_embedding
from mlxft.errors import InputError
from mlxft.models import audit
from mlxft.models.adapter_tensors import (
    Adapter,
    LowRank,
    check_finite,
    number,
    read_tensors,
    together,
)
from mlxft.models.targets import LinearLayer

log = logging.getLogger("mlxft")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
_OF_LINEARS = (".lora_A.weight", ".lora_B.weight")
_OF_EMBEDDINGS = (".lora_embedding_A", ".lora_embedding_B")
_LENGTHS = "lora_magnitude_vector"
_BASE = ".base_layer.weight"  # of an embedding that is adapted: PEFT saves its base too

# Settings that change what the adapter computes or which tensors it has, with their neutral values.
_UNSUPPORTED = {
    "bias": ("none", None),
    "lora_bias": (False, None),
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
        tensors[plain.replace(f"{_LENGTHS}.weight", _LENGTHS)] = tensor
    check_finite(tensors, folder / WEIGHTS)
    number(config, "r", file)
    number(config, "lora_alpha", file)
    embeddings = _taken(tensors, lambda name: name.endswith(_BASE))
    kept = config.get("modules_to_save") or []
    weights = _taken(tensors, lambda name: "lora_" not in name and any(f".{m}." in f".{name}" for m in kept))
    of_embeddings = _taken(tensors, lambda name: name.endswith(_OF_EMBEDDINGS))
    found = together(of_embeddings, _OF_EMBEDDINGS, folder / WEIGHTS)
    dora = bool(config.get("use_dora"))
    suffixes = (*_OF_LINEARS, f".{_LENGTHS}") if dora else _OF_LINEARS
    found |= together(tensors, suffixes, folder / WEIGHTS)
    return Adapter(
        folder,
        "dora" if dora else "lora",
        {path: _low_rank(path, arrays, config, folder) for path, arrays in found.items()},
        weights,
        lambda linears: _chosen(linears, config),
        {name.removesuffix(_BASE): array for name, array in embeddings.items()},
        is_tied=False,
        num_new_tokens=None,
    )


def write_content(
    updates: dict[str, LowRank], whole: dict[str, mx.array], base: str, is_tied: bool = False
) -> tuple[dict, dict]:
    """Returns the tensors and the configuration of an adapter.

    updates: by the module's path, each at its own rank and scale; what most have stands as r and lora_alpha,
    the others in patterns. whole: arrays of modules that are saved whole, by name. is_tied: whether the
    model's embedding is its head, so that an update of it is the head's too. Raises: InputError for updates
    of experts, which the layout has no word for.
    """
    _check_experts(updates)
    tensors = {_PREFIX + _transformers_path(name): array for name, array in whole.items()}
    updates = {_transformers_path(path): update.trimmed() for path, update in updates.items()}
    embeddings = [path for path in updates if is_embedding(path)]
    if is_tied and embeddings:
        updates["lm_head"] = _of_head(updates[embeddings[0]])
        log.warning(
            "%s is the head too: PEFT loads its update for both uses, but PEFT 0.21 adds it twice where it "
            "merges it. Merge it with mlxft export to=merged",
            embeddings[0],
        )
    for path, update in updates.items():
        names = _OF_EMBEDDINGS if is_embedding(path) else _OF_LINEARS
        arrays = zip(names, (update.a.T, update.b.T), strict=True)
        tensors |= {f"{_PREFIX}{path}{name}": mx.contiguous(array) for name, array in arrays}
        if update.m is not None:
            tensors[f"{_PREFIX}{path}.{_LENGTHS}"] = update.m
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **_sizes(updates),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(updates),
        "modules_to_save": sorted({_transformers_path(name).rpartition(".")[0] for name in whole}) or None,
        "use_dora": any(update.m is not None for update in updates.values()),
        "use_rslora": False,  # lora_alpha / r is the scale, however it came about
    }
    if is_tied and (embeddings or any(is_embedding(name.rpartition(".")[0]) for name in whole)):
        config["ensure_weight_tying"] = True  # PEFT then keeps one update for both uses
    return tensors, config


def _sizes(updates: dict[str, LowRank]) -> dict[str, Any]:
    """Returns r and lora_alpha as most layers have them, and patterns for the layers that differ."""
    ranks = {path: update.rank for path, update in updates.items()}
    alphas = {path: _whole_if_near(update.scale * update.rank) for path, update in updates.items()}
    rank, alpha = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: own for path, own in ranks.items() if own != rank},
        "alpha_pattern": {path: own for path, own in alphas.items() if own != alpha},
    }


def _whole_if_near(alpha: float) -> float:
    """Returns 16 for what should be 16 and is off by the rounding of scale times rank."""
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def _of_head(update: LowRank) -> LowRank:
    """Returns a tied embedding's update as the head has it: E + A B on rows is h + (h B^T) A^T on logits."""
    return LowRank(update.b.T, update.a.T, update.scale)


def _check_experts(updates: dict[str, LowRank]) -> None:
    experts = [path for path, low in updates.items() if low.a.ndim == 3]
    if experts:
        raise InputError(
            f"PEFT's layout has no updates of experts in one array, as {experts[0]} is here. Merge the "
            "adapter into the model (to=merged), or leave experts out of adapter.targets"
        )


def _transformers_path(path: str) -> str:
    """Returns where transformers has what mlx-lm has at `path`: they wrap text models the other way round."""
    inner = path.removeprefix("language_model.")
    if inner == path:
        return path
    return f"model.language_model.{inner.removeprefix('model.')}" if inner.startswith("model.") else inner


def _taken(tensors: dict[str, mx.array], wanted: Callable[[str], bool]) -> dict[str, mx.array]:
    """Takes the wanted tensors out of `tensors` and returns them."""
    return {name: tensors.pop(name) for name in list(tensors) if wanted(name)}


def _low_rank(path: str, arrays: tuple, config: dict, folder: Path) -> LowRank:
    a, b, *m = arrays
    rank = _by_pattern(config, "rank_pattern", path, config["r"])
    if a.shape[0] != rank or b.shape[-1] != rank:
        raise InputError(f"{folder / WEIGHTS}: {path} has lora_A {tuple(a.shape)} and lora_B "
                         f"{tuple(b.shape)}, but {CONFIG} says rank {rank}")
    alpha = _by_pattern(config, "alpha_pattern", path, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a.T, b.T, scale, *m)


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
    linears = [layer for layer in linears if not layer.is_experts]  # which it has one by one
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
