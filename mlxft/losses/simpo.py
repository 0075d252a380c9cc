"""SimPO: the mean log-probability of an answer is its reward, and the chosen one's must lead by a margin."""

import mlx.core as mx

from mlxft.losses.log_probabilities import log_sigmoid


def simpo_loss(
    chosen_mean_logps: mx.array, rejected_mean_logps: mx.array, beta: float, gamma: float
) -> mx.array:
    """Returns the unreduced loss (P,) float32: -log sigmoid(beta (chosen - rejected) - gamma).

    *_mean_logps: (P,) mean log-probability of the answers' tokens, in nats. gamma: the lead in reward that
    is asked for, itself, not its ratio to beta. What is logged is `cpo_metrics` of the means.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6; equal to TRL 1.16's.
    """
    lead = chosen_mean_logps.astype(mx.float32) - rejected_mean_logps.astype(mx.float32)
    return -log_sigmoid(beta * lead - gamma)
