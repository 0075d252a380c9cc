"""Long texts cut into windows in which every token is scored exactly once."""

from typing import Optional

import numpy as np

from mlxft.data.example import Example
from mlxft.errors import InputError


def cut(
    example: Example, length: int, bos_id: Optional[int] = None, stride: Optional[int] = None
) -> list[Example]:
    """Returns the text in windows of at most `length` tokens, itself if it is no longer.

    Every token of the text but the first is scored once. stride: how many a window scores, after the first
    one, which scores all it has; the tokens before these are read as context only. None: as many as there can
    be, so that a window shares one token with the one before. A text that begins with `bos_id` has it at the
    head of every window: many models read text without it badly.

    Raises: InputError where `length` leaves no token to score.
    """
    if len(example.tokens) <= length:
        return [example]
    num_heads = int(bos_id is not None and example.tokens[0] == bos_id)
    head, body, mask = example.tokens[:num_heads], example.tokens[num_heads:], example.mask[num_heads:]
    most = length - num_heads - 1
    if most < 1:
        raise InputError(
            f"data.max_length={length} leaves no token to score in a window of a long text: "
            f"at least {num_heads + 2} are needed"
        )
    step = min(stride or most, most)
    windows = []
    for start in range(0, max(len(body) - 1 - most, 0) + step, step):
        scored = mask[start : start + most + 1].copy()
        if start:
            scored[: most + 1 - step] = False  # the windows before have these
        windows.append(
            Example(
                np.concatenate([head, body[start : start + most + 1]]),
                np.concatenate([np.zeros(num_heads, dtype=bool), scored]),
                example.where,
            )
        )
    return windows
