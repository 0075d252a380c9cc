"""Rows longer than the limit: what each policy keeps, and what it says was lost."""

import numpy as np
import pytest

from mlxft.data.truncate import (
    ANSWER_BEYOND,
    ANSWER_CUT,
    PROMPT_CUT,
    TAIL_CUT,
    TEXT_CUT,
    TOO_LONG,
    UNTRAINED,
    Limit,
    fit,
)
from mlxft.errors import InputError

BOS = 0


def cut(num_prompt, num_answer, limit, policy, num_tail=0, bos_id=None):
    """Returns the fitted row of tokens 0, 1, 2, ...: a prompt, an answer, and what follows it."""
    mask = np.array([False] * num_prompt + [True] * num_answer + [False] * num_tail)
    tokens = np.arange(len(mask), dtype=np.int32)
    return fit(tokens, mask, Limit(limit, policy, bos_id), "rows.jsonl:2")


@pytest.mark.parametrize("policy", ["prompt_left", "right", "drop", "error"])
def test_a_row_that_fits_is_left_alone(policy):
    fitted = cut(6, 4, 10, policy)
    assert (len(fitted.tokens), fitted.lost, fitted.dropped) == (10, None, None)


def test_prompt_left_keeps_the_answer_whole():
    fitted = cut(30, 10, 20, "prompt_left")
    assert fitted.tokens.tolist() == list(range(20, 40))
    assert fitted.mask.tolist() == [False] * 10 + [True] * 10
    assert (fitted.lost, fitted.dropped) == (PROMPT_CUT, None)


def test_prompt_left_keeps_bos_in_its_place():
    fitted = cut(30, 10, 20, "prompt_left", bos_id=BOS)
    assert fitted.tokens.tolist() == [BOS, *range(21, 40)]
    assert cut(30, 10, 20, "prompt_left", bos_id=7).tokens.tolist() == list(range(20, 40))


def test_prompt_left_keeps_one_token_before_the_answer_so_that_all_of_it_is_trained():
    fitted = cut(30, 10, 11, "prompt_left")
    assert fitted.tokens.tolist() == list(range(29, 40))
    assert fitted.mask[1:].sum() == 10
    assert cut(30, 10, 11, "prompt_left", bos_id=BOS).tokens.tolist() == [BOS, *range(30, 40)]


def test_prompt_left_cuts_the_end_of_an_answer_that_is_too_long_by_itself():
    fitted = cut(30, 10, 8, "prompt_left")
    assert fitted.tokens.tolist() == list(range(29, 37))
    assert fitted.mask.tolist() == [False] + [True] * 7
    assert fitted.lost == ANSWER_CUT


def test_prompt_left_lets_go_first_of_what_follows_the_answer():
    fitted = cut(5, 3, 9, "prompt_left", num_tail=4)
    assert (fitted.tokens.tolist(), fitted.lost) == (list(range(9)), TAIL_CUT)
    fitted = cut(5, 3, 6, "prompt_left", num_tail=4)
    assert (fitted.tokens.tolist(), fitted.lost) == (list(range(2, 8)), PROMPT_CUT)


def test_prompt_left_keeps_later_answers_when_there_is_room():
    mask = np.array([False] * 6 + [True] * 2 + [False] * 3 + [True] * 2)
    fitted = fit(np.arange(13), mask, Limit(9, "prompt_left"), "rows.jsonl:2")
    assert fitted.tokens.tolist() == list(range(4, 13))
    assert fitted.mask.sum() == 4


@pytest.mark.parametrize("policy", ["prompt_left", "right"])
def test_the_end_of_a_text_is_cut(policy):
    fitted = cut(0, 10, 4, policy)
    assert (fitted.tokens.tolist(), fitted.lost) == ([0, 1, 2, 3], TEXT_CUT)


def test_right_cuts_the_end_and_says_what_it_was():
    fitted = cut(4, 10, 6, "right")
    assert (fitted.tokens.tolist(), fitted.mask.sum(), fitted.lost) == (list(range(6)), 2, ANSWER_CUT)
    assert cut(2, 3, 6, "right", num_tail=4).lost == TAIL_CUT


def test_right_drops_a_row_whose_answer_begins_beyond_the_limit():
    assert cut(30, 10, 20, "right").dropped == ANSWER_BEYOND
    assert cut(20, 10, 20, "right").dropped == ANSWER_BEYOND
    assert cut(19, 10, 20, "right").dropped is None


def test_drop_drops_what_is_too_long():
    assert cut(6, 5, 10, "drop").dropped == TOO_LONG


def test_error_names_the_row_and_the_way_out():
    with pytest.raises(
        InputError, match=r"^rows\.jsonl:2: 11 tokens, and data\.max_length is 10.*data\.truncate"
    ):
        cut(6, 5, 10, "error")


@pytest.mark.parametrize("policy", ["prompt_left", "right", "drop", "error"])
def test_a_row_without_a_target_is_dropped_whatever_its_length(policy):
    assert cut(5, 0, 10, policy).dropped == UNTRAINED
    assert cut(50, 0, 10, policy).dropped == UNTRAINED
    assert cut(0, 1, 10, policy, num_tail=3).dropped == UNTRAINED  # nothing comes before the first token


def test_every_length_keeps_the_answer_or_says_that_it_did_not():
    for num_prompt in range(1, 8):
        for num_answer in range(1, 8):
            for limit in range(2, 12):
                for bos_id in (None, BOS):
                    fitted = cut(num_prompt, num_answer, limit, "prompt_left", bos_id=bos_id)
                    assert len(fitted.tokens) == min(limit, num_prompt + num_answer)
                    whole = fitted.mask[1:].sum() == num_answer
                    assert whole == (fitted.lost != ANSWER_CUT) == (num_answer + 1 <= limit)


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match=r"^data\.max_length=1: must be 2 or more"):
        Limit(1, "right")
    with pytest.raises(
        InputError, match=r"^data\.truncate=left: must be one of prompt_left, right, drop, error"
    ):
        Limit(10, "left")
