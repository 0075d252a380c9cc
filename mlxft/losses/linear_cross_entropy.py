"""Log-probabilities from hidden states without keeping logits: the head in chunks of tokens.

Shapes: M supervised tokens, H width, V vocabulary.
    z = head(hidden) (M, V);  log p(y) = z[y] - logsumexp(z), reduced in float32
A frozen head's chunk of logits is made once: log p(y) of a token depends on its own hidden state only, so
that its gradient can be made along with it, (M, H), before it is known what the token will count. A trained
head's gradient adds up over tokens and has to know: its logits are made once more in the backward.
"""

from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map


@dataclass(frozen=True)
class Head:
    """A head that may be trained: `apply(params, hidden (M, H)) -> logits (M, V)`.

    params: a tree of arrays that the gradient flows into; empty for a frozen head. differentiated: what
    is computed is about to be: where it can be, its gradient is made along with it, from the same logits.
    """

    apply: Callable[[Any, mx.array], mx.array]
    params: Any = field(default_factory=dict)
    differentiated: bool = False


def as_head(head: Union[Head, mx.array]) -> Head:
    """Returns `head`, or the head that multiplies by the weight (V, H) it is given."""
    if isinstance(head, Head):
        return head
    return Head(lambda params, hidden: hidden @ params["weight"].T, {"weight": head})


def linear_logps(
    hidden: mx.array, head: Union[Head, mx.array], targets: mx.array, chunk: Optional[int] = None
) -> mx.array:
    """Returns the log-probability (M,) float32 in nats of each target under the head's logits.

    hidden: (M, H). targets: (M,) integers in [0, V). chunk: tokens whose logits exist at once; None
    makes all logits at once and keeps them for the backward, which is faster where they fit.
    """
    head = as_head(head)
    if chunk is None:
        return _token_logps(head.apply(head.params, hidden), targets)
    if head.differentiated and not head.params:
        return _with_own_gradients(head, targets, chunk)(hidden)[0]
    return _chunked(head, targets, chunk)(head.params, hidden)


def _with_own_gradients(head: Head, targets: mx.array, chunk: int) -> Callable:
    """Returns f(hidden) -> (logps (M,), the gradient (M, H) of each by its own hidden state).

    For a frozen head. The backward multiplies: a chunk's logits are made once for both.
    """

    @mx.custom_function
    def forward(hidden):
        logps: list[mx.array] = []
        gradients: list[mx.array] = []
        for span in _spans(targets, chunk):
            rows = mx.depends(hidden[span], [logps[-1], gradients[-1]]) if logps else hidden[span]
            part, gradient = _own_gradients(head, rows, targets[span])
            logps.append(part)
            gradients.append(gradient)
        return mx.concatenate(logps), mx.concatenate(gradients)

    @forward.vjp
    def backward(_, cotangents, outputs):
        return _times_rows(cotangents[0], outputs[1])

    return forward


def _own_gradients(head: Head, rows: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the log-probabilities of a chunk and the gradient of each by its own row of `rows`."""

    def logps(rows):
        return _token_logps(head.apply(head.params, rows), targets)

    (values,), (gradients,) = mx.vjp(logps, [rows], [mx.ones(targets.shape)])
    return values, gradients


def _times_rows(weights: mx.array, rows: mx.array) -> mx.array:
    """Returns rows (M, H) times what each counts, (M,), in the type of the rows, rounded once."""
    return (weights[:, None] * rows.astype(mx.float32)).astype(rows.dtype)


def _chunked(head: Head, targets: mx.array, chunk: int) -> Callable:
    """Returns logps(params, hidden) (M,) with a backward that makes a chunk's logits once more.

    The graph would evaluate chunks side by side and hold all their logits: each is made to wait for
    the one before.
    """
    spans = _spans(targets, chunk)

    @mx.custom_function
    def logps(params, hidden):
        parts: list[mx.array] = []
        for span in spans:
            rows = mx.depends(hidden[span], parts[-1]) if parts else hidden[span]
            parts.append(_token_logps(head.apply(params, rows), targets[span]))
        return mx.concatenate(parts)

    @logps.vjp
    def backward(primals, cotangent, _):
        params, hidden = primals
        d_params, parts = params, []
        for span in spans:
            rows = _after(hidden[span], parts[-1:], d_params) if parts else hidden[span]
            _, (part, d_rows) = _part(head, params, rows, targets[span], -cotangent[span])
            d_params = tree_map(mx.add, d_params, part) if parts else part
            parts.append(d_rows)
        return d_params, mx.concatenate(parts)

    return logps


def linear_cross_entropy(
    hidden: mx.array,
    head: Union[Head, mx.array],
    targets: mx.array,
    weights: mx.array,
    chunk: Optional[int] = None,
) -> mx.array:
    """Returns the scalar sum of weights (M,) times the negative log-probability of each target.

    hidden: (M, H). targets: (M,). Other arguments as in `linear_logps`.
    """
    head = as_head(head)
    if head.differentiated and head.params and chunk is not None:
        return _with_gradient(head, targets, weights, chunk)(head.params, hidden)[0]
    return -(weights * linear_logps(hidden, head, targets, chunk)).sum()


def _with_gradient(head: Head, targets: mx.array, weights: mx.array, chunk: int) -> Callable:
    """Returns f(params, hidden) -> (loss, its gradients): a chunk's logits are made once for both.

    For a trained head, of which the weights have to be known before.
    """

    @mx.custom_function
    def forward(params, hidden):
        loss, d_params, parts = mx.zeros(()), params, []
        for span in _spans(targets, chunk):
            # The loss too: what it is made of would otherwise wait, with the chunk's logits, for the end.
            rows = _after(hidden[span], [loss, parts[-1]], d_params) if parts else hidden[span]
            part, (d_part, d_rows) = _part(head, params, rows, targets[span], weights[span])
            loss = loss + part
            d_params = tree_map(mx.add, d_params, d_part) if parts else d_part
            parts.append(d_rows)
        return loss, d_params, mx.concatenate(parts)

    @forward.vjp
    def backward(_, cotangents, outputs):
        d_loss, (_, d_params, d_hidden) = cotangents[0], outputs
        scaled = tree_map(lambda d: d_loss.astype(d.dtype) * d, d_params)
        return scaled, d_loss.astype(d_hidden.dtype) * d_hidden

    return forward


def stepped_gradients(
    head: Head, hidden: mx.array, targets: mx.array, loss_of: Callable, chunk: int
) -> tuple[Any, Any, mx.array]:
    """Returns loss_of's value and the gradients of head.params and hidden, evaluated chunk by chunk.

    loss_of: (M,) log-probabilities -> (loss, metrics). For use outside of any graph: what is evaluated
    within one keeps all that it was made of, and a GPU frees nothing of what it was given to do together.
    """
    logps, gradients = [], []
    for span in _spans(targets, chunk):
        if head.params:
            logps.append(_token_logps(head.apply(head.params, hidden[span]), targets[span]))
        else:
            part, gradient = _own_gradients(head, hidden[span], targets[span])
            logps.append(part)
            gradients.append(gradient)
        mx.eval(logps[-1:], gradients[-1:])
    value, d_logps = mx.value_and_grad(loss_of)(mx.concatenate(logps))
    mx.eval(value, d_logps)
    if not head.params:
        return value, head.params, _times_rows(d_logps, mx.concatenate(gradients))
    _, d_params, d_hidden = stepped_cross_entropy(head, hidden, targets, -d_logps, chunk)
    return value, d_params, d_hidden


def stepped_cross_entropy(
    head: Head, hidden: mx.array, targets: mx.array, weights: mx.array, chunk: int
) -> tuple[mx.array, Any, mx.array]:
    """Returns `linear_cross_entropy` and its gradients of head.params and hidden, as `stepped_gradients`.

    A chunk's logits are made once for both.
    """
    if not head.params:  # in the arithmetic of `linear_cross_entropy`
        (loss, _), d_params, d_hidden = stepped_gradients(
            head, hidden, targets, lambda logps: (-(weights * logps).sum(), {}), chunk
        )
        return loss, d_params, d_hidden
    loss, d_params, parts = mx.zeros(()), head.params, []
    for span in _spans(targets, chunk):
        part, (d_part, d_rows) = _part(head, head.params, hidden[span], targets[span], weights[span])
        d_params = tree_map(mx.add, d_params, d_part) if parts else d_part
        loss = loss + part
        parts.append(d_rows)
        mx.eval(loss, d_params, d_rows)
    return loss, d_params, mx.concatenate(parts)


def _after(rows: mx.array, made: list[mx.array], d_params: Any) -> mx.array:
    """Returns `rows` that wait for what the last chunk made, and for the head's gradient so far: or that of
    each chunk, (V, H), would be there till the end."""
    return mx.depends(rows, [*made, *(array for _, array in tree_flatten(d_params))])


def stepped_scores(
    hidden: mx.array, head: Union[Head, mx.array], targets: mx.array, chunk: Optional[int] = None
) -> tuple[mx.array, mx.array]:
    """Returns `linear_logps` (M,), and whether each target is the likeliest token (M,), chunk by chunk.

    For use outside of any graph; arguments as in `linear_logps`.
    """
    head = as_head(head)
    logps, likeliest = [], []
    for span in _spans(targets, chunk or targets.shape[0]):
        logits = head.apply(head.params, hidden[span])
        logps.append(_token_logps(logits, targets[span]))
        likeliest.append(logits.argmax(axis=-1) == targets[span])
        mx.eval(logps[-1], likeliest[-1])
    return mx.concatenate(logps), mx.concatenate(likeliest)


def stepped_divergence(
    logits: Callable[[slice], mx.array],
    ref_logits: Callable[[slice], mx.array],
    targets: mx.array,
    chunk: Optional[int] = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Returns (M,) each: the targets' log p and log q, KL(q || p), whether both have one likeliest token.

    KL = sum over V of q (log q - log p), in nats and float32. logits, ref_logits: rows [start, stop) ->
    logits (M, V) of p and q; those of one chunk exist at a time. For use outside of any graph.
    """
    parts = []
    for span in _spans(targets, chunk or targets.shape[0]):
        p, q = (_log_softmax(each(span)) for each in (logits, ref_logits))
        logps = [mx.take_along_axis(each, targets[span][:, None], axis=-1)[:, 0] for each in (p, q)]
        kl = (mx.exp(q) * (q - p)).sum(axis=-1)
        parts.append((*logps, kl, p.argmax(axis=-1) == q.argmax(axis=-1)))
        mx.eval(parts[-1])
    return tuple(mx.concatenate(column) for column in zip(*parts, strict=True))


def _log_softmax(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _spans(targets: mx.array, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, targets.shape[0], chunk)]


def _part(head: Head, params: Any, rows: mx.array, targets: mx.array, weights: mx.array):
    """Returns a chunk's sum of weights times -log p, and the gradients (of params, of rows)."""

    def loss(params, rows):
        return -(weights * _token_logps(head.apply(params, rows), targets)).sum()

    if params:
        return mx.value_and_grad(loss, argnums=(0, 1))(params, rows)
    value, d_rows = mx.value_and_grad(loss, argnums=1)(params, rows)
    return value, (params, d_rows)


def _token_logps(logits: mx.array, targets: mx.array) -> mx.array:
    # On a GPU the fused op reads half-precision logits and reduces in float32 itself; the CPU's
    # fallback reduces in the type of the logits.
    if mx.default_device().type == mx.DeviceType.cpu:
        logits = logits.astype(mx.float32)
    return -mx.fast.cross_entropy(logits, targets).astype(mx.float32)
