"""NEFTune's noise on embeddings: a function of step, row and place in the row, whatever the layout.

    e + u alpha / sqrt(L H),    u uniform in +-1, drawn for each number of each token

L is the tokens of the row, H the width. Rows that share a prompt are one: L is the longest one's, and their
prompt has one noise, so that it can be forwarded once. What is padding has none.
Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", algorithm 1.
"""

import math

import mlx.core as mx
import numpy as np

from mlxft.layouts.arrange import Arrangement

_BRANCH = 24  # bits of a place in the row, below those of which branch it is in


def noise_inputs(arranged: Arrangement, first: int, alpha: float, key: np.ndarray) -> dict[str, mx.array]:
    """Returns what `noisy` needs of a micro-batch.

    first: the number of its first group among those of the step. key: (2,) uint32, the step's.
    noise_places: (B, T, 2) uint32, a name for each token that is its own in the step. noise_sizes: (B, T).
    """
    shape = arranged.tokens.shape
    places, sizes = np.zeros((arranged.tokens.size, 2), np.uint32), np.zeros(arranged.tokens.size, np.float32)
    rows = iter(arranged.places)
    for number, group in enumerate(arranged.groups):
        prompt = len(group.prompt)
        longest = prompt + max(len(branch) for branch in group.branches)
        for branch in range(1, len(group.branches) + 1):
            at = next(rows)
            position = np.arange(len(at))
            places[at, 0] = first + number
            places[at, 1] = position + (branch << _BRANCH) * (position >= prompt)
            sizes[at] = alpha / math.sqrt(longest)
    return {
        "noise_key": mx.array(key),
        "noise_places": mx.array(places.reshape(*shape, 2)),
        "noise_sizes": mx.array(sizes.reshape(shape)),
    }


def noisy(embedded: mx.array, inputs: dict[str, mx.array]) -> mx.array:
    """Returns the embeddings (B, T, H) with noise on them. inputs: with those of `noise_inputs`."""
    width = embedded.shape[-1]
    # The step's key is hashed first: two steps' keys may differ by as little as two tokens' places do.
    keys = mx.random.split(inputs["noise_key"], 1)[0] + inputs["noise_places"]
    drawn = mx.vmap(lambda key: mx.random.uniform(-1, 1, (width,), key=key))(keys.reshape(-1, 2))
    noise = drawn.reshape(embedded.shape) * (inputs["noise_sizes"][..., None] / math.sqrt(width))
    return embedded + noise.astype(embedded.dtype)
