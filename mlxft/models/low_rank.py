"""Which kind of update a layer gets, in which shapes: linear layers, experts, embeddings; LoRA or DoRA."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxft.errors import InputError
from mlxft.models.adapter_tensors import LowRank
from mlxft.models.dora_linear import DoRALinear
from mlxft.models.frozen_linear import dimensions
from mlxft.models.lora_embedding import LoRAEmbedding
from mlxft.models.lora_experts import LoRAExperts
from mlxft.models.lora_linear import AdaptedLayer, LoRALinear, initial_a
from mlxft.models.targets import LinearLayer

Shape = tuple[int, ...]


def shapes(layer: LinearLayer, rank: int) -> tuple[Shape, Shape]:
    """Returns the shapes of lora_a and lora_b of that rank on the layer."""
    module = layer.module
    if layer.is_experts:
        experts, inputs, outputs = module.num_experts, module.input_dims, module.output_dims
        return (experts, rank, inputs), (experts, outputs, rank)
    inputs, outputs = dimensions(module)
    if layer.is_embedding:
        inputs, outputs = outputs, inputs
    return (inputs, rank), (rank, outputs)


def fresh(layer: LinearLayer, rank: int, scale: float, seed: int) -> LowRank:
    """Returns an update that is zero: B is, and A depends on the seed and the layer's path only."""
    of_a, of_b = shapes(layer, rank)
    inputs = of_a[-1] if layer.is_experts else of_a[0]
    return LowRank(initial_a(seed, layer.path, inputs, of_a), mx.zeros(of_b), scale)


def wrapped(
    layer: LinearLayer, low: LowRank, kind: str, dropout: float, place: tuple[int, int]
) -> AdaptedLayer:
    """Returns the layer with its update, float32. Raises: InputError for DoRA where there is none."""
    given: tuple[Any, ...] = (low.a.astype(mx.float32), low.b.astype(mx.float32), low.scale, dropout, place)
    if kind == "dora":
        check_dora(layer)
        return DoRALinear(layer.module, *given, m=None if low.m is None else low.m.astype(mx.float32))
    of_kind: type = LoRALinear
    if layer.is_experts:
        of_kind = LoRAExperts
    elif layer.is_embedding:
        of_kind = LoRAEmbedding
    return of_kind(layer.module, *given)


def check_dora(layer: LinearLayer) -> None:
    """Raises InputError if the layer is none that DoRA is defined for here."""
    if layer.is_experts or layer.is_embedding:
        what = "experts" if layer.is_experts else "an embedding"
        raise InputError(
            f"adapter.kind=dora: {layer.path} is {what}, and DoRA is of linear layers only. Leave it out of "
            "adapter.targets, or use adapter.kind=lora"
        )


def base_of(module: nn.Module) -> nn.Module:
    """Returns the frozen layer of an adapted one, any other module as it is."""
    return module.base if isinstance(module, AdaptedLayer) else module
