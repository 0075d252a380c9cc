"""DPO's variants against TRL's and float64's numbers, hand-worked values, and what each must satisfy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxft.losses import DPO_VARIANTS, dpo_loss, dpo_metrics
from tests.losses.pair_rows import (
    CONFIDENT,
    GRADIENT_REL,
    IDENTICAL,
    MASKED_CHOSEN,
    ONE_TOKEN,
    PARITY,
    VERY_NEGATIVE,
    assert_equals_reference,
    assert_means_equal_trl,
    central_differences,
    gradients,
    pair_rows,
    relative,
)

# Names in dpo.npz, where they aren't the variant's own.
VARIANT_OF = {"sigmoid_beta_0.5": "sigmoid", "sigmoid_norm": "norm"}
IN_FILE = [*(name for name in DPO_VARIANTS if name != "norm"), *VARIANT_OF]
SMOOTHING = {"robust": 0.1, "cdpo": 0.1, "exo_pair": 0.001}


def reference_file():
    return np.load(PARITY / "dpo.npz")


def pair_losses(rows, reference, name):
    """Returns (hidden, weight) -> the losses of each pair, as dpo.npz has them under `name`."""
    ref_logps = rows.answers(rows.ref_hidden, rows.weight)
    counts = rows.split(rows.counts())
    settings = [float(reference[f"{name}.{key}"]) for key in ("beta", "label_smoothing")]

    def losses(hidden, weight):
        beta, smoothing = settings
        logps = rows.answers(hidden, weight)
        return dpo_loss(*logps, *ref_logps, *counts, beta, VARIANT_OF.get(name, name), smoothing)

    return losses


def one_pair(chosen, rejected, variant, beta=0.1, label_smoothing=None, counts=(1, 1)):
    """Returns the loss (1,) of a pair with these scores against a reference that gives every answer 0."""
    if label_smoothing is None:
        label_smoothing = SMOOTHING.get(variant, 0.0)
    zero = mx.zeros(1)
    arrays = [mx.array([x]) if isinstance(x, float) else x for x in (chosen, rejected)]
    counts = [mx.array([count]) for count in counts]
    return dpo_loss(*arrays, zero, zero, *counts, beta, variant, label_smoothing)


@pytest.mark.parametrize("name", IN_FILE)
def test_loss_and_gradients_equal_trl_and_float64(name):
    rows, reference = pair_rows(), reference_file()
    losses = pair_losses(rows, reference, name)
    assert_equals_reference(lambda hidden, weight: losses(hidden, weight).mean(), rows, reference, name)


@pytest.mark.parametrize("name", ["cdpo", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("kind", [ONE_TOKEN, VERY_NEGATIVE, CONFIDENT, IDENTICAL])
def test_gradients_of_each_kind_of_row_are_right_on_their_own_scale(name, kind):
    """A batch's largest gradient would hide what is wrong with the rows of a small one."""
    rows, reference = pair_rows(), reference_file()
    losses = pair_losses(rows, reference, name)
    gradient = mx.grad(lambda hidden: losses(hidden, rows.weight).mean())(rows.hidden)
    for row in (kind, kind + rows.num_pairs):
        expected = reference[f"{name}.exact.grad_hidden"][row]
        assert np.abs(expected).max() > 0
        assert relative(gradient[row], expected) < GRADIENT_REL


@pytest.mark.parametrize("name", IN_FILE)
def test_a_chosen_answer_without_a_token_moves_only_the_rejected_one(name):
    rows, reference = pair_rows(MASKED_CHOSEN), reference_file()
    losses = pair_losses(rows, reference, name)
    gradient = mx.grad(lambda hidden: losses(hidden, rows.weight).sum())(rows.hidden)
    assert mx.isfinite(losses(rows.hidden, rows.weight)).all()
    assert mx.isfinite(gradient).all()
    assert not gradient[0].any()
    assert gradient[1].any()


def test_the_fine_tuning_term_is_the_token_mean_over_chosen_answers():
    """As the docstring of the module tells the loop to add it to `sigmoid`: TRL's ["sigmoid", "sft"]."""
    rows, reference = pair_rows(), reference_file()
    losses = pair_losses(rows, reference, "sigmoid")
    chosen_counts, _ = rows.split(rows.counts())

    def loss(hidden, weight):
        chosen_logps, _ = rows.answers(hidden, weight)
        return losses(hidden, weight).mean() - chosen_logps.sum() / chosen_counts.sum()

    assert_equals_reference(loss, rows, reference, "sigmoid_plus_sft")


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid_beta_0.5", "ipo"])
def test_metrics_equal_trl(name):
    rows, reference = pair_rows(), reference_file()
    logps = rows.answers(rows.hidden, rows.weight)
    ref_logps = rows.answers(rows.ref_hidden, rows.weight)
    metrics = dpo_metrics(*logps, *ref_logps, float(reference[f"{name}.beta"]))
    assert set(metrics) == {
        *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
        *("logps/chosen", "logps/rejected"),
    }
    assert_means_equal_trl(metrics, reference, name)


def test_metrics_carry_no_gradient():
    def total(*logps):
        return sum(dpo_metrics(*logps, mx.zeros(1), mx.zeros(1), 0.1).values())

    assert gradients(total, -4.0, -5.0) == [0.0, 0.0]


def test_identical_answers_have_no_margin_and_are_not_counted_as_right():
    rows = pair_rows(IDENTICAL)
    # The chosen answer's numbers for both: a GPU's products may round two equal rows differently.
    logps, ref_logps = (rows.answers(h, rows.weight)[0] for h in (rows.hidden, rows.ref_hidden))
    metrics = dpo_metrics(logps, logps, ref_logps, ref_logps, 0.1)
    assert metrics["rewards/margins"].tolist() == [0.0]
    assert metrics["rewards/accuracies"].tolist() == [0.0]


# Chosen: policy -1, reference -2, 2 tokens. Rejected: policy -4, reference -3, 4 tokens. So the scores are
# 1 and -1, their means over tokens 1/2 and -1/4; the margin is 2 or 3/4; beta 1/2 makes that 1 or 3/8.
BY_HAND = {
    "sigmoid": 0.3132617,  # log(1 + 1/e)
    "cdpo": 0.4132617,  # 0.9 x 0.3132617 + 0.1 x 1.3132617
    "robust": 0.1882617,  # (0.9 x 0.3132617 - 0.1 x 1.3132617) / 0.8
    "ipo": 0.0625,  # (3/4 - 1)^2
    "hinge": 0.0,  # 1 - 1
    "norm": 0.5231233,  # log(1 + exp(-3/8))
    "exo_pair": 1.2763097,  # 0.7310586 (-0.3132617 + 0.0010005) + 0.2689414 (-1.3132617 + 6.9077553)
    "apo_zero": 0.7550813,  # 2 / (1 + exp(1/2))
}


@pytest.mark.parametrize("variant", DPO_VARIANTS)
def test_a_pair_worked_by_hand(variant):
    logps = [mx.array([x]) for x in (-1.0, -4.0, -2.0, -3.0)]
    counts = [mx.array([2]), mx.array([4])]
    loss = dpo_loss(*logps, *counts, 0.5, variant, SMOOTHING.get(variant, 0.0))
    assert loss.tolist() == pytest.approx([BY_HAND[variant]], abs=1e-6)


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def exact(variant, chosen, rejected, beta, e):
    """The same in float64 and plain Python; ipo and norm for answers of one token."""
    x = beta * (chosen - rejected)
    wins, loses = 1 / (1 + math.exp(-x)), 1 / (1 + math.exp(x))
    return {
        "sigmoid": softplus(-x),
        "norm": softplus(-x),
        "cdpo": (1 - e) * softplus(-x) + e * softplus(x),
        "robust": ((1 - e) * softplus(-x) - e * softplus(x)) / (1 - 2 * e),
        "ipo": (chosen - rejected - 0.5 / beta) ** 2,
        "hinge": max(0.0, 1 - x),
        "exo_pair": wins * math.log(wins / (1 - e)) + loses * math.log(loses / e) if e else None,
        "apo_zero": 1 / (1 + math.exp(beta * chosen)) + 1 / (1 + math.exp(-beta * rejected)),
    }[variant]


@pytest.mark.parametrize("variant", DPO_VARIANTS)
@pytest.mark.parametrize("scores", [(0.0, 0.0), (3.0, -1.0), (-20.0, 4.0), (-7.5, -60.0)])
def test_gradients_equal_finite_differences(variant, scores):
    e = SMOOTHING.get(variant, 0.0)
    expected = central_differences(lambda *s: exact(variant, *s, 0.3, e), *scores)
    found = gradients(lambda *s: one_pair(*s, variant, beta=0.3), *scores)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


# A model that is still its reference scores 0 on everything.
AT_THE_START = {
    **dict.fromkeys(["sigmoid", "norm", "cdpo", "robust"], math.log(2)),
    "hinge": 1.0,
    "ipo": 25.0,  # (1 / (2 x 0.1))^2
    "apo_zero": 1.0,
    "exo_pair": math.log(0.5) - 0.5 * (math.log(0.999) + math.log(0.001)),
}


@pytest.mark.parametrize("variant", DPO_VARIANTS)
def test_before_the_first_step_the_loss_is_known(variant):
    assert one_pair(0.0, 0.0, variant).item() == pytest.approx(AT_THE_START[variant], rel=1e-6)


def test_every_variant_is_a_loss_of_its_own():
    losses = {
        variant: one_pair(4.0, -5.0, variant, counts=(2, 3)).item()
        for variant in DPO_VARIANTS  # unlike lengths, or norm would be sigmoid
    }
    assert len({round(loss, 4) for loss in losses.values()}) == len(DPO_VARIANTS)


@pytest.mark.parametrize("variant", DPO_VARIANTS)
@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_huge_margins_have_finite_losses_and_gradients(variant, margin):
    assert mx.isfinite(one_pair(margin, 0.0, variant)).all()
    assert all(math.isfinite(g) for g in gradients(lambda *s: one_pair(*s, variant), margin, 0.0))


def test_a_lost_pair_pulls_with_all_of_beta_and_a_won_one_not_at_all():
    assert gradients(lambda *s: one_pair(*s, "sigmoid", beta=0.25), -1e4, 0.0) == [-0.25, 0.25]
    assert gradients(lambda *s: one_pair(*s, "sigmoid", beta=0.25), 1e4, 0.0) == [0.0, 0.0]


def test_hinge_leaves_pairs_alone_that_lead_by_one_over_beta():
    assert gradients(lambda *s: one_pair(*s, "hinge", beta=0.5), 2.5, 0.0) == [0.0, 0.0]
    assert gradients(lambda *s: one_pair(*s, "hinge", beta=0.5), 1.5, 0.0) == [-0.5, 0.5]


def test_ipo_is_satisfied_by_a_mean_margin_of_one_over_two_beta():
    loss = one_pair(15.0, 0.0, "ipo", beta=0.1, counts=(3, 1))
    assert loss.item() == pytest.approx(0.0, abs=1e-9)
    assert one_pair(16.5, 0.0, "ipo", beta=0.1, counts=(3, 1)).item() == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("variant", ["cdpo", "robust"])
def test_without_doubt_in_the_labels_smoothed_variants_are_sigmoid(variant):
    loss = one_pair(2.0, -3.0, variant, label_smoothing=0.0)
    assert loss.item() == pytest.approx(one_pair(2.0, -3.0, "sigmoid").item(), rel=1e-6)


def test_robust_is_right_on_average_where_labels_are_flipped():
    """Pairs right with probability 0.8 and swapped with 0.2 cost in the mean what clean ones would."""
    kept = one_pair(2.0, -3.0, "robust", label_smoothing=0.2).item()
    swapped = one_pair(-3.0, 2.0, "robust", label_smoothing=0.2).item()
    clean = one_pair(2.0, -3.0, "sigmoid").item()
    assert 0.8 * kept + 0.2 * swapped == pytest.approx(clean, rel=1e-6)


def test_cdpo_is_the_mean_of_sigmoid_over_flipped_labels():
    kept, swapped = one_pair(2.0, -3.0, "sigmoid").item(), one_pair(-3.0, 2.0, "sigmoid").item()
    smoothed = one_pair(2.0, -3.0, "cdpo", label_smoothing=0.2).item()
    assert smoothed == pytest.approx(0.8 * kept + 0.2 * swapped, rel=1e-6)


def test_exo_pair_is_zero_where_the_policy_doubts_as_much_as_the_label():
    margin = math.log(0.9 / 0.1) / 0.1  # so that sigmoid(beta margin) is 0.9
    assert one_pair(margin, 0.0, "exo_pair", label_smoothing=0.1).item() == pytest.approx(0.0, abs=1e-6)


def test_a_common_shift_of_both_answers_changes_only_apo_zero():
    for variant in DPO_VARIANTS:
        loss, shifted = one_pair(3.0, -2.0, variant).item(), one_pair(7.0, 2.0, variant).item()
        assert (abs(loss - shifted) < 1e-6) == (variant != "apo_zero")


def test_half_precision_log_probabilities_are_computed_with_in_float32():
    """-1001 is -1000 in bfloat16: the reference in float32 must not be rounded to match."""
    chosen = mx.array([-1000.0], mx.bfloat16)
    zero = mx.zeros(1, mx.bfloat16)
    loss = dpo_loss(chosen, zero, mx.array([-1001.0]), zero, mx.array([1]), mx.array([1]), 1.0)
    assert loss.dtype == mx.float32
    assert loss.item() == pytest.approx(0.3132617, abs=1e-6)


def test_an_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'sigmod'.*sigmoid, robust, cdpo, ipo, hinge, norm, exo_pair"):
        one_pair(0.0, 0.0, "sigmod")


@pytest.mark.parametrize(
    ("variant", "label_smoothing", "text"),
    [
        ("sigmoid", 0.1, "sigmoid has no use for.*robust, cdpo, exo_pair"),
        ("robust", 0.5, "at least 0 and below 0.5"),
        ("cdpo", -0.1, "at least 0 and below 0.5"),
        ("exo_pair", 0.0, "above 0"),
    ],
)
def test_a_smoothing_that_would_be_ignored_or_infinite_is_refused(variant, label_smoothing, text):
    with pytest.raises(ValueError, match=text):
        one_pair(0.0, 0.0, variant, label_smoothing=label_smoothing)
