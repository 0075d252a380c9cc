"""The low-rank updates of experts against mlx-lm's layer, and what a run says of them."""

import logging

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Example
from mlxft.errors import InputError
from mlxft.layouts.arrange import Arranger
from mlxft.models.adapters import load_adapter, save_adapter
from mlxft.models.decoder import view
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_experts import LoRAExperts
from mlxft.models.lora_linear import adapter_disabled
from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives import HeadPlan, Sft
from tests.devices import ON_CPU
from tests.tiny_models import make_model, model_config, random_model

EXPERTS, INPUTS, OUTPUTS = 4, 32, 64
RANK = 3 if ON_CPU else 8  # mlx-lm's own layer has no gradient of other ranks on CUDA


def normal(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def layers(quantised=False, bias=False):
    """Our layer and mlx-lm's on one base, with the same updates."""
    base = SwitchLinear(INPUTS, OUTPUTS, EXPERTS, bias=bias)
    base.weight = 0.2 * normal(1, EXPERTS, OUTPUTS, INPUTS)
    if quantised:
        base = base.to_quantized(group_size=32, bits=4)
    base.freeze()
    a, b = normal(2, EXPERTS, RANK, INPUTS), normal(3, EXPERTS, OUTPUTS, RANK)
    theirs = LoRASwitchLinear.from_base(base, r=RANK, scale=1.5)
    assert (theirs.lora_a.shape, theirs.lora_b.shape) == (a.shape, b.shape)
    theirs.lora_a, theirs.lora_b = a, b
    return LoRAExperts(base, a, b, 1.5), theirs


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_output_and_gradients_are_those_of_mlx_lms_layer(quantised, is_sorted):
    ours, theirs = layers(quantised, bias=True)
    indices = mx.array([[0], [0], [1], [3], [3]]) if is_sorted else mx.array([[1, 3], [0, 1], [3, 2]])
    x = normal(4, indices.shape[0], 1, INPUTS)
    x = x if is_sorted else x[:, None]
    results = []
    for layer in (ours, theirs):

        def run(a, b, x, layer=layer):
            layer.lora_a, layer.lora_b = a, b
            y = layer(x, indices[:, 0] if is_sorted else indices, sorted_indices=is_sorted)
            return mx.square(y).sum()

        results.append(mx.value_and_grad(run, argnums=(0, 1, 2))(layer.lora_a, layer.lora_b, x))
    (value, gradients), (their_value, their_gradients) = results
    assert mx.allclose(value, their_value, rtol=1e-5)
    for one, other in zip(gradients, their_gradients, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-3)


def test_each_expert_gives_what_a_linear_layer_with_its_weight_and_update_would():
    ours, _ = layers()
    x, indices = normal(4, 6, 1, 1, INPUTS), mx.array([[0, 1], [1, 2], [3, 0], [2, 2], [1, 3], [0, 0]])
    found = np.array(ours(x, indices))[:, :, 0]
    weights = np.array(ours.linear.weight, np.float64) + 1.5 * np.array(ours.lora_b @ ours.lora_a, np.float64)
    for token in range(6):
        for place in range(2):
            expected = weights[indices[token, place].item()] @ np.array(x[token, 0, 0], np.float64)
            assert np.abs(found[token, place] - expected).max() < 1e-4
    with adapter_disabled(ours):
        assert mx.array_equal(ours(x, indices), ours.linear(x, indices))


def test_a_mixture_of_many_tokens_sorts_them_and_gives_the_same():
    glu = SwitchGLU(INPUTS, OUTPUTS, EXPERTS)
    a, b = normal(2, EXPERTS, RANK, INPUTS), normal(3, EXPERTS, OUTPUTS, RANK)
    glu.up_proj = LoRAExperts(glu.up_proj, a, b, 1.0)
    x = normal(5, 40, INPUTS)
    indices = mx.random.randint(0, EXPERTS, (40, 2), key=mx.random.key(6))  # 80 of them: sorted
    apart = mx.concatenate([glu(x[n : n + 1], indices[n : n + 1]) for n in range(40)])
    assert mx.allclose(glu(x, indices), apart, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=3)


def test_targets_name_experts_and_the_report_counts_them():
    model = random_model(model_config("qwen3_moe"))
    targets = ["q_proj", "mlp.switch_mlp.up_proj", "*.down_proj"]
    report = apply_adapter(model, AdapterConfig(rank=2, targets=targets))
    # Block 1 has an MLP of its own; 0, 2 and 3 have two such layers each, of four experts.
    assert (report.expert_layers, report.experts) == (6, 24)
    assert ", 6 of them of experts, an update for each of 24" in str(report)
    assert report.num_trainable == sum(a.size for _, a in tree_flatten(model.trainable_parameters()))
    experts = model.layers[0].mlp.switch_mlp
    assert experts.down_proj.lora_a.shape == (4, 2, 32) and experts.down_proj.lora_b.shape == (4, 64, 2)
    assert not isinstance(experts.gate_proj, LoRAExperts)


def test_experts_that_are_not_named_are_not_adapted_and_the_log_says_how_many(caplog):
    model = random_model(model_config("qwen3_moe"))
    with caplog.at_level(logging.WARNING, logger="mlxft"):
        report = apply_adapter(model, AdapterConfig())
    assert report.experts == 0
    assert "the model's 9 expert layers are not adapted; adapter.targets can name them" in caplog.text


def test_dora_of_experts_is_refused():
    model = random_model(model_config("qwen3_moe"))
    with pytest.raises(InputError, match="adapter.kind=dora: .*switch_mlp.up_proj is experts"):
        apply_adapter(model, AdapterConfig(kind="dora", targets=["*switch_mlp.up_proj"]))


@pytest.mark.parametrize("quantised", [False, True])
def test_stock_mlx_lm_gives_the_same_logits_from_base_and_folder(folder, tmp_path, quantised):
    base = make_model(tmp_path / "base", "qwen3_moe", quantize=4) if quantised else folder
    cfg = AdapterConfig(rank=3, targets=["v_proj", "up_proj", "down_proj"], layers="last 2")
    model = load_model(base)
    apply_adapter(model, cfg)
    for number, module in enumerate(model.modules()):
        if "lora_b" in module:
            module.lora_b = 0.1 * normal(number, *module.lora_b.shape)
    save_adapter(tmp_path / "adapter", model, cfg, str(base))
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(tmp_path / "adapter"))
    tokens = mx.array([[5, 80, 7, 200, 31, 9]])
    expected = model(tokens)
    limit = 2e-5 if quantised else 1e-6
    assert (mx.abs(theirs(tokens) - expected).max() / mx.abs(expected).max()).item() < limit
    again = load_model(base)
    load_adapter(again, tmp_path / "adapter")
    assert mx.array_equal(again(tokens), expected)


def test_a_gradient_of_the_base_is_not_made():
    model = random_model(model_config("qwen3_moe"))
    apply_adapter(model, AdapterConfig(rank=2, targets=["*_proj"]))
    gradients = nn.value_and_grad(model, lambda m: m(mx.array([[1, 2, 3]])).sum())(model)[1]
    assert {name.rpartition(".")[2] for name, _ in tree_flatten(gradients)} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_experts_have_gradients_in_evaluation_mode_too(kind):
    """Of a row whose tokens are sorted by expert, which mlx-lm does from 64 choices on."""
    gradients = []
    for mode in (True, False):
        model = random_model(model_config("qwen3_moe", num_hidden_layers=2))
        cfg = AdapterConfig(kind="full") if kind == "full" else AdapterConfig(rank=2, targets=["*_proj"])
        apply_adapter(model, cfg)
        for number, module in enumerate(model.modules()):
            if "lora_b" in module:
                module.lora_b = 0.1 * normal(number, *module.lora_b.shape)
        model.train(mode)
        row = Example(np.arange(3, 43, dtype=np.int32), np.ones(40, bool), "")
        objective = Sft(HeadPlan("full"), Arranger())
        prepared = objective.prepare([row], {"tokens": 39})
        gradient = Gradient(view(model), objective, "checkpoint")
        loss, _, found = gradient(model.trainable_parameters(), prepared.inputs, prepared.layout)
        gradients.append({"loss": loss} | dict(tree_flatten(found)))
    trained, evaluated = gradients
    assert any("switch_mlp" in name and mx.any(array != 0).item() for name, array in evaluated.items())
    assert all(mx.array_equal(trained[name], evaluated[name]) for name in trained)
