"""Odds-ratio preference optimisation: chosen answers are made likelier against rejected ones, no reference.

    odds(p) = p / (1 - p), of p = exp(mean log-probability of an answer's tokens)
    loss = nll + beta * mean over pairs of orpo_loss;  the paper calls beta lambda

The loop adds the nll, a mean over all tokens of the chosen rows together: prompt and answer
(`loss.nll_scope=full`, the paper and TRL), or the answer alone (`response`).
"""

import mlx.core as mx

from mlxft.losses.log_probabilities import log_one_minus_exp, log_sigmoid
from mlxft.losses.rewards import Metrics, reward_metrics


def orpo_loss(chosen_mean_logps: mx.array, rejected_mean_logps: mx.array) -> mx.array:
    """Returns the unreduced odds-ratio term (P,) float32: -log sigmoid(log odds ratio).

    *_mean_logps: (P,) mean log-probability of the answers' tokens, in nats. Finite with finite gradients
    for every pair of finite means up to 0. A mean over no tokens (nan) has no odds: drop such pairs.

    Source: Hong et al. 2024, arXiv:2403.07691, eq. 7.
    """
    return -log_sigmoid(log_odds_ratio(chosen_mean_logps, rejected_mean_logps))


def log_odds_ratio(chosen_mean_logps: mx.array, rejected_mean_logps: mx.array) -> mx.array:
    """Returns log(odds(chosen) / odds(rejected)), (P,) float32; positive where the chosen is likelier."""
    chosen = chosen_mean_logps.astype(mx.float32)
    rejected = rejected_mean_logps.astype(mx.float32)
    return (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))


def orpo_metrics(chosen_mean_logps: mx.array, rejected_mean_logps: mx.array, beta: float) -> Metrics:
    """Returns what `reward_metrics` says and the odds, (P,) each; a reward is beta times the mean logp.

    log_odds_chosen: the log odds ratio. log_odds_ratio: log sigmoid of it, which is TRL's name for the
    negated loss term. logps are means over tokens, as in TRL.
    """
    chosen, rejected = mx.stop_gradient(chosen_mean_logps), mx.stop_gradient(rejected_mean_logps)
    log_odds = log_odds_ratio(chosen, rejected)
    return {
        **reward_metrics(beta * chosen, beta * rejected, chosen, rejected),
        "log_odds_ratio": log_sigmoid(log_odds),
        "log_odds_chosen": log_odds,
    }
