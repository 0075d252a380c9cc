"""The reference pairs as rows: all chosen rows, then all rejected ones, become pairs of one prompt."""

import numpy as np

from mlxft.data.example import Pair


def pairs_of(input_ids, attention_mask, completion_mask) -> list[Pair]:
    """Returns the P pairs of (2P, T) arrays."""
    half = len(input_ids) // 2
    return [
        _pair(*((array[i], array[half + i]) for array in (input_ids, attention_mask, completion_mask)))
        for i in range(half)
    ]


def _pair(ids, attended, answered) -> Pair:
    prompts = [int(mask.argmax()) for mask in answered]
    lengths = [int(mask.sum()) for mask in attended]
    assert prompts[0] == prompts[1] and (ids[0][: prompts[0]] == ids[1][: prompts[0]]).all()
    answers = [
        row[prompt:length].astype(np.int32) for row, prompt, length in zip(ids, prompts, lengths, strict=True)
    ]
    masks = [
        row[prompt:length].astype(bool)
        for row, prompt, length in zip(answered, prompts, lengths, strict=True)
    ]
    return Pair(ids[0][: prompts[0]].astype(np.int32), *answers, *masks, "")
