import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.adapters import save_adapter
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import LoRALinear, adapter_disabled
from tests.tiny_models import make_model

TOKENS = mx.array([[5, 80, 7, 200, 31, 9]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def model(folder):
    return load_model(folder)


def start_somewhere(model):
    """Gives every update's B (zero at first) values, as training would."""
    for number, (_, module) in enumerate(sorted(model.named_modules(), key=lambda item: item[0])):
        if isinstance(module, LoRALinear):
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=mx.random.key(number))


@pytest.fixture
def saved(folder, tmp_path):
    """An adapter of rank 4 and alpha 6 on q_proj and v_proj of the last three blocks."""
    model = load_model(folder)
    cfg = AdapterConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj"], layers="last 3")
    apply_adapter(model, cfg)
    start_somewhere(model)
    save_adapter(tmp_path / "adapter", model, cfg, str(folder))
    return tmp_path / "adapter", model(TOKENS)


def test_only_the_updates_are_trainable_and_the_numbers_are_right(model):
    report = apply_adapter(model, AdapterConfig(rank=4))
    # q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 96: sum of (in + out) x 4 blocks x rank 4
    expected = (2 * 128 + 2 * 96 + 3 * 160) * 4 * 4
    trainable = tree_flatten(model.trainable_parameters())
    assert report.num_trainable == expected == sum(array.size for _, array in trainable)
    base = 2 * 259 * 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    assert report.num_total == base + expected
    assert (report.rank, report.alpha, len(report.targets)) == (4, 8.0, 28)
    assert all(name.endswith(("lora_a", "lora_b")) for name, _ in trainable)


def test_a_fresh_adapter_changes_nothing(folder, model):
    expected = load_model(folder)(TOKENS)
    apply_adapter(model, AdapterConfig())
    assert mx.array_equal(model(TOKENS), expected)


def test_by_default_the_rank_is_8_and_the_scale_2(model):
    report = apply_adapter(model, AdapterConfig())
    assert (report.rank, report.alpha) == (8, 16)
    assert model.layers[0].self_attn.q_proj.scale == 2.0


def test_rank_stabilised_updates_are_scaled_by_the_root_of_the_rank(model):
    report = apply_adapter(model, AdapterConfig(rank=4, alpha=6.0, rslora=True))
    assert model.layers[0].self_attn.q_proj.scale == 3.0  # 6 / sqrt(4)
    assert "rsLoRA of rank 4, scale 3 on 28 layers" in str(report)


def test_a_fresh_dora_adapter_changes_nothing_and_trains_lengths_too(folder, model):
    expected = load_model(folder)(TOKENS)
    report = apply_adapter(model, AdapterConfig(kind="dora", rank=4))
    assert mx.allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    lora = apply_adapter(load_model(folder), AdapterConfig(rank=4))
    lengths = 4 * (64 + 2 * 32 + 64 + 2 * 96 + 64)  # outputs of q, k and v, o, gate and up, down
    assert report.num_trainable == lora.num_trainable + lengths
    assert report.num_total == lora.num_total + lengths
    assert "DoRA of rank 4, alpha 8 on 28 layers" in str(report)


def test_a_layers_start_does_not_depend_on_the_other_targets_or_the_global_generator(folder):
    starts = []
    for targets, number in ((["q_proj"], 1), (None, 2)):
        model = load_model(folder)
        mx.random.seed(number)
        apply_adapter(model, AdapterConfig(targets=targets), seed=3)
        starts.append(model.layers[1].self_attn.q_proj.lora_a)
    assert mx.array_equal(*starts)


def test_full_training_trains_every_weight(folder, model):
    report = apply_adapter(model, AdapterConfig(kind="full"))
    number = sum(a.size for _, a in tree_flatten(model.parameters()))
    assert report.num_trainable == report.num_total == number
    assert len(tree_flatten(model.trainable_parameters())) == len(tree_flatten(model.parameters()))


def test_full_training_of_a_quantised_model_is_refused(model):
    nn.quantize(model, group_size=32, bits=4)
    with pytest.raises(InputError, match="cannot train quantised weights .30 layers, first lm_head"):
        apply_adapter(model, AdapterConfig(kind="full"))


def test_the_packed_weights_of_a_quantised_model_are_counted_as_what_they_stand_for(folder, model):
    dense = apply_adapter(load_model(folder), AdapterConfig())
    nn.quantize(model, group_size=32, bits=4)
    assert apply_adapter(model, AdapterConfig()) == dense


@pytest.mark.parametrize("setting", [
    {"rank": 4}, {"targets": ["q_proj"]}, {"layers": "last 2"}, {"dropout": 0.1}])
def test_settings_of_lora_are_refused_in_full_training(model, setting):
    with pytest.raises(InputError, match=f"adapter.{next(iter(setting))} has no meaning"):
        apply_adapter(model, AdapterConfig(kind="full", **setting))


@pytest.mark.parametrize("setting, message", [
    ({"rank": 0}, "adapter.rank=0"), ({"alpha": 0.0}, "adapter.alpha=0.0"),
    ({"dropout": 1.0}, "adapter.dropout=1.0"),
    ({"kind": "vera"}, "adapter.kind='vera'"), ({"targets": []}, "adapter.targets is an empty list")])
def test_settings_that_would_train_nothing_are_refused(model, setting, message):
    with pytest.raises(InputError, match=message):
        apply_adapter(model, AdapterConfig(**setting))


def test_init_from_takes_over_rank_scale_targets_and_layers(saved, model):
    folder, expected = saved
    report = apply_adapter(model, AdapterConfig(init_from=str(folder)))
    assert (report.rank, report.alpha) == (4, 6.0)
    assert report.targets == [f"model.layers.{i}.self_attn.{n}_proj" for i in (1, 2, 3) for n in "qv"]
    assert mx.array_equal(model(TOKENS), expected)
    assert sum(a.size for _, a in tree_flatten(model.trainable_parameters())) == report.num_trainable


def test_init_from_takes_settings_that_agree_with_it(saved, model):
    agreeing = AdapterConfig(init_from=str(saved[0]), rank=4, alpha=6.0, targets=["v_proj", "q_proj"],
                             layers="last 3", dropout=0.1)
    apply_adapter(model, agreeing)
    assert model.layers[3].self_attn.q_proj.dropout == 0.1


@pytest.mark.parametrize("setting, message", [
    ({"rank": 8}, r"adapter.rank=8 contradicts adapter.init_from=.*rank 4"),
    ({"alpha": 8.0}, r"adapter.alpha=8.0 contradicts adapter.init_from=.*alpha 6"),
    ({"targets": ["q_proj"]}, r"adapter.targets=.* contradict adapter.init_.*4 layers, the adapter has 6"),
    ({"layers": "last 2"}, r"adapter.layers='last 2' contradict adapter.*14 layers, the adapter has 6"),
    ({"kind": "full"}, "adapter.kind=full contradicts adapter.init_from"),
])
def test_settings_that_contradict_init_from_are_refused_naming_both(saved, model, setting, message):
    with pytest.raises(InputError, match=message):
        apply_adapter(model, AdapterConfig(init_from=str(saved[0]), **setting))


def test_full_weights_are_taken_over_by_full_training_and_by_nothing_else(folder, tmp_path, model):
    trained = load_model(folder)
    apply_adapter(trained, AdapterConfig(kind="full"))
    trained.model.norm.weight = trained.model.norm.weight * 1.5
    save_adapter(tmp_path / "full", trained, AdapterConfig(kind="full"), str(folder))
    cfg = AdapterConfig(kind="lora", init_from=str(tmp_path / "full"))
    with pytest.raises(InputError, match="adapter.kind=lora contradicts adapter.init_from"):
        apply_adapter(model, cfg)
    apply_adapter(model, AdapterConfig(kind="full", init_from=str(tmp_path / "full")))
    assert mx.array_equal(model(TOKENS), trained(TOKENS))


def test_with_the_adapter_disabled_the_logits_are_exactly_the_bases(saved, folder, model):
    base = model(TOKENS)
    apply_adapter(model, AdapterConfig(init_from=str(saved[0])))
    with adapter_disabled(model):
        assert mx.array_equal(model(TOKENS), base)
    assert mx.array_equal(model(TOKENS), saved[1])
    assert not mx.allclose(saved[1], base, atol=1e-2)


def test_adapting_twice_is_a_fault_of_the_caller(model):
    apply_adapter(model, AdapterConfig())
    with pytest.raises(ValueError, match="has an adapter already"):
        apply_adapter(model, AdapterConfig())


def test_the_adapters_configuration_is_what_mlx_lm_reads(saved):
    config = json.loads((saved[0] / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora" and config["num_layers"] == 3
    assert config["lora_parameters"] == {
        "rank": 4, "scale": 1.5, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
