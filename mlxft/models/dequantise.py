"""Turns quantised layers into dense ones, for CPUs: MLX's quantised products are 10 to 100 times slower."""

import logging

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxft.models.trellis.linear import TrellisLinear
from mlxft.sizes import written

log = logging.getLogger("mlxft")

# Room that dense weights may take; activations, gradients and the optimiser need the rest.
_SHARE_OF_MEMORY = 0.6


def is_quantised(module: nn.Module) -> bool:
    """Returns whether the module's own weight is stored in packed form."""
    return "scales" in module and "weight" in module


def dequantise_where_it_fits(
    model: nn.Module, dtype: mx.Dtype, free_bytes: int, lazily: bool = False
) -> bool:
    """Makes the quantised layers of `model` dense if they fit `free_bytes`, says so, and returns whether.

    lazily: only as far as shapes go; nothing is computed or said.
    """
    layers = [(name, module) for name, module in model.named_modules() if is_quantised(module)]
    if not layers:
        return False
    need = sum(num_packed_values(module) for _, module in layers) * dtype.size
    if need > _SHARE_OF_MEMORY * free_bytes:
        level = logging.DEBUG if lazily else logging.WARNING
        log.log(level, "the quantised weights stay quantised: dense they would take %s of the %s "
                    "that are free. Each is made dense anew wherever it is used, which takes longer.",
                    written(need), written(free_bytes))
        return False
    left = []
    for name, module in layers:
        if (made := dense(module, dtype)) is None:
            left.append(name)
            continue
        if not lazily:
            mx.eval(made.parameters())  # one at a time: never all of both forms in memory
        model.update_modules(tree_unflatten([(name, made)]))
    if lazily:
        return True
    log.info("%d quantised layers made dense once (%s, %s): quantised products are slow on a CPU",
             len(layers) - len(left), str(dtype).removeprefix("mlx.core."), written(need))
    if left:
        log.warning("%d layers of a kind that cannot be made dense stay quantised, first %s",
                    len(left), left[0])
    return True


def num_packed_values(module: nn.Module) -> int:
    """Returns how many weights the packed form of a quantised module stands for."""
    return module.weight.size * 32 // module.bits


def dense(module: nn.Module, dtype: mx.Dtype) -> nn.Module | None:
    """Returns the dense layer that computes what `module` does, or None for kinds with code of their own."""
    if type(module) in (nn.QuantizedLinear, TrellisLinear):
        layer = nn.Linear(1, 1, bias=False)
    elif type(module) is nn.QuantizedEmbedding:
        layer = nn.Embedding(1, 1)
    elif type(module) is QuantizedSwitchLinear and module.global_scale is None:
        layer = SwitchLinear(1, 1, 1, bias=False)
    else:
        return None
    layer.weight = _dense_weight(module).astype(dtype)
    if "bias" in module:
        layer.bias = module.bias.astype(dtype)
    layer.packed_bits = module.bits
    return layer


def _dense_weight(module: nn.Module) -> mx.array:
    """Returns the weight of a quantised module in float32."""
    if type(module) is TrellisLinear:
        return module.dense_weight()
    scales, biases = module.scales, module.get("biases")
    if module.mode == "affine":  # in float32, so that scale x code + bias is rounded once, to `dtype`
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(module.weight, scales, biases, group_size=module.group_size, bits=module.bits,
                         mode=module.mode, dtype=mx.float32)


def bits_of(module: nn.Module) -> int:
    """Returns the bits that each of a layer's weights is stored in, also of one that was made dense here."""
    if is_quantised(module):
        return module.bits
    return getattr(module, "packed_bits", None) or 8 * module.weight.dtype.size
