"""Cutting long texts: what every window holds, and that nothing is scored twice or left out."""

import numpy as np
import pytest

from mlxft.data.example import Example
from mlxft.errors import InputError
from mlxft.evaluation.text_windows import cut

BOS = 7


def text(tokens: list[int]) -> Example:
    return Example(np.array(tokens, dtype=np.int32), np.ones(len(tokens), dtype=bool), "a.jsonl:1")


def contents(windows: list[Example]) -> list[tuple[list[int], list[int]]]:
    """Returns each window's tokens, and which of them are scored (the first never is)."""
    return [(window.tokens.tolist(), window.tokens[1:][window.mask[1:]].tolist()) for window in windows]


def test_a_text_that_fits_stays_whole():
    example = text([10, 11, 12])
    assert cut(example, 3) == [example]


def test_windows_overlap_by_the_token_that_is_only_read():
    assert contents(cut(text([10, 11, 12, 13, 14, 15]), 3)) == [
        ([10, 11, 12], [11, 12]),
        ([12, 13, 14], [13, 14]),
        ([14, 15], [15]),
    ]


def test_a_text_with_a_beginning_token_has_it_at_the_head_of_every_window():
    assert contents(cut(text([BOS, 10, 11, 12, 13, 14]), 4, bos_id=BOS)) == [
        ([BOS, 10, 11, 12], [10, 11, 12]),
        ([BOS, 12, 13, 14], [13, 14]),
    ]


def test_a_text_without_a_beginning_token_gets_none():
    assert contents(cut(text([10, 11, 12, 13]), 3, bos_id=BOS)) == [
        ([10, 11, 12], [11, 12]),
        ([12, 13], [13]),
    ]


@pytest.mark.parametrize("bos_id", [None, BOS])
@pytest.mark.parametrize("num_tokens", [4, 5, 16, 17, 18, 19, 40])
@pytest.mark.parametrize("length", [3, 4, 5, 17])
def test_every_token_but_the_first_is_scored_once(bos_id, num_tokens, length):
    tokens = [BOS] * (bos_id is not None) + list(range(100, 100 + num_tokens))
    windows = cut(text(tokens), length, bos_id)
    assert [token for _, scored in contents(windows) for token in scored] == tokens[1:]
    assert max(len(window.tokens) for window in windows) <= length


def test_tokens_that_are_no_target_stay_none():
    example = text([10, 11, 12, 13, 14])
    example.mask[3] = False
    assert [scored for _, scored in contents(cut(example, 3))] == [[11, 12], [14]]


def test_a_window_without_room_for_a_scored_token_is_refused():
    with pytest.raises(InputError, match=r"data\.max_length=2 leaves no token to score.*at least 3"):
        cut(text([BOS, 10, 11]), 2, bos_id=BOS)


def test_with_a_stride_each_window_after_the_first_scores_so_many_tokens():
    assert contents(cut(text([10, 11, 12, 13, 14, 15, 16]), 4, stride=2)) == [
        ([10, 11, 12, 13], [11, 12, 13]),
        ([12, 13, 14, 15], [14, 15]),
        ([14, 15, 16], [16]),
    ]


@pytest.mark.parametrize("stride", [1, 2, 5, 6, None])
@pytest.mark.parametrize("bos_id", [None, BOS])
def test_with_any_stride_every_token_but_the_first_is_scored_once(stride, bos_id):
    tokens = [BOS, *range(10, 40)]
    scored = [token for _, own in contents(cut(text(tokens), 8, bos_id, stride)) for token in own]
    assert scored == tokens[1:]
