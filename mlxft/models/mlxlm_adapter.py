"""mlx-lm's adapter layout: adapters.safetensors and adapter_config.json."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from mlxft.config.choices import ADAPTERS
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
from mlxft.models.new_rows import BIAS, ROWS
from mlxft.models.targets import LinearLayer

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
NEW_TOKENS = "new_tokens"  # in it: an addition of ours, which mlx-lm passes over


def read(folder: Path) -> Adapter:
    """Returns the adapter in `folder`. Raises: InputError naming the file and what is wrong in it."""
    file = folder / CONFIG
    config = audit.read_json(file)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ADAPTERS:
        raise InputError(f"{file}: fine_tune_type {kind!r} is not supported, only {', '.join(ADAPTERS)}")
    tensors = read_tensors(folder / WEIGHTS)
    num_new = len(new_tokens_in(config, file))
    if kind == "full":
        return Adapter(folder, kind, weights=tensors, num_new_tokens=num_new)
    check_finite(tensors, folder / WEIGHTS)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise InputError(f"{file}: lora_parameters is missing or not an object")
    rank, scale = number(parameters, "rank", file), float(number(parameters, "scale", file))
    num_layers = int(number(config, "num_layers", file))
    if not math.isfinite(scale) or scale == 0:
        raise InputError(f"{file}: lora_parameters.scale is {scale}; it has to be finite and not 0")
    keys = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise InputError(f"{file}: lora_parameters.keys is {keys!r}; it has to be a list of names of layers")
    modules = config.get("modules_to_save") or []
    weights = {
        name: tensors.pop(name)
        for name in list(tensors)
        if name.rpartition(".")[0] in modules or name.rpartition(".")[2] in (ROWS, BIAS)
    }
    suffixes = (".lora_a", ".lora_b", ".m") if kind == "dora" else (".lora_a", ".lora_b")
    layers = {}
    for path, (a, b, *m) in together(tensors, suffixes, folder / WEIGHTS).items():
        layers[path] = low = LowRank(a, b, scale, *m)
        if low.rank != rank or low.rank_of_b != rank:
            raise InputError(f"{folder / WEIGHTS}: {path} has lora_a {tuple(a.shape)} and lora_b "
                             f"{tuple(b.shape)}, but {CONFIG} says rank {rank}")
    return Adapter(
        folder,
        kind,
        layers,
        weights,
        lambda linears: _chosen(linears, num_layers, keys),
        num_new_tokens=num_new,
        chosen_are_all=True,  # mlx-lm goes by its configuration and drops other tensors without a word
    )


def new_tokens_in(config: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    """Returns what an adapter's configuration says of new tokens: {"id", "text", "special"} of each.

    Raises: InputError, naming the file, if it cannot be made out.
    """
    said = config.get(NEW_TOKENS) or []
    kinds = {"id": int, "text": str, "special": bool}
    is_right = isinstance(said, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), kind) for name, kind in kinds.items())
        for each in said
    )
    if not is_right:
        raise InputError(f"{file}: {NEW_TOKENS} is {said!r}; it has to be a list of {{id, text, special}}")
    return said


def _chosen(linears: list[LinearLayer], num_layers: int, keys: list[str] | None) -> set[str]:
    """Returns the paths that mlx-lm adapts: `keys` inside the last `num_layers` blocks, or as whole paths."""
    num_blocks = 1 + max((layer.block for layer in linears if layer.block is not None), default=-1)
    first = num_blocks - num_layers if 0 < num_layers < num_blocks else 0
    paths = {layer.path for layer in linears if layer.block is not None and layer.block >= first
             and (keys is None or layer.name in keys)}
    return paths | {layer.path for layer in linears if keys is not None and layer.path in keys}


def layers_config(places: list[LinearLayer], chosen: set[str]) -> tuple[int, list[str]]:
    """Returns num_layers and keys of adapter_config.json for updates on `chosen` of the layers `places`.

    The same names in each of the last N blocks are written as names with N; any other choice as whole
    paths, which mlx-lm takes too.
    """
    num_blocks = 1 + max((p.block for p in places if p.block is not None), default=-1)
    names = defaultdict(set)
    for place in places:
        if place.path in chosen and place.block is not None:
            names[place.name].add(place.block)
    first = min((min(blocks) for blocks in names.values()), default=0)
    outside = sorted(p.path for p in places if p.path in chosen and p.block is None)
    keys = sorted(names) + outside
    if _chosen(places, num_blocks - first, keys) != chosen:
        keys = sorted(chosen)
    return num_blocks - first, keys


def at_one_rank(layers: dict[str, LowRank]) -> dict[str, LowRank]:
    """Returns the same updates at one rank and one scale, which is all that the layout can say.

    Smaller ranks are filled up with zeros, which get no gradient; a scale that differs goes into b.
    """
    rank = max(layer.rank for layer in layers.values())
    scale = max(layer.scale for layer in layers.values())
    return {path: layer.widened(rank, scale) for path, layer in layers.items()}
