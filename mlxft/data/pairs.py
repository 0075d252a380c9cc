"""Splits encoded answers from their prompt, the same tokens for both answers of a pair, and fits them.

Each answer's conversation is encoded whole, as the tokenizer itself does it. The prompt is what both
begin with in common and none is trained on, token by token: where a merge across the seam makes a
token of one answer that the other has not, the prompt ends before it.
"""

from dataclasses import dataclass, replace

import numpy as np

from mlxft.data.example import Pair, Unpaired
from mlxft.data.plain_text import shared_start
from mlxft.data.truncate import (
    ANSWER_BEYOND,
    ANSWER_CUT,
    PROMPT_CUT,
    TAIL_CUT,
    TOO_LONG,
    UNTRAINED,
    Limit,
    check_length,
)
from mlxft.errors import InputError

_NO_PROMPT = (
    "no token comes before the answer, so nothing would predict its first one. Write a prompt (this "
    "tokenizer puts no token of its own before an empty one, or joins a very short one to the answer)."
)

Encoded = tuple[np.ndarray, np.ndarray]  # tokens (T,) int32, mask (T,) bool


@dataclass(frozen=True)
class FittedPair:
    """A pair that fits. lost: what was cut off it, or None. dropped: why there is no pair, or None."""

    pair: Pair
    lost: str | None = None
    dropped: str | None = None


def split_pair(chosen: Encoded, rejected: Encoded, where: str) -> Pair:
    """Returns both answers apart from the prompt that they share.

    Raises:
        InputError: they share no token before the answers, so nothing would predict their first ones.
    """
    size = min(shared_start(chosen[0], rejected[0]), _first_target(chosen[1]), _first_target(rejected[1]))
    if size == 0:
        raise InputError(f"{where}: {_NO_PROMPT}")
    return Pair(
        chosen[0][:size], chosen[0][size:], rejected[0][size:], chosen[1][size:], rejected[1][size:], where
    )


def split_unpaired(tokens: np.ndarray, mask: np.ndarray, label: bool, where: str) -> Unpaired:
    """Returns an answer apart from its prompt.

    Raises:
        InputError: nothing comes before the answer.
    """
    size = _first_target(mask)
    if size == 0:
        raise InputError(f"{where}: {_NO_PROMPT}")
    return Unpaired(tokens[:size], tokens[size:], mask[size:], label, where)


def _first_target(mask: np.ndarray) -> int:
    return int(mask.argmax()) if mask.any() else len(mask)


def fit_pair(pair: Pair, limit: Limit) -> FittedPair:
    """Returns the pair cut so that the prompt with either answer has `limit.max_length` tokens at most.

    The policies, for a pair whose longer answer makes it too long:
    prompt_left: first goes what follows an answer's last target. Then the prompt is cut from its left,
        once for both answers, by what the longer one is too long; BOS stays in place if the prompt begins
        with it, and one token always stays. If that is not enough an answer's end is cut.
    right: the ends of the answers are cut; a pair left without a target in either is dropped.
    drop: the pair is dropped. error: InputError.
    A pair with an answer of no target is dropped whatever its length: there is nothing to compare.

    Raises:
        InputError: a pair is too long and the policy is error.
    """
    if not (pair.chosen_mask.any() and pair.rejected_mask.any()):
        return FittedPair(pair, dropped=UNTRAINED)
    if pair.length <= limit.max_length:
        return FittedPair(pair)
    check_length(pair.length, limit, pair.where)
    if limit.policy == "drop":
        return FittedPair(pair, dropped=TOO_LONG)
    prompt = _cut_prompt(pair, limit) if limit.policy == "prompt_left" else pair.prompt
    room = max(limit.max_length - len(prompt), 0)
    fitted = replace(
        pair,
        prompt=prompt,
        chosen=pair.chosen[:room],
        rejected=pair.rejected[:room],
        chosen_mask=pair.chosen_mask[:room],
        rejected_mask=pair.rejected_mask[:room],
    )
    if not (fitted.chosen_mask.any() and fitted.rejected_mask.any()):
        return FittedPair(pair, dropped=ANSWER_BEYOND)
    if fitted.num_supervised < pair.num_supervised:
        return FittedPair(fitted, lost=ANSWER_CUT)
    return FittedPair(fitted, lost=PROMPT_CUT if len(prompt) < len(pair.prompt) else TAIL_CUT)


def _cut_prompt(pair: Pair, limit: Limit) -> np.ndarray:
    answers = max(_after_last_target(pair.chosen_mask), _after_last_target(pair.rejected_mask))
    excess = len(pair.prompt) + answers - limit.max_length
    removed = min(max(excess, 0), len(pair.prompt) - 1)
    begin = int(limit.bos_id is not None and int(pair.prompt[0]) == limit.bos_id)
    return np.concatenate([pair.prompt[:begin], pair.prompt[begin + removed :]])


def _after_last_target(mask: np.ndarray) -> int:
    return int(np.flatnonzero(mask)[-1]) + 1
