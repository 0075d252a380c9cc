"""Preference objectives: one forward of a shared prompt equals two, for losses and every gradient."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Pair, Unpaired
from mlxft.layouts.arrange import Arranger
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import adapter_disabled, apply_adapter
from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives import Cpo, Dpo, Kto, Orpo, Simpo
from mlxft.training.objectives.common import HeadPlan, with_ref_logps
from mlxft.training.objectives.preference import LossSettings
from mlxft.training.objectives.unpaired import KtoSettings, mismatch
from mlxft.training.reference import adapter_off
from tests.invariance.test_batching import CLOSE, SLACK, difference, fill_adapters, made  # noqa: F401 (a fixture)
from tests.tiny_models import VOCAB_SIZE, make_model

FULL = LossSettings(beta=0.1, nll_weight=1.0, nll_scope="full")
OBJECTIVES = {
    "dpo": lambda *how: Dpo(*how, LossSettings(beta=0.3), adapter_off),
    "dpo with its own loss": lambda *how: Dpo(*how, LossSettings(beta=0.3, nll_weight=0.5), adapter_off),
    "ipo": lambda *how: Dpo(*how, LossSettings(beta=0.3, variant="ipo"), adapter_off),
    "orpo": lambda *how: Orpo(*how, FULL),
    "orpo on the answer": lambda *how: Orpo(*how, replace(FULL, nll_scope="response")),
    "cpo": lambda *how: Cpo(*how, LossSettings(beta=0.1, nll_weight=1.0, label_smoothing=0.1)),
    "simpo": lambda *how: Simpo(*how, LossSettings(beta=2.0, gamma=0.5)),
}


def pair(prompt, chosen, rejected, seed=0, unanswered=0) -> Pair:
    """Random tokens; the last `unanswered` of each branch are the template's, not the answer's."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in (prompt, chosen, rejected)]
    masks = [np.arange(n) < n - unanswered for n in (chosen, rejected)]
    return Pair(*tokens, *masks, "")


def pairs() -> list[Pair]:
    """Prompts longer and shorter than Gemma's window of 8, a branch of one token, identical branches."""
    identical = pair(5, 6, 6, seed=3)
    return [
        pair(13, 4, 9, seed=1, unanswered=1),
        pair(6, 1, 5, seed=2),
        replace(identical, rejected=identical.chosen),
        pair(1, 3, 1, seed=4),
    ]


def window(made, objective, rows, batch_size=4, kind="whole", key=None):  # noqa: F811
    """Loss and metrics, and gradients, added up over the micro-batches of one window."""
    cut = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    batches, counts = objective.begin(cut, made)
    gradient = Gradient(made, objective, kind)
    total, gradients = {}, {}
    for batch in batches:
        prepared = objective.prepare(batch, counts)
        inputs = dict(prepared.inputs) | ({} if key is None else {"dropout_key": mx.random.key(key)})
        loss, metrics, tree = gradient(made.model.trainable_parameters(), inputs, prepared.layout)
        for name, array in ({"loss": loss} | metrics).items():
            total[name] = total.get(name, 0.0) + array.item()
        for name, array in tree_flatten(tree):
            gradients[name] = gradients.get(name, 0.0) + np.array(array)
    return total, gradients


def assert_equal(one, other):
    assert difference((one[0]["loss"], one[1]), (other[0]["loss"], other[1])) < CLOSE * SLACK
    for name, value in one[0].items():
        if name == "rewards/accuracies" and SLACK > 1:
            continue  # of two identical answers a GPU's rounding makes either the likelier
        assert other[0][name] == pytest.approx(value, rel=1e-4 * SLACK, abs=1e-5 * SLACK), name


@pytest.mark.parametrize("layout, multiple", [("packed", 1), ("prefix_shared", 1), ("prefix_shared", 4)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_shared_prompt_equals_two_forwards(made, name, layout, multiple):  # noqa: F811
    two_forwards = window(made, OBJECTIVES[name](HeadPlan(), Arranger("padded")), pairs())
    shared = OBJECTIVES[name](HeadPlan("chunked", 7), Arranger(layout, multiple))
    assert_equal(two_forwards, window(made, shared, pairs()))


@pytest.mark.parametrize("layout", ["padded", "prefix_shared"])
@pytest.mark.parametrize("name", ["dpo with its own loss", "orpo"])
def test_micro_batches_add_up_to_the_window(made, name, layout):  # noqa: F811
    """Terms with different divisors: pairs, and tokens of the chosen rows."""
    objective = OBJECTIVES[name](HeadPlan(), Arranger(layout))
    together = window(made, objective, pairs())
    assert_equal(together, window(made, objective, pairs(), batch_size=1))
    assert_equal(together, window(made, objective, pairs(), batch_size=3))


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_checkpointing_replays_dropout_in_every_layout(made, layout):  # noqa: F811
    objective = OBJECTIVES["orpo"](HeadPlan(), Arranger(layout))
    dropped = window(made, objective, pairs(), key=5)
    assert_equal(dropped, window(made, objective, pairs(), key=5, kind="checkpoint"))
    other = window(made, objective, pairs(), key=6)
    assert difference((dropped[0]["loss"], dropped[1]), (other[0]["loss"], other[1])) > 0.01


def test_pieces_that_come_again_are_compiled_and_two_layouts_of_one_length_are_two_programs(made):  # noqa: F811
    """With only shapes as the key the second layout would silently get the first one's result."""
    objective = OBJECTIVES["orpo"](HeadPlan(), Arranger("prefix_shared"))
    rows = [[pair(9, 4, 5, seed=1)], [pair(8, 5, 5, seed=2)]]
    compiled, plain = (Gradient(made, objective, "whole", compiled=c) for c in (True, False))
    params = made.model.trainable_parameters()
    for _ in range(3):
        for batch in rows:
            _, counts = objective.begin([batch], made)
            prepared = objective.prepare(batch, counts)
            assert prepared.inputs["tokens"].shape == (1, 16)
            one, other = (g(params, prepared.inputs, prepared.layout) for g in (compiled, plain))
            assert one[0].item() == pytest.approx(other[0].item(), rel=CLOSE * SLACK)
    assert len(compiled._programs) == 2


def test_the_reference_switch_restores_every_layers_own_scale(made):  # noqa: F811
    layers = [module for module in made.model.modules() if hasattr(module, "lora_a")]
    for number, layer in enumerate(layers):
        layer.scale = 1.0 + number
    try:
        objective = OBJECTIVES["dpo"](HeadPlan(), Arranger())
        scored = with_ref_logps(objective, pairs(), made)
        assert [layer.scale for layer in layers] == [1.0 + number for number in range(len(layers))]
        policy = objective.answer_logps(made, pairs())
        assert np.abs(policy - np.array([p.ref_logps for p in scored])).max() > 0.1
    finally:
        for layer in layers:
            layer.scale = 2.0


def unpaired() -> list[Unpaired]:
    random = np.random.default_rng(8)
    rows = [
        Unpaired(
            random.integers(3, VOCAB_SIZE, p).astype(np.int32),
            random.integers(3, VOCAB_SIZE, c).astype(np.int32),
            np.ones(c, bool),
            label,
            "",
        )
        for p, c, label in ((9, 4, True), (3, 7, False), (12, 1, True), (5, 5, True))
    ]
    return mismatch(rows, 100)


def kto(layout="padded", **weights) -> Kto:
    return Kto(HeadPlan(), Arranger(layout), KtoSettings(0.4, **weights), adapter_off)


def test_kto_rows_may_be_packed_and_its_kl_is_the_windows(made):  # noqa: F811
    together = window(made, kto(), unpaired())
    assert together[0]["kl"] >= 0
    assert_equal(together, window(made, kto("packed"), unpaired()))
    assert_equal(together, window(made, kto(), unpaired(), batch_size=1))
    assert_equal(together, window(made, kto("packed"), unpaired(), batch_size=3))


def test_kto_is_its_formula_on_the_models_own_log_probabilities(tmp_path):
    """Worked out with numpy from plain forwards of the model with and without its adapter."""
    model, _ = load(str(make_model(tmp_path, "llama")), dtype="float32")
    made_here = view(model)
    apply_adapter(model, AdapterConfig(rank=4), seed=1)
    fill_adapters(model)

    def logp(prompt, answer):
        tokens = np.concatenate([prompt, answer])
        logits = np.array(model(mx.array(tokens[None, :-1])), np.float64)[0]
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return logps[np.arange(len(prompt) - 1, len(tokens) - 1), answer].sum()

    rows = unpaired()
    policy = [(logp(r.prompt, r.completion), logp(r.prompt, r.other)) for r in rows]
    with adapter_disabled(model):
        refs = [(logp(r.prompt, r.completion), logp(r.prompt, r.other)) for r in rows]
    lead, mismatched = (np.array(policy) - np.array(refs)).T
    kl = max(mismatched.mean(), 0.0)
    good = np.array([row.label for row in rows])
    terms = np.where(good, 2.0 / (1 + np.exp(0.4 * (lead - kl))), 0.5 / (1 + np.exp(-0.4 * (lead - kl))))
    total, _ = window(made_here, kto(desirable_weight=2.0, undesirable_weight=0.5), rows)
    assert total["loss"] == pytest.approx(terms.mean(), rel=1e-5)
    assert total["kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert total["rewards/chosen"] == pytest.approx(0.4 * lead[good].mean(), rel=1e-4)
    assert total["rewards/rejected"] == pytest.approx(0.4 * lead[~good].mean(), rel=1e-4)
    assert total["rewards/accuracies"] == pytest.approx((lead * np.where(good, 1, -1) > 0).mean())


def test_a_mismatched_answer_is_cut_where_it_would_be_too_long():
    """Prompts of 9, 3, 12 and 5 tokens, answers of 4, 7, 1 and 5, at most 12 together."""
    rows = mismatch(unpaired(), 12)
    assert [len(row.other) for row in rows] == [3, 1, 1, 4]
