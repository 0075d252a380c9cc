"""Which rows go together in a micro-batch, epoch by epoch."""

from collections.abc import Sequence
from typing import Optional

import numpy as np

from mlxft.config.schema import DataConfig
from mlxft.data.example import Example, Pair, Unpaired
from mlxft.data.mixture import Mixture
from mlxft.data.rows import sizes_of
from mlxft.errors import InputError

_ORDER_STREAM = 1  # keeps this generator apart from others made of the same seed
_WINDOW_BATCHES = 50  # rows are sorted by length among this many batches of a random order


class BatchOrder:
    """The order of micro-batches in each epoch: every row exactly once, the last batch smaller.

    A pure function of (seed, epoch): resuming needs no generator's state. With `shuffle`, rows of
    similar length go together, so little is padded: a random order is cut into windows, each window
    sorted by length and cut into batches, and the batches shuffled. The smaller batch takes rows at
    random and comes last. Without `shuffle`: the order of the rows, `batch_size` at a time.

    lengths: (N,) tokens of each row. mixture: which rows an epoch has, where it is not each one once.

    Raises:
        InputError: no rows, or a batch size or seed out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        shuffle: bool,
        seed: int,
        mixture: Optional[Mixture] = None,
    ):
        if batch_size < 1:
            raise InputError(f"data.batch_size={batch_size}: must be 1 or more.")
        if seed < 0:
            raise InputError(f"trainer.seed={seed}: must be 0 or more.")
        if len(lengths) == 0:
            raise InputError("There are no rows to make batches of.")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._mixture = mixture
        self._last: tuple[int, list[list[int]]] = (-1, [])  # an epoch of many rows takes a second to order

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def epoch(self, n: int) -> list[list[int]]:
        """Returns the rows' indices of each micro-batch of epoch `n` (from 0)."""
        if self._last[0] != n:
            self._last = (n, self._ordered(n))
        return self._last[1]

    def _ordered(self, n: int) -> list[list[int]]:
        if not self._shuffle:
            return _cut(np.arange(len(self._lengths)), self._batch_size)
        random = np.random.default_rng(np.random.SeedSequence([self._seed, n, _ORDER_STREAM]))
        order = random.permutation(self._mixture.rows(n) if self._mixture else len(self._lengths))
        num_full = len(order) // self._batch_size * self._batch_size
        batches: list[list[int]] = []
        for rows in _cut(order[:num_full], _WINDOW_BATCHES * self._batch_size):
            window = np.array(rows)
            by_length = window[np.argsort(self._lengths[window], kind="stable")]
            batches += _cut(by_length, self._batch_size)
        batches = [batches[place] for place in random.permutation(len(batches))]
        return batches + _cut(order[num_full:], self._batch_size)

    def longest(self) -> list[int]:
        """Returns the rows of the batch that is largest to forward: no epoch has a larger one."""
        if self._shuffle:  # the longest rows may meet
            return np.argsort(-self._lengths, kind="stable")[: self._batch_size].tolist()
        return max(self.epoch(0), key=lambda rows: len(rows) * int(self._lengths[rows].max()))


class SampleOrder(BatchOrder):
    """The order of the first rows of many, with one more after them that is as long as any may be."""

    def longest(self) -> list[int]:
        """Returns the place of the row after the others, as often as a batch has rows."""
        return [len(self._lengths)] * self._batch_size


class PackedOrder:
    """Micro-batches of up to `batch_tokens` forwarded positions, whatever number of rows that is.

    Rows are put together once, longest first, each into the first micro-batch with room for it, so that
    little of any is left over; with `shuffle` every epoch has them in an order of its own, a pure
    function of (seed, epoch). Without, they come in the order of their first rows.

    lengths: (N,) tokens of each row; a row forwards all but its last.

    Raises:
        InputError: no rows, or one that alone is more than `batch_tokens`.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, shuffle: bool, seed: int):
        positions = np.asarray(lengths, dtype=np.int64) - 1
        if len(positions) == 0:
            raise InputError("There are no rows to make batches of.")
        if positions.max() > batch_tokens:
            raise InputError(
                f"data.batch_tokens={batch_tokens} has no room for the longest row, which forwards "
                f"{positions.max()} positions. Raise it, or lower data.max_length."
            )
        self._shuffle = shuffle
        self._seed = seed
        self._positions = positions
        self._batches = sorted(_first_fit(positions, batch_tokens))

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return len(self._batches)

    def epoch(self, n: int) -> list[list[int]]:
        """Returns the rows' indices of each micro-batch of epoch `n` (from 0)."""
        if not self._shuffle:
            return self._batches
        random = np.random.default_rng(np.random.SeedSequence([self._seed, n, _ORDER_STREAM]))
        return [self._batches[place] for place in random.permutation(self.num_batches)]

    def longest(self) -> list[int]:
        """Returns the rows of the batch that is largest to forward."""
        return max(self._batches, key=lambda rows: int(self._positions[rows].sum()))


def order_of(
    rows: Sequence[Example | Pair | Unpaired], cfg: DataConfig, seed: int, mixture: Optional[Mixture] = None
) -> BatchOrder | PackedOrder:
    """Returns the order in which rows are trained on: so many a micro-batch, or so many tokens.

    Raises:
        InputError: as the orders do.
    """
    lengths = sizes_of(rows, "num_tokens")
    if cfg.batch_tokens is not None:
        return PackedOrder(lengths, cfg.batch_tokens, cfg.shuffle, seed)
    return BatchOrder(lengths, cfg.batch_size, cfg.shuffle, seed, mixture)


def packed_sizes(
    rows: Sequence[Example | Pair | Unpaired], order: BatchOrder | PackedOrder, multiple: int
) -> str:
    """Returns what packed micro-batches hold, on average over the first epoch, as a sentence.

    multiple: what the length of a packed row is rounded up to.
    """
    batches = order.epoch(0)
    positions = np.array([_num_positions(row) for row in rows])
    used = np.array([positions[batch].sum() for batch in batches])
    forwarded = -(-used // multiple) * multiple
    padding = 100 * (1 - used.sum() / forwarded.sum())
    supervised = int(sizes_of(rows, "num_supervised").sum())
    return (
        f"on average a batch holds {len(rows) / len(batches):,.1f} rows with "
        f"{supervised / len(batches):,.0f} tokens trained on, in {forwarded.mean():,.0f} positions, "
        f"{padding:.1f}% of them padding"
    )


def _num_positions(row: Example | Pair | Unpaired) -> int:
    """Returns the positions a row forwards where no prompt is shared: all its tokens but an answer's last."""
    return row.num_tokens + len(row.prompt) - 2 if isinstance(row, Pair) else row.num_tokens - 1


def _first_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Returns the indices of each bin, in their order, largest first into the first bin with room."""
    free = np.full(len(sizes), room, np.int64)
    bins: list[list[int]] = []
    for place in np.argsort(-sizes, kind="stable"):
        into = int(np.argmax(free[: len(bins) + 1] >= sizes[place]))
        if into == len(bins):
            bins.append([])
        free[into] -= sizes[place]
        bins[into].append(int(place))
    return [sorted(rows) for rows in bins]


def _cut(rows: np.ndarray, size: int) -> list[list[int]]:
    return [rows[begin : begin + size].tolist() for begin in range(0, len(rows), size)]
