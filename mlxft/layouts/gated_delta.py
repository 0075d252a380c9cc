"""The gated delta rule with a gradient, on every backend.

    S[t] = g[t] S[t - 1] + d[t] k[t]^T        d[t] = b[t] (v[t] - g[t] S[t - 1] k[t])
    y[t] = S[t] q[t]

Metal has kernels for it (`mx.fast.gated_delta_update`). Elsewhere MLX unrolls a loop over time, thousands
of small operations a layer. There the row is cut into chunks of C steps: with G[t] the product of a chunk's
decays up to t, and A[t, i] = b[t] G[t] / G[i] k[t].k[i] for i < t, a chunk's d are

    (I + A) d = b (v - G S k)                 S: the state that enters the chunk

so that, but for that state, all chunks are computed at once, and a chunk's end is two products away from
its beginning.

Source: Yang et al. 2024, "Gated Delta Networks", section 3.3.
Shapes: B rows, T steps, K key heads, V value heads, N chunks, Dk and Dv widths of keys and values.
"""

from collections.abc import Callable
from typing import Optional

import mlx.core as mx
import mlx.nn as nn

from mlxft.backend import backend

_CHUNK = 64
_BLOCK = 16  # rows solved one after the other; larger triangles are put together from these

State = tuple[mx.array, mx.array]


class GatedDelta:
    """Stands for `gated_delta_update` of mlx-lm, whose kernel has no gradient.

    original: taken for what the rule here does not do: masks, bounded gates, a gate for each entry of a key.
    """

    follows_layouts = True

    def __init__(self, original: Callable):
        self.original = original

    def __call__(self, q, k, v, a, b, A_log, dt_bias, state=None, mask=None, *, use_kernel=True, **rest):
        if mask is not None or rest or a.ndim != 3:
            return self.original(q, k, v, a, b, A_log, dt_bias, state, mask, use_kernel=False, **rest)
        log_decay = -mx.exp(A_log.astype(mx.float32)) * nn.softplus(a + dt_bias)
        return gated_delta(q, k, v, log_decay, mx.sigmoid(b), state)


def gated_delta(q, k, v, log_decay, beta, state: Optional[mx.array] = None) -> State:
    """Returns the outputs (B, T, V, Dv) and the final state (B, V, Dv, Dk).

    q, k: (B, T, K, Dk). v: (B, T, V, Dv). log_decay: log g, and beta: b, (B, T, V). state: zeros if None.
    """
    if state is None:
        state = mx.zeros((k.shape[0], *v.shape[2:], k.shape[3]), mx.float32)
    if backend() == "metal":
        return tuple(mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state))
    return in_chunks(q, k, v, log_decay, beta, state)


def in_chunks(q, k, v, log_decay, beta, state: mx.array) -> State:
    """The same by chunks, in float32."""
    length, dtype = q.shape[1], q.dtype
    q, k, v, beta, total = _chunks(q, k, v, beta, log_decay)
    total = mx.cumsum(total, axis=-1)  # log G, (B, V, N, C)
    grown = mx.exp(total)[..., None]
    ratio = mx.exp(mx.minimum(total[..., :, None] - total[..., None, :], 0.0))  # G[t] / G[i] for i <= t
    keys = mx.swapaxes(k, -1, -2)
    solve = inverse(mx.tril(beta[..., None] * ratio * (k @ keys), -1))
    own = solve @ (beta[..., None] * v)
    from_state = solve @ (beta[..., None] * grown * k)
    seen = mx.tril(ratio * (q @ keys))
    asked, left = grown * q, ratio[..., -1:, :] * keys
    state = mx.swapaxes(state, -1, -2)
    kept = grown[..., -1:, :]
    outputs = []
    for chunk in zip(*(_one_by_one(x) for x in (own, from_state, asked, seen, kept, left)), strict=True):
        own, from_state, asked, seen, kept, left = chunk
        delta = own - from_state @ state
        outputs.append(asked @ state + seen @ delta)
        state = kept * state + left @ delta
    out = mx.concatenate(outputs, axis=2).swapaxes(1, 2)
    return out[:, :length].astype(dtype), mx.swapaxes(state, -1, -2)


def _chunks(q, k, v, beta, log_decay) -> list[mx.array]:
    """Returns the arrays in float32 as (B, V, N, C, ...); steps that fill up a chunk change nothing."""
    length = q.shape[1]
    size = min(_CHUNK, -(-length // _BLOCK) * _BLOCK)
    chunked = []
    for array in (q, k, v, beta, log_decay):
        array = mx.pad(array.astype(mx.float32), [(0, 0), (0, -length % size)] + [(0, 0)] * (array.ndim - 2))
        array = array.swapaxes(1, 2)
        if array.shape[1] != v.shape[2]:
            array = mx.repeat(array, v.shape[2] // array.shape[1], axis=1)
        chunked.append(array.reshape(*array.shape[:2], -1, size, *array.shape[3:]))
    return chunked


def _one_by_one(x: mx.array) -> list[mx.array]:
    """(B, V, N, ...) -> N of (B, V, ...); split, whose gradient joins, where slices' would add up."""
    return [part.squeeze(2) for part in mx.split(x, x.shape[2], axis=2)]


@mx.custom_function
def inverse(lower: mx.array) -> mx.array:
    """Returns (I + lower)^-1 for strictly lower triangular (..., C, C), C a multiple of 16."""
    size = lower.shape[-1]
    if size <= _BLOCK:
        return _substituted(lower)
    half = size // 2 if size % (2 * _BLOCK) == 0 else _BLOCK
    first, second = inverse(lower[..., :half, :half]), inverse(lower[..., half:, half:])
    below = -(second @ lower[..., half:, :half] @ first)
    above = mx.zeros((*first.shape[:-1], size - half))
    return mx.concatenate(
        [mx.concatenate([first, above], axis=-1), mx.concatenate([below, second], axis=-1)], axis=-2
    )


@inverse.vjp
def _inverse_vjp(lower, cotangent, found):
    turned = mx.swapaxes(found, -1, -2)
    return mx.tril(-(turned @ cotangent @ turned), -1)


def _substituted(lower: mx.array) -> mx.array:
    """Row after row: each is its unit vector less what the rows before it contribute."""
    size = lower.shape[-1]
    unit = mx.broadcast_to(mx.eye(size), lower.shape)
    rows = unit[..., :1, :]
    for number in range(1, size):
        row = unit[..., number : number + 1, :] - lower[..., number : number + 1, :number] @ rows
        rows = mx.concatenate([rows, row], axis=-2)
    return rows
