"""Losses as pure functions on arrays: terms per token or per pair, unreduced."""

from mlxft.losses.linear_cross_entropy import Head, linear_cross_entropy, linear_logps
from mlxft.losses.sft import sft_loss

__all__ = ["Head", "linear_cross_entropy", "linear_logps", "sft_loss"]
