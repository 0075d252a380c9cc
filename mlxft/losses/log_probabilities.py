"""What the preference losses share: log-probabilities of rows, and their logarithms done safely.

Shapes: M supervised tokens, R rows (B, or P chosen and P rejected), P pairs. Nats, float32 throughout.
"""

import mlx.core as mx

# Nearer to 0 than any mean log-probability that float32 logits give (about 1e-9 at the finest), and far
# enough from the smallest normal float32 that no backend takes it, or one over it, for 0 or infinity.
_NEAREST_TO_ONE = -(2.0**-100)
_LOG_HALF = -0.6931471805599453


def row_sums(token_logps: mx.array, rows: mx.array, num_rows: int) -> mx.array:
    """Returns the summed log-probability (R,) float32 of each row; 0 for a row without a token.

    token_logps: (M,), as `linear_logps` gives them. rows: (M,) integers in [0, num_rows), whose row a
    token is; others add to none. A row's mean is this over the row's count.
    """
    # A scatter would add in an order of its own on a GPU; M x R selections always add in the same one.
    belongs = rows[None] == mx.arange(num_rows)[:, None]
    return mx.where(belongs, token_logps.astype(mx.float32)[None], 0.0).sum(axis=1)


def token_means(logps: mx.array, counts: mx.array) -> mx.array:
    """Returns sums (R,) divided by the tokens in each, counted as at least 1."""
    return logps / mx.maximum(counts.astype(mx.float32), 1.0)


def log_sigmoid(x: mx.array) -> mx.array:
    """Returns log(1 / (1 + exp(-x))), with value and gradient right at any size of x."""
    # In this order: the gradient by the second argument is one minus a sigmoid, which loses a won pair's.
    return -mx.logaddexp(-x, mx.zeros_like(x))


def smoothed_log_sigmoid_loss(x: mx.array, label_smoothing: float) -> mx.array:
    """Returns -(1 - e) log sigmoid(x) - e log sigmoid(-x): a label that is wrong with probability e."""
    return -(1 - label_smoothing) * log_sigmoid(x) - label_smoothing * log_sigmoid(-x)


def log_one_minus_exp(x: mx.array) -> mx.array:
    """Returns log(1 - exp(x)) for log-probabilities x <= 0, finite and with a finite gradient for all.

    Where x is 0, because float32 has no number between a probability and 1, the result is -69.3 and the
    gradient 0: what the logarithm truly is there can no longer be told.
    """
    x = mx.minimum(x, _NEAREST_TO_ONE)
    # The gradient of a branch not taken is multiplied by 0, and 0 times infinity is nan: each branch
    # therefore sees a harmless number wherever it isn't taken.
    near_one = x > _LOG_HALF
    by_expm1 = mx.log(-mx.expm1(mx.where(near_one, x, -0.5)))
    by_log1p = mx.log1p(-mx.exp(mx.where(near_one, -1.0, x)))
    return mx.where(near_one, by_expm1, by_log1p)
