"""DoRA of a linear layer against the formula in float64, and against mlx-lm's own layer."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.dora import DoRALinear as TheirDoRALinear

from mlxft.models.dora_linear import DoRALinear
from mlxft.models.lora_linear import adapter_disabled, dropout_keys

INPUTS, OUTPUTS, RANK, SCALE = 64, 32, 4, 1.5

# Every bit width and mode that MLX can pack, with a group that it can have.
PACKINGS = [(bits, 32, "affine") for bits in (2, 3, 4, 5, 6, 8)]
PACKINGS += [(4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")]


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def linear(bias=False, packing=None):
    made = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    made.weight = 0.2 * normal(1, OUTPUTS, INPUTS)
    if bias:
        made.bias = normal(2, OUTPUTS)
    if packing:
        bits, group_size, mode = packing
        made = nn.QuantizedLinear.from_linear(made, group_size=group_size, bits=bits, mode=mode)
    made.freeze()
    return made


def moved(base, dropout=0.0):
    """A layer that has moved away from its start."""
    layer = DoRALinear(base, 0.3 * normal(3, INPUTS, RANK), 0.3 * normal(4, RANK, OUTPUTS), SCALE, dropout)
    layer.m = layer.m * (1 + 0.1 * normal(5, OUTPUTS))
    return layer


def weight_of(base):
    """The base's weight (out, in), float64."""
    if isinstance(base, nn.QuantizedLinear):
        packed = base.weight, base.scales, base.get("biases")
        weight = mx.dequantize(*packed, group_size=base.group_size, bits=base.bits, mode=base.mode)
        return np.array(weight.astype(mx.float32), np.float64)
    return np.array(base.weight, np.float64)


def by_formula(layer, x, d_y):
    """y = (m / |V|) V x + bias with V = W + scale B A, |V| held constant, and all gradients for d_y."""
    w, x, d_y = weight_of(layer.linear), np.array(x, np.float64), np.array(d_y, np.float64)
    a, b, m = (np.array(array, np.float64) for array in (layer.lora_a, layer.lora_b, layer.m))
    v = w + SCALE * (a @ b).T
    lengths = np.linalg.norm(v, axis=1)
    y = x @ v.T * (m / lengths)
    d_v_x = d_y * (m / lengths)
    gradients = {
        "m": (d_y * (x @ v.T) / lengths).sum(0),
        "lora_a": SCALE * x.T @ d_v_x @ b.T,
        "lora_b": SCALE * (x @ a).T @ d_v_x,
        "x": d_v_x @ v,
    }
    bias = layer.linear.get("bias")
    return y + (0 if bias is None else np.array(bias, np.float64)), gradients


def found(layer, x, d_y):
    names = ("m", "lora_a", "lora_b")

    def run(*arrays):
        layer.update(dict(zip(names, arrays[:-1], strict=True)))
        return layer(arrays[-1])

    (y,), gradients = mx.vjp(run, [*(layer[name] for name in names), x], [d_y])
    return y, dict(zip((*names, "x"), gradients, strict=True))


def assert_near(ours, expected, limit=2e-5):
    assert np.abs(np.array(ours) - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("rows", [3, 40])  # few rows go through the packed product, many through a dense one
@pytest.mark.parametrize("packing", [None, *PACKINGS], ids=str)
def test_output_and_gradients_are_those_of_the_formula(packing, rows):
    layer, x, d_y = moved(linear(packing=packing)), normal(6, rows, INPUTS), normal(7, rows, OUTPUTS)
    y, gradients = found(layer, x, d_y)
    expected, expected_gradients = by_formula(layer, x, d_y)
    assert_near(y, expected)
    for name, gradient in gradients.items():
        assert_near(gradient, expected_gradients[name])


def test_the_bias_is_added_after_the_lengths():
    layer, x, d_y = moved(linear(bias=True)), normal(6, 3, INPUTS), normal(7, 3, OUTPUTS)
    y, gradients = found(layer, x, d_y)
    expected, expected_gradients = by_formula(layer, x, d_y)
    assert_near(y, expected)
    assert_near(gradients["m"], expected_gradients["m"])


def test_output_and_gradients_are_those_of_mlx_lms_layer():
    base = linear(bias=True)
    layer, x, d_y = moved(base), normal(6, 5, INPUTS), normal(7, 5, OUTPUTS)
    theirs = TheirDoRALinear.from_base(base, r=RANK, scale=SCALE)
    assert mx.allclose(theirs.m, DoRALinear(base, layer.lora_a, layer.lora_b, SCALE).m, rtol=1e-6)
    theirs.lora_a, theirs.lora_b, theirs.m = layer.lora_a, layer.lora_b, layer.m
    y, gradients = found(layer, x, d_y)
    their_y, their_gradients = found(theirs, x, d_y)
    assert_near(y, np.array(their_y))
    for name, gradient in gradients.items():
        assert_near(gradient, np.array(their_gradients[name]))


@pytest.mark.parametrize("packing", [None, (4, 32, "affine"), (3, 32, "affine")], ids=str)
def test_a_fresh_layer_gives_its_base_and_so_does_a_disabled_one(packing):
    base, x = linear(bias=True, packing=packing), normal(6, 3, INPUTS)
    fresh = DoRALinear(base, normal(3, INPUTS, RANK), mx.zeros((RANK, OUTPUTS)), SCALE)
    assert mx.allclose(fresh(x), base(x), rtol=1e-6, atol=1e-6)
    layer = moved(base)
    with adapter_disabled(layer):
        assert mx.array_equal(layer(x), base(x))
    assert not mx.allclose(layer(x), base(x), rtol=1e-2)


def test_only_the_update_and_the_lengths_are_trained():
    assert set(moved(linear(bias=True)).trainable_parameters()) == {"lora_a", "lora_b", "m", "linear"}
    assert not moved(linear(bias=True)).trainable_parameters()["linear"]


def test_a_row_of_zeros_has_finite_gradients():
    base = linear()
    base.weight = base.weight * (mx.arange(OUTPUTS)[:, None] > 0)
    layer = DoRALinear(base, normal(3, INPUTS, RANK), mx.zeros((RANK, OUTPUTS)), SCALE)
    y, gradients = found(layer, normal(6, 3, INPUTS), normal(7, 3, OUTPUTS))
    assert all(mx.isfinite(array).all().item() for array in (y, *gradients.values()))
    assert mx.array_equal(y[:, 0], mx.zeros(3))


def test_lengths_change_by_less_than_half_precision_can_tell_near_one():
    """1.003 is 1 in bfloat16, whose next number is 1.0078; outputs move all the same."""
    base = linear()
    base.weight = base.weight.astype(mx.bfloat16)
    layer = DoRALinear(base, normal(3, INPUTS, RANK), mx.zeros((RANK, OUTPUTS)), SCALE)
    x = normal(6, 2000, INPUTS).astype(mx.bfloat16)
    before = layer(x)
    layer.m = layer.m * 1.003
    after = layer(x)
    assert before.dtype == after.dtype == mx.bfloat16
    growth = mx.abs(after.astype(mx.float32)).sum() / mx.abs(before.astype(mx.float32)).sum()
    assert growth.item() > 1.001


def test_dropout_is_on_the_updates_input_only_and_its_key_replays_it():
    layer, x = moved(linear(), dropout=0.5), normal(6, 40, INPUTS)
    with dropout_keys(mx.random.key(1)):
        once, again = layer(x), layer(x)
        kept = layer.kept(x)
    with dropout_keys(mx.random.key(2)):
        other = layer(x)
    assert mx.array_equal(once, again) and not mx.allclose(once, other, rtol=1e-2)
    ratio = layer.m / layer.lengths(mx.float32)
    update = mx.where(kept, 2 * x, 0) @ layer.lora_a @ (SCALE * layer.lora_b)
    assert mx.allclose(once, ratio * (layer.linear(x) + update), rtol=1e-4, atol=1e-5)
