"""What is put in the place of mlx-lm's modules: the same numbers, and nothing left behind."""

import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rope_utils
from mlx_lm.models.smollm3 import NoPE

from mlxft.layouts.cache import Positions, TrainingCache
from mlxft.layouts.install import _PieceRope, layouts_installed
from mlxft.layouts.pieces import Layout, Piece, padded
from tests.devices import cpu_figures
from tests.tiny_models import model_config, random_model

# A prompt of 7 with branches of 4 and 9 tokens, then a row of its own.
LAYOUT = Layout(
    25, (Piece(0, 11, ((0, 11),), 0), Piece(11, 20, ((0, 7), (11, 20)), 7), Piece(20, 25, ((20, 25),), 0))
)

ROPES = {
    "plain": nn.RoPE(16),
    "traditional": nn.RoPE(16, traditional=True),
    "partial and scaled": nn.RoPE(8, base=5000.0, scale=0.5),
    "llama3": rope_utils.Llama3RoPE(16, scaling_config={"factor": 8.0}),
    "yarn": rope_utils.YarnRoPE(16, scaling_factor=4.0, mscale=1.3),
    "longrope": rope_utils.SuScaledRoPE(16, short_factor=[1.0] * 8, long_factor=[1.5] * 8),
    "proportional": rope_utils.ProportionalRoPE(16, 4),
    "dynamic": rope_utils.DynamicNTKScalingRoPE(16, 8, False, 10000.0, 2.0),
    "none": NoPE(),
}


def one_by_one(rope, x):
    parts = [rope(x[..., piece.start : piece.stop, :], offset=piece.position) for piece in LAYOUT.pieces]
    return mx.concatenate(parts, axis=-2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("name", ROPES)
def test_every_rope_turns_a_token_as_in_a_call_for_its_piece_alone(name, dtype):
    """To the bit, outputs and gradients, for two rows."""
    rope = ROPES[name]
    x, weight = (mx.random.normal((2, 3, 25, 16), key=mx.random.key(n)).astype(dtype) for n in range(2))
    positions = Positions(LAYOUT)
    installed = _PieceRope(rope)
    assert mx.array_equal(installed(x, offset=positions), one_by_one(rope, x))
    gradient = mx.grad(lambda x: (installed(x, offset=positions) * weight).sum())(x)
    assert mx.array_equal(gradient, mx.grad(lambda x: (one_by_one(rope, x) * weight).sum())(x))


def test_a_model_may_make_an_array_of_its_offset():
    """Gemma 4 does: it is then one position a token."""
    positions = mx.array(Positions(LAYOUT))
    assert positions.tolist() == [*range(11), *range(7, 16), *range(5)]
    x = mx.random.normal((1, 3, 25, 16), key=mx.random.key(0))
    assert mx.array_equal(_PieceRope(ROPES["plain"])(x, offset=positions), one_by_one(ROPES["plain"], x))


@cpu_figures
def test_pieces_of_any_lengths_are_one_rope_call():
    calls = []

    class Counted(nn.RoPE):
        def __call__(self, x, offset=0):
            calls.append(x.shape)
            return super().__call__(x, offset)

    _PieceRope(Counted(16))(mx.zeros((2, 3, 25, 16)), offset=Positions(LAYOUT))
    assert calls == [(50, 3, 1, 16)]


def test_numbers_as_offsets_reach_the_inner_rope_as_they_are():
    rope, x = ROPES["plain"], mx.random.normal((2, 3, 5, 16), key=mx.random.key(0))
    for offset in (0, 4, mx.array(4)):
        assert mx.array_equal(_PieceRope(rope)(x, offset=offset), rope(x, offset=offset))


@pytest.fixture(scope="module")
def recurrent_model():
    return random_model(model_config("qwen3_next"))


def test_recurrent_layers_are_themselves_again_after_use(recurrent_model):
    layer = recurrent_model.layers[0].linear_attn
    kind, source = type(layer), sys.modules[type(layer).__module__]
    before = kind.__call__, source.gated_delta_update
    for _ in range(2):
        with pytest.raises(RuntimeError), layouts_installed(recurrent_model.layers, [layer]):
            assert kind.__call__ is not before[0] and source.gated_delta_update is not before[1]
            inside = kind.__call__
            with layouts_installed(recurrent_model.layers, [layer]):
                assert kind.__call__ is inside  # not wrapped twice
            raise RuntimeError
        assert (kind.__call__, source.gated_delta_update) == before


def test_a_recurrent_layer_keeps_no_state_between_forwards(recurrent_model):
    """The same row twice, another one between: the first and the last are equal to the bit."""
    layer = recurrent_model.layers[0].linear_attn
    cache = TrainingCache(LAYOUT)
    x, other = (mx.random.normal((1, 25, 64), key=mx.random.key(n)) for n in range(2))
    with layouts_installed(recurrent_model.layers, [layer]):
        first, between, again = (layer(row, None, cache) for row in (x, other, x))
    assert mx.array_equal(first, again) and not mx.array_equal(first, between)
    assert not any(isinstance(value, mx.array) for value in vars(cache).values())


def test_a_plain_row_takes_the_layers_own_path(recurrent_model):
    layer = recurrent_model.layers[0].linear_attn
    x = mx.random.normal((2, 9, 64), key=mx.random.key(0))
    with layouts_installed(recurrent_model.layers, [layer]):
        found = layer(x, None, TrainingCache(padded(9)))
    assert np.abs(np.array(found - layer(x, None, None))).max() < 1e-5
