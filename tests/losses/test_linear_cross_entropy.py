"""The chunked head against TRL's and float64's numbers, and against hand-worked values."""

import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxft.losses import Head, linear_cross_entropy, linear_logps, sft_loss

PARITY = Path(__file__).parent.parent / "parity"
REL = 2e-5  # tests/parity/README.md, losses and gradients on `pairs`, CPU float32


def relative(value, reference) -> float:
    return float(np.abs(np.asarray(value) - reference).max() / np.abs(reference).max())


def pairs():
    """Hidden states, head, and the supervised positions of the 18 rows with their targets."""
    data = np.load(PARITY / "pairs.npz")
    mask = data["completion_mask"][:, 1:].astype(bool)
    index = np.flatnonzero(mask)
    targets = data["input_ids"][:, 1:].reshape(-1)[index]
    hidden = data["hidden"][:, :-1].reshape(-1, data["hidden"].shape[-1])
    return mx.array(hidden), mx.array(data["head_weight"]), mx.array(index), mx.array(targets)


@pytest.mark.parametrize("chunk", [None, 7, 16, 1000])
@pytest.mark.parametrize("variant", ["token_mean", "items_50"])
def test_loss_and_gradients_equal_trl(variant, chunk):
    reference = np.load(PARITY / "sft.npz")
    hidden, weight, index, targets = pairs()
    count = 50 if variant == "items_50" else len(targets)

    def loss(hidden, weight):
        weights = mx.full(index.shape, 1.0 / count)
        return linear_cross_entropy(hidden[index], weight, targets, weights, chunk)

    value, (grad_hidden, grad_weight) = mx.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
    for source in ("trl", "exact"):
        assert value.item() == pytest.approx(float(reference[f"{variant}.{source}.loss"]), rel=5e-6)
        expected = reference[f"{variant}.{source}.grad_hidden"][:, :-1].reshape(hidden.shape)
        assert relative(grad_hidden, expected) < REL
        assert relative(grad_weight, reference[f"{variant}.{source}.grad_head_weight"]) < REL


def test_token_log_probabilities_equal_float64():
    hidden, weight, index, targets = pairs()
    expected = np.load(PARITY / "sft.npz")["token_logps"].reshape(-1)[np.array(index)]
    assert relative(linear_logps(hidden[index], weight, targets, 5), expected) < REL


def test_a_uniform_head_gives_log_of_the_vocabulary():
    logps = linear_logps(mx.zeros((3, 4)), mx.ones((10, 4)), mx.array([0, 5, 9]))
    assert logps.tolist() == pytest.approx([-math.log(10)] * 3)


def test_chunks_do_not_change_the_gradient_of_a_trained_quantised_head():
    """A frozen quantised head with a trained low-rank part: gradients of both its arrays and the input."""
    quantised = nn.QuantizedLinear.from_linear(nn.Linear(64, 50, bias=False), group_size=32, bits=4)
    params = {
        "a": mx.random.normal((64, 3), key=mx.random.key(1)),
        "b": mx.random.normal((3, 50), key=mx.random.key(2)),
    }
    hidden = mx.random.normal((11, 64), key=mx.random.key(3))
    targets = mx.arange(11)

    def loss(params, hidden, chunk):
        head = Head(lambda p, h: quantised(h) + (h @ p["a"]) @ p["b"], params)
        return linear_cross_entropy(hidden, head, targets, mx.ones(11), chunk)

    whole = mx.grad(loss, argnums=(0, 1))(params, hidden, None)
    parts = mx.grad(loss, argnums=(0, 1))(params, hidden, 4)
    for one, other in zip(
        (whole[0]["a"], whole[0]["b"], whole[1]), (parts[0]["a"], parts[0]["b"], parts[1]), strict=True
    ):
        assert mx.abs(one).max().item() > 0
        assert relative(other, np.array(one)) < 1e-5  # chunks add up in another order


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_the_gradient_made_along_with_the_loss_is_the_one_made_after(chunk, trained):
    """Of 11 tokens, times a factor that comes after the loss; of the head's weight too where it trains."""
    keys = mx.random.split(mx.random.key(1), 3)
    weight, hidden = mx.random.normal((50, 64), key=keys[0]), mx.random.normal((11, 64), key=keys[1])
    weights, targets = mx.random.uniform(shape=(11,), key=keys[2]), mx.arange(11)

    def loss(params, hidden, differentiated):
        given = params if trained else {}
        head = Head(lambda p, h: h @ (p or params)["weight"].T, given, differentiated)
        return 3.0 * linear_cross_entropy(hidden, head, targets, weights, chunk)

    def both(differentiated):
        return mx.value_and_grad(loss, argnums=(0, 1))({"weight": weight}, hidden, differentiated)

    (value, (d_params, d_hidden)), (expected, (d_weight, d_rows)) = both(True), both(False)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative(d_hidden, np.array(d_rows)) < 1e-6
    if trained:
        assert relative(d_params["weight"], np.array(d_weight["weight"])) < 1e-6


def test_logits_are_made_once_where_the_gradient_comes_along():
    """Three chunks: three calls of the head for loss and gradient, six where the backward makes them anew."""
    weight, hidden = mx.random.normal((50, 64)), mx.random.normal((12, 64))
    calls = []

    def apply(params, rows):
        calls.append(rows.shape[0])
        return rows @ weight.T

    for differentiated, expected in ((True, [4] * 3), (False, [4] * 6)):
        calls.clear()
        head = Head(apply, {}, differentiated)

        def loss(rows, head=head):
            return linear_cross_entropy(rows, head, mx.arange(12), mx.ones(12), 4)

        mx.eval(mx.grad(loss)(hidden))
        assert calls == expected


def summed(hidden, weight, chunk):
    count = hidden.shape[0]
    return linear_cross_entropy(hidden, weight, mx.zeros(count, mx.int32), mx.ones(count), chunk)


def peak_bytes(num_tokens, chunk, width=8, vocabulary=4096, of=summed, argnums=0):
    """Peak over the inputs of a loss and its gradient, on a CPU: a GPU counts what is still in flight."""
    hidden, weight = mx.random.normal((num_tokens, width)), mx.random.normal((vocabulary, width))
    mx.eval(hidden, weight)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with mx.stream(mx.cpu):
        mx.eval(mx.value_and_grad(lambda h, w: of(h, w, chunk), argnums)(hidden, weight))
    return mx.get_peak_memory() - before


def test_logits_of_one_chunk_exist_at_a_time():
    """2,048 tokens x 4,096 entries are 32 MiB of logits more than 32 tokens need; in chunks of 32, none."""
    assert peak_bytes(2048, None) - peak_bytes(32, None) > 31 * 2**20
    assert peak_bytes(2048, 32) - peak_bytes(64, 32) < 4 * 2**20


@pytest.mark.parametrize("along", [True, False])
def test_gradients_of_a_trained_head_are_added_up_chunk_by_chunk(along):
    """Twelve chunks or three, of 2 MiB each if all were there; MLX may run ahead by two.

    The gradient comes along with the loss, or after it.
    """

    def loss(hidden, weight, chunk):
        head = Head(lambda p, h: h @ p["weight"].T, {"weight": weight}, along)
        count = hidden.shape[0]
        return linear_cross_entropy(hidden, head, mx.zeros(count, mx.int32), mx.ones(count), chunk)

    sizes = {"width": 128, "of": loss, "argnums": (0, 1)}
    assert peak_bytes(96, 8, **sizes) - peak_bytes(24, 8, **sizes) < 3 * 2 * 2**20


def test_masked_tokens_cost_nothing_even_where_their_probability_is_zero():
    logps = mx.array([[-1.5, -mx.inf], [-2.0, -0.5]])
    loss = sft_loss(logps, mx.array([[True, False], [True, True]]))
    assert loss.tolist() == [[1.5, 0.0], [2.0, 0.5]]
