"""The pairwise cover: nothing is missing that could be there, nothing is there that is refused."""

from itertools import product

import pytest

from tests.invariance.pairwise import pairs_of, pairwise

AXES = {
    "letter": "abcde",
    "number": (1, 2, 3),
    "sign": ("+", "-"),
    "flag": (True, False),
    "size": ("small", "large"),
}


def everything(axes):
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def nothing(part):
    return False


def two_together(part):
    return part.get("letter") == "a" and part.get("number", 1) != 1


def three_together(part):
    """No pair of them is refused."""
    return (part.get("sign"), part.get("flag"), part.get("size")) == ("+", True, "small")


def a_value_that_no_case_has(part):
    return part.get("number") == 2


def a_pair_that_only_its_completions_rule_out(part):
    """With e and large, neither flag is left."""
    return (part.get("letter"), part.get("flag")) == ("e", True) or (
        (part.get("size"), part.get("flag")) == ("large", False) and part.get("letter") == "e"
    )


RULES = [
    nothing, two_together, three_together, a_value_that_no_case_has, a_pair_that_only_its_completions_rule_out
]  # fmt: skip


@pytest.mark.parametrize("refused", RULES)
def test_what_any_case_can_have_is_in_the_cover_and_nothing_else(refused):
    possible = {pair for case in everything(AXES) if not refused(case) for pair in pairs_of(case)}
    cover = pairwise(AXES, refused)
    assert {pair for case in cover for pair in pairs_of(case)} == possible
    assert all(case.keys() == AXES.keys() and not refused(case) for case in cover)


@pytest.mark.parametrize("refused", RULES)
def test_the_cover_is_the_same_every_time_and_has_no_case_twice(refused):
    cover = pairwise(AXES, refused)
    assert cover == pairwise(AXES, refused)
    assert len({tuple(case.items()) for case in cover}) == len(cover)


def test_few_cases_are_needed_beyond_the_pairs_of_the_two_longest_axes():
    assert 15 <= len(pairwise(AXES)) <= 18
    many = {"first": range(20), "second": range(12), **{str(n): (0, 1) for n in range(10)}}
    assert 240 <= len(pairwise(many)) <= 250
    assert len(everything(many)) == 245_760
