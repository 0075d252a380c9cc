"""What is predicted is what a run then takes: peaks within a fifth, for every way to run the backward."""

import gc
import json

import mlx.core as mx
import pytest

from mlxft.config import compose
from mlxft.planning.command import survey
from tests.runs import train, write_token_rows

PLANS = {
    "whole": ["trainer.gradient=whole"],
    "checkpoint": ["trainer=checkpoint"],
    "segmented": ["trainer=segmented", "trainer.segment_layers=1"],
    "segmented of 2": ["trainer=segmented", "trainer.segment_layers=2"],
}


def predicted(model, data, *overrides):
    """The prediction of the longest batch for the plan that is asked for."""
    words = [f"model.path={model}", f"data.train={data}", "data.format=tokens", *overrides]
    found = survey(compose(words, command="plan").config)
    return next(line.longest for line in found.lines if line.longest.plan == found.choice.plan)


def measured(model, data, run_dir, *overrides):
    """`peak_bytes` of two steps of the same rows; the optimiser's state is there from the second on.

    Over what other tests' models take, which they keep.
    """
    gc.collect()
    before = mx.get_active_memory()
    train(model, data, run_dir, *overrides, "trainer.max_steps=2")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return max(json.loads(line)["peak_bytes"] for line in lines) - before


@pytest.mark.parametrize("how", PLANS)
def test_a_peak_is_predicted_within_a_fifth(how, model, data, here):
    prediction = predicted(model, data, *PLANS[how])
    assert prediction.peak_bytes == pytest.approx(measured(model, data, here / "run", *PLANS[how]), rel=0.2)


@pytest.mark.parametrize("how", ["whole", "segmented"])
def test_so_is_that_of_full_training(how, model, data, here):
    asked = [*PLANS[how], "adapter=full"]
    peak = predicted(model, data, *asked).peak_bytes
    assert peak == pytest.approx(measured(model, data, here / "run", *asked), rel=0.2)


def test_so_is_that_of_rows_longer_than_any_probe(model, here):
    """Two rows are probed at 512 positions at the most."""
    data = write_token_rows(here / "long.jsonl", [1025] * 2)
    asked = PLANS["segmented"]
    peak = predicted(model, data, *asked).peak_bytes
    assert peak == pytest.approx(measured(model, data, here / "run", *asked), rel=0.2)


@pytest.mark.parametrize("how", ["whole", "segmented"])
def test_so_is_that_of_layers_of_two_kinds(how, windowed, data, here):
    peak = predicted(windowed, data, *PLANS[how]).peak_bytes
    assert peak == pytest.approx(measured(windowed, data, here / "run", *PLANS[how]), rel=0.2)


def test_layers_below_the_adapter_keep_nothing(model, data, here):
    asked = [*PLANS["whole"], "adapter.layers=2"]
    few, all_layers = predicted(model, data, *asked), predicted(model, data, *PLANS["whole"])
    assert few.layers_bytes < all_layers.layers_bytes / 2
    assert few.peak_bytes == pytest.approx(measured(model, data, here / "run", *asked), rel=0.2)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_every_objectives_rows_are_counted(objective, model, here):
    """Positions as they are forwarded: two answers to a prompt of 20, one of 12 and one of 8 tokens."""
    answers = {"dpo": {"chosen_ids": [5] * 12, "rejected_ids": [6] * 8}, "kto": {"completion_ids": [5] * 12}}
    row = {"prompt_ids": [7] * 20, **answers[objective]} | ({"label": True} if objective == "kto" else {})
    (here / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    words = [f"model.path={model}", f"data.train={here / 'rows.jsonl'}", "data.format=tokens"]
    words += [f"trainer={objective}", "trainer.layout=padded"]
    found = survey(compose(words, command="plan").config)
    rows, length = found.longest.rows, found.longest.length
    assert (rows, length) == {"dpo": (8, 31), "kto": (4, 31)}[objective]
    assert found.longest.targets == {"dpo": 4 * 20, "kto": 4 * 12}[objective]
