"""Long texts cut into windows in which every token is scored exactly once."""

from typing import Optional

import numpy as np

from mlxft.data.example import Example
from mlxft.errors import InputError


def cut(example: Example, length: int, bos_id: Optional[int] = None) -> list[Example]:
    """Returns the text in windows of at most `length` tokens, itself if it is no longer.

    A window begins with the last token of the one before, which is read and not scored again, so that
    every token of the text but the first is scored once. A text that begins with `bos_id` has it at the
    head of every window: many models read text without it badly.

    Raises: InputError where `length` leaves no token to score.
    """
    if len(example.tokens) <= length:
        return [example]
    num_heads = int(bos_id is not None and example.tokens[0] == bos_id)
    head, body, mask = example.tokens[:num_heads], example.tokens[num_heads:], example.mask[num_heads:]
    step = length - num_heads - 1
    if step < 1:
        raise InputError(
            f"data.max_length={length} leaves no token to score in a window of a long text: "
            f"at least {num_heads + 2} are needed"
        )
    windows = []
    for start in range(0, len(body) - 1, step):
        scored = mask[start : start + step + 1].copy()
        scored[0] &= start == 0
        windows.append(
            Example(
                np.concatenate([head, body[start : start + step + 1]]),
                np.concatenate([np.zeros(num_heads, dtype=bool), scored]),
                example.where,
            )
        )
    return windows
