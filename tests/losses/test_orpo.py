"""ORPO's odds-ratio term against TRL's and float64's numbers, and where probabilities reach 1."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxft.losses import log_odds_ratio, orpo_loss, orpo_metrics
from tests.losses.pair_rows import (
    CONFIDENT,
    GRADIENT_REL,
    IDENTICAL,
    MASKED_CHOSEN,
    ONE_TOKEN,
    PARITY,
    SATURATED,
    VERY_NEGATIVE,
    assert_equals_reference,
    assert_means_equal_trl,
    central_differences,
    gradients,
    pair_rows,
    relative,
)

SCOPE_MASK = {"": "attention_mask", "_response_nll": "completion_mask"}  # prompt and answer; the answer


def reference_file():
    return np.load(PARITY / "orpo.npz")


def defined_pairs():
    return pair_rows(*reference_file()["pairs_used"])


def total_loss(rows, beta, mask):
    """Returns (hidden, weight) -> nll + beta x the mean term, as the loop adds them up."""
    chosen_tokens, _ = rows.split(rows.counts(mask))

    def loss(hidden, weight):
        chosen, _ = rows.split(rows.logps(hidden, weight, mask))
        nll = -chosen.sum() / chosen_tokens.sum()
        return nll + beta * orpo_loss(*rows.answer_means(hidden, weight)).mean()

    return loss


@pytest.mark.parametrize("beta", ["0.1", "1.0"])
@pytest.mark.parametrize("scope", SCOPE_MASK)
def test_loss_and_gradients_equal_trl_and_float64(beta, scope):
    rows = defined_pairs()
    loss = total_loss(rows, float(beta), SCOPE_MASK[scope])
    assert_equals_reference(loss, rows, reference_file(), f"beta_{beta}{scope}")


def test_log_odds_equal_float64():
    rows, reference = defined_pairs(), reference_file()
    log_odds = log_odds_ratio(*rows.answer_means(rows.hidden, rows.weight))
    assert relative(log_odds, reference["beta_0.1.exact.log_odds"]) < GRADIENT_REL


@pytest.mark.parametrize("kind", [ONE_TOKEN, VERY_NEGATIVE, CONFIDENT, IDENTICAL])
def test_gradients_of_each_kind_of_row_are_right_on_their_own_scale(kind):
    """A batch's largest gradient would hide what is wrong with the rows of a small one."""
    rows, reference = defined_pairs(), reference_file()
    gradient = mx.grad(total_loss(rows, 1.0, "attention_mask"))(rows.hidden, rows.weight)
    for row in (kind, kind + rows.num_pairs):
        expected = reference["beta_1.0.exact.grad_hidden"][row]
        assert np.abs(expected).max() > 0
        assert relative(gradient[row], expected) < GRADIENT_REL


@pytest.mark.parametrize("beta", ["0.1", "1.0"])
def test_metrics_equal_trl(beta):
    rows = defined_pairs()
    metrics = orpo_metrics(*rows.answer_means(rows.hidden, rows.weight), float(beta))
    assert {"rewards/accuracies", "rewards/margins", "log_odds_ratio", "log_odds_chosen"} < set(metrics)
    assert_means_equal_trl(metrics, reference_file(), f"beta_{beta}")


def test_metrics_carry_no_gradient():
    assert gradients(lambda *means: sum(orpo_metrics(*means, 0.1).values()), -0.5, -1.0) == [0.0, 0.0]


@pytest.mark.parametrize("scope", SCOPE_MASK)
def test_a_chosen_answer_of_probability_one_costs_nothing_and_moves_nothing(scope):
    """Its mean log-probability is 0 in float32, where TRL's gradient is nan."""
    rows = pair_rows(SATURATED)
    means = rows.answer_means(rows.hidden, rows.weight)
    assert means[0].tolist() == [0.0]
    loss = total_loss(rows, 0.1, SCOPE_MASK[scope])
    value, gradients = mx.value_and_grad(loss, argnums=(0, 1))(rows.hidden, rows.weight)
    assert 0 <= value.item() < 1e-6
    for gradient in gradients:
        assert mx.isfinite(gradient).all()
        assert mx.abs(gradient).max().item() < 1e-6
    assert all(mx.isfinite(metric).all() for metric in orpo_metrics(*means, 0.1).values())


def test_an_answer_without_tokens_has_no_term_and_leaves_other_pairs_theirs():
    with_it, without = pair_rows(0, 1, MASKED_CHOSEN), pair_rows(0, 1)
    terms = orpo_loss(*with_it.answer_means(with_it.hidden, with_it.weight))
    others = orpo_loss(*without.answer_means(without.hidden, without.weight))
    assert math.isnan(terms[2].item())
    assert terms[:2].tolist() == pytest.approx(others.tolist(), rel=1e-6)


def test_a_pair_worked_by_hand():
    """Probabilities 1/2 and 1/4: odds 1 and 1/3, ratio 3, sigmoid(log 3) = 3/4."""
    chosen, rejected = mx.array([math.log(1 / 2)]), mx.array([math.log(1 / 4)])
    assert log_odds_ratio(chosen, rejected).tolist() == pytest.approx([math.log(3)], rel=1e-6)
    assert orpo_loss(chosen, rejected).tolist() == pytest.approx([math.log(4 / 3)], rel=1e-6)


def exact(chosen, rejected):
    """The odds-ratio term in float64 and plain Python."""
    log_odds = chosen - rejected - math.log(-math.expm1(chosen)) + math.log(-math.expm1(rejected))
    return max(-log_odds, 0.0) + math.log1p(math.exp(-abs(log_odds)))


MEANS = [(-0.5, -2.0), (-3.0, -0.9), (-0.69, -0.7), (-0.01, -0.02), (-60.0, -2.0), (-1.0, -1.0)]


@pytest.mark.parametrize("means", MEANS)
def test_terms_and_gradients_equal_float64_and_finite_differences(means):
    term = orpo_loss(*(mx.array([mean]) for mean in means))
    assert term.item() == pytest.approx(exact(*means), rel=2e-6)
    found = gradients(orpo_loss, *means)
    assert found == pytest.approx(central_differences(exact, *means, step=1e-6), rel=1e-5)


@pytest.mark.parametrize("means", MEANS)
def test_the_gradient_is_the_doubt_over_one_minus_the_probability(means):
    """-sigmoid(-log odds) / (1 - p) by the chosen mean, the opposite sign by the rejected."""
    log_odds = log_odds_ratio(*(mx.array([mean]) for mean in means)).item()
    doubt = 1 / (1 + math.exp(log_odds))
    expected = [doubt / math.expm1(means[0]), -doubt / math.expm1(means[1])]
    assert gradients(orpo_loss, *means) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mean", [-1e-3, -1e-5, -1e-7, -1e-9, -1e-12])
def test_nearly_certain_answers_keep_their_odds(mean):
    """p = 1 - 1e-9 against 1/2: odds of 1e9. A floor under 1 - p would stop at the floor."""
    half = mx.array([math.log(0.5)])
    log_odds = log_odds_ratio(mx.array([mean]), half)
    assert log_odds.item() == pytest.approx(mean - math.log(-math.expm1(mean)), rel=1e-6)
    # Rejected, it is pushed down with 1 / (1 - p).
    _, pushed = gradients(orpo_loss, math.log(0.5), mean)
    assert pushed == pytest.approx(-1 / math.expm1(mean), rel=2e-3)


@pytest.mark.parametrize("mean", [0.0, -1e-45, -1e-38, -1e-30, -2000.0, -1e30])
@pytest.mark.parametrize("other", [0.0, -1e-30, -1.0, -2000.0, -1e30])
def test_terms_and_gradients_are_finite_at_any_mean(mean, other):
    assert mx.isfinite(orpo_loss(mx.array([mean]), mx.array([other]))).all()
    assert all(math.isfinite(g) for g in gradients(orpo_loss, mean, other))


def test_a_rejected_answer_of_probability_one_still_pulls_the_chosen_up():
    chosen, _ = gradients(orpo_loss, math.log(0.5), 0.0)
    assert chosen == pytest.approx(-2.0, rel=1e-6)  # -1 / (1 - p)


def test_swapping_the_answers_negates_the_log_odds():
    chosen, rejected = mx.array([-0.3, -5.0, -1e-4]), mx.array([-2.0, -0.1, -8.0])
    forward, backward = log_odds_ratio(chosen, rejected), log_odds_ratio(rejected, chosen)
    assert forward.tolist() == (-backward).tolist()
    # softplus(-x) - softplus(x) = -x
    difference = orpo_loss(chosen, rejected) - orpo_loss(rejected, chosen)
    assert difference.tolist() == pytest.approx((-forward).tolist(), rel=1e-6)


def test_identical_answers_cost_log_two():
    mean = mx.array([-3.0, -1e-6, -500.0, 0.0])
    assert orpo_loss(mean, mean).tolist() == pytest.approx([math.log(2)] * 4, rel=1e-6)


def test_unlikely_answers_are_compared_by_probability_alone():
    """Far below 1 the odds are the probability, and the term is -log sigmoid of the difference of means."""
    log_odds = log_odds_ratio(mx.array([-40.0]), mx.array([-42.0]))
    assert log_odds.item() == pytest.approx(2.0, rel=1e-6)


def test_half_precision_means_are_computed_with_in_float32():
    assert orpo_loss(mx.array([-1.0], mx.bfloat16), mx.array([-2.0], mx.float16)).dtype == mx.float32
