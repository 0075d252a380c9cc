import logging

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.available_memory import available_bytes
from mlxft.models.dequantise import dequantise_where_it_fits, is_quantised
from tests.tiny_models import model_config, random_model

TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])
PLENTY = 10**12


def quantised(family="llama", **how):
    model = random_model(model_config(family) if isinstance(family, str) else family)
    nn.quantize(model, **{"group_size": 32, "bits": 4, **how})
    return model


@pytest.mark.parametrize("how", [{}, {"bits": 8}, {"mode": "mxfp4"}], ids=["affine4", "affine8", "mxfp4"])
def test_dense_layers_compute_what_the_quantised_ones_did(how):
    model = quantised(**how)
    expected = np.array(model(TOKENS))
    assert dequantise_where_it_fits(model, mx.float32, PLENTY)
    assert not any(is_quantised(module) for module in model.modules())
    assert all(array.dtype == mx.float32 for _, array in tree_flatten(model.parameters()))
    assert np.abs(np.array(model(TOKENS)) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_weight_is_rounded_once_from_scale_times_code_plus_bias():
    model = quantised()
    layer = model.layers[0].self_attn.q_proj
    layer.scales, layer.biases = layer.scales.astype(mx.bfloat16), layer.biases.astype(mx.bfloat16)
    packed = np.array(layer.weight)
    codes = (packed[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(64, 2, 32)
    scales, biases = (np.array(a.astype(mx.float32), dtype=np.float64)[:, :, None]
                      for a in (layer.scales, layer.biases))
    expected = (scales * codes + biases).reshape(64, 64)
    dequantise_where_it_fits(model, mx.float32, PLENTY)
    difference = np.abs(np.array(model.layers[0].self_attn.q_proj.weight) - expected)
    assert difference.max() < 2 * np.finfo(np.float32).eps * np.abs(expected).max()


def test_expert_layers_become_dense_too():
    model = quantised(model_config(
        "qwen3", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
        mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True, num_hidden_layers=2))
    expected = model(TOKENS)
    dequantise_where_it_fits(model, mx.float32, PLENTY)
    assert not any(is_quantised(module) for module in model.modules())
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_stays_quantised_with_a_warning(caplog):
    model = quantised()
    with caplog.at_level(logging.WARNING, "mlxft"):
        assert not dequantise_where_it_fits(model, mx.float32, 100_000)
    assert is_quantised(model.layers[0].self_attn.q_proj)
    assert "the quantised weights stay quantised" in caplog.text


def test_a_dense_model_is_left_alone():
    model = random_model(model_config("llama"))
    before = model(TOKENS)
    assert not dequantise_where_it_fits(model, mx.float32, PLENTY)
    assert mx.array_equal(model(TOKENS), before)


def test_the_available_memory_is_a_sensible_number():
    assert 10**7 < available_bytes() < 10**14
