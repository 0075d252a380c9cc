"""Which layers of a model are adapted: names, patterns and blocks."""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Optional

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxft.errors import InputError
from mlxft.models.lora_linear import AdaptedLayer
from mlxft.models.new_rows import NewRows
from mlxft.models.trellis.linear import TrellisLinear

LINEARS = (nn.Linear, nn.QuantizedLinear, TrellisLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)

_SLOTS_OF_LINEARS = 1000  # of a block; those of other layers come after them


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of a model, as it is without an adapter, and its place; or experts, or an embedding.

    path: in the whole model. block: number of its decoder block, None outside of them. name: its path
    inside the block (outside: `path`, of a table with new rows that of both). slot: its rank by name among
    the block's linear layers.
    """

    path: str
    block: Optional[int]
    name: str
    slot: int
    module: nn.Module

    @property
    def is_experts(self) -> bool:
        """True for a layer of experts, each with a weight of its own."""
        return isinstance(self.module, EXPERTS)

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, EMBEDDINGS)


def adaptable_layers(model: nn.Module) -> list[LinearLayer]:
    """Returns the linear layers of `model`, its layers of experts, and its embeddings.

    Experts have slots of their own, and embeddings: masks of linear layers do not depend on them.
    """
    others = [
        replace(layer, slot=layer.slot + _SLOTS_OF_LINEARS)
        for layer in _layers(model, (*EXPERTS, *EMBEDDINGS))
        if layer.is_experts or layer.block is None
    ]
    return linear_layers(model) + others


def linear_layers(model: nn.Module) -> list[LinearLayer]:
    """Returns the dense and quantised linear layers of `model`, by block and name, those outside last.

    Kinds with code of their own (experts, layers that split their output) are not among them. An adapted
    layer counts as the linear layer that it wraps, at its own path.
    """
    return _layers(model, LINEARS)


def _layers(model: nn.Module, kinds: tuple[type, ...]) -> list[LinearLayer]:
    blocks = {id(block): number for number, block in enumerate(model.layers)}
    modules = dict(model.named_modules())
    prefixes = {path + ".": blocks[id(module)] for path, module in modules.items() if id(module) in blocks}
    places = []
    for path, module in modules.items():
        if isinstance(module, AdaptedLayer):
            module = module.base
        elif isinstance(modules.get(path.rpartition(".")[0]), AdaptedLayer):
            continue
        if type(module) in kinds:
            prefix = next((p for p in prefixes if path.startswith(p)), "")
            parent = path.rpartition(".")[0]
            called = parent if isinstance(modules.get(parent), NewRows) else path.removeprefix(prefix)
            places.append((prefixes.get(prefix), called, path, module))
    found, slots = [], {}
    for block, name, path, module in sorted(places, key=lambda p: (p[0] is None, p[0] or 0, p[1])):
        slot = slots[block] = slots.get(block, -1) + 1
        found.append(LinearLayer(path, block, name, slot, module))
    return found


def select(model: nn.Module, targets: Any = None, layers: Any = "all") -> list[LinearLayer]:
    """Returns the layers that `targets` and `layers` choose, at least one.

    targets: None for all linear ones inside the blocks; or names and patterns (fnmatch) of a layer's last
    name ("q_proj"), its path inside a block ("self_attn.*") or its whole path ("model.layers.3.*"), experts
    among them. A layer outside the blocks is chosen by its exact path or last name only ("lm_head",
    "embed_tokens"). layers: "all", "last N" or N.

    Raises: InputError for a pattern that matches nothing, listing what there is.
    """
    first = first_block(layers, len(model.layers))
    every = adaptable_layers(model)
    inside = [layer for layer in every if layer.block is not None and layer.block >= first]
    if targets is None:
        inside = [layer for layer in inside if not layer.is_experts]
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
        matching |= {layer.path for layer in outside if pattern in (layer.name, _last(layer.name))}
        if not matching:
            there = sorted({layer.name for layer in inside}) + [layer.name for layer in outside]
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
    """Returns how many layers of experts the model has."""
    return sum(isinstance(module, EXPERTS) for module in model.modules())


def _matches(pattern: str, layer: LinearLayer) -> bool:
    return any(fnmatchcase(name, pattern) for name in (_last(layer.name), layer.name, layer.path))


def _last(path: str) -> str:
    return path.rpartition(".")[2]
