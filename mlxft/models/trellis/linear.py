"""A linear layer with a trellis-quantised weight, and a checkpoint's word for which layers have one.

config.json names them by their paths in the model:

    "trellis": {"code": "1mad", "state_bits": 12, "axis": 1, "rotation": 0 | null,
                "modules": {"model.layers.0.mlp.up_proj": {"bits": 3, "block": 192}, ...}}

rotation: the seed of the rotation of inputs, null for none. Each has the tensors `weight` (codes) and
`scales`, and `bias` where the layer has one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxft.errors import InputError
from mlxft.models.trellis.format import BITS, STATE_BITS, check_geometry, dequantize
from mlxft.models.trellis.rotation import rotated, rotated_back

_FIXED = {"code": "1mad", "state_bits": STATE_BITS, "axis": 1}


@dataclass(frozen=True)
class Geometry:
    """bits: of a code. block: weights that share a ring. rotation: the seed of the inputs', None: none."""

    bits: int
    block: int
    rotation: Optional[int] = None


class TrellisLinear(nn.Module):
    """y = W x + bias with W (out, in) in trellis codes: made dense, used and dropped, in each direction anew.

    The weight is frozen; its inputs have exact gradients.
    """

    def __init__(self, inputs: int, outputs: int, geometry: Geometry, bias: bool = False):
        super().__init__()
        check_geometry(inputs, geometry.bits, geometry.block)
        self.geometry = geometry
        self.weight = mx.zeros((outputs, inputs * geometry.bits // 32), mx.uint32)
        self.scales = mx.zeros((outputs,), mx.bfloat16)
        if bias:
            self.bias = mx.zeros((outputs,))
        self.freeze(keys=["weight", "scales"])

    @property
    def bits(self) -> int:
        """Bits a weight, as quantised layers of MLX have it."""
        return self.geometry.bits

    def dense_weight(self, dtype: mx.Dtype = mx.float32, after: Optional[mx.array] = None) -> mx.array:
        """Returns the weight (out, in) for inputs as they are, rotation undone.

        after: an array before which it is not made.
        """
        weight = self._coded_weight(mx.float32, after)
        return self._turned_back(weight).astype(dtype)

    def _coded_weight(self, dtype: mx.Dtype, after: Optional[mx.array]) -> mx.array:
        codes = self["weight"] if after is None else mx.depends(self["weight"], after)
        return dequantize(codes, self["scales"], self.geometry.bits, self.geometry.block, dtype)

    def _turned(self, x: mx.array) -> mx.array:
        return x if self.geometry.rotation is None else rotated(x, self.geometry.rotation)

    def _turned_back(self, x: mx.array) -> mx.array:
        return x if self.geometry.rotation is None else rotated_back(x, self.geometry.rotation)

    def product(self, x: mx.array) -> mx.array:
        """Returns W x (..., out), without the bias, for x (..., in)."""
        return self._turned(x) @ self._coded_weight(x.dtype, x).T

    def transposed_product(self, d_y: mx.array) -> mx.array:
        """Returns W^T d_y (..., in): the gradient of x for that of W x, d_y (..., out)."""
        return self._turned_back(d_y @ self._coded_weight(d_y.dtype, d_y))

    def __call__(self, x: mx.array) -> mx.array:
        y = _frozen_product(self)(x)
        return y + self["bias"] if "bias" in self else y

    def _extra_repr(self) -> str:
        outputs, words = self["weight"].shape
        return f"inputs={words * 32 // self.bits}, outputs={outputs}, {self.geometry}"


def _frozen_product(linear: TrellisLinear):
    """Returns x -> W x whose backward makes the weight dense anew in place of keeping it."""

    @mx.custom_function
    def forward(x):
        return linear.product(x)

    @forward.vjp
    def backward(_, d_y, __):
        return linear.transposed_product(d_y)

    return forward


def geometries(config: dict[str, Any], folder: Path) -> dict[str, Geometry]:
    """Returns the trellis layers that a checkpoint's configuration names, by path. Raises: InputError."""
    section = config.get("trellis")
    if section is None:
        return {}
    where = f'{folder / "config.json"}: "trellis"'
    if not isinstance(section, dict) or not isinstance(section.get("modules"), dict):
        raise InputError(f"{where} has to be an object with modules, an object of one entry a layer")
    if unknown := sorted(section.keys() - {*_FIXED, "rotation", "modules"}):
        raise InputError(f"{where} has {', '.join(unknown)}, which this version can't read")
    for name, value in _FIXED.items():
        if section.get(name, value) != value:
            raise InputError(f"{where}: {name} is {section[name]!r}; this version reads {value!r} only")
    rotation = section.get("rotation")
    if rotation is not None and not _is_number(rotation):
        raise InputError(f"{where}: rotation is {rotation!r}; it has to be a number, or null")
    return {path: _geometry(entry, rotation, where, path) for path, entry in section["modules"].items()}


def _geometry(entry: Any, rotation: Optional[int], where: str, path: str) -> Geometry:
    if not isinstance(entry, dict) or entry.keys() != {"bits", "block"}:
        raise InputError(f"{where}: {path} has to have bits and block, and nothing else")
    if not all(_is_number(value) for value in entry.values()) or entry["bits"] not in BITS:
        raise InputError(f"{where}: {path} has {entry}; bits are 2, 3 or 4, block is a number of weights")
    return Geometry(entry["bits"], entry["block"], rotation)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def insert(model: nn.Module, wanted: dict[str, Geometry], folder: Path) -> None:
    """Puts trellis layers, yet without codes, in the place of the linear layers of `model` that are named.

    Raises: InputError naming what is no linear layer, or can't have such codes.
    """
    modules = dict(model.named_modules())
    for path, geometry in wanted.items():
        linear = modules.get(path)
        if type(linear) is not nn.Linear:
            what = "isn't there" if linear is None else f"is a {type(linear).__name__}"
            raise InputError(f'{folder / "config.json"}: "trellis" names {path}, which {what} in the model')
        outputs, inputs = linear.weight.shape
        try:
            made = TrellisLinear(inputs, outputs, geometry, "bias" in linear)
        except InputError as error:
            raise InputError(f'{folder / "config.json"}: "trellis": {path}: {error}') from error
        model.update_modules(tree_unflatten([(path, made)]))


def section(modules: dict[str, Geometry], rotation: Optional[int]) -> dict[str, Any]:
    """Returns what config.json says of the trellis layers of a model, by path."""
    entries = {path: {"bits": made.bits, "block": made.block} for path, made in modules.items()}
    return _FIXED | {"rotation": rotation, "modules": entries}
