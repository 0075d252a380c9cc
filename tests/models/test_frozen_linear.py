"""Products with quantised weights made dense for many rows, against MLX's quantised products."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxft.backend import backend
from mlxft.models import frozen_linear
from mlxft.models.frozen_linear import product, quantised_at_dense_speed, transposed_product

MODES = {"affine": (4, 32), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


def quantised(mode, bias=False):
    bits, group_size = MODES[mode]
    linear = nn.Linear(64, 48, bias=bias)
    linear.weight = mx.random.normal((48, 64), key=mx.random.key(0))
    if bias:
        linear.bias = mx.arange(48.0)
    return nn.QuantizedLinear.from_linear(linear, group_size=group_size, bits=bits, mode=mode)


@pytest.fixture(params=[1, 32, 100])
def rows(request):
    return request.param


def given(rows, width, key=1):
    return mx.random.normal((2, rows // 2 or 1, width), key=mx.random.key(key))


def close(one, other):
    return mx.abs(one - other).max().item() < 1e-5 * mx.abs(other).max().item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_product_is_the_same_whether_the_weight_was_made_dense(mode, bias, rows):
    layer = quantised(mode, bias)
    x, d_y = given(rows, 64), given(rows, 48, 2)
    assert close(product(layer, x), layer(x))
    expected = mx.grad(lambda x: (layer(x) * d_y).sum())(x)
    assert close(transposed_product(layer, d_y), expected)


@pytest.mark.parametrize("mode", MODES)
def test_within_the_block_layers_have_the_outputs_and_gradients_they_had(mode, rows):
    layer, x, d_y = quantised(mode), given(rows, 64), given(rows, 48, 2)
    values = lambda x: (layer(x) * d_y).sum()  # noqa: E731
    expected = mx.value_and_grad(values)(x)
    with quantised_at_dense_speed():
        found = mx.value_and_grad(values)(x)
    assert close(found[0], expected[0]) and close(found[1], expected[1])


def test_a_tied_quantised_head_is_made_dense_too(rows):
    head = nn.QuantizedEmbedding(48, 64, group_size=32, bits=4)
    x = given(rows, 64)
    expected = head.as_linear(x)
    with quantised_at_dense_speed():
        assert close(head.as_linear(x), expected)


def test_few_rows_and_layers_that_are_trained_keep_mlxs_products():
    layer, enough = quantised("affine"), {"cpu": 32, "cuda": 768}[backend()]
    assert frozen_linear._pays(layer, mx.zeros((enough, 64)))
    assert not frozen_linear._pays(layer, mx.zeros((enough - 1, 64)))
    layer.unfreeze(keys=["scales"])
    assert not frozen_linear._pays(layer, mx.zeros((enough, 64)))


def test_after_the_block_the_classes_are_as_they_were_also_when_nested():
    before = nn.QuantizedLinear.__call__, nn.QuantizedEmbedding.as_linear
    with quantised_at_dense_speed():
        inside = nn.QuantizedLinear.__call__
        with quantised_at_dense_speed():
            assert nn.QuantizedLinear.__call__ is inside
        assert nn.QuantizedLinear.__call__ is inside is not before[0]
    assert (nn.QuantizedLinear.__call__, nn.QuantizedEmbedding.as_linear) == before


def test_the_dense_weight_is_not_kept_for_the_backward():
    """8 layers of 512 x 512 in 4 bits: dense they would take 8.4 MB together, one takes 1.05."""
    layers = [nn.QuantizedLinear(512, 512, bias=False, group_size=64, bits=4) for _ in range(8)]
    x = mx.random.normal((32, 512))
    mx.eval(x, [layer.parameters() for layer in layers])

    def forward(x):
        for layer in layers:
            x = layer(x)
        return x.sum()

    with quantised_at_dense_speed():
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(forward)(x))
    assert mx.get_peak_memory() - before < 5e6
