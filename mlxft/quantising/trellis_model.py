"""Makes the linear layers of a decoder trellis-quantised, layer by layer, each kept when it is done."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxft.models.decoder import DecoderView
from mlxft.models.targets import LinearLayer, linear_layers
from mlxft.models.trellis.encode import quantize
from mlxft.models.trellis.feedback import quantize_with_feedback
from mlxft.models.trellis.format import block_for
from mlxft.models.trellis.linear import Geometry, TrellisLinear
from mlxft.models.trellis.rotation import rotated
from mlxft.quantising.inputs import RowsOnTheirWay
from mlxft.training.disk import write_arrays

# With errors carried from block to block, short blocks carry them more often, and lose little by being short.
BLOCK_WITH_FEEDBACK = 32


@dataclass(frozen=True)
class Wanted:
    """bits: a weight. rotation: the seed of the inputs' rotation, None for none. block: None for the best.

    stored: the type of what is not quantised, in the file.
    """

    bits: int
    rotation: Optional[int]
    block: Optional[int]
    stored: mx.Dtype = mx.bfloat16

    def geometry(self, width: int, has_feedback: bool) -> Geometry:
        """Returns the geometry of a layer with rows of `width` weights. Raises: InputError."""
        best = min(block_for(width), BLOCK_WITH_FEEDBACK) if has_feedback else block_for(width)
        return Geometry(self.bits, self.block or best, self.rotation)


@dataclass(frozen=True)
class LayerDone:
    """index: of the decoder layer. errors: how far its weights moved, relative, by path."""

    index: int
    errors: dict[str, float]


def quantise_layers(
    view: DecoderView, wanted: Wanted, rows: Optional[Sequence[np.ndarray]], kept: Path
) -> Iterator[LayerDone]:
    """Puts trellis layers in the place of the dense linear layers of the view's decoder, yielding after each.

    rows: of tokens, which the inputs' moments are taken from; None for codes that are near the weights
    themselves. kept: a folder with the layers that an earlier run finished, and where those of this one go.

    Raises: InputError for a layer that can't have such codes.
    """
    by_layer: list[list[LinearLayer]] = [[] for _ in view.layers]
    for linear in linear_layers(view.model):
        if linear.block is not None and type(linear.module) is nn.Linear:
            by_layer[linear.block].append(linear)
    reading = RowsOnTheirWay(view, rows) if rows else None
    for index, linears in enumerate(by_layer):
        file = kept / f"layer-{index:05d}.safetensors"
        if file.exists():
            errors = _take_up(view, linears, wanted, reading is not None, file)
        else:
            names = [linear.name for linear in linears]
            moments = reading.moments(index, names, wanted.rotation) if reading else {}
            errors = {
                linear.path: _replace(view.model, linear, wanted, moments.get(linear.name))
                for linear in linears
            }
            _keep(view, index, errors, wanted.stored, file)
        if reading:
            reading.advance(index)
        yield LayerDone(index, errors)


def _replace(
    model: nn.Module, linear: LinearLayer, wanted: Wanted, moments: Optional[np.ndarray]
) -> float:
    """Puts a trellis layer in the place of one linear layer; returns its relative squared error."""
    weight = linear.module.weight.astype(mx.float32)
    geometry = wanted.geometry(weight.shape[1], moments is not None)
    seed = geometry.rotation
    turned = weight if seed is None else rotated(weight, seed)
    if moments is None:
        codes, scales = quantize(turned, geometry.bits, geometry.block)
    else:
        codes, scales = quantize_with_feedback(turned, moments, geometry.bits, geometry.block)
    made = _empty(linear, geometry)
    made.weight, made.scales = codes, scales
    error = mx.square(made.dense_weight() - weight).sum() / mx.maximum(mx.square(weight).sum(), 1e-30)
    mx.eval(made.parameters(), error)
    model.update_modules(tree_unflatten([(linear.path, made)]))
    return error.item()


def _empty(linear: LinearLayer, geometry: Geometry) -> TrellisLinear:
    outputs, inputs = linear.module.weight.shape
    made = TrellisLinear(inputs, outputs, geometry, "bias" in linear.module)
    if "bias" in linear.module:
        made.bias = linear.module.bias
    return made


def _keep(view: DecoderView, index: int, errors: dict[str, float], stored: mx.Dtype, file: Path) -> None:
    """Writes all arrays of one decoder layer, under their names in the model, and the errors."""
    prefix = next(path for path, module in view.model.named_modules() if module is view.layers[index])
    arrays = {
        f"{prefix}.{name}": array.astype(stored) if array.dtype == mx.float32 else array  # not codes' scales
        for name, array in tree_flatten(view.layers[index].parameters())
    }
    aside = file.with_name(f".{file.name}")
    write_arrays(aside, arrays, {"errors": json.dumps(errors)})
    os.replace(aside, file)  # whole, or not there


def _take_up(
    view: DecoderView, linears: Sequence[LinearLayer], wanted: Wanted, has_feedback: bool, file: Path
) -> dict[str, float]:
    """Puts the trellis layers of `file` in their places; returns their errors. Raises: InputError."""
    arrays, notes = mx.load(str(file), return_metadata=True)
    for linear in linears:
        made = _empty(linear, wanted.geometry(linear.module.weight.shape[1], has_feedback))
        made.weight, made.scales = arrays[f"{linear.path}.weight"], arrays[f"{linear.path}.scales"]
        view.model.update_modules(tree_unflatten([(linear.path, made)]))
    return json.loads(notes["errors"])
