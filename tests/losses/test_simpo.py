"""SimPO against hand-worked values, finite differences, and what its margin means."""

import math

import mlx.core as mx
import pytest

from mlxft.losses import cpo_loss, simpo_loss
from tests.losses.pair_rows import MASKED_CHOSEN, central_differences, gradients, pair_rows


def loss_of(chosen, rejected, beta=2.0, gamma=0.5):
    return simpo_loss(mx.array([chosen]), mx.array([rejected]), beta, gamma).item()


def test_a_pair_worked_by_hand():
    """2 x ((-0.5) - (-1.25)) - 0.5 = 1: log(1 + 1/e). gamma over beta would give 2 x (0.75 - 0.25)."""
    assert loss_of(-0.5, -1.25) == pytest.approx(0.3132617, abs=1e-6)
    assert loss_of(-0.5, -1.25, gamma=1.5) == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("means", [(-1.0, -1.0), (-9.0, -0.5), (-0.5, -9.0)])
def test_gradients_equal_finite_differences(means):
    def exact(chosen, rejected):
        return math.log1p(math.exp(-(2.0 * (chosen - rejected) - 0.5)))

    found = gradients(lambda *given: simpo_loss(*given, 2.0, 0.5), *means)
    assert found == pytest.approx(central_differences(exact, *means), rel=1e-5, abs=1e-8)


def test_the_gradient_is_beta_times_the_doubt_in_the_margin():
    """-beta sigmoid(-(beta (c - r) - gamma)) by the chosen mean: here -2 sigmoid(0.5)."""
    pull = 2 / (1 + math.exp(-0.5))
    assert gradients(lambda *given: simpo_loss(*given, 2.0, 0.5), -1.0, -1.0) == pytest.approx([-pull, pull])


def test_a_lead_of_the_margin_alone_costs_log_two():
    for beta, gamma in ((1.0, 0.3), (2.0, 1.0), (10.0, 5.0)):
        assert loss_of(-1.0 + gamma / beta, -1.0, beta, gamma) == pytest.approx(math.log(2), rel=1e-5)


def test_without_a_margin_it_is_cpo_on_means():
    chosen, rejected = mx.array([-0.5, -3.0]), mx.array([-2.0, -1.0])
    assert simpo_loss(chosen, rejected, 2.0, 0.0).tolist() == cpo_loss(chosen, rejected, 2.0).tolist()


def test_a_larger_margin_costs_more_and_means_shifted_together_the_same():
    assert loss_of(-1.0, -2.0, gamma=1.0) > loss_of(-1.0, -2.0, gamma=0.5)
    assert loss_of(-1.0, -2.0) == loss_of(-5.0, -6.0)


def test_repeating_an_answer_does_not_change_its_loss():
    """Sums twice as long have the same mean: length buys nothing."""
    once, twice = mx.array([-6.0]) / 3, mx.array([-12.0]) / 6
    rejected = mx.array([-2.5])
    assert simpo_loss(once, rejected, 2.0, 0.5).item() == simpo_loss(twice, rejected, 2.0, 0.5).item()


def test_every_defined_row_of_the_kit_has_finite_gradients():
    pairs = [pair for pair in range(9) if pair != MASKED_CHOSEN]
    rows = pair_rows(*pairs)
    both = mx.grad(lambda h, w: simpo_loss(*rows.answer_means(h, w), 2.0, 0.5).mean(), argnums=(0, 1))
    for gradient in both(rows.hidden, rows.weight):
        assert mx.isfinite(gradient).all()
        assert gradient.any()


def test_half_precision_means_are_computed_with_in_float32():
    assert simpo_loss(mx.array([-1.0], mx.bfloat16), mx.array([-2.0]), 2.0, 0.5).dtype == mx.float32
