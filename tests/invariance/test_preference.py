"""Preference objectives, beside what test_combinations compares: programs, the reference, kto's formula."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Pair, Unpaired
from mlxft.layouts.arrange import LAYOUTS, Arranger
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from mlxft.models.lora_linear import adapter_disabled
from mlxft.segmented.gradients import Gradient
from mlxft.training.objectives import Dpo, Kto, Orpo
from mlxft.training.objectives.common import HeadPlan, with_ref_logps
from mlxft.training.objectives.preference import LossSettings
from mlxft.training.objectives.unpaired import KtoSettings, mismatch
from mlxft.training.reference import adapter_off
from tests.devices import CLOSE, SLACK
from tests.gradients import fill_adapters
from tests.tiny_models import VOCAB_SIZE, make_model


def pair(prompt, chosen, rejected, seed=0) -> Pair:
    random = np.random.default_rng(seed)
    tokens = [random.integers(3, VOCAB_SIZE, n).astype(np.int32) for n in (prompt, chosen, rejected)]
    return Pair(*tokens, np.ones(chosen, bool), np.ones(rejected, bool), "")


def test_pieces_that_come_again_are_compiled_and_two_layouts_of_one_length_are_two_programs(made):
    """With only shapes as the key the second layout would silently get the first one's result."""
    settings = LossSettings(beta=0.1, nll_weight=1.0, nll_scope="full")
    objective = Orpo(HeadPlan(), Arranger("prefix_shared"), settings)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pair_of_one_answer_twice_is_never_counted_as_right(layout, made):
    """The head takes seven tokens at once: rounding makes either answer of four the likelier."""
    pairs = [pair(5, 4, 7, seed) for seed in range(40)]
    twice = [replace(p, rejected=p.chosen, rejected_mask=p.chosen_mask) for p in pairs]
    objective = Orpo(HeadPlan("chunked", 7), Arranger(layout), LossSettings(beta=0.1))
    gradient = Gradient(made, objective, "whole", compiled=False)
    params = made.model.trainable_parameters()

    def accuracy(rows) -> float:
        prepared = objective.prepare(rows, objective.counts(rows))
        return gradient(params, prepared.inputs, prepared.layout)[1]["rewards/accuracies"].item()

    assert accuracy(twice) == 0.0
    assert accuracy(pairs + twice) == pytest.approx(accuracy(pairs) / 2)


def test_the_reference_switch_restores_every_layers_own_scale(made):
    layers = [module for module in made.model.modules() if hasattr(module, "lora_a")]
    pairs = [pair(13, 4, 9, seed=1), pair(6, 1, 5, seed=2)]
    for number, layer in enumerate(layers):
        layer.scale = 1.0 + number
    try:
        objective = Dpo(HeadPlan(), Arranger(), LossSettings(beta=0.3), adapter_off)
        scored = with_ref_logps(objective, pairs, made)
        assert [layer.scale for layer in layers] == [1.0 + number for number in range(len(layers))]
        policy = objective.answer_logps(made, pairs)
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
    objective = Kto(HeadPlan(), Arranger(), KtoSettings(0.4, 2.0, 0.5), adapter_off)
    (batch,), counts = objective.begin([rows], made_here)
    prepared = objective.prepare(batch, counts)
    gradient = Gradient(made_here, objective)
    loss, total, _ = gradient(model.trainable_parameters(), prepared.inputs, prepared.layout)
    assert loss.item() == pytest.approx(terms.mean(), rel=1e-5)
    assert total["kl"].item() == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert total["rewards/chosen"].item() == pytest.approx(0.4 * lead[good].mean(), rel=1e-4)
    assert total["rewards/rejected"].item() == pytest.approx(0.4 * lead[~good].mean(), rel=1e-4)
    assert total["rewards/accuracies"].item() == pytest.approx((lead * np.where(good, 1, -1) > 0).mean())


def test_a_mismatched_answer_is_cut_where_it_would_be_too_long():
    """Prompts of 9, 3, 12 and 5 tokens, answers of 4, 7, 1 and 5, at most 12 together."""
    rows = mismatch(unpaired(), 12)
    assert [len(row.other) for row in rows] == [3, 1, 1, 4]
