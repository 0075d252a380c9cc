"""CPO's term against hand-worked values, finite differences, and DPO."""

import math

import mlx.core as mx
import pytest

from mlxft.losses import cpo_loss, cpo_metrics, dpo_loss
from tests.losses.pair_rows import central_differences, gradients, pair_rows


def loss_of(chosen, rejected, beta=0.1, label_smoothing=0.0):
    return cpo_loss(mx.array([chosen]), mx.array([rejected]), beta, label_smoothing).item()


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def test_a_pair_worked_by_hand():
    """(-2) - (-12) = 10, times 0.1 is 1: log(1 + 1/e); smoothed 0.9 x 0.3132617 + 0.1 x 1.3132617."""
    assert loss_of(-2.0, -12.0) == pytest.approx(0.3132617, abs=1e-6)
    assert loss_of(-2.0, -12.0, label_smoothing=0.1) == pytest.approx(0.4132617, abs=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
@pytest.mark.parametrize("logps", [(-3.0, -3.0), (-40.0, -2.0), (-2.0, -40.0)])
def test_gradients_equal_finite_differences(logps, label_smoothing):
    def exact(chosen, rejected):
        x = 0.3 * (chosen - rejected)
        return (1 - label_smoothing) * softplus(-x) + label_smoothing * softplus(x)

    found = gradients(lambda *given: cpo_loss(*given, 0.3, label_smoothing), *logps)
    assert found == pytest.approx(central_differences(exact, *logps), rel=1e-5, abs=1e-8)


def test_it_is_dpo_against_a_reference_that_knows_nothing():
    rows = pair_rows()
    logps, zero = rows.answers(rows.hidden, rows.weight), mx.zeros(rows.num_pairs)
    counts = rows.split(rows.counts())
    for variant, smoothing in (("sigmoid", 0.0), ("cdpo", 0.1)):
        by_dpo = dpo_loss(*logps, zero, zero, *counts, 0.1, variant, smoothing)
        assert cpo_loss(*logps, 0.1, smoothing).tolist() == by_dpo.tolist()


def test_every_row_of_the_kit_has_finite_gradients():
    rows = pair_rows()
    both = mx.grad(lambda h, w: cpo_loss(*rows.answers(h, w), 0.1).mean(), argnums=(0, 1))
    for gradient in both(rows.hidden, rows.weight):
        assert mx.isfinite(gradient).all()
        assert gradient.any()


def test_swapped_answers_with_certainly_wrong_labels_are_the_pair_itself():
    assert loss_of(-12.0, -2.0, label_smoothing=1.0) == loss_of(-2.0, -12.0)


def test_identical_answers_cost_log_two_whatever_the_smoothing():
    assert loss_of(-7.0, -7.0) == pytest.approx(math.log(2))
    assert loss_of(-7.0, -7.0, label_smoothing=0.3) == pytest.approx(math.log(2))


def test_a_pair_lost_by_far_costs_its_distance_and_a_won_one_nothing():
    assert loss_of(-1e5, -1.0) == pytest.approx(0.1 * (1e5 - 1), rel=1e-6)
    assert loss_of(-1.0, -1e5) == 0.0


def test_metrics_are_beta_times_log_probabilities():
    """-2 and -12, -5 and -3, at 0.1; the first pair is right."""
    metrics = cpo_metrics(mx.array([-2.0, -5.0]), mx.array([-12.0, -3.0]), 0.1)
    assert metrics["rewards/chosen"].tolist() == pytest.approx([-0.2, -0.5])
    assert metrics["rewards/rejected"].tolist() == pytest.approx([-1.2, -0.3])
    assert metrics["rewards/margins"].tolist() == pytest.approx([1.0, -0.2], rel=1e-6)
    assert metrics["rewards/accuracies"].tolist() == [1.0, 0.0]
    assert metrics["logps/chosen"].tolist() == [-2.0, -5.0]
    assert metrics["logps/rejected"].tolist() == [-12.0, -3.0]
