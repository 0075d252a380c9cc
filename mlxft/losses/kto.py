"""Kahneman-Tversky optimisation: answers marked good or bad one by one, without pairs.

    reward r = log policy(answer) - log reference(answer);  kl = how far the policy is from the reference
    a good answer should have a reward above kl, a bad one below

kl is estimated on answers put behind other rows' prompts: `kto_kl` per row, mean over the whole window.
"""

import mlx.core as mx

from mlxft.losses.rewards import Metrics


def kto_loss(
    logps: mx.array,
    ref_logps: mx.array,
    labels: mx.array,
    kl: mx.array,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> mx.array:
    """Returns the unreduced loss (B,) float32, between 0 and the row's weight.

    good: desirable_weight sigmoid(-beta (r - kl)); bad: undesirable_weight sigmoid(beta (r - kl))
    logps, ref_logps: (B,) summed log-probabilities of the answers in nats. labels: (B,) true or 1 for a
    good answer. kl: scalar, the mean of `kto_kl`; taken as at least 0 and as a constant.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, section 4; equal to TRL 1.16's.
    """
    reference_point = mx.maximum(mx.stop_gradient(kl).astype(mx.float32), 0.0)
    lead = logps.astype(mx.float32) - ref_logps.astype(mx.float32) - reference_point
    weights = mx.where(labels, desirable_weight, undesirable_weight)
    return weights * mx.sigmoid(beta * mx.where(labels, -lead, lead))


def kto_kl(mismatched_logps: mx.array, ref_mismatched_logps: mx.array) -> mx.array:
    """Returns each row's share (B,) of the estimate of kl, without gradient; single shares may be negative.

    mismatched_logps: (B,) summed log-probabilities of each row's prompt with another row's answer, under
    the policy, and under the reference. The loop divides their sum by the rows of the window.
    """
    return mx.stop_gradient(mismatched_logps.astype(mx.float32) - ref_mismatched_logps.astype(mx.float32))


def kto_metrics(logps: mx.array, ref_logps: mx.array, labels: mx.array, beta: float) -> Metrics:
    """Returns each row's metrics, (B,) float32 and without gradient, under TRL's names where it has one.

    rewards/chosen, logps/chosen: of good rows, 0 in others: divide the sum by the number of good rows.
    rewards/rejected, logps/rejected: of bad rows likewise. TRL's rewards/margins is the difference of the
    two means of rewards, and so no row's. rewards/accuracies: 1 for a good row whose reward is above 0
    and a bad one whose reward is below it; TRL logs none for KTO.
    """
    logps = mx.stop_gradient(logps.astype(mx.float32))
    rewards = beta * (logps - ref_logps.astype(mx.float32))
    return {
        "rewards/chosen": mx.where(labels, rewards, 0.0),
        "rewards/rejected": mx.where(labels, 0.0, rewards),
        "rewards/accuracies": mx.where(labels, rewards > 0, rewards < 0).astype(mx.float32),
        "logps/chosen": mx.where(labels, logps, 0.0),
        "logps/rejected": mx.where(labels, 0.0, logps),
    }
