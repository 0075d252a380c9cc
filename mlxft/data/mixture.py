"""Sets of rows mixed by weight: how many rows of each an epoch has, and which ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxft.errors import InputError

_MIXTURE_STREAM = 3  # keeps these random numbers apart from others made of the same seed


@dataclass(frozen=True)
class Mixture:
    """Sets whose rows follow each other, and the weights by which an epoch draws from them.

    An epoch has as many rows as all sets together, shared out by weight. A set's rows are gone through in
    random orders, one after the other, and an epoch goes on where the last one stopped: so no row is seen
    more than once more often than another of its set. All of it is a pure function of (seed, epoch).

    names, sizes, weights: of each set.

    Raises: InputError for a set without rows.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def __post_init__(self):
        for name, size in zip(self.names, self.sizes, strict=True):
            if size == 0:
                raise InputError(f"{name}: no row is left to draw from. Take the set out of data.train.")

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows that an epoch has of each set, at least one; together as many as there are rows."""
        total, whole = sum(self.sizes), np.array(self.weights) / sum(self.weights)
        shares = np.maximum(np.floor(whole * total), 1).astype(np.int64)
        behind = whole * total - shares
        while shares.sum() != total:
            step = int(np.sign(total - shares.sum()))
            place = int(np.argmax(behind * step if step > 0 else np.where(shares > 1, -behind, -np.inf)))
            shares[place] += step
            behind[place] -= step
        return tuple(shares.tolist())

    def rows(self, epoch: int) -> np.ndarray:
        """Returns the indices of an epoch's rows (N,), set by set; some more than once, some not at all."""
        firsts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        drawn = [
            first + self._drawn(place, epoch * count, (epoch + 1) * count)
            for place, (first, count) in enumerate(zip(firsts, self.counts, strict=True))
        ]
        return np.concatenate(drawn)

    def lines(self) -> list[str]:
        """Returns for each set, as a sentence, how often it is seen in an epoch."""
        lines = []
        for name, size, weight, count in zip(self.names, self.sizes, self.weights, self.counts, strict=True):
            often = f"{count:,} of its {size:,} rows" if count < size else f"its {size:,} rows once"
            if count > size:
                often = f"each of its {size:,} rows {count / size:,.1f} times"
            lines.append(f"{name}: weight {weight:g}, {count / sum(self.counts):.0%}: an epoch sees {often}")
        return lines

    def _drawn(self, place: int, begin: int, end: int) -> np.ndarray:
        """Returns the rows `begin` to `end` of a set's endless sequence of random orders."""
        size = self.sizes[place]
        orders = []
        for turn in range(begin // size, -(-end // size)):
            sequence = np.random.SeedSequence([self.seed, turn, place, _MIXTURE_STREAM])
            order = np.random.default_rng(sequence).permutation(size)
            orders.append(order[max(begin - turn * size, 0) : end - turn * size])
        return np.concatenate(orders)


def mixture_of(
    names: Sequence[str], sizes: Sequence[int], weights: Sequence[float | None], seed: int
) -> Mixture | None:
    """Returns how sets are mixed, those without a weight having 1; None where none has one."""
    if all(weight is None for weight in weights):
        return None
    given = tuple(1.0 if weight is None else float(weight) for weight in weights)
    return Mixture(tuple(names), tuple(sizes), given, seed)
