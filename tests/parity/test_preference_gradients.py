"""One step of DPO and ORPO against TRL and PEFT: loss, every gradient and metric, in every layout."""


import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxft.config.choices import GRADIENTS
from mlxft.config.schema import AdapterConfig
from mlxft.layouts.arrange import LAYOUTS, Arranger
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from mlxft.segmented.build import build
from mlxft.segmented.plan import GradientPlan
from mlxft.training.objectives.common import HeadPlan, with_ref_logps
from mlxft.training.objectives.preference import Dpo, LossSettings, Orpo
from mlxft.training.reference import adapter_off
from tests.devices import SLACK
from tests.parity.kit import HERE, MODEL, compare, lora_name
from tests.parity.pair_rows import pairs_of

OBJECTIVES = {
    "dpo": lambda head, arranger: Dpo(head, arranger, LossSettings(beta=0.1), adapter_off),
    "orpo": lambda head, arranger: Orpo(
        head, arranger, LossSettings(beta=0.1, nll_weight=1.0, nll_scope="full")
    ),
}
# What TRL logs besides: statistics of logits, which are never all there here.
NOT_LOGGED = {"entropy", "num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy"}


def step(name, layout, kind, batch_size, chunk=1000):
    """Loss, metrics and gradients of one window over all pairs, `batch_size` a micro-batch."""
    data = dict(np.load(HERE / "lora_llama_untied.npz"))
    pairs = pairs_of(*(data[f"{name}.{key}"] for key in ("input_ids", "attention_mask", "completion_mask")))
    model, _ = load(str(MODEL), dtype="float32", tokenizer_required=False)
    made = view(model)
    apply_adapter(model, AdapterConfig(init_from=str(MODEL / "adapter")), seed=0)
    objective = OBJECTIVES[name](HeadPlan("chunked", chunk), Arranger(layout))
    gradient = build(made, objective, GradientPlan(kind))
    batches, counts = objective.begin(
        [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)], made
    )
    total = {}
    for batch in batches:
        prepared = objective.prepare(batch, counts)
        loss, metrics, tree = gradient(model.trainable_parameters(), prepared.inputs, prepared.layout)
        for key, array in [("loss", loss), *metrics.items(), *tree_flatten(tree)]:
            total[key] = total.get(key, 0.0) + np.array(array)
    gradients = {key: array for key, array in total.items() if ".lora_" in key}
    return data, total, gradients


@pytest.mark.parametrize("batch_size", [4, 1])
@pytest.mark.parametrize("kind", GRADIENTS[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_gradients_and_metrics_equal_trl(name, layout, kind, batch_size):
    data, total, gradients = step(name, layout, kind, batch_size)
    assert total["loss"] == pytest.approx(float(data[f"{name}.loss"]), rel=5e-6 * SLACK)
    compare(gradients, data, f"{name}.grad.", lora_name)
    prefix = f"{name}.metric."
    logged = {key.removeprefix(prefix): float(data[key]) for key in data if key.startswith(prefix)}
    for key in logged.keys() - NOT_LOGGED:
        assert total[key] == pytest.approx(logged[key], rel=2e-5 * SLACK, abs=2e-6 * SLACK), key


def test_a_chunked_head_gives_the_same_preference_gradients():
    _, one, gradients = step("orpo", "prefix_shared", "whole", 4)
    _, other, chunked = step("orpo", "prefix_shared", "whole", 4, chunk=7)
    largest = max(np.abs(array).max() for array in gradients.values())
    assert one["loss"] == pytest.approx(float(other["loss"]), rel=5e-6 * SLACK)
    assert max(np.abs(gradients[key] - chunked[key]).max() for key in gradients) < 1e-5 * SLACK * largest


def test_the_reference_is_scored_once_if_it_is_known():
    """Known reference log-probabilities are used as they are: the reference is not run."""
    data = dict(np.load(HERE / "lora_llama_untied.npz"))
    pairs = pairs_of(*(data[f"dpo.{key}"] for key in ("input_ids", "attention_mask", "completion_mask")))
    made = view(load(str(MODEL), dtype="float32", tokenizer_required=False)[0])
    objective = OBJECTIVES["dpo"](HeadPlan(), Arranger())
    scored = with_ref_logps(objective, pairs, made)
    again, _ = Dpo(HeadPlan(), Arranger(), LossSettings(beta=0.1)).begin([scored], made)
    assert [pair.ref_logps for pair in again[0]] == [pair.ref_logps for pair in scored]
    assert all(np.isfinite(pair.ref_logps).all() for pair in scored)
