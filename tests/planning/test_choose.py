"""Which plan a run takes, what it says, and how it ends where nothing fits."""

import gc
import json
import logging
import re
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxft.config import compose
from mlxft.errors import GuardStop, InputError
from mlxft.planning import calibrate, choose
from mlxft.planning.choose import fastest
from mlxft.planning.command import survey
from mlxft.planning.predict import Prediction
from mlxft.planning.probe import ProbeModel
from mlxft.segmented.plan import GradientPlan
from mlxft.sizes import written
from tests.runs import arrays, metrics, same, train, write_rows
from tests.tiny_models import make_model

WHOLE, CHECKPOINT = GradientPlan("whole"), GradientPlan("checkpoint")
ONE, TWO = GradientPlan("segmented", 1), GradientPlan("segmented", 2)
HALF = GradientPlan("segmented", halves=True)


def prediction(plan, peak, seconds):
    return Prediction(plan, peak, seconds, 0, 0, 0)


def surveyed(model, data, *overrides):
    words = [f"model.path={model}", f"data.train={data}", "data.format=tokens", *overrides]
    return survey(compose(words, command="plan"))


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


def test_a_limit_makes_auto_take_less_than_whole_and_a_line_says_so(model, data, here, between, caplog):
    caplog.set_level(logging.INFO)
    gc.collect()
    others = mx.get_active_memory()  # of other tests' models, which they keep
    train(model, data, here / "run", "trainer.max_steps=1", f"trainer.memory_limit={between[0]}")
    said = next(line for line in caplog.messages if line.startswith("gradient: "))
    assert said.startswith(("gradient: segmented", "gradient: checkpoint"))
    assert f"of {written(between[0] * 1e9)}" in said
    peak = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[0])["peak_bytes"]
    assert peak - others < between[0] * 1e9


def test_auto_takes_halves_below_what_a_layer_needs(data, here):
    """Where they are about as large. Who asks for whole layers is told of them."""
    model = make_model(here / "model", "qwen3", intermediate_size=128)
    peaks = {line.longest.plan: line.longest.peak_bytes for line in surveyed(model, data).lines}
    assert peaks[HALF] < 0.95 * peaks[ONE]
    limit = [f"trainer.memory_limit={(peaks[HALF] + peaks[ONE]) / 2e9}"]
    assert surveyed(model, data, *limit).choice.plan == HALF
    asked = [*limit, "trainer=segmented", "trainer.segment_layers=1"]
    said = surveyed(model, data, *asked).choice.help
    assert said.startswith("By prediction these fit: trainer.segment_layers=half (about")
    gc.collect()
    others = mx.get_active_memory()
    halves = ["trainer=segmented", "trainer.segment_layers=half"]
    train(model, data, here / "run", "trainer.max_steps=1", *halves)
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
    """Its first part computed layers again, near its limit; now there is room for everything."""
    asked = ["optimizer.lr=1e-2", "trainer.save_every=1"]
    train(model, data, here / "straight", *asked, "trainer.max_steps=2", "trainer.gradient=whole")
    train(model, data, here / "run", *asked, "trainer.max_steps=2", f"trainer.memory_limit={between[0]}")
    state = json.loads((here / "run" / "checkpoints" / "step-000002" / "state.json").read_text())
    kind = state["gradient"]["kind"]
    assert kind in ("checkpoint", "segmented")
    caplog.set_level(logging.INFO)
    more = ["trainer.max_steps=3", "trainer.resume=auto", "schedule=constant"]
    train(model, data, here / "run", *asked, *more)
    assert f"gradient: {kind}" in caplog.text
    # On a CPU in float32 a plan changes no bit of what is trained.
    first = [line["loss"] for line in metrics(here / "run", "train")][:2]
    assert first == [line["loss"] for line in metrics(here / "straight", "train")]


def test_probes_are_kept_and_damage_is_measured_again(model, data, cache, caplog):
    surveyed(model, data)
    caplog.set_level(logging.INFO)
    found = surveyed(model, data)
    assert "measured in" not in caplog.text
    file = found.planner.measured_in
    assert file.parent == cache / "mlxft" / "plans"
    text = file.read_text()
    file.write_text(text.replace('"kept": {', '"kept": {}, "more": {', 1))
    surveyed(model, data)
    assert "measured in" in caplog.text
    file.write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{",
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"rows": 2', '"rows": 3'),
        lambda text: json.dumps({"figures": json.loads(text)["figures"] | {"kept": {}}}),
        lambda text: json.dumps(json.loads(text) | {"figures": {}}),
        lambda text: json.dumps(json.loads(text)["figures"]),
    ],
)
def test_figures_damaged_in_any_way_count_as_none_with_a_line_for_who_looks(
    damage, model, data, here, caplog
):
    caplog.set_level(logging.DEBUG, "mlxft")
    known = surveyed(model, data).planner.predictor.calibration
    file = here / "figures.json"
    assert calibrate._kept(file) is None and not caplog.messages[-1].startswith(str(file))
    calibrate._keep(file, known)
    assert calibrate._kept(file) == known
    file.write_text(damage(file.read_text()))
    assert calibrate._kept(file) is None
    assert caplog.messages[-1].startswith(f"{file} is damaged, and measured again")


def test_a_moment_of_other_programs_work_does_not_slow_the_figures_down(model, data, monkeypatch, here):
    """The first step of each kind is told to have taken a hundred times as long."""
    usual = surveyed(model, data).planner.predictor.calibration
    monkeypatch.setenv("XDG_CACHE_HOME", str(here))
    step, seen = ProbeModel.step, set()

    def disturbed(probe, plan, rows, length, repeat=1):
        cost, update = step(probe, plan, rows, length, repeat)
        first = (plan, length) not in seen
        seen.add((plan, length))
        return replace(cost, seconds=cost.seconds * 100) if first else cost, update

    monkeypatch.setattr(ProbeModel, "step", disturbed)
    found = surveyed(model, data).planner.predictor.calibration
    for kind, seconds in found.seconds.items():
        assert all(one < 20 * other for one, other in zip(seconds, usual.seconds[kind], strict=True))


def test_a_segment_of_more_layers_than_there_are_is_refused(model, data):
    with pytest.raises(
        InputError, match="trainer.segment_layers=9: the backward goes through the model's 8 la"
    ):
        surveyed(model, data, "trainer=segmented", "trainer.segment_layers=9")
    few = ["trainer=segmented", "trainer.segment_layers=3", "adapter.layers=2"]
    with pytest.raises(
        InputError, match="goes through the 2 from the lowest trained one on of the model's 8"
    ):
        surveyed(model, data, *few)
    plans = surveyed(model, data, "trainer=segmented", "adapter.layers=2").planner.plans()
    assert {plan.segment_layers for plan in plans} == {1, 2}


def test_a_family_that_runs_as_a_whole_keeps_to_the_limit_it_is_given(not_probed, data, here, caplog):
    """Its bound is above the limit, which says nothing yet: the trial step does."""
    bound = surveyed(not_probed, data).planner.bound_bytes
    with pytest.raises(GuardStop) as stop:
        train(not_probed, data, here / "run", f"trainer.memory_limit={bound / 50 / 1e9}")
    said = str(stop.value)
    assert "does not fit: whole took" in said and "trainer.memory_limit" in said and "data.max_length" in said
    assert not (here / "run" / "metrics.jsonl").exists()


def test_what_would_fit_is_said_in_rows_and_tokens_of_the_data(model, here):
    """Of a prompt of 80 tokens with answers of 90 and 70: padded, a pair is two rows of 169 positions."""
    pair = {"prompt_ids": [7] * 80, "chosen_ids": [5] * 90, "rejected_ids": [6] * 70}
    rows = write_rows(here / "pairs.jsonl", [pair] * 4)
    asked = ["trainer=dpo", "trainer.layout=padded"]
    padded = surveyed(model, rows, *asked).longest
    assert (padded.rows, padded.length, padded.batch_size, padded.max_length) == (8, 169, 4, 170)
    assert padded.batch_size_of(5) == 2 and padded.max_length_of(100) == 101
    shared = surveyed(model, rows, "trainer=dpo", "trainer.layout=prefix_shared").longest
    # 240 tokens of a pair but the last of each answer; cut by 60 the prompt has 20 left.
    assert (shared.rows, shared.length, shared.max_length) == (4, 238, 170)
    assert shared.max_length_of(178) == 110
    # Twice as long, answers are too.
    assert shared.max_length_of(2 * 238) == 1 + 2 * 169
    peak = min(line.longest.peak_bytes for line in surveyed(model, rows, *asked).lines)
    limited = surveyed(model, rows, *asked, f"trainer.memory_limit={peak / 1e9 * 0.9}")
    numbers = re.findall(r"data\.(batch_size|max_length)=(\d+)", limited.choice.help)
    assert numbers and all(int(number) < {"batch_size": 4, "max_length": 170}[key] for key, number in numbers)
