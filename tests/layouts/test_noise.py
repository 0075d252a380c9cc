"""NEFTune's noise: whose it is, how large, and that no layout, batch or resume changes it."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxft.layouts.arrange import Arranger, Group
from mlxft.layouts.noise import noise_inputs, noisy

WIDTH, ALPHA = 64, 5.0
NO_PROMPT = np.zeros(0, np.int32)


def tokens(length):
    return np.arange(1, length + 1, dtype=np.int32)


def rows(*lengths):
    return [Group(NO_PROMPT, (tokens(length),)) for length in lengths]


PAIRS = [Group(tokens(6), (tokens(3), tokens(8))), Group(tokens(9), (tokens(1), tokens(4)))]


def noise_of(groups, layout="padded", first=0, key=(1, 2), multiple=4):
    """The noise of each logical row (L - 1, H), and of everything (B * T, H)."""
    arranged = Arranger(layout, multiple)(groups)
    inputs = noise_inputs(arranged, first, ALPHA, np.array(key, np.uint32))
    noise = np.array(noisy(mx.zeros((*arranged.tokens.shape, WIDTH)), inputs)).reshape(-1, WIDTH)
    return [noise[place] for place in arranged.places], noise, arranged


def assert_same(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert np.array_equal(one, other)


def test_noise_is_uniform_within_alpha_over_the_root_of_tokens_times_width():
    for length in (5, 50):
        ((noise, *_), *_) = noise_of(rows(length, 80))
        bound = ALPHA / math.sqrt(length * WIDTH)  # of the row's own length, whatever the batch's
        assert 0.95 * bound < np.abs(noise).max() <= bound
        number = noise.size
        assert abs(noise.mean()) < 4 * bound / math.sqrt(3 * number)
        assert abs((noise**2).mean() / (bound**2 / 3) - 1) < 4 * math.sqrt(0.8 / number)


def test_padding_has_none():
    _, noise, arranged = noise_of(rows(5, 9))
    read = np.concatenate(arranged.places)
    assert not np.delete(noise, read, axis=0).any() and len(noise) > len(read)
    assert np.abs(noise[read]).min(axis=1).max() > 0


def test_no_two_tokens_of_a_step_have_the_same():
    found, *_ = noise_of([*rows(9, 9), *PAIRS], "prefix_shared")
    assert len(np.unique(np.concatenate(found[:2])[:, 0])) == 16
    (chosen, rejected), prompt = found[2:4], 6
    assert np.array_equal(chosen[:prompt], rejected[:prompt])  # a prompt that both answers share
    assert not np.isclose(chosen[prompt:], rejected[prompt : len(chosen)]).any()


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
@pytest.mark.parametrize("groups", [rows(5, 12, 3), PAIRS], ids=["rows", "pairs"])
def test_every_layout_has_the_same(layout, groups):
    assert_same(noise_of(groups, layout)[0], noise_of(groups)[0])


def test_a_window_in_one_micro_batch_or_in_several_has_the_same():
    whole, *_ = noise_of([*rows(5, 12), *PAIRS])
    parts = noise_of(rows(5))[0] + noise_of([*rows(12), *PAIRS], first=1)[0]
    assert_same(whole, parts)


def test_other_steps_and_seeds_have_others():
    one, other = (np.concatenate(noise_of(rows(9), key=key)[0]) for key in ((1, 2), (1, 3)))
    assert not np.isclose(one, other).any()
    # A key that differs by as little as a token's place does is no neighbour's.
    assert not np.isclose(one[1:], other[:-1]).any()


def test_noise_takes_the_type_of_the_embeddings_and_is_compiled_to_the_same():
    arranged = Arranger("packed", 4)(PAIRS)
    inputs = noise_inputs(arranged, 0, ALPHA, np.array([3, 4], np.uint32))
    embedded = mx.random.normal((*arranged.tokens.shape, WIDTH), key=mx.random.key(0))
    assert mx.allclose(mx.compile(noisy)(embedded, inputs), noisy(embedded, inputs), rtol=1e-5, atol=1e-6)
    assert noisy(embedded.astype(mx.bfloat16), inputs).dtype == mx.bfloat16
