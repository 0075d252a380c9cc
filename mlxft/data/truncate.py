"""What happens to a row that is longer than `data.max_length`: by a named policy, and counted."""

from dataclasses import dataclass

import numpy as np

from mlxft.config.choices import TRUNCATIONS
from mlxft.errors import InputError

# Why a row was dropped.
UNTRAINED = "nothing to train on"
TOO_LONG = "longer than data.max_length"
ANSWER_BEYOND = "the answer begins beyond data.max_length"

# What a row lost.
TAIL_CUT = "what follows the answer"
PROMPT_CUT = "the left of the prompt"
ANSWER_CUT = "the end of the answer"
TEXT_CUT = "the end of the text"


@dataclass(frozen=True)
class Fitted:
    """A row that fits. lost: what was cut off it, or None. dropped: why there is no row, or None."""

    tokens: np.ndarray
    mask: np.ndarray
    lost: str | None = None
    dropped: str | None = None


@dataclass(frozen=True)
class Limit:
    """The longest a row may be, what to do beyond it, and the BOS token that stays (None: there is none)."""

    max_length: int
    policy: str
    bos_id: int | None = None

    def __post_init__(self):
        if self.policy not in TRUNCATIONS:
            raise InputError(f"data.truncate={self.policy}: must be one of {', '.join(TRUNCATIONS)}.")
        if self.max_length < 2:
            raise InputError(f"data.max_length={self.max_length}: must be 2 or more.")


def fit(tokens: np.ndarray, mask: np.ndarray, limit: Limit, where: str) -> Fitted:
    """Returns the row cut to `limit.max_length` tokens.

    tokens: (T,). mask: (T,) bool, true on targets; mask[0] does not count, nothing comes before it.
    The policies, for a row that is too long:
    prompt_left: first goes what follows the last target, from its end. Then what precedes the first
        target, from its left, but BOS stays in place if the row begins with it, and if it does not,
        the token right before the first target stays. If that is not enough the end of the answer is
        cut. A text trained from its start has no prompt: its end is cut.
    right: the end is cut; a row left without a target is dropped.
    drop: the row is dropped. error: InputError.

    Raises:
        InputError: a row is too long and the policy is error.
    """
    if not mask[1:].any():
        return Fitted(tokens, mask, dropped=UNTRAINED)
    if len(tokens) <= limit.max_length:
        return Fitted(tokens, mask)
    check_length(len(tokens), limit, where)
    if limit.policy == "drop":
        return Fitted(tokens, mask, dropped=TOO_LONG)
    if limit.policy == "prompt_left":
        return _cut_prompt_left(tokens, mask, limit)
    kept = slice(0, limit.max_length)
    if not mask[kept][1:].any():
        return Fitted(tokens, mask, dropped=ANSWER_BEYOND)
    return Fitted(tokens[kept], mask[kept], lost=_end_lost(mask, limit.max_length))


def check_length(length: int, limit: Limit, where: str) -> None:
    """Raises InputError when a row is too long and the policy is error."""
    if limit.policy == "error" and length > limit.max_length:
        raise InputError(
            f"{where}: {length} tokens, and data.max_length is {limit.max_length}. Raise it, shorten "
            "the row, or choose what to do with long rows: data.truncate=prompt_left, right or drop."
        )


def _cut_prompt_left(tokens: np.ndarray, mask: np.ndarray, limit: Limit) -> Fitted:
    targets = np.flatnonzero(mask[1:]) + 1
    first, last = int(targets[0]), int(targets[-1])
    end = max(limit.max_length, last + 1)  # without what follows the last target, as far as needed
    has_bos = limit.bos_id is not None and int(tokens[0]) == limit.bos_id
    removed = min(max(end - limit.max_length, 0), first - 1)
    begin = 1 if has_bos else 0
    kept = np.r_[0:begin, begin + removed : end][: limit.max_length]
    if end - removed > limit.max_length:
        lost = TEXT_CUT if mask.all() else ANSWER_CUT
    else:
        lost = PROMPT_CUT if removed else TAIL_CUT
    return Fitted(tokens[kept], mask[kept], lost=lost)


def _end_lost(mask: np.ndarray, end: int) -> str:
    if mask.all():
        return TEXT_CUT
    return ANSWER_CUT if mask[end:].any() else TAIL_CUT
