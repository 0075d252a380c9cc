"""Direct preference optimisation and its variants: a policy against a reference, pair by pair.

    s = log policy(answer) - log reference(answer), summed over the answer's tokens
    margin = s(chosen) - s(rejected);  every variant is a function of beta times it, or of the two s

The fine-tuning term that may be added to any of them ("sigmoid + SFT") is not a term per pair: it is the
mean of -log policy over all chosen tokens together. The loop adds
`weight * -chosen_logps.sum() / chosen_counts.sum()`, both sums over the whole window.
"""

import math

import mlx.core as mx

from mlxft.losses.log_probabilities import log_sigmoid, smoothed_log_sigmoid_loss, token_means
from mlxft.losses.rewards import Metrics, reward_metrics


def dpo_loss(
    chosen_logps: mx.array,
    rejected_logps: mx.array,
    ref_chosen_logps: mx.array,
    ref_rejected_logps: mx.array,
    chosen_counts: mx.array,
    rejected_counts: mx.array,
    beta: float,
    variant: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> mx.array:
    """Returns the unreduced loss (P,) float32 of each pair.

    *_logps: (P,) summed log-probabilities of the answers in nats, policy and reference (`ref_`).
    *_counts: (P,) their tokens; only ipo and norm use them. beta: how strongly to stay near the reference.
    variant: a key of `DPO_VARIANTS`. label_smoothing: the chance that a pair's label is wrong, for cdpo,
    robust and exo_pair; 0 for all others.

    Raises: ValueError for an unknown variant, and for a label_smoothing that the variant has no use for.
    Source: of each variant, at its function below. Equal to TRL 1.16's, which calls norm sigmoid_norm.
    """
    _check_variant(variant, label_smoothing)
    chosen = chosen_logps.astype(mx.float32) - ref_chosen_logps.astype(mx.float32)
    rejected = rejected_logps.astype(mx.float32) - ref_rejected_logps.astype(mx.float32)
    if variant in _PER_TOKEN:
        chosen, rejected = token_means(chosen, chosen_counts), token_means(rejected, rejected_counts)
    return DPO_VARIANTS[variant](chosen, rejected, beta, label_smoothing)


def _check_variant(variant: str, label_smoothing: float) -> None:
    """Raises ValueError, naming what would do, where `dpo_loss` could not compute what is asked for."""
    if variant not in DPO_VARIANTS:
        raise ValueError(f"no DPO variant is called {variant!r}; there are {', '.join(DPO_VARIANTS)}")
    if variant not in _SMOOTHED and label_smoothing != 0:
        raise ValueError(
            f"label_smoothing is {label_smoothing}, which {variant} has no use for: "
            f"set it to 0, or take one of {', '.join(_SMOOTHED)}"
        )
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it has to be at least 0 and below 0.5")
    if variant == "exo_pair" and label_smoothing == 0:
        raise ValueError("exo_pair divides by label_smoothing: it has to be above 0, for instance 0.001")


def dpo_metrics(
    chosen_logps: mx.array,
    rejected_logps: mx.array,
    ref_chosen_logps: mx.array,
    ref_rejected_logps: mx.array,
    beta: float,
) -> Metrics:
    """Returns what `reward_metrics` says, (P,) each; a reward is beta (log policy - log reference)."""
    chosen = chosen_logps.astype(mx.float32) - ref_chosen_logps.astype(mx.float32)
    rejected = rejected_logps.astype(mx.float32) - ref_rejected_logps.astype(mx.float32)
    return reward_metrics(beta * chosen, beta * rejected, chosen_logps, rejected_logps)


def _sigmoid(chosen, rejected, beta, _):
    """-log sigmoid(beta margin). Rafailov et al. 2023, arXiv:2305.18290, eq. 7."""
    return -log_sigmoid(beta * (chosen - rejected))


def _cdpo(chosen, rejected, beta, label_smoothing):
    """The expected sigmoid loss under labels flipped with probability e. Mitchell 2023, "cDPO", eq. 3."""
    return smoothed_log_sigmoid_loss(beta * (chosen - rejected), label_smoothing)


def _robust(chosen, rejected, beta, label_smoothing):
    """The sigmoid loss with the flips' expected effect taken out; may be negative.

    ((1 - e) L(margin) - e L(-margin)) / (1 - 2e). Chowdhury et al. 2024, arXiv:2403.00409.
    """
    x = beta * (chosen - rejected)
    kept, flipped = -log_sigmoid(x), -log_sigmoid(-x)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def _ipo(chosen, rejected, beta, _):
    """(margin of token means - 1 / (2 beta))^2. Azar et al. 2023, arXiv:2310.12036, eq. 17."""
    return mx.square(chosen - rejected - 1 / (2 * beta))


def _hinge(chosen, rejected, beta, _):
    """max(0, 1 - beta margin). Zhao et al. 2023, arXiv:2305.10425, on scores against a reference."""
    return mx.maximum(1 - beta * (chosen - rejected), 0.0)


def _exo_pair(chosen, rejected, beta, label_smoothing):
    """KL(softmax of the two scores || (1 - e, e)). Ji et al. 2024, arXiv:2402.00856, eq. 16."""
    x = beta * (chosen - rejected)
    for_chosen = mx.sigmoid(x) * (log_sigmoid(x) - math.log1p(-label_smoothing))
    return for_chosen + mx.sigmoid(-x) * (log_sigmoid(-x) - math.log(label_smoothing))


def _apo_zero(chosen, rejected, beta, _):
    """sigmoid(-beta s(chosen)) + sigmoid(beta s(rejected)).

    D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7.
    """
    return mx.sigmoid(-beta * chosen) + mx.sigmoid(beta * rejected)


DPO_VARIANTS = {
    "sigmoid": _sigmoid,
    "robust": _robust,
    "cdpo": _cdpo,
    "ipo": _ipo,
    "hinge": _hinge,
    "norm": _sigmoid,  # of token means
    "exo_pair": _exo_pair,
    "apo_zero": _apo_zero,
}
_PER_TOKEN = ("ipo", "norm")
_SMOOTHED = ("robust", "cdpo", "exo_pair")
