"""Ranks that differ from layer to layer: by name, and by the bits that a layer is stored in."""

import json
import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxft.config import compose
from mlxft.config.schema import AdapterConfig
from mlxft.errors import InputError
from mlxft.models.load import load_model
from mlxft.models.lora import apply_adapter, layer_ranks
from mlxft.models.targets import select
from tests.runs import arrays, same, train, write_token_rows
from tests.tiny_models import make_model, model_config, random_model


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model whose block 1 is in 8 bits and the other in 4, as mlx-lm writes such."""
    folder = make_model(tmp_path_factory.mktemp("model") / "mixed", "llama", num_hidden_layers=2)
    config = model_config("llama", num_hidden_layers=2)
    model = random_model(config)
    high = {"group_size": 32, "bits": 8}

    def how(path, module):
        return hasattr(module, "to_quantized") and (high if ".layers.1." in path else True)

    nn.quantize(model, group_size=32, bits=4, class_predicate=how)
    eights = {path: high for path, module in model.named_modules() if getattr(module, "bits", 4) == 8}
    config["quantization"] = {"group_size": 32, "bits": 4} | eights
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ranks_of(folder, **settings):
    model = load_model(folder)
    layers = select(model, settings.get("targets"))
    ranks = layer_ranks(layers, AdapterConfig(**settings))
    return {layer.path: rank for layer, rank in zip(layers, ranks, strict=True)}


def test_ranks_by_bits_are_rank_times_bits_over_four(mixed):
    """On a CPU the layers are dense by then; what they were stored in counts."""
    found = ranks_of(mixed, rank=3, rank_by="bits")
    assert {rank for path, rank in found.items() if ".layers.0." in path} == {math.ceil(3 * 4 / 4)}
    assert {rank for path, rank in found.items() if ".layers.1." in path} == {math.ceil(3 * 8 / 4)}
    assert min(ranks_of(mixed, rank=1, rank_by="bits").values()) == 2


def test_ranks_that_are_named_win_and_of_those_the_last(mixed):
    found = ranks_of(mixed, rank=3, rank_by="bits", ranks={"q_proj": 5, "model.layers.1.*": 7})
    assert found["model.layers.0.self_attn.q_proj"] == 5
    assert {rank for path, rank in found.items() if ".layers.1." in path} == {7}
    assert found["model.layers.0.self_attn.v_proj"] == 3


def test_zeros_that_fill_a_smaller_rank_up_stay_zeros_and_nothing_else_does(mixed, tmp_path):
    rows = write_token_rows(tmp_path / "rows.jsonl", [12, 9, 10, 11])
    given = ("adapter.rank=2", "adapter.ranks={q_proj:5,down_proj:3}")
    train(mixed, rows, tmp_path / "run", *given, "trainer.max_steps=3", "optimizer.lr=1e-2")
    trained = arrays(tmp_path / "run" / "adapter")
    for name, array in trained.items():
        rank = 5 if "q_proj" in name else 3 if "down_proj" in name else 2
        used = mx.any(array != 0, axis=0 if name.endswith("lora_a") else 1).tolist()
        assert used == [True] * rank + [False] * (5 - rank), name
    log = (tmp_path / "run" / "train.log").read_text()
    assert "LoRA of ranks 2 (10 layers), 3 (2 layers), 5 (2 layers), scale 2 on 14 layers" in log


def test_a_layer_learns_as_it_does_where_all_have_its_rank(mixed, tmp_path):
    """One step from the start, where B is zero: q_proj at rank 2 beside k_proj at 2 or at 5."""
    rows = write_token_rows(tmp_path / "rows.jsonl", [12, 9])
    given = ["adapter.targets=[q_proj,k_proj]", "adapter.rank=2", "trainer.max_steps=1"]
    given += ["trainer.clip_norm=0", "optimizer=sgd", "optimizer.lr=1", "optimizer.weight_decay=0"]
    train(mixed, rows, tmp_path / "plain", *given)
    train(mixed, rows, tmp_path / "ranks", *given, "adapter.ranks={k_proj:5}")
    plain, ranks = (arrays(tmp_path / run / "adapter") for run in ("plain", "ranks"))
    b = plain["model.layers.0.self_attn.q_proj.lora_b"]
    found = ranks["model.layers.0.self_attn.q_proj.lora_b"]
    assert found.shape[0] == 5 and mx.abs(b).max().item() > 1e-3
    assert mx.allclose(found[:2], b, rtol=1e-4, atol=1e-7).item()


def test_a_resumed_run_with_ranks_equals_one_that_never_stopped(mixed, tmp_path):
    rows = write_token_rows(tmp_path / "rows.jsonl", [12, 9, 10, 11])
    given = ("adapter.ranks={q_proj:5}", "adapter.rank=2", "optimizer.lr=1e-2", "trainer.save_every=1")
    given += ("schedule=constant",)
    train(mixed, rows, tmp_path / "straight", *given, "trainer.max_steps=3")
    train(mixed, rows, tmp_path / "stopped", *given, "trainer.max_steps=2")
    train(mixed, rows, tmp_path / "stopped", *given, "trainer.max_steps=3", "trainer.resume=auto")
    assert same(arrays(tmp_path / "straight" / "adapter"), arrays(tmp_path / "stopped" / "adapter"))
    with pytest.raises(InputError, match="adapter.ranks"):
        train(mixed, rows, tmp_path / "stopped", "adapter.rank=2", "optimizer.lr=1e-2", "schedule=constant",
              "adapter.ranks={q_proj:4}", "trainer.max_steps=4", "trainer.save_every=1",
              "trainer.resume=auto")  # fmt: skip


def test_names_that_match_nothing_and_bits_that_tell_nothing_apart_are_refused(mixed, tmp_path):
    with pytest.raises(InputError, match="adapter.ranks: 'q_prok' matches none of the adapted layers: mlp"):
        apply_adapter(load_model(mixed), AdapterConfig(ranks={"q_prok": 4}))
    plain = make_model(tmp_path / "plain", "llama", num_hidden_layers=1)
    with pytest.raises(InputError, match="adapter.rank_by=bits: all adapted layers have 32 bits"):
        apply_adapter(load_model(plain), AdapterConfig(rank_by="bits"))


@pytest.mark.parametrize("keys, message", [
    (["adapter.rank_by=bist"], "adapter.rank_by: 'bist' is not known; did you mean bits?"),
    (["adapter.ranks={q_proj:0}"], "adapter.ranks: q_proj: rank 0 trains nothing"),
    (["adapter.ranks={q_proj:4}", "adapter.rslora=true"], "with adapter.rslora each rank would have a scale"),
    (["adapter.rank_by=bits", "adapter.init_from=x"], "the ranks of adapter.init_from are taken over"),
    (["adapter.rank_by=bits", "adapter=full"], "it has no meaning with adapter.kind=full"),
], ids=str)  # fmt: skip
def test_keys_that_make_no_sense_are_refused(keys, message):
    with pytest.raises(InputError) as error:
        compose(["model.path=owner/name", "data.train=bundled:pebble.jsonl", *keys])
    assert message in str(error.value)
