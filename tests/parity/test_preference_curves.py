"""Twenty steps of DPO and ORPO by `mlxft train` against TRL, PEFT and torch, in every layout."""

import numpy as np
import pytest

from tests.parity.kit import ADAPTER, HERE, MODEL, PLAIN, assert_equals_curve
from tests.parity.pair_rows import pairs_of
from tests.runs import metrics, train, write_rows


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Reference log-probabilities of one test are not another's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pair_file(path):
    """Batch i of the curves is pairs 4 i to 4 i + 3."""
    data = np.load(HERE / "curves_llama_untied.npz")
    rows = []
    for batch in range(4):
        arrays = (data[f"pairs.{key}"][batch] for key in ("input_ids", "attention_mask", "completion_mask"))
        rows += [
            {
                "prompt_ids": pair.prompt.tolist(),
                "chosen_ids": pair.chosen.tolist(),
                "rejected_ids": pair.rejected.tolist(),
            }
            for pair in pairs_of(*arrays)
        ]
    return write_rows(path, rows)


@pytest.mark.parametrize("layout", ["auto", "padded", "packed", "prefix_shared"])
@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_twenty_steps_equal_trl(name, layout, tmp_path):
    overrides = [
        *PLAIN,
        ADAPTER,
        f"trainer={name}",
        f"trainer.layout={layout}",
        "optimizer.lr=2e-3",
        "data.shuffle=false",
        "data.batch_size=4",
        "trainer.max_steps=20",
    ]
    result = train(MODEL, pair_file(tmp_path / "pairs.jsonl"), tmp_path / "run", *overrides)
    assert_equals_curve(result, f"{name}_lora")


@pytest.mark.parametrize("when", ["once", "every_step"])
def test_when_the_reference_is_scored_changes_nothing(when, tmp_path):
    overrides = [ADAPTER, "trainer=dpo", "data.shuffle=false", "trainer.max_steps=3", "data.batch_size=4"]
    data = pair_file(tmp_path / "pairs.jsonl")
    train(MODEL, data, tmp_path / "first", *overrides)
    train(MODEL, data, tmp_path / "again", *overrides, f"loss.reference_scored={when}")
    first, again = (metrics(tmp_path / name, "train") for name in ("first", "again"))
    for one, other in zip(first, again, strict=True):
        numbers = {key: value for key, value in one.items() if key != "kind"}
        assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=1e-5, abs=1e-6)
