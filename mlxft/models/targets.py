"""Which linear layers of a model are adapted: names, patterns and blocks."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Optional

import mlx.nn as nn

from mlxft.errors import InputError
from mlxft.models.lora_linear import LoRALinear


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a model, as it is without an adapter, and its place.

    path: in the whole model. block: number of its decoder block, None outside of them. name: its path
    inside the block (outside: `path`). slot: its rank by name among the block's linear layers.
    """

    path: str
    block: Optional[int]
    name: str
    slot: int
    module: nn.Module


def linear_layers(model: nn.Module) -> list[LinearLayer]:
    """Returns the dense and quantised linear layers of `model`, by block and name, those outside last.

    Kinds with code of their own (experts, layers that split their output) are not among them. An adapted
    layer counts as the linear layer that it wraps, at its own path.
    """
    blocks = {id(block): number for number, block in enumerate(model.layers)}
    modules = dict(model.named_modules())
    prefixes = {path + ".": blocks[id(module)] for path, module in modules.items() if id(module) in blocks}
    places = []
    for path, module in modules.items():
        if isinstance(module, LoRALinear):
            module = module.linear
        elif isinstance(modules.get(path.rpartition(".")[0]), LoRALinear):
            continue
        if type(module) in (nn.Linear, nn.QuantizedLinear):
            prefix = next((p for p in prefixes if path.startswith(p)), "")
            places.append((prefixes.get(prefix), path.removeprefix(prefix), path, module))
    found, slots = [], {}
    for block, name, path, module in sorted(places, key=lambda p: (p[0] is None, p[0] or 0, p[1])):
        slot = slots[block] = slots.get(block, -1) + 1
        found.append(LinearLayer(path, block, name, slot, module))
    return found


def select(model: nn.Module, targets: Any = None, layers: Any = "all") -> list[LinearLayer]:
    """Returns the linear layers that `targets` and `layers` choose, at least one.

    targets: None for all inside the blocks; or names and patterns (fnmatch) of a layer's last name
    ("q_proj"), its path inside a block ("self_attn.*") or its whole path ("model.layers.3.*"). A layer
    outside the blocks is chosen by its exact path only ("lm_head"). layers: "all", "last N" or N.

    Raises: InputError for a pattern that matches nothing, listing what there is.
    """
    first = first_block(layers, len(model.layers))
    every = linear_layers(model)
    inside = [layer for layer in every if layer.block is not None and layer.block >= first]
    if targets is None:
        if not inside:
            raise InputError("the model's decoder blocks have no linear layer that can be adapted")
        return inside
    outside = [layer for layer in every if layer.block is None]
    patterns = [targets] if isinstance(targets, str) else [str(pattern) for pattern in targets]
    if not patterns:
        raise InputError("adapter.targets is an empty list: nothing would be trained. Leave it out to adapt "
                         "every linear layer of the blocks.")
    chosen = set()
    for pattern in patterns:
        matching = {layer.path for layer in inside if _matches(pattern, layer)}
        matching |= {layer.path for layer in outside if layer.path == pattern}
        if not matching:
            there = sorted({layer.name for layer in inside}) + [layer.path for layer in outside]
            raise InputError(f"adapter.targets: {pattern!r} matches no linear layer of blocks {first} to "
                             f"{len(model.layers) - 1}. There are: {', '.join(there)}")
        chosen |= matching
    return [layer for layer in every if layer.path in chosen]


def first_block(layers: Any, num_blocks: int) -> int:
    """Returns the first adapted block: 0 for "all", num_blocks - N for "last N" or N.

    Raises: InputError for anything else.
    """
    if layers == "all":
        return 0
    number = re.fullmatch(r"(?:last\s+)?(\d+)", str(layers).strip())
    if number is None or int(number[1]) == 0:
        raise InputError(f'adapter.layers={layers!r}: expected "all" or "last N", N from 1 to {num_blocks}')
    if int(number[1]) > num_blocks:
        raise InputError(f"adapter.layers={layers!r}: the model has only {num_blocks} decoder blocks")
    return num_blocks - int(number[1])


def num_expert_layers(model: nn.Module) -> int:
    """Returns how many expert layers the model has; they are not adapted."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return sum(isinstance(module, (SwitchLinear, QuantizedSwitchLinear)) for module in model.modules())


def _matches(pattern: str, layer: LinearLayer) -> bool:
    return any(fnmatchcase(name, pattern) for name in (layer.name.rpartition(".")[2], layer.name, layer.path))
