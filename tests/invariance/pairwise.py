"""A small set of cases in which every two values of any two axes meet at least once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product
from random import Random
from typing import Optional

Axes = Mapping[str, Sequence[Hashable]]
Case = dict[str, Hashable]  # a value for each axis
Refused = Callable[[Case], bool]
Pair = frozenset[tuple[str, Hashable]]  # two axes, each with one of its values


def pairs_of(case: Case) -> list[Pair]:
    """Returns what a case covers."""
    return [frozenset(pair) for pair in combinations(case.items(), 2)]


def pairs_among(axes: Axes) -> list[Pair]:
    """Returns every two values of any two axes."""
    return [
        frozenset(((one, first), (other, second)))
        for one, other in combinations(axes, 2)
        for first, second in product(axes[one], axes[other])
    ]


def pairwise(axes: Axes, refused: Refused = lambda part: False) -> list[Case]:
    """Returns cases that cover every pair of values that any case can have; the same ones every time.

    refused: whether no case can have these values. It is asked about parts of cases too: what it refuses
    of a part it has to refuse of the whole.

    Each case begins with the first pair that is still missing and takes, axis by axis, the value that
    covers most of the others; of equal ones any.
    """
    missing = dict.fromkeys(pairs_among(axes))
    random = Random(0)  # without it the values of short axes would go in step, always the same together

    def order(axis: str, part: Case) -> list[Hashable]:
        def merit(value: Hashable) -> tuple[int, float]:
            new = sum(frozenset((item, (axis, value))) in missing for item in part.items())
            return -new, random.random()

        return sorted(axes[axis], key=merit)

    cases = []
    while missing:
        first = next(iter(missing))
        case = completed(dict(first), axes, refused, order)
        if case is None:
            del missing[first]  # no case can have it
            continue
        for pair in pairs_of(case):
            missing.pop(pair, None)
        cases.append(case)
    return cases


def completed(
    part: Case, axes: Axes, refused: Refused, order: Callable[[str, Case], Sequence[Hashable]]
) -> Optional[Case]:
    """Returns the first case with the values of `part` that is not refused, None if there is none.

    order: an axis's values, in the order in which to try them after those of a part.
    """
    if refused(part):
        return None
    axis = next((axis for axis in axes if axis not in part), None)
    if axis is None:
        return {axis: part[axis] for axis in axes}
    tried = (completed(part | {axis: value}, axes, refused, order) for value in order(axis, part))
    return next((case for case in tried if case is not None), None)
