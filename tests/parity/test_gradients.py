"""One step's loss and every gradient against TRL and PEFT (see README.md beside this file)."""


import numpy as np
import pytest

from mlxft.config.choices import GRADIENTS
from mlxft.config.schema import AdapterConfig
from mlxft.data.example import Example
from mlxft.models.decoder import view
from mlxft.models.load import load
from mlxft.models.lora import apply_adapter
from mlxft.segmented.build import build
from mlxft.segmented.plan import GradientPlan
from mlxft.training.objectives.common import HeadPlan
from mlxft.training.objectives.sft import Sft
from tests.devices import SLACK
from tests.gradients import added_up
from tests.parity.kit import HERE, MODEL, compare, lora_name


def reference() -> dict[str, np.ndarray]:
    return dict(np.load(HERE / "lora_llama_untied.npz"))


def sft_rows(data) -> list[Example]:
    rows = zip(
        data["sft.input_ids"], data["sft.completion_mask"], data["sft.attention_mask"].sum(1), strict=True
    )
    return [Example(ids[:n].astype(np.int32), mask[:n].astype(bool), "") for ids, mask, n in rows]


def loss_and_gradients(adapter: AdapterConfig, kind: str, chunk: int, batches: list[list[Example]]):
    """Sums over the micro-batches of one window, as the loop makes them."""
    model, _ = load(str(MODEL), dtype="float32", tokenizer_required=False)
    made = view(model)
    apply_adapter(model, adapter, seed=0)
    objective = Sft(HeadPlan("chunked", chunk))
    gradient = build(made, objective, GradientPlan(kind))
    counts = {"tokens": sum(objective.counts(batch)["tokens"] for batch in batches)}
    prepared = [objective.prepare(batch, counts) for batch in batches]
    params = model.trainable_parameters()
    return added_up(gradient(params, each.inputs, each.layout) for each in prepared)


@pytest.mark.parametrize("kind", GRADIENTS[1:])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_lora_gradients_equal_peft(kind, chunk):
    data = reference()
    adapter = AdapterConfig(init_from=str(MODEL / "adapter"))
    loss, gradients = loss_and_gradients(adapter, kind, chunk, [sft_rows(data)])
    assert loss == pytest.approx(float(data["sft.loss"]), rel=5e-6 * SLACK)
    compare(gradients, data, "sft.grad.", lora_name)


@pytest.mark.parametrize("kind", GRADIENTS[1:])
def test_full_gradients_equal_torch(kind):
    data = reference()
    loss, gradients = loss_and_gradients(AdapterConfig(kind="full"), kind, 7, [sft_rows(data)])
    assert loss == pytest.approx(float(data["full_sft.loss"]), rel=5e-6 * SLACK)
    compare(gradients, data, "full_sft.grad.", lambda name: (name, False))


def test_accumulation_weights_by_tokens_not_by_micro_batches():
    """Two micro-batches of 2 and 37 targets: the mean of their means is the usual bug."""
    data = reference()
    rows = sft_rows(data)
    tokens = [int(n) for n in data["accum.tokens"]]
    split = next(cut for cut in range(1, 4) if sum(row.num_supervised for row in rows[:cut]) == tokens[0])
    parts = [rows[:split], rows[split:]]
    adapter = AdapterConfig(init_from=str(MODEL / "adapter"))
    loss, gradients = loss_and_gradients(adapter, "whole", 1000, parts)
    assert loss == pytest.approx(float(data["accum.token_weighted.loss"]), rel=5e-6 * SLACK)
    assert abs(loss - float(data["accum.mean_of_means.loss"])) > 100 * 5e-6 * loss
    compare(gradients, data, "accum.token_weighted.grad.", lora_name)
