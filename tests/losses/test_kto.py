"""KTO against hand-worked values, finite differences, and what its reference point means."""

import math

import mlx.core as mx
import pytest

from mlxft.losses import kto_kl, kto_loss, kto_metrics
from tests.losses.pair_rows import central_differences, gradients, pair_rows


def loss_of(reward, good, kl=0.0, beta=0.1, weights=(1.0, 1.0)):
    """The loss of one row with this reward, against a reference that gives every answer -5."""
    logps, ref_logps = mx.array([reward - 5.0]), mx.array([-5.0])
    return kto_loss(logps, ref_logps, mx.array([good]), mx.array(kl), beta, *weights).item()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_rows_worked_by_hand():
    """Reward 12, kl 2, beta 0.1: one above. Good: 1 - sigmoid(1) = 0.2689414; bad: sigmoid(1)."""
    assert loss_of(12.0, True, kl=2.0) == pytest.approx(0.2689414, abs=1e-6)
    assert loss_of(12.0, False, kl=2.0) == pytest.approx(0.7310586, abs=1e-6)
    assert loss_of(12.0, True, kl=2.0, weights=(1.5, 4.0)) == pytest.approx(0.4034121, abs=1e-6)
    assert loss_of(12.0, False, kl=2.0, weights=(1.5, 4.0)) == pytest.approx(2.9242343, abs=1e-6)


def test_a_batch_keeps_its_order_and_each_label_its_own_term():
    logps, ref_logps = mx.array([-3.0, -20.0, -8.0]), mx.array([-5.0, -10.0, -8.0])
    labels = mx.array([True, False, True])
    loss = kto_loss(logps, ref_logps, labels, mx.array(1.0), 0.5, 2.0, 3.0)
    # Rewards 2, -10, 0; leads 1, -11, -1.
    assert loss.tolist() == pytest.approx([2 * sigmoid(-0.5), 3 * sigmoid(-5.5), 2 * sigmoid(0.5)], rel=1e-5)


def test_labels_may_be_numbers():
    arrays = mx.array([-3.0, -4.0]), mx.array([-5.0, -5.0])
    as_numbers = kto_loss(*arrays, mx.array([1, 0]), mx.array(0.5), 0.1)
    as_truths = kto_loss(*arrays, mx.array([True, False]), mx.array(0.5), 0.1)
    assert as_numbers.tolist() == as_truths.tolist()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("reward", [0.0, 4.0, -30.0])
def test_gradients_equal_finite_differences(reward, good):
    labels, kl, weights = mx.array([good]), mx.array(1.5), (1.3, 0.7)

    def exact(logp):
        lead = 0.3 * (logp + 5 - 1.5)
        return weights[0] * sigmoid(-lead) if good else weights[1] * sigmoid(lead)

    found = gradients(lambda x: kto_loss(x, mx.array([-5.0]), labels, kl, 0.3, *weights), reward - 5.0)
    assert found == pytest.approx(central_differences(exact, reward - 5.0), rel=1e-5, abs=1e-8)


def test_a_reward_at_the_reference_point_costs_half_and_pulls_the_most():
    assert loss_of(3.0, True, kl=3.0) == loss_of(3.0, False, kl=3.0) == 0.5

    def pull(reward):
        labels = mx.array([True])
        return gradients(lambda x: kto_loss(x, mx.array([0.0]), labels, mx.array(3.0), 0.4), reward)[0]

    assert pull(3.0) == pytest.approx(-0.4 / 4)  # beta sigmoid'(0)
    assert abs(pull(0.0)) < abs(pull(3.0)) > abs(pull(6.0))


def test_good_and_bad_share_one_of_weight_between_them():
    for reward in (-40.0, -1.0, 0.0, 7.0, 500.0):
        assert loss_of(reward, True, kl=2.0) + loss_of(reward, False, kl=2.0) == pytest.approx(1.0)


def test_a_loss_lies_between_nothing_and_its_weight_however_far_the_reward():
    assert loss_of(1e5, True) == loss_of(-1e5, False) == 0.0
    assert loss_of(-1e5, True, weights=(2.0, 3.0)) == 2.0
    assert loss_of(1e5, False, weights=(2.0, 3.0)) == 3.0


def test_an_estimate_of_kl_below_zero_counts_as_zero():
    assert loss_of(4.0, True, kl=-7.0) == loss_of(4.0, True, kl=0.0)
    assert loss_of(4.0, True, kl=0.01) > loss_of(4.0, True, kl=0.0)


def test_no_gradient_flows_through_kl():
    def loss(logps, mismatched):
        kl = kto_kl(mismatched, mx.array([-9.0])).mean()
        return kto_loss(logps, mx.array([-5.0]), mx.array([True]), kl, 0.1).sum()

    by_logps, by_kl = mx.grad(loss, argnums=(0, 1))(mx.array([-4.0]), mx.array([-8.0]))
    assert by_logps.item() < 0
    assert by_kl.item() == 0.0
    given = mx.grad(lambda kl: kto_loss(mx.array([-4.0]), mx.array([-5.0]), mx.array([True]), kl, 0.1).sum())
    assert given(mx.array(1.0)).item() == 0.0
    assert gradients(lambda mismatched: kto_kl(mismatched, mx.array([-9.0])), -8.0) == [0.0]


def test_kl_is_the_mean_log_ratio_on_mismatched_answers():
    """Log ratios 1, -3 and 5: single shares may be negative, their mean is 1."""
    shares = kto_kl(mx.array([-4.0, -8.0, -1.0]), mx.array([-5.0, -5.0, -6.0]))
    assert shares.tolist() == [1.0, -3.0, 5.0]
    assert shares.mean().item() == 1.0


def test_metrics_are_those_of_each_label_and_zero_elsewhere():
    logps, ref_logps = mx.array([-3.0, -20.0, -8.0]), mx.array([-5.0, -10.0, -8.5])
    metrics = kto_metrics(logps, ref_logps, mx.array([True, False, True]), 0.1)
    assert metrics["rewards/chosen"].tolist() == pytest.approx([0.2, 0.0, 0.05])
    assert metrics["rewards/rejected"].tolist() == pytest.approx([0.0, -1.0, 0.0])
    assert metrics["logps/chosen"].tolist() == [-3.0, 0.0, -8.0]
    assert metrics["logps/rejected"].tolist() == [0.0, -20.0, 0.0]


def test_a_row_is_right_where_its_reward_has_the_sign_of_its_label():
    """Rewards above, at and below 0, of good rows and then of bad ones: no change is not right."""
    logps = mx.array([-4.0, -5.0, -6.0] * 2)
    metrics = kto_metrics(logps, mx.full(6, -5.0), mx.array([True] * 3 + [False] * 3), 0.1)
    assert metrics["rewards/accuracies"].tolist() == [1, 0, 0, 0, 0, 1]


def test_metrics_carry_no_gradient():
    def total(logps):
        return sum(kto_metrics(logps, mx.array([-5.0]), mx.array([True]), 0.1).values())

    assert gradients(total, -4.0) == [0.0]


def test_every_row_of_the_kit_has_finite_gradients():
    rows = pair_rows()
    ref_logps = rows.logps(rows.ref_hidden, rows.weight)
    labels = mx.arange(2 * rows.num_pairs) < rows.num_pairs

    def loss(hidden, weight):
        return kto_loss(rows.logps(hidden, weight), ref_logps, labels, mx.array(2.0), 0.1).mean()

    for gradient in mx.grad(loss, argnums=(0, 1))(rows.hidden, rows.weight):
        assert mx.isfinite(gradient).all()
        assert gradient.any()
