"""The loss of supervised fine-tuning: the negative log-probability of each supervised token."""

import mlx.core as mx


def sft_loss(token_logps: mx.array, mask: mx.array) -> mx.array:
    """Returns the unreduced loss (B, T): -log p of each target where `mask` is true, else 0.

    token_logps: (B, T) float32, log-probabilities in nats of each position's target. mask: (B, T).
    Training divides once, by the supervised tokens of the whole accumulation window, and makes the same sum
    without all log-probabilities (`linear_cross_entropy`).
    """
    return mx.where(mask, -token_logps, mx.zeros_like(token_logps))
