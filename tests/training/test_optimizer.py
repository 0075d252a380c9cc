"""Schedules, clipping and optimisers against values worked out by hand."""

import math

import mlx.core as mx
import pytest

from mlxft.config.schema import OptimizerConfig, ScheduleConfig
from mlxft.errors import InputError
from mlxft.training.optimizer import (
    CLASSES,
    Group,
    build,
    check_schedule,
    clip,
    global_norm,
    grouping,
    learning_rate,
)


def rates(schedule, total, peak=1.0):
    return [learning_rate(step, total, peak, schedule) for step in range(total)]


def test_warm_up_rises_in_equal_steps_and_the_first_one_already_learns():
    assert rates(ScheduleConfig("constant", warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_is_half_way_in_the_middle_and_never_quite_reaches_its_end():
    values = rates(ScheduleConfig("cosine", final_ratio=0.2), 4)
    # final + (peak - final) (1 + cos(pi p)) / 2 at p = 0, 1/4, 1/2, 3/4
    assert values == pytest.approx([1.0, 0.6 + 0.4 / math.sqrt(2), 0.6, 0.6 - 0.4 / math.sqrt(2)])


def test_linear_falls_in_equal_steps_after_the_warm_up():
    assert rates(ScheduleConfig("linear", warmup_steps=1, final_ratio=0.5), 5, peak=2.0) == [
        2.0,
        2.0,
        1.75,
        1.5,
        1.25,
    ]


def test_wsd_stays_at_its_peak_and_falls_in_its_last_steps():
    schedule = ScheduleConfig("wsd", warmup_steps=2, final_ratio=0.5, decay_share=0.4)
    # 4 of 10 steps: 2 + (1 - 2) k / 4 for k = 0 to 3
    assert rates(schedule, 10, peak=2.0) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.75, 1.5, 1.25]


def test_wsd_falls_in_one_step_at_least():
    assert rates(ScheduleConfig("wsd", decay_share=0.01), 3) == [1.0, 1.0, 1.0]  # the next one would be 0


@pytest.mark.parametrize("schedule, message", [
    (ScheduleConfig("cosine", warmup_steps=10), "warmup_steps=10 are not fewer than the run's 10 steps"),
    (ScheduleConfig("wsd", warmup_steps=7, decay_share=0.4), "the 4 last steps that schedule.decay_share"),
])
def test_a_warm_up_that_leaves_no_step_at_the_peak_is_refused(schedule, message):
    with pytest.raises(InputError, match=message):
        check_schedule(schedule, 10)
    check_schedule(ScheduleConfig("wsd", warmup_steps=6, decay_share=0.4), 10)


def test_arrays_are_in_groups_by_what_they_are():
    assert grouping(OptimizerConfig()) is None
    group_of = grouping(OptimizerConfig(lora_plus_ratio=16.0, decay_vectors=False))
    vector, matrix = mx.zeros(2), mx.zeros((2, 2))
    assert group_of("layers.0.q_proj.lora_b", matrix) == Group(16.0, True)
    assert group_of("layers.0.q_proj.lora_a", matrix) == Group(1.0, True)
    assert group_of("layers.0.q_proj.m", vector) == Group(1.0, False)
    assert group_of("norm.weight", vector) == Group(1.0, False)
    assert grouping(OptimizerConfig(lora_plus_ratio=2.0))("norm.weight", vector) == Group(1.0, True)


def test_a_warm_up_of_all_steps_does_not_divide_by_zero():
    assert rates(ScheduleConfig("cosine", warmup_steps=2), 2) == [0.5, 1.0]


def test_clipping_scales_all_gradients_by_one_factor():
    gradients = {"a": mx.array([3.0]), "b": {"c": mx.array([[4.0]])}}
    norm = global_norm(gradients)
    assert norm.item() == 5.0
    clipped = clip(gradients, norm, 1.0)
    assert clipped["a"].item() == pytest.approx(3 / (5 + 1e-6), rel=1e-6)
    assert clipped["b"]["c"].item() == pytest.approx(4 / (5 + 1e-6), rel=1e-6)


@pytest.mark.parametrize("limit", [0, 100.0])
def test_no_limit_or_a_norm_below_it_leaves_gradients_as_they_are(limit):
    gradients = {"a": mx.array([3.0, 4.0])}
    assert clip(gradients, global_norm(gradients), limit)["a"].tolist() == [3.0, 4.0]


def test_the_first_step_of_corrected_adam_moves_by_the_learning_rate():
    """m / (1 - b1) = g and v / (1 - b2) = g^2: the step is lr g / (|g| + eps), after the decay."""
    optimizer = build(OptimizerConfig(lr=0.1, weight_decay=0.5))
    moved = optimizer.apply_gradients({"w": mx.array([2.0, -3.0])}, {"w": mx.array([1.0, 1.0])})
    assert moved["w"].tolist() == pytest.approx([0.95 - 0.1, 0.95 + 0.1], rel=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimiser_lowers_a_quadratic(name):
    optimizer = build(OptimizerConfig(name=name, lr=0.05, weight_decay=0.0))
    weights = {"w": mx.array([[1.0, -2.0], [0.5, 1.5]])}
    before = mx.square(weights["w"]).sum().item()
    for _ in range(20):
        optimizer.learning_rate = 0.05
        weights = optimizer.apply_gradients({"w": 2 * weights["w"]}, weights)
    assert mx.square(weights["w"]).sum().item() < before
