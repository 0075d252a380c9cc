"""Rows, adapters that have moved, and losses and gradients: added up, and how far two are apart."""

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxft.data.example import Example
from tests.tiny_models import VOCAB_SIZE

Sums = tuple[float, dict[str, np.ndarray]]  # loss, gradients by name


def added_up(parts: Iterable[tuple[mx.array, Any, Any]]) -> Sums:
    """Returns the sums over what a `Gradient` gave for each forward."""
    loss, total = 0.0, {}
    for part, _, gradients in parts:
        loss += part.item()
        for name, array in tree_flatten(gradients):
            total[name] = total.get(name, 0.0) + np.array(array)
    return loss, total


def difference(one: Sums, other: Sums) -> float:
    """Returns the largest difference: of the loss over the loss, of gradients over the largest of them."""
    largest = max(np.abs(array).max() for array in one[1].values())
    assert one[1].keys() == other[1].keys() and largest > 0
    worst = max(np.abs(one[1][name] - other[1][name]).max() for name in one[1])
    return max(abs(one[0] - other[0]) / abs(one[0]), worst / largest)


def fill_adapters(model):
    """B starts at zero, where half of all gradients are zero too."""
    arrays = tree_flatten(model.trainable_parameters())
    keys = mx.random.split(mx.random.key(5), len(arrays))
    model.load_weights(
        [
            (name, 0.1 * mx.random.normal(array.shape, key=key))
            for (name, array), key in zip(arrays, keys, strict=True)
        ],
        strict=False,
    )


def rows(lengths=(9, 23, 14, 3)) -> list[Example]:
    random = np.random.default_rng(3)
    return [
        Example(random.integers(3, VOCAB_SIZE, n).astype(np.int32), np.arange(n) * 3 >= n, f"row {n}")
        for n in lengths
    ]
