"""Where a prompt ends and its answers begin, token by token, and pairs longer than the limit."""

import numpy as np
import pytest

from mlxft.data.example import Pair
from mlxft.data.pairs import fit_pair, split_pair, split_unpaired
from mlxft.data.truncate import (
    ANSWER_BEYOND,
    ANSWER_CUT,
    PROMPT_CUT,
    TAIL_CUT,
    TOO_LONG,
    UNTRAINED,
    Limit,
)
from mlxft.errors import InputError

WHERE = "rows.jsonl:2"
BOS = 0


def encoded(tokens, num_untrained):
    mask = [False] * num_untrained + [True] * (len(tokens) - num_untrained)
    return np.array(tokens, np.int32), np.array(mask)


def made(num_prompt, num_chosen, num_rejected, tails=(0, 0)):
    """Returns a pair of the prompt 0, 1, ... and the answers 100, 101, ... and 200, 201, ... with tails."""

    def answer(first, num_trained, num_tail):
        mask = np.array([True] * num_trained + [False] * num_tail, bool)
        return np.arange(first, first + len(mask), dtype=np.int32), mask

    chosen, chosen_mask = answer(100, num_chosen, tails[0])
    rejected, rejected_mask = answer(200, num_rejected, tails[1])
    prompt = np.arange(num_prompt, dtype=np.int32)
    return Pair(prompt, chosen, rejected, chosen_mask, rejected_mask, WHERE)


def cut(pair, max_length, policy="prompt_left", bos_id=None):
    return fit_pair(pair, Limit(max_length, policy, bos_id))


def parts(pair):
    return pair.prompt.tolist(), pair.chosen.tolist(), pair.rejected.tolist()


def test_the_prompt_ends_where_the_answers_begin():
    pair = split_pair(encoded([1, 2, 3, 4], 2), encoded([1, 2, 5], 2), WHERE)
    assert parts(pair) == ([1, 2], [3, 4], [5])
    assert (pair.chosen_mask.all(), pair.rejected_mask.all(), pair.where) == (True, True, WHERE)


def test_answers_that_begin_alike_stay_whole():
    pair = split_pair(encoded([1, 2, 3, 4], 2), encoded([1, 2, 3, 5], 2), WHERE)
    assert parts(pair) == ([1, 2], [3, 4], [3, 5])


def test_an_answer_that_begins_with_the_other_stays_whole():
    pair = split_pair(encoded([1, 2, 3], 2), encoded([1, 2, 3, 4], 2), WHERE)
    assert parts(pair) == ([1, 2], [3], [3, 4])


def test_the_prompt_ends_before_a_token_that_one_answer_joined_to_it():
    # 12 is 2 with the first of the answer; the other answer left 2 as it was.
    pair = split_pair(encoded([1, 12, 3], 1), encoded([1, 2, 4], 2), WHERE)
    assert parts(pair) == ([1], [12, 3], [2, 4])
    assert pair.chosen_mask.tolist() == [True, True]
    assert pair.rejected_mask.tolist() == [False, True]


def test_the_prompt_goes_no_further_than_the_earlier_answer():
    # What the template wrote before the second answer begins like the first one.
    pair = split_pair(encoded([1, 2, 3, 4], 2), encoded([1, 2, 3, 5], 3), WHERE)
    assert parts(pair) == ([1, 2], [3, 4], [3, 5])
    assert pair.rejected_mask.tolist() == [False, True]


def test_answers_without_a_prompt_are_refused():
    for chosen, rejected in (([1, 2], [3, 4]), ([1, 2], [1, 3])):
        with pytest.raises(InputError, match=r"^rows\.jsonl:2: no token comes before the answer"):
            split_pair(encoded(chosen, 0), encoded(rejected, 0), WHERE)
    with pytest.raises(InputError, match=r"^rows\.jsonl:2: no token comes before the answer"):
        split_unpaired(*encoded([1, 2], 0), True, WHERE)


def test_an_unpaired_answer_is_split_where_it_begins():
    row = split_unpaired(*encoded([1, 2, 3, 4], 3), False, WHERE)
    assert (row.prompt.tolist(), row.completion.tolist(), row.label) == ([1, 2, 3], [4], False)
    assert (row.num_tokens, row.length, row.num_supervised) == (4, 4, 1)


def test_a_pair_counts_its_prompt_once():
    pair = made(5, 3, 2, tails=(1, 1))
    assert (pair.num_tokens, pair.length, pair.num_supervised) == (5 + 4 + 3, 5 + 4, 3 + 2)
    assert not pair.is_identical


@pytest.mark.parametrize("policy", ["prompt_left", "right", "drop", "error"])
def test_a_pair_that_fits_with_its_longer_answer_is_left_alone(policy):
    pair = made(6, 4, 2)
    fitted = cut(pair, 10, policy)
    assert (fitted.pair, fitted.lost, fitted.dropped) == (pair, None, None)


def test_the_prompt_is_cut_once_by_what_the_longer_answer_is_too_long():
    fitted = cut(made(6, 5, 2), 8)
    assert parts(fitted.pair) == ([3, 4, 5], list(range(100, 105)), [200, 201])
    assert fitted.lost == PROMPT_CUT
    assert parts(cut(made(6, 2, 5), 8).pair) == ([3, 4, 5], [100, 101], list(range(200, 205)))


def test_bos_stays_when_the_prompt_is_cut():
    assert cut(made(6, 5, 2), 8, bos_id=BOS).pair.prompt.tolist() == [BOS, 4, 5]
    assert cut(made(6, 5, 2), 6, bos_id=BOS).pair.prompt.tolist() == [BOS]
    assert cut(made(6, 5, 2), 8, bos_id=7).pair.prompt.tolist() == [3, 4, 5]


def test_the_end_of_an_answer_that_is_too_long_by_itself_is_cut_and_the_other_stays_whole():
    fitted = cut(made(6, 9, 2), 5)
    assert parts(fitted.pair) == ([5], [100, 101, 102, 103], [200, 201])
    assert fitted.pair.chosen_mask.all()
    assert fitted.lost == ANSWER_CUT


def test_what_follows_an_answer_goes_before_the_prompt_does():
    fitted = cut(made(4, 3, 2, tails=(2, 2)), 8)
    assert parts(fitted.pair) == ([0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203])
    assert fitted.lost == TAIL_CUT
    fitted = cut(made(4, 3, 2, tails=(2, 2)), 6)
    assert parts(fitted.pair) == ([1, 2, 3], [100, 101, 102], [200, 201, 202])
    assert fitted.lost == PROMPT_CUT


def test_right_cuts_the_answers_ends_and_no_prompt():
    fitted = cut(made(3, 5, 2), 6, "right")
    assert parts(fitted.pair) == ([0, 1, 2], [100, 101, 102], [200, 201])
    assert fitted.lost == ANSWER_CUT
    assert cut(made(3, 2, 2, tails=(4, 0)), 6, "right").lost == TAIL_CUT


def test_right_drops_a_pair_whose_answers_begin_beyond_the_limit():
    assert cut(made(6, 2, 3), 6, "right").dropped == ANSWER_BEYOND
    assert cut(made(9, 2, 3), 6, "right").dropped == ANSWER_BEYOND
    assert cut(made(5, 2, 3), 6, "right").dropped is None


def test_drop_drops_a_pair_that_is_too_long_with_either_answer():
    assert cut(made(6, 5, 2), 10, "drop").dropped == TOO_LONG
    assert cut(made(6, 2, 5), 10, "drop").dropped == TOO_LONG


def test_error_names_the_row_and_the_way_out():
    with pytest.raises(
        InputError, match=r"^rows\.jsonl:2: 11 tokens, and data\.max_length is 10.*data\.truncate"
    ):
        cut(made(6, 2, 5), 10, "error")


@pytest.mark.parametrize("policy", ["prompt_left", "right", "drop", "error"])
def test_a_pair_with_an_answer_of_no_target_is_dropped_whatever_its_length(policy):
    for limit in (20, 4):
        assert cut(made(5, 0, 2, tails=(3, 0)), limit, policy).dropped == UNTRAINED
        assert cut(made(5, 2, 0, tails=(0, 3)), limit, policy).dropped == UNTRAINED


def test_every_length_keeps_both_answers_or_says_that_it_did_not():
    for num_prompt in range(1, 6):
        for num_chosen in range(1, 6):
            for num_rejected in range(1, 6):
                for limit in range(2, 10):
                    pair = made(num_prompt, num_chosen, num_rejected)
                    fitted = cut(pair, limit, bos_id=BOS)
                    longer = max(num_chosen, num_rejected)
                    assert fitted.dropped is None
                    assert fitted.pair.length == min(limit, num_prompt + longer)
                    assert len(fitted.pair.prompt) == max(min(num_prompt, limit - longer), 1)
                    whole = fitted.pair.num_supervised == pair.num_supervised
                    assert whole == (fitted.lost != ANSWER_CUT) == (longer + 1 <= limit)
