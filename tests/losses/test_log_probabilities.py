"""What the preference losses share, against float64."""

import math

import mlx.core as mx
import pytest

from mlxft.losses.log_probabilities import log_one_minus_exp, log_sigmoid, row_sums

# Both sides of the change of formula at log(1/2), and far out.
BELOW_ZERO = [-1e-12, -1e-6, -0.1, -0.6931, -0.69315, -0.7, -2.0, -10.0, -30.0, -90.0]


def test_tokens_add_up_by_row_and_a_row_without_one_is_zero():
    sums = row_sums(mx.array([-1.0, -2.0, -4.0, -8.0]), mx.array([0, 2, 2, 0]), 3)
    assert sums.tolist() == [-9.0, 0.0, -6.0]


def test_a_token_gets_the_gradient_of_its_own_row_and_one_of_no_row_none():
    def weighted(logps):
        return (row_sums(logps, mx.array([1, 0, 1, 9]), 2) * mx.array([3.0, 5.0])).sum()

    assert mx.grad(weighted)(mx.array([-1.0, -2.0, -4.0, -8.0])).tolist() == [5.0, 3.0, 5.0, 0.0]


def test_an_impossible_token_spoils_only_its_own_row():
    sums = row_sums(mx.array([-1.0, -mx.inf]), mx.array([0, 1]), 2)
    assert sums.tolist() == [-1.0, -math.inf]


@pytest.mark.parametrize("x", BELOW_ZERO)
def test_log_one_minus_exp_and_its_gradient_equal_float64(x):
    expected = math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x))
    assert log_one_minus_exp(mx.array(x)).item() == pytest.approx(expected, rel=1e-6)
    slope = mx.grad(log_one_minus_exp)(mx.array(x)).item()
    assert slope == pytest.approx(math.exp(x) / math.expm1(x), rel=1e-5)


def test_log_one_minus_exp_of_zero_is_finite_without_a_gradient():
    assert log_one_minus_exp(mx.array(0.0)).item() == pytest.approx(-100 * math.log(2), rel=1e-6)
    assert mx.grad(log_one_minus_exp)(mx.array(0.0)).item() == 0.0


@pytest.mark.parametrize("x", [-1e4, -80.0, -1.0, 0.0, 1.0, 80.0, 1e4])
def test_log_sigmoid_and_its_gradient_equal_float64(x):
    expected = min(x, 0.0) - math.log1p(math.exp(-abs(x)))
    assert log_sigmoid(mx.array(x)).item() == pytest.approx(expected, rel=1e-6, abs=1e-30)
    slope = math.exp(-max(x, 0.0)) / (1 + math.exp(-abs(x))) if x < 700 else 0.0
    assert mx.grad(log_sigmoid)(mx.array(x)).item() == pytest.approx(slope, rel=1e-5, abs=1e-30)
