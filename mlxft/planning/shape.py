"""The trained model as shapes: every array known by size and type, none of them read."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxft.config.schema import Config
from mlxft.models.decoder import DecoderView, unchecked_view
from mlxft.models.frozen_linear import dimensions
from mlxft.models.load import lazy_model
from mlxft.models.lora import AdapterReport, apply_adapter
from mlxft.models.new_tokens import NewToken, add_new_tokens
from mlxft.models.targets import EXPERTS, LINEARS
from mlxft.models.whole_modules import base_arrays
from mlxft.planning.scores import Attention
from mlxft.training import optimizer

_PRODUCTS = (*LINEARS, *EXPERTS)
_EXPERTS_OF_A_TOKEN = 8


@dataclass(frozen=True)
class LayerGroup:
    """Layers that cost the same. indices: their places. is_walked: the backward goes through them.

    window: that of sliding attention, in positions, None without.
    linear_values: that the linear layers of one read and write for a position. weight_values: of one's
    linear layers. trained_bytes: of one. arrays: what they are made of.
    """

    indices: tuple[int, ...]
    window: Optional[int]
    is_walked: bool
    linear_values: int
    weight_values: int
    trained_bytes: int
    arrays: tuple

    @property
    def count(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class ModelShape:
    """What a model and its adapter are made of: counts, and bytes of arrays.

    state_bytes: of the optimiser. outside_bytes: trained arrays outside of the layers (embedding, norm,
    head), the largest of which has largest_outside_bytes. trained_head_bytes: of what makes logits.
    window: the shortest sliding window, None without. item_bytes: of a hidden state's numbers.
    """

    view: DecoderView
    groups: tuple[LayerGroup, ...]
    num_parameters: int
    num_trained: int
    model_bytes: int
    trained_bytes: int
    state_bytes: int
    outside_bytes: int
    largest_outside_bytes: int
    trained_head_bytes: int
    vocabulary: int
    width: int
    attention: Attention
    window: Optional[int]
    item_bytes: int

    @property
    def num_walked(self) -> int:
        """Layers that the backward goes through."""
        return sum(group.count for group in self.groups if group.is_walked)

    @property
    def can_probe(self) -> bool:
        """False for families whose layers cannot be run one without the others."""
        return self.view.in_parts and self.view.layers_are_alike


def shape_in(config: Config, folder: Path, new: Sequence[NewToken] = ()) -> ModelShape:
    """Returns the shape of the model in `folder` trained as `config` says; only headers are read.

    new: tokens that it is given. Raises: InputError as loading the model and putting the adapter on it do.
    """
    with _quietly():  # a run says it all when it loads the model
        model, _ = lazy_model(folder, config.model.dtype, lazily=True)
        add_new_tokens(model, new)
        view = unchecked_view(model)
        report = apply_adapter(model, config.adapter, config.trainer.seed, lazily=True)
    return shape_of(view, report, config)


def shape_of(view: DecoderView, report: AdapterReport, config: Config) -> ModelShape:
    """Returns the shape of a model with its adapter, of which `report` tells."""
    model, groups = view.model, tuple(_groups(view))
    trained_bytes = _bytes(model.trainable_parameters())
    hidden = view.embedding(mx.zeros((1, 1), mx.int32))  # of one token: only its shape is looked at
    windows = [size for size in view.windows() if size is not None]
    return ModelShape(
        view=view,
        groups=groups,
        num_parameters=report.num_total,
        num_trained=report.num_trainable,
        model_bytes=_bytes(model.parameters()) + _bytes(base_arrays(model)),
        trained_bytes=trained_bytes,
        state_bytes=_state_bytes(config, model),
        outside_bytes=trained_bytes - sum(group.trained_bytes * group.count for group in groups),
        largest_outside_bytes=_largest_outside(view),
        trained_head_bytes=_bytes(view.head_module.trainable_parameters()),
        vocabulary=view.vocabulary,
        width=hidden.shape[-1],
        attention=_attention(view, hidden),
        window=min(windows, default=None),
        item_bytes=hidden.dtype.size,
    )


def model_bytes_in(folder: Path, dtype: str) -> int:
    """Returns the bytes of the model in `folder` by itself, from its headers."""
    with _quietly():
        return _bytes(lazy_model(folder, dtype, lazily=True)[0].parameters())


@contextmanager
def _quietly():
    log = logging.getLogger("mlxft")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _state_bytes(config: Config, model: nn.Module) -> int:
    made = optimizer.build(config.optimizer)
    made.init(model.trainable_parameters())
    return _bytes(made.state)


def _largest_outside(view: DecoderView) -> int:
    inside = {id(module) for layer in view.layers for module in layer.modules()}
    return max(
        (
            value.nbytes
            for module in view.model.modules()
            if id(module) not in inside
            for name, value in module.items()
            if isinstance(value, mx.array) and name in module.trainable_parameters()
        ),
        default=0,
    )


def _attention(view: DecoderView, hidden: mx.array) -> Attention:
    args: Any = getattr(view.text, "args", None)
    names = ("num_attention_heads", "n_head", "num_heads")
    heads = next((getattr(args, name) for name in names if getattr(args, name, None)), 1)
    width = getattr(args, "head_dim", None) or hidden.shape[-1] // heads
    return Attention(heads, width, hidden.dtype.size)


def _groups(view: DecoderView) -> Iterable[LayerGroup]:
    lowest = view.lowest_trainable()
    kinds: dict[Any, list[int]] = {}
    for index, (layer, window) in enumerate(zip(view.layers, view.windows(), strict=True)):
        kinds.setdefault((_arrays(layer), window, index >= lowest), []).append(index)
    for (arrays, window, is_walked), indices in kinds.items():
        layer = view.layers[indices[0]]
        linears = [_dimensions(module) for module in layer.modules() if isinstance(module, _PRODUCTS)]
        yield LayerGroup(
            indices=tuple(indices),
            window=window,
            is_walked=is_walked,
            linear_values=sum(map(sum, linears)),
            weight_values=sum(inputs * outputs for inputs, outputs in linears),
            trained_bytes=_bytes(layer.trainable_parameters()),
            arrays=arrays,
        )


def _dimensions(module: nn.Module) -> tuple[int, int]:
    """Returns what a token reads and writes in a layer, of experts in as many as it is likely sent to."""
    if isinstance(module, EXPERTS):
        return _EXPERTS_OF_A_TOKEN * module.input_dims, _EXPERTS_OF_A_TOKEN * module.output_dims
    return dimensions(module)


def _arrays(layer: nn.Module) -> tuple:
    """Returns what a layer's cost depends on: its modules' classes and their arrays' shapes and types."""
    return tuple(
        (path, type(module).__name__, name, tuple(value.shape), str(value.dtype), name in module._no_grad)
        for path, module in sorted(layer.named_modules(), key=lambda item: item[0])
        for name, value in sorted(module.items())
        if isinstance(value, mx.array)
    )


def _bytes(tree: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(tree))
