"""Contrastive preference optimisation: DPO's term without a reference, beside fine-tuning on the chosen.

    loss = mean over pairs of cpo_loss + alpha * nll

The loop adds the nll, the mean of -log p over all chosen tokens together. TRL's takes the answer's tokens.
"""

import mlx.core as mx

from mlxft.losses.log_probabilities import smoothed_log_sigmoid_loss
from mlxft.losses.rewards import Metrics, reward_metrics


def cpo_loss(
    chosen_logps: mx.array, rejected_logps: mx.array, beta: float, label_smoothing: float = 0.0
) -> mx.array:
    """Returns the unreduced preference term (P,) float32: -log sigmoid(beta (chosen - rejected)).

    *_logps: (P,) summed log-probabilities of the answers in nats. label_smoothing: e in [0, 1], the
    chance that a pair's label is wrong: (1 - e) of the loss plus e of the loss of the swapped pair.

    Source: Xu et al. 2024, arXiv:2401.08417, eq. 3; equal to TRL 1.16's.
    """
    margin = chosen_logps.astype(mx.float32) - rejected_logps.astype(mx.float32)
    return smoothed_log_sigmoid_loss(beta * margin, label_smoothing)


def cpo_metrics(chosen_logps: mx.array, rejected_logps: mx.array, beta: float) -> Metrics:
    """Returns what `reward_metrics` says, (P,) each; a reward is beta times the logps that the loss saw.

    For SimPO give the means, as to its loss.
    """
    return reward_metrics(beta * chosen_logps, beta * rejected_logps, chosen_logps, rejected_logps)
