"""What attention's scores take in a layer: the part of its memory that is not in proportion to the length.

Rows that attend as a whole keep the scores of all positions; in blocks only those of the block at work are
alive; with a sliding window each query behind the first window has two windows of them.
"""

from dataclasses import dataclass
from typing import Optional

from mlxft.backend import backend
from mlxft.layouts.attention import FAST_HEAD_WIDTH, queries_in_windows, scores_bytes

_FEWEST_QUERIES = 32  # of a block, whatever its scores take
# Arrays of scores that are alive at once in the backward, measured: of blocks also the next one's begin.
_ALIVE, _ALIVE_OF_BLOCK = 3.5, 6.2


@dataclass(frozen=True)
class Attention:
    """How a model's layers attend. num_heads: of queries. item_bytes: of a score."""

    num_heads: int
    head_width: int
    item_bytes: int

    @property
    def is_fused(self) -> bool:
        """True where the backend's own backward keeps no scores."""
        return backend() == "cuda" and self.item_bytes == 2 and self.head_width <= FAST_HEAD_WIDTH

    def longest_at_once(self, rows: int) -> int:
        """Returns the length up to which so many rows attend in one call, not in blocks."""
        return int((scores_bytes() / (4 * rows * self.num_heads)) ** 0.5)

    def kept(self, window: Optional[int], rows: int, length: int) -> float:
        """Returns the bytes of scores that a layer keeps for its backward."""
        if window is None or length <= window:
            at_once = not self.is_fused and length <= self.longest_at_once(rows)
            return self._bytes(rows, length * length) if at_once else 0.0
        if length > queries_in_windows(rows, self.num_heads, window):
            return 0.0
        return self._bytes(rows, 2 * window * _behind(window, length))

    def alive(self, window: Optional[int], rows: int, length: int) -> float:
        """Returns the bytes of scores and what is made of them, at the most while the backward of a layer
        runs, the kept included."""
        if kept := self.kept(window, rows, length):
            return _ALIVE * kept
        if window is not None and length > window:
            at_once = min(queries_in_windows(rows, self.num_heads, window), length)
            return _ALIVE_OF_BLOCK * self._bytes(rows, at_once * min(window + at_once, 2 * window))
        if self.is_fused:
            return 0.0
        at_once = max(scores_bytes() // (4 * rows * self.num_heads * length), _FEWEST_QUERIES)
        full, rest = length - length % at_once, length % at_once
        return _ALIVE_OF_BLOCK * self._bytes(rows, max(min(at_once, length) * full, rest * length))

    def pairs(self, window: Optional[int], length: int) -> float:
        """Returns the pairs of a query and a key that a row multiplies."""
        if window is None or length <= window:
            return length * length / 2
        return window * window / 2 + 2 * window * _behind(window, length)

    def _bytes(self, rows: int, pairs: float) -> float:
        return float(rows * self.num_heads * pairs * self.item_bytes)


def _behind(window: int, length: int) -> int:
    """Returns the positions behind the first window, filled up to windows."""
    return -(-(length - window) // window) * window
