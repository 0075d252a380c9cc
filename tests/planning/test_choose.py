"""Which plan a run takes, what it says, and how it ends where nothing fits."""

import gc
import json
import logging

import mlx.core as mx
import pytest

from mlxft.config import compose
from mlxft.errors import GuardStop
from mlxft.planning import choose
from mlxft.planning.choose import fastest
from mlxft.planning.command import survey
from mlxft.planning.predict import Prediction
from mlxft.segmented.build import GradientPlan
from tests.runs import arrays, metrics, same, train
from tests.tiny_models import make_model

WHOLE, CHECKPOINT = GradientPlan("whole"), GradientPlan("checkpoint")
ONE, TWO = GradientPlan("segmented", 1), GradientPlan("segmented", 2)
HALF = GradientPlan("segmented", halves=True)


def prediction(plan, peak, seconds):
    return Prediction(plan, peak, seconds, 0, 0, 0)


def surveyed(model, data, *overrides):
    words = [f"model.path={model}", f"data.train={data}", "data.format=tokens", *overrides]
    return survey(compose(words, command="plan").config)


@pytest.fixture(scope="module")
def between(model, data):
    """Limits in GB: one that segments fit and the whole backward does not, one that nothing fits."""
    peaks = {line.longest.plan: line.longest.peak_bytes for line in surveyed(model, data).lines}
    assert peaks[ONE] < 0.9 * peaks[WHOLE]
    return (peaks[ONE] + peaks[WHOLE]) / 2e9, 0.3 * min(peaks.values()) / 1e9


def test_whole_is_taken_where_it_fits():
    """Nothing computes less, whatever a busy machine has measured."""
    slow = [prediction(WHOLE, 90, 9.0), prediction(CHECKPOINT, 50, 7.0), prediction(ONE, 10, 8.0)]
    assert fastest(slow, 100).plan == WHOLE


def test_else_the_fastest_that_fits_is_taken():
    known = [prediction(WHOLE, 90, 1.0), prediction(CHECKPOINT, 50, 1.2), prediction(ONE, 10, 1.5)]
    assert fastest(known, 60).plan == CHECKPOINT
    assert fastest(known, 20).plan == ONE


def test_of_equally_fast_ones_that_of_least_memory_is_taken():
    known = [prediction(CHECKPOINT, 50, 1.30), prediction(TWO, 20, 1.32), prediction(ONE, 10, 1.33)]
    assert fastest(known, 60).plan == ONE


def test_halves_are_taken_where_nothing_faster_fits():
    """They compute more than all others, whatever a busy machine has measured."""
    known = [prediction(CHECKPOINT, 50, 1.3), prediction(ONE, 20, 1.5), prediction(HALF, 10, 1.2)]
    assert fastest(known, 20).plan == ONE
    assert fastest(known, 19).plan == HALF


def test_where_none_fits_the_smallest_is_named():
    assert fastest([prediction(WHOLE, 90, 1.0), prediction(ONE, 10, 1.5)], 5).plan == ONE


def test_a_run_that_fits_by_far_measures_nothing(model, data, here, monkeypatch, caplog):
    monkeypatch.setattr(choose, "calibrate", None)  # to call it would be an error
    caplog.set_level(logging.INFO)
    train(model, data, here / "run", "trainer.max_steps=1")
    assert "gradient: whole; peak less than" in caplog.text


def test_a_limit_makes_auto_take_segments_and_a_line_says_so(model, data, here, between, caplog):
    caplog.set_level(logging.INFO)
    gc.collect()
    others = mx.get_active_memory()  # of other tests' models, which they keep
    train(model, data, here / "run", "trainer.max_steps=1", f"trainer.memory_limit={between[0]}")
    said = next(line for line in caplog.messages if line.startswith("gradient: "))
    assert said.startswith("gradient: segmented") and f"of {between[0]:.2f} GB" in said
    peak = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[0])["peak_bytes"]
    assert peak - others < between[0] * 1e9


def test_auto_takes_halves_below_what_a_layer_needs(data, here, caplog):
    """Where they are about as large. Who asks for whole layers is told of them."""
    model = make_model(here / "model", "qwen3", intermediate_size=128)
    peaks = {line.longest.plan: line.longest.peak_bytes for line in surveyed(model, data).lines}
    assert peaks[HALF] < 0.95 * peaks[ONE]
    limit = [f"trainer.memory_limit={(peaks[HALF] + peaks[ONE]) / 2e9}"]
    assert surveyed(model, data, *limit).choice.plan == HALF
    asked = [*limit, "trainer=segmented", "trainer.segment_layers=1"]
    said = surveyed(model, data, *asked).choice.help
    assert said.startswith("By prediction these fit: trainer.segment_layers=half (about")
    caplog.set_level(logging.INFO)
    gc.collect()
    others = mx.get_active_memory()
    train(model, data, here / "run", "trainer.max_steps=1", *limit)
    assert "gradient: segmented, half a layer a segment" in caplog.text
    peak = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[0])["peak_bytes"]
    assert peak - others < (peaks[HALF] + peaks[ONE]) / 2


def test_near_the_limit_the_longest_batch_is_tried_and_changes_nothing(model, data, here, between, caplog):
    caplog.set_level(logging.INFO)
    near = [f"trainer.memory_limit={between[0]}", "trainer=segmented", "adapter.dropout=0.1"]
    train(model, data, here / "near", "trainer.max_steps=2", *near)
    assert "is tried first" in caplog.text
    caplog.clear()
    train(model, data, here / "far", "trainer.max_steps=2", *near[1:])
    assert "is tried first" not in caplog.text
    assert metrics(here / "near") == metrics(here / "far")
    assert same(arrays(here / "near" / "adapter"), arrays(here / "far" / "adapter"))


def test_what_cannot_fit_is_refused_before_it_starts_with_what_would(model, data, here, between):
    with pytest.raises(GuardStop) as stop:
        train(model, data, here / "run", "trainer.gradient=whole", f"trainer.memory_limit={between[0]}")
    said = str(stop.value)
    assert "the longest batch (2 rows of 160 positions, 160 trained on) does not fit" in said
    assert "trainer.memory_limit" in said and "trainer=segmented (about" in said
    assert "data.batch_size=1 with trainer.gradient=whole" in said and "data.max_length=" in said
    assert not (here / "run" / "metrics.jsonl").exists()


def test_what_is_said_to_fit_fits(model, data, here, between):
    _, nothing_fits = between
    found = surveyed(model, data, f"trainer.memory_limit={nothing_fits * 2}")
    for line in found.lines:
        wanted = found.longest.at(line.fits_length)
        limit = found.planner.limit_bytes
        assert not line.fits_length or found.planner.predictor(line.longest.plan, wanted).peak_bytes <= limit
        longer = found.longest.at(line.fits_length + 1)
        assert found.planner.predictor(line.longest.plan, longer).peak_bytes > limit


def test_a_continued_run_keeps_its_plan_while_that_fits(model, data, here, between, caplog):
    """Its first part ran in segments of two layers, near its limit; now there is room for everything."""
    asked = ["optimizer.lr=1e-2", "trainer.save_every=1"]
    train(model, data, here / "straight", *asked, "trainer.max_steps=2", "trainer.gradient=whole")
    train(model, data, here / "run", *asked, "trainer.max_steps=2", f"trainer.memory_limit={between[0]}")
    state = json.loads((here / "run" / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["gradient"]["kind"] == "segmented"
    caplog.set_level(logging.INFO)
    more = ["trainer.max_steps=3", "trainer.resume=auto", "schedule=constant"]
    train(model, data, here / "run", *asked, *more)
    assert "gradient: segmented" in caplog.text
    # On a CPU in float32 a plan changes no bit of what is trained.
    first = [line["loss"] for line in metrics(here / "run", "train")][:2]
    assert first == [line["loss"] for line in metrics(here / "straight", "train")]


def test_probes_are_kept_and_damage_is_measured_again(model, data, cache, caplog):
    surveyed(model, data)
    caplog.set_level(logging.INFO)
    surveyed(model, data)
    assert "measured in" not in caplog.text
    for file in (cache / "mlxft" / "plans").iterdir():
        file.write_text("{")
    surveyed(model, data)
    assert "measured in" in caplog.text
