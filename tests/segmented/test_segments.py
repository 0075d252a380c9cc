"""The segmented backward beside the whole one: gradients, programs shared by layers, what is left behind."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from mlxft.models.new_tokens import NewToken, add_new_tokens
from mlxft.segmented import segments
from mlxft.segmented.gradients import Gradient
from mlxft.segmented.kinds import kind_of
from mlxft.segmented.plan import GradientPlan
from mlxft.segmented.segments import SegmentedGradient
from mlxft.training.objectives.common import HeadPlan
from mlxft.training.objectives.sft import Sft
from tests.devices import CLOSE, SLACK
from tests.gradients import difference, fill_adapters, rows
from tests.tiny_models import FAMILIES, make_model, model_config, random_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


def trained_view(folder, **settings):
    model, _ = load(str(folder), dtype="float32")
    made = view(model)
    apply_adapter(model, AdapterConfig(**({"rank": 4, "dropout": 0.3} | settings)), seed=1)
    if settings.get("kind") != "full":
        fill_adapters(model)
    return made


def results(made, gradient, layout="padded", lengths=(9, 23, 14, 3), key=4):
    """Loss and gradients of one batch."""
    objective = gradient.objective
    batch = rows(lengths)
    prepared = Sft(HeadPlan("full"), Arranger(layout)).prepare(batch, objective.counts(batch))
    inputs = dict(prepared.inputs)
    if key is not None:
        inputs["dropout_key"] = mx.random.key(key)
    loss, _, gradients = gradient(made.model.trainable_parameters(), inputs, prepared.layout)
    return loss.item(), {name: np.array(array) for name, array in tree_flatten(gradients)}


def both(made, layout="padded", **settings):
    objective = Sft(HeadPlan("full"), Arranger(layout))
    whole = results(made, Gradient(made, objective), layout)
    segmented = SegmentedGradient(made, objective, GradientPlan("segmented", **settings))
    return whole, results(made, segmented, layout)


@pytest.mark.parametrize("size", [1, 2, 3, 99])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_the_whole_backwards_in_segments_of_any_size(family, size, folders):
    whole, segmented = both(trained_view(folders(family)), segment_layers=size)
    assert difference(whole, segmented) < CLOSE * SLACK


def test_the_same_arithmetic_gives_the_same_bits(folders):
    whole, segmented = both(trained_view(folders("llama")))
    assert whole[0] == segmented[0]
    for name, array in whole[1].items():
        assert np.array_equal(array, segmented[1][name]), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4"])
def test_full_training_reaches_norms_embeddings_and_tied_heads(family, folders):
    made = trained_view(folders(family), kind="full", rank=None, dropout=0.0)
    whole, segmented = both(made)
    assert any("embed_tokens" in name for name in whole[1]) and any("norm" in name for name in whole[1])
    assert difference(whole, segmented) < CLOSE * SLACK


def test_layers_below_the_lowest_trained_one_are_not_walked(folders, monkeypatch):
    made = trained_view(folders("llama"), layers="last 2")
    walked = []
    gradient = SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()))
    backward = gradient._runner.backward
    monkeypatch.setattr(
        gradient._runner,
        "backward",
        lambda segment, *rest: walked.append(segment.start) or backward(segment, *rest),
    )
    segmented = results(made, gradient)
    assert walked == [3, 2]
    assert difference(results(made, Gradient(made, gradient.objective)), segmented) < CLOSE * SLACK


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gemma4"])
def test_compiled_programs_give_what_traced_ones_do(family, folders):
    made = trained_view(folders(family))
    traced, compiled = (
        results(made, SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()), compiled=c))
        for c in (False, True)
    )
    assert difference(traced, compiled) < CLOSE * SLACK


@pytest.mark.parametrize("family, settings", [
    ("llama", {"kind": "dora"}),
    ("qwen3", {"kind": "dora", "layers": "last 2"}),
    ("qwen3_moe", {"targets": ["*"]}),
    ("qwen3", {"targets": ["*", "embed_tokens"]}),
    ("llama", {"targets": ["*", "embed_tokens", "lm_head"]}),
    ("qwen3", {"modules_to_save": ["*norm", "embed_tokens"]}),
    ("llama", {"modules_to_save": ["*norm", "embed_tokens", "lm_head"]}),
], ids=str)  # fmt: skip
def test_every_kind_of_adapter_has_the_whole_backwards_gradients(family, settings, folders):
    """Layer by layer, in halves, and by programs that the layers share, with dropout."""
    made = trained_view(folders(family), **settings)
    objective = Sft(HeadPlan("full"), Arranger())
    whole = results(made, Gradient(made, objective))
    assert difference(whole, results(made, Gradient(made, objective, "checkpoint"))) < CLOSE * SLACK
    for compiled, halves in ((False, False), (False, True), (True, False), (True, True)):
        gradient = SegmentedGradient(made, objective, GradientPlan("segmented", halves=halves), compiled)
        assert difference(whole, results(made, gradient)) < CLOSE * SLACK, (compiled, halves)


@pytest.mark.parametrize("settings", [{"kind": "dora"}, {"modules_to_save": ["*norm"]}], ids=str)
def test_layers_with_lengths_or_whole_norms_of_their_own_share_a_program(settings, folders):
    made = trained_view(folders("qwen3"), **settings)
    gradient = SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()), compiled=True)
    results(made, gradient)
    assert len(gradient._runner._kept) == 2  # a forward and a backward, for all four layers


@pytest.mark.parametrize("mode, bits, group_size", [("affine", 3, 32), ("affine", 6, 32), ("nvfp4", 4, 16)])
def test_dora_on_quantised_layers_has_the_same_gradients_in_segments(mode, bits, group_size, folders):
    model, _ = load(str(folders("llama")), dtype="float32")
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    made = view(model)
    apply_adapter(model, AdapterConfig(kind="dora", rank=4), seed=1)
    fill_adapters(model)
    whole, segmented = both(made, halves=True)
    assert difference(whole, segmented) < CLOSE * SLACK


def test_alike_layers_share_a_program_and_two_layouts_of_one_length_do_not(folders):
    made = trained_view(folders("qwen3"))
    gradient = SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()), compiled=True)
    whole = Gradient(made, gradient.objective)
    for lengths in ((12, 12), (9, 15)):  # 22 positions each, packed: pieces of 11 and 11, of 8 and 14
        expected = results(made, whole, "packed", lengths)
        assert difference(expected, results(made, gradient, "packed", lengths)) < CLOSE * SLACK
    assert len(gradient._runner._kept) == 4  # a forward and a backward for each layout, for all layers


def test_a_program_sees_new_weights_and_keys(folders):
    made = trained_view(folders("qwen3"))
    gradient = SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()), compiled=True)
    whole = Gradient(made, gradient.objective)
    seen = set()
    for key in range(3):
        fill = {name: array + 0.01 * key for name, array in tree_flatten(made.model.trainable_parameters())}
        made.model.load_weights(list(fill.items()), strict=False)
        expected, found = results(made, whole, key=key), results(made, gradient, key=key)
        assert difference(expected, found) < CLOSE * SLACK
        seen.add(found[0])
    assert len(seen) == 3


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_layers_of_one_window_are_alike_and_those_of_another_are_not(family, folders):
    made = trained_view(folders(family))
    assert made.windows() == [8, None, 8, None]
    assert [kind_of(layer) == kind_of(made.layers[0]) for layer in made.layers] == [True, False, True, False]


def test_a_layers_number_counts_only_where_its_code_reads_it(folders):
    """Gemma 3's attention has it too, and Gemma 4's names it in a message."""
    for family, alike in (("gemma3", True), ("gemma4", False)):
        first, _, third, *_ = trained_view(folders(family)).layers
        assert (first.self_attn.layer_idx, third.self_attn.layer_idx) == (0, 2)
        assert (kind_of(first) == kind_of(third)) == alike


def test_layers_are_alike_only_if_all_that_tracing_reads_is_equal(folders):
    plain = trained_view(folders("llama"))
    assert kind_of(plain.layers[0]) == kind_of(plain.layers[1])
    plain.layers[1].mlp.up_proj.scale = 7.0
    assert kind_of(plain.layers[0]) != kind_of(plain.layers[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_afterwards_the_model_has_its_own_arrays(compiled, folders):
    made = trained_view(folders("llama"))
    before = {name: id(array) for name, array in tree_flatten(made.model.parameters())}
    results(made, SegmentedGradient(made, Sft(HeadPlan("full"), Arranger()), compiled=compiled))
    assert {name: id(array) for name, array in tree_flatten(made.model.parameters())} == before


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_how_many_segments_are_in_flight_changes_nothing(in_flight, folders):
    made = trained_view(folders("llama"))
    whole, segmented = both(made, in_flight=in_flight)
    assert difference(whole, segmented) == 0


@pytest.mark.parametrize("settings", [{}, {"kind": "full", "rank": None, "dropout": 0.0}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_evaluated_in_chunks_changes_nothing(family, settings, folders):
    """Tied, capped softly, and trained: 5 chunks of 7 targets and the rest."""
    made = trained_view(folders(family), **settings)
    objective = Sft(HeadPlan("chunked", 7), Arranger())
    expected = results(made, Gradient(made, Sft(HeadPlan("full"), Arranger())))
    assert difference(expected, results(made, SegmentedGradient(made, objective))) < CLOSE * SLACK


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_walking_attention_and_mlp_apart_changes_nothing(family, layout, dropout, folders, monkeypatch):
    """The MLP 10 tokens at a time, where there is no dropout; families whose layers differ go whole."""
    monkeypatch.setattr(segments, "MLP_TOKENS", 10)
    made = trained_view(folders(family), dropout=dropout)
    whole, segmented = both(made, layout, halves=True)
    assert difference(whole, segmented) < CLOSE * SLACK


def test_layers_that_scale_what_they_add_have_no_halves(folders):
    """Granite's modules have the same names as Llama's, and it multiplies both sums."""
    llama, granite = trained_view(folders("llama")), trained_view(folders("granite"))
    assert llama.has_halves(0) and not granite.has_halves(0)
    assert len(SegmentedGradient(llama, None, GradientPlan("segmented", halves=True))._halves) == 4
    assert not SegmentedGradient(granite, None, GradientPlan("segmented", halves=True))._halves


@pytest.mark.parametrize(
    "mode, bits, group_size", [("affine", 4, 32), ("affine", 8, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_quantised_layers_and_heads_have_the_same_gradients_in_segments(
    family, mode, bits, group_size, folders
):
    """Untied and tied, of every packing; the head's chunks of 40 targets are made dense, those of 7 not."""
    model, _ = load(str(folders(family)), dtype="float32")
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=4), seed=1)
    fill_adapters(model)
    expected = results(made, Gradient(made, Sft(HeadPlan("full"), Arranger())), lengths=(70, 61))
    for chunk in (7, 40):
        objective = Sft(HeadPlan("chunked", chunk), Arranger())
        found = results(made, SegmentedGradient(made, objective), lengths=(70, 61))
        assert difference(expected, found) < CLOSE * SLACK


def test_an_adapted_head_gets_its_gradient_in_chunks_too(folders):
    made = trained_view(folders("llama"), targets=["lm_head", "q_proj"], dropout=0.0)
    expected = results(made, Gradient(made, Sft(HeadPlan("full"), Arranger())))
    assert any(name.startswith("lm_head") for name in expected[1])
    found = results(made, SegmentedGradient(made, Sft(HeadPlan("chunked", 7), Arranger())))
    assert difference(expected, found) < CLOSE * SLACK


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_programs_see_new_rows_that_have_changed(family):
    """Rows of new tokens beyond the table, of a head of its own and of one that is the embedding."""
    model = random_model(model_config(family, vocab_size=250))  # of rows with tokens up to 258
    add_new_tokens(model, [NewToken(number, "", False, (5, number % 9)) for number in range(250, 259)])
    made = view(model)
    apply_adapter(model, AdapterConfig(rank=2), seed=1)
    objective = Sft(HeadPlan("full"), Arranger("padded"))
    plain = Gradient(made, objective)
    compiled = Gradient(made, objective, compiled=True), SegmentedGradient(made, objective, compiled=True)
    fill_adapters(model)
    for _ in range(2):
        expected = results(made, plain, key=None)
        trained = [name for name, array in expected[1].items() if "new_rows" in name and array.any()]
        assert len(trained) == {"llama": 2, "qwen3": 1}[family]
        for gradient in compiled:
            assert difference(results(made, gradient, key=None), expected) < CLOSE * SLACK
        halved = [(name, array / 2) for name, array in tree_flatten(model.trainable_parameters())]
        model.load_weights(halved, strict=False)
