"""Losses as pure functions on arrays: terms per token or per pair, unreduced."""

from mlxft.losses.cpo import cpo_loss, cpo_metrics
from mlxft.losses.dpo import DPO_VARIANTS, dpo_loss, dpo_metrics
from mlxft.losses.kto import kto_kl, kto_loss, kto_metrics
from mlxft.losses.linear_cross_entropy import (
    Head,
    linear_cross_entropy,
    linear_logps,
    stepped_cross_entropy,
    stepped_divergence,
    stepped_gradients,
    stepped_scores,
)
from mlxft.losses.log_probabilities import row_sums
from mlxft.losses.orpo import log_odds_ratio, orpo_loss, orpo_metrics
from mlxft.losses.sft import sft_loss
from mlxft.losses.simpo import simpo_loss

__all__ = [
    "DPO_VARIANTS",
    "Head",
    "cpo_loss",
    "cpo_metrics",
    "dpo_loss",
    "dpo_metrics",
    "kto_kl",
    "kto_loss",
    "kto_metrics",
    "linear_cross_entropy",
    "linear_logps",
    "log_odds_ratio",
    "orpo_loss",
    "orpo_metrics",
    "row_sums",
    "sft_loss",
    "simpo_loss",
    "stepped_cross_entropy",
    "stepped_divergence",
    "stepped_gradients",
    "stepped_scores",
]
