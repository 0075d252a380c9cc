import io
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.models.frozen_linear import dimensions
from mlxft.models.lora_linear import (
    LoRALinear,
    adapter_disabled,
    dropout_keys,
    initial_a,
    mask_key,
    set_siblings,
    thin_products_joined,
)
from tests.devices import SLACK


def make_layer(dropout=0.0, quantised=False, place=(0, 0), scale=2.0):
    keys = mx.random.split(mx.random.key(1), 3)
    linear = nn.Linear(64, 32, bias=False)
    linear.weight = mx.random.normal((32, 64), key=keys[0])
    if quantised:
        linear = nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4)
    a, b = mx.random.normal((64, 4), key=keys[1]), mx.random.normal((4, 32), key=keys[2])
    return LoRALinear(linear, a, b, scale, dropout, place)


def inputs(dtype=mx.float32):
    return mx.random.normal((2, 5, 64), key=mx.random.key(2)).astype(dtype)


@pytest.mark.parametrize("quantised", [False, True])
def test_the_output_is_the_base_plus_scale_times_the_product(quantised):
    layer, x = make_layer(quantised=quantised), inputs()
    weight = layer.linear.weight
    if quantised:
        weight = mx.dequantize(weight, layer.linear.scales, layer.linear.biases, group_size=32, bits=4)
    a, b, w, x64 = (np.array(array, dtype=np.float64) for array in (layer.lora_a, layer.lora_b, weight, x))
    expected = x64 @ w.T + 2.0 * (x64 @ a @ b)
    assert np.abs(np.array(layer(x)) - expected).max() < 1e-5 * np.abs(expected).max()
    assert dimensions(layer.linear) == (64, 32)


def test_a_bfloat16_input_gives_a_bfloat16_output():
    layer = make_layer()
    layer.linear.set_dtype(mx.bfloat16)
    assert layer(inputs(mx.bfloat16)).dtype == mx.bfloat16
    assert layer.lora_a.dtype == layer.lora_b.dtype == mx.float32


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_of_the_formula(quantised, dropout):
    """Of the input, A and B, against automatic differentiation of y = W x + scale * B A dropped(x)."""
    layer, x = make_layer(dropout, quantised), inputs()
    factor = mx.random.normal((2, 5, 32), key=mx.random.key(3))
    key = mx.random.key(4) if dropout else None

    def ours(x, a, b):
        layer.lora_a, layer.lora_b = a, b
        with dropout_keys(key):
            return (layer(x) * factor).sum()

    def plain(x, a, b):
        kept = mx.ones(x.shape, mx.bool_)
        if dropout:
            kept = mx.random.bernoulli(0.5, x.shape, key=mask_key(key, 0, 0))
        return ((layer.linear(x) + 2.0 * mx.where(kept, x / (1 - dropout), 0) @ a @ b) * factor).sum()

    arguments = x, layer.lora_a, layer.lora_b
    expected = mx.grad(plain, argnums=(0, 1, 2))(*arguments)
    for one, other in zip(mx.grad(ours, argnums=(0, 1, 2))(*arguments), expected, strict=True):
        assert mx.abs(one - other).max().item() < 1e-5 * mx.abs(other).max().item()


def test_a_bias_of_the_layer_stays():
    layer, x = make_layer(scale=2.0), inputs()
    without = layer(x)
    layer.linear.bias = mx.arange(32.0)
    assert mx.allclose(layer(x), without + mx.arange(32.0), rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Two adapted layers that read one input, of unlike widths, ranks and scales."""

    def __init__(self, dropout=0.0):
        super().__init__()
        keys = mx.random.split(mx.random.key(7), 6)
        for slot, (name, width, rank) in enumerate((("q_proj", 32, 4), ("v_proj", 16, 3))):
            linear = nn.Linear(64, width, bias=False)
            linear.weight = mx.random.normal((width, 64), key=keys[slot])
            a = mx.random.normal((64, rank), key=keys[2 + slot])
            b = mx.random.normal((rank, width), key=keys[4 + slot])
            self[name] = LoRALinear(linear, a, b, 1.0 + slot, dropout, (0, slot))
        set_siblings([self])

    def __call__(self, x):
        return mx.concatenate([self.q_proj(x), self.v_proj(x)], axis=-1)


def value_and_gradients(module, x, key=None):
    def loss(params, x):
        module.update(params)
        with dropout_keys(key):
            return mx.sin(module(x)).sum()

    return tree_flatten(mx.value_and_grad(loss, argnums=(0, 1))(module.trainable_parameters(), x))


def num_products(module, x):
    """Returns how many products the module's forward and backward consist of."""
    text = io.StringIO()
    mx.export_to_dot(text, *[array for _, array in value_and_gradients(module, x)])
    return len(re.findall(r'label ="(Matmul|AddMM)"', text.getvalue()))


def test_layers_that_share_an_input_give_with_joined_thin_products_what_they_give_apart():
    module, x = Attention(), inputs()
    apart, products_apart = value_and_gradients(module, x), num_products(module, x)
    with thin_products_joined():
        joined, products_joined = value_and_gradients(module, x), num_products(module, x)
    for (name, one), (_, other) in zip(joined, apart, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-6 * SLACK * mx.abs(other).max().item(), name
    assert products_joined < products_apart


def test_with_dropout_each_layer_reads_the_input_by_itself():
    module, x = Attention(dropout=0.5), inputs()
    apart = value_and_gradients(module, x, mx.random.key(3))
    with thin_products_joined():
        joined = value_and_gradients(module, x, mx.random.key(3))
    for (name, one), (_, other) in zip(joined, apart, strict=True):
        assert mx.array_equal(one, other), name


def test_what_was_made_together_is_not_taken_for_other_inputs_or_other_weights():
    module, x = Attention(), inputs()
    before = module.v_proj(x)
    with thin_products_joined():
        module.q_proj(x)  # and nobody asks for v's yet
        assert mx.allclose(module.v_proj(2 * x), 2 * before, rtol=1e-5 * SLACK, atol=1e-4 * SLACK)
        module.q_proj(x)
        module.v_proj.lora_b = 3 * module.v_proj.lora_b
        after = module.v_proj(x)
    base = module.v_proj.linear(x)
    assert mx.allclose(after - base, 3 * (before - base), 1e-4 * SLACK, 1e-3 * SLACK)


def test_a_disabled_layer_gives_its_base_beside_one_that_is_not():
    module, x = Attention(), inputs()
    with thin_products_joined():
        module.v_proj.scale = 0.0
        module.q_proj(x)
        assert mx.array_equal(module.v_proj(x), module.v_proj.linear(x))


def test_without_a_key_there_is_no_dropout_also_in_training_mode():
    layer, plain, x = make_layer(dropout=0.5), make_layer(), inputs()
    layer.train()
    assert mx.array_equal(layer(x), plain(x))
    with dropout_keys(None):
        assert mx.array_equal(layer(x), plain(x))


def test_the_same_key_replays_the_same_mask_and_another_key_or_place_does_not():
    x = inputs()
    with dropout_keys(mx.random.key(3)):
        first = make_layer(0.5)(x)
        mx.random.seed(99)  # the global generator has no say
        assert mx.array_equal(make_layer(0.5)(x), first)
        assert not mx.array_equal(make_layer(0.5, place=(0, 1))(x), first)
        assert not mx.array_equal(make_layer(0.5, place=(1, 0))(x), first)
    with dropout_keys(mx.random.key(4)):
        assert not mx.array_equal(make_layer(0.5)(x), first)


def test_masks_of_neighbouring_keys_and_places_are_independent():
    # key(1) at place 0 and key(0) at place 1 differ from key(0) at place 0 by the same little step
    keys = [mask_key(mx.random.key(n // 16), n // 4 % 4, n % 4) for n in range(64)]
    masks = np.array([mx.random.bernoulli(0.5, (4096,), key=key) for key in keys], dtype=np.float64)
    correlation = np.corrcoef(masks) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(4096)


def test_dropout_keeps_the_expected_share_and_the_expected_value():
    layer = make_layer(dropout=0.25)
    x = mx.ones((200, 64))
    with dropout_keys(mx.random.key(0)):
        kept = layer.kept(x).astype(mx.float32).mean().item()
        layer.linear.weight, layer.lora_a = mx.zeros((32, 64)), mx.ones((64, 4)) / 64
        update = layer(x) @ mx.linalg.pinv(layer.scale * layer.lora_b, stream=mx.cpu)
    assert abs(kept - 0.75) < 4 * (0.25 * 0.75 / 12800) ** 0.5  # four standard errors
    assert abs(update.mean().item() - 1) < 4 * (0.25 / 0.75 / 12800) ** 0.5


def gradients(function, layer, key, x):
    def loss(a, b, key, x):
        layer.lora_a, layer.lora_b = a, b
        return mx.square(function(layer, x)).sum()

    def run(a, b, key, x):
        with dropout_keys(key):
            return mx.value_and_grad(loss, argnums=(0, 1))(a, b, key, x)

    return run, (layer.lora_a, layer.lora_b, key, x)


def plain(layer, x):
    return layer(layer.linear(x)[..., :1] * x)


def checkpointed(layer, x):
    def run(a, b, x):
        layer.lora_a, layer.lora_b = a, b
        return plain(layer, x)

    return mx.checkpoint(run)(layer.lora_a, layer.lora_b, x)


def test_a_checkpoint_recomputes_with_the_same_mask():
    key, x = mx.random.key(5), inputs()
    run, arguments = gradients(plain, make_layer(0.3), key, x)
    again, same_arguments = gradients(checkpointed, make_layer(0.3), key, x)
    (loss, grads), (loss_again, grads_again) = run(*arguments), again(*same_arguments)
    assert mx.array_equal(loss, loss_again)
    assert all(mx.allclose(g, h, rtol=1e-6, atol=0).item() for g, h in zip(grads, grads_again, strict=True))
    with_other_key, arguments = gradients(plain, make_layer(0.3), mx.random.key(6), x)
    assert not mx.allclose(with_other_key(*arguments)[1][0], grads[0], rtol=1e-2)


@pytest.mark.parametrize("function", [plain, checkpointed])
def test_a_compiled_step_takes_the_key_as_an_input(function):
    x = inputs()
    run, arguments = gradients(function, make_layer(0.3), mx.random.key(5), x)
    compiled = mx.compile(run)
    for seed in (5, 6):
        arguments = (*arguments[:2], mx.random.key(seed), x)
        (loss, grads), (loss_c, grads_c) = run(*arguments), compiled(*arguments)
        assert mx.allclose(loss, loss_c, rtol=1e-6)
        for plain_grad, compiled_grad in zip(grads, grads_c, strict=True):
            assert mx.allclose(plain_grad, compiled_grad, rtol=1e-5, atol=1e-4)


def test_a_vjp_walked_later_sees_the_mask_of_its_own_key():
    layer, x, key = make_layer(0.3), inputs(), mx.random.key(8)
    cotangent = mx.ones((2, 5, 32))

    def run(a):
        layer.lora_a = a
        return layer(x)

    a = layer.lora_a
    with dropout_keys(key):
        outputs, [grad] = mx.vjp(run, [a], [cotangent])
    with dropout_keys(key):
        dropped = mx.where(layer.kept(x), x / 0.7, 0)
    expected = 2.0 * mx.einsum("bti,btr->ir", dropped, cotangent @ layer.lora_b.T)
    assert mx.allclose(grad, expected, rtol=1e-5, atol=1e-4)


def test_a_program_of_one_block_makes_the_masks_of_another_that_is_so_many_further_up():
    x, key = inputs(), mx.random.key(3)
    with dropout_keys(key):
        expected = make_layer(0.5, place=(7, 2))(x)
    shared = make_layer(0.5, place=(3, 2))

    @mx.compile
    def run(key, shift):
        with dropout_keys(key, shift):
            return shared(x)

    assert mx.allclose(run(key, mx.array(4)), expected, rtol=1e-5, atol=1e-5)
    assert not mx.allclose(run(key, mx.array(0)), expected, rtol=1e-2)


def test_disabling_restores_each_layers_own_scale_also_after_an_error():
    model = nn.Sequential(make_layer(scale=2.0), nn.Linear(32, 64), make_layer(scale=0.5))
    x = inputs()
    base = model.layers[2].linear(model.layers[1](model.layers[0].linear(x)))
    before = model(x)
    with adapter_disabled(model):
        assert mx.array_equal(model(x), base)
    with pytest.raises(KeyError), adapter_disabled(model):
        raise KeyError
    assert (model.layers[0].scale, model.layers[2].scale) == (2.0, 0.5)
    assert mx.array_equal(model(x), before)


def test_the_start_depends_on_seed_and_path_only():
    a = initial_a(0, "model.layers.0.q_proj", 64, (64, 8))
    mx.random.uniform(shape=(100,))
    assert mx.array_equal(a, initial_a(0, "model.layers.0.q_proj", 64, (64, 8)))
    assert not mx.array_equal(a, initial_a(1, "model.layers.0.q_proj", 64, (64, 8)))
    assert not mx.array_equal(a, initial_a(0, "model.layers.1.q_proj", 64, (64, 8)))
    assert a.shape == (64, 8) and a.dtype == mx.float32
    assert 0.11 < mx.abs(a).max().item() <= 0.125  # uniform within 1 / sqrt(64)
    assert abs(a.std().item() - 0.125 / 3 ** 0.5) < 0.005
