"""Trellis codes say what the format says, and the encoder finds paths as near as the code allows."""

import mlx.core as mx
import numpy as np
import pytest

from mlxft.errors import InputError
from mlxft.models.trellis import dequantize, encode, quantize
from mlxft.models.trellis.format import block_for, codebook, pack

GEOMETRIES = [(bits, block) for bits in (2, 3, 4) for block in (32, 160, 192, 256)]


def read_one_by_one(codes: np.ndarray, scales: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Reads the format bit by bit, with whole numbers of Python."""
    rows, words = codes.shape
    per_block = block * bits // 32
    weights = np.zeros((rows, words * 32 // bits), np.float32)
    for row in range(rows):
        for start in range(0, words, per_block):
            ring = [(int(codes[row, start + b // 32]) >> b % 32) & 1 for b in range(block * bits)]
            for t in range(block):
                first = (block - 1 - t) * bits
                state = sum(ring[(first + i) % len(ring)] << i for i in range(12))
                mixed = (state * 34038481 + 76625530) % 2**32
                total = sum((mixed >> 8 * byte) & 255 for byte in range(4))
                value = np.float32(total - 510) / np.float32(147.800537109375)
                weights[row, start * 32 // bits + t] = value * np.float32(scales[row])
    return weights


@pytest.mark.parametrize("bits, block", GEOMETRIES)
def test_decoding_equals_the_format_read_bit_by_bit(bits, block):
    random = np.random.default_rng(bits * block)
    codes = random.integers(0, 2**32, (3, 2 * block * bits // 32), dtype=np.uint32)
    scales = mx.array(random.standard_normal(3)).astype(mx.bfloat16)
    decoded = dequantize(mx.array(codes), scales, bits, block)
    expected = read_one_by_one(codes, np.array(scales.astype(mx.float32)), bits, block)
    assert np.array_equal(np.array(decoded), expected)


def test_the_code_has_the_moments_of_a_normal_draw():
    values = codebook()
    assert values.mean() == pytest.approx(-0.0071, abs=1e-4)
    assert values.std() == pytest.approx(1.0041, abs=1e-4)
    assert (values.min(), values.max()) == (pytest.approx(-3.031, abs=1e-3), pytest.approx(3.072, abs=1e-3))
    assert len(np.unique(values)) == 713


def test_a_product_is_rounded_once_to_the_type_asked_for():
    codes = mx.array(np.random.default_rng(0).integers(0, 2**32, (2, 24), dtype=np.uint32))
    scales = mx.array([0.37, -1.9]).astype(mx.bfloat16)
    exact = dequantize(codes, scales, 3)
    assert mx.array_equal(dequantize(codes, scales, 3, dtype=mx.bfloat16), exact.astype(mx.bfloat16))


@pytest.mark.parametrize("bits, block", GEOMETRIES)
def test_states_survive_packing_and_the_ring_closes(bits, block):
    weights = np.random.default_rng(block).standard_normal((5, block)).astype(np.float32)
    states = encode.tail_biting_states(weights, bits)
    lasting = (1 << 12 - bits) - 1
    before = np.roll(states, 1, axis=1)
    assert np.array_equal(states >> bits, before & lasting)  # also of the first weight, before it the last
    decoded = dequantize(mx.array(pack(states, bits)), mx.ones(5), bits, block)
    assert np.array_equal(np.array(decoded), codebook()[states])


@pytest.mark.parametrize("bits, most", [(2, 0.076), (3, 0.0197), (4, 0.0056)])
def test_normal_weights_lose_as_little_as_the_code_allows(bits, most):
    weight = 0.02 * mx.random.normal((64, 1024), key=mx.random.key(bits))
    codes, scales = quantize(weight, bits)
    assert codes.shape == (64, 1024 * bits // 32) and scales.dtype == mx.bfloat16
    error = mx.square(dequantize(codes, scales, bits) - weight).mean() / mx.square(weight).mean()
    assert error.item() < most


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_compiled_walk_and_the_one_in_mlx_find_equally_near_paths(bits):
    if encode._library() is None:
        pytest.fail("there is no C compiler")
    weights = np.random.default_rng(bits).standard_normal((40, 64)).astype(np.float32)
    for ring in (None, np.arange(40) * 7 % (1 << 12 - bits)):
        paths = [walk(weights, bits, ring) for walk in (encode._walk_in_c, encode.walk_in_mlx)]
        costs = [np.square(codebook()[states] - weights).sum(axis=1) for states in paths]
        assert costs[0] == pytest.approx(costs[1], rel=1e-6)
        for states in paths:
            assert np.array_equal(states[:, 1:] >> bits, states[:, :-1] & (1 << 12 - bits) - 1)
            assert ring is None or np.array_equal(states[:, 0] >> bits, ring)
            assert ring is None or np.array_equal(states[:, -1] & (1 << 12 - bits) - 1, ring)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_path_is_nearer_than_the_one_found(bits):
    """Against all paths of three weights from every state, tried one by one."""
    weights = np.random.default_rng(bits).standard_normal((2, 3)).astype(np.float32)
    steps = np.arange(1 << bits)
    states = np.arange(1 << 12)[:, None, None]
    second = (states << bits | steps[:, None]) & 4095
    third = (second << bits | steps) & 4095
    for found, x in zip(encode.walk_in_mlx(weights, bits), weights, strict=True):
        off = [np.square(codebook()[s] - w) for s, w in zip((states, second, third), x, strict=True)]
        assert np.square(codebook()[found] - x).sum() == pytest.approx((off[0] + off[1] + off[2]).min())


def test_rows_of_zeros_stay_zeros_and_rows_keep_their_scales():
    weight = mx.stack([mx.zeros(256), mx.random.normal((256,)), 1e-4 * mx.random.normal((256,))])
    codes, scales = quantize(weight, 4)
    decoded = dequantize(codes, scales, 4)
    assert mx.array_equal(decoded[0], mx.zeros(256))
    errors = mx.square(decoded - weight).mean(axis=1)[1:] / mx.square(weight).mean(axis=1)[1:]
    assert errors.max().item() < 0.01


def test_blocks_are_the_longest_that_fit_and_what_cannot_be_cut_is_named():
    assert [block_for(width) for width in (4096, 576, 640, 5120, 1536, 96)] == [256, 192, 160, 256, 256, 96]
    with pytest.raises(InputError, match="rows of 100 weights can't be cut"):
        block_for(100)
    with pytest.raises(InputError, match="576 weights can't be cut into trellis blocks of 256"):
        quantize(mx.zeros((2, 576)), 3)
    with pytest.raises(InputError, match="2, 3 or 4 bits a weight, not 5"):
        quantize(mx.zeros((2, 256)), 5)


def test_codes_and_scales_that_do_not_fit_are_refused():
    codes = mx.zeros((4, 24), mx.uint32)
    with pytest.raises(InputError, match="3 scales, don't fit"):
        dequantize(codes, mx.ones(3), 3)
    with pytest.raises(InputError, match="uint32, not"):
        dequantize(codes.astype(mx.int32), mx.ones(4), 3)
    with pytest.raises(InputError, match="can't be cut|don't fit"):
        dequantize(mx.zeros((4, 23), mx.uint32), mx.ones(4), 3)
