"""A trellis layer computes what its dense weight does, forward and backward, rotated or not."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxft.models import frozen_linear
from mlxft.models.dequantise import dense
from mlxft.models.trellis.encode import quantize
from mlxft.models.trellis.linear import Geometry, TrellisLinear
from mlxft.models.trellis.rotation import hadamard_size, rotated, rotated_back


def original(inputs: int = 96, outputs: int = 20) -> mx.array:
    return mx.random.normal((outputs, inputs), key=mx.random.key(3))


def trellis_layer(inputs: int = 96, outputs: int = 20, rotation=7, bias: bool = True) -> TrellisLinear:
    weight = original(inputs, outputs)
    layer = TrellisLinear(inputs, outputs, Geometry(3, 96, rotation), bias)
    layer.weight, layer.scales = quantize(weight if rotation is None else rotated(weight, rotation), 3, 96)
    if bias:
        layer.bias = mx.random.normal((outputs,))
    return layer


@pytest.mark.parametrize("rotation", [None, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_what_its_dense_weight_does(rotation, bias):
    layer = trellis_layer(rotation=rotation, bias=bias)
    x = mx.random.normal((2, 5, 96))
    weight = layer.dense_weight()
    expected = x @ weight.T + (layer.bias if bias else 0)
    assert mx.allclose(layer(x), expected, atol=1e-4)
    assert mx.allclose(dense(layer, mx.float32)(x), expected, atol=1e-4)
    error = mx.square(weight - original()).mean() / mx.square(original()).mean()
    assert error.item() < 0.03


@pytest.mark.parametrize("rotation", [None, 7])
def test_the_gradient_of_its_input_is_that_of_the_dense_product(rotation):
    layer = trellis_layer(rotation=rotation)
    x, d_y = mx.random.normal((4, 96)), mx.random.normal((4, 20))
    _, (d_x,) = mx.vjp(layer, [x], [d_y])
    assert mx.allclose(d_x, d_y @ layer.dense_weight(), atol=1e-4)


def test_the_products_that_adapters_use_are_its_own():
    layer, x, d_y = trellis_layer(), mx.random.normal((4, 96)), mx.random.normal((4, 20))
    weight = layer.dense_weight()
    assert frozen_linear.dimensions(layer) == (96, 20)
    assert mx.allclose(frozen_linear.product(layer, x), x @ weight.T + layer.bias, atol=1e-4)
    assert mx.allclose(frozen_linear.product(layer, x, bias=False), x @ weight.T, atol=1e-4)
    assert mx.allclose(frozen_linear.transposed_product(layer, d_y, x), x + d_y @ weight, atol=1e-4)
    assert mx.allclose(frozen_linear.squared_rows(layer), mx.square(weight).sum(axis=1), rtol=1e-4)


def test_codes_and_scales_are_never_trained():
    layer = trellis_layer()
    assert set(layer.trainable_parameters()) == {"bias"}


@pytest.mark.parametrize(
    "width, size", [(96, 32), (576, 64), (640, 128), (1152, 128), (1024, 1024), (1536, 512)]
)
def test_a_rotation_keeps_lengths_and_is_undone_by_its_transpose(width, size):
    assert hadamard_size(width) == size
    x = mx.random.normal((3, width))
    turned = rotated(x, seed=5)
    assert mx.allclose(mx.square(turned).sum(axis=1), mx.square(x).sum(axis=1), rtol=1e-4)
    assert mx.allclose(rotated_back(turned, 5), x, atol=1e-5)
    assert not mx.allclose(rotated(x, 6), turned, atol=1e-2)


def test_a_rotation_spreads_one_large_weight_over_its_hadamard_block():
    x = mx.zeros((1, 576)).at[0, 70].add(8.0)
    turned = np.abs(np.array(rotated(x, 0)[0]))
    assert np.allclose(turned[64:128], 1.0) and np.count_nonzero(turned) == 64


def test_an_adapter_on_it_learns(tmp_path):
    from mlxft.config.schema import AdapterConfig
    from mlxft.models.lora import apply_adapter

    model = nn.Module()
    model.layers = [nn.Module()]
    model.layers[0].up_proj = trellis_layer(bias=False)
    report = apply_adapter(model, AdapterConfig(rank=2))
    assert report.num_trainable == 2 * (96 + 20)
    x = mx.random.normal((6, 96))
    loss = nn.value_and_grad(model, lambda: mx.square(model.layers[0].up_proj(x)).mean())
    _, gradients = loss()
    names = {"lora_a", "lora_b"}
    assert set(gradients["layers"][0]["up_proj"]) & names == names
    assert mx.abs(gradients["layers"][0]["up_proj"]["lora_b"]).max().item() > 0
