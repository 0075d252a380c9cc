"""Pieces of one shape as rows of one batch, so that many short pieces cost a few calls, not a few each.

    folded = folding(layout, multiple)
    for q, k, v in zip(folded.queries(q), folded.keys(k), folded.keys(v)): ...     one call a group
    out = folded.unfolded(outputs)

Pieces are of one shape if they have as many queries, rounded up to `multiple`, after as many keys seen
before. What rounds a piece up comes after its last query, which no real query sees, in queries and keys
alike, so "causal" stays aligned to the lower right. Each way is one gather, and so is its backward.

Shapes: B rows, N heads, T positions of the row, D head width; a group has G pieces of Q queries.
"""

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxft.layouts.pieces import Layout

_NONE = -1  # in an index: no row comes from here


@dataclass(frozen=True)
class _Group:
    """Pieces of one shape: their numbers in the layout, how many keys come before their own, and Q."""

    pieces: tuple[int, ...]
    before: int
    length: int


class Folding:
    """A layout's pieces in groups. multiple: what a piece's number of queries is rounded up to."""

    def __init__(self, layout: Layout, multiple: int = 1):
        self.layout = layout
        alike: dict[tuple[int, int], list[int]] = {}
        for number, piece in enumerate(layout.pieces):
            rounded = -(-piece.num_queries // multiple) * multiple
            alike.setdefault((piece.num_keys - piece.num_queries, rounded), []).append(number)
        self.groups = [_Group(tuple(numbers), *shape) for shape, numbers in alike.items()]
        self._kept: dict[tuple[str, int, int], _Gather] = {}

    def queries(self, x: mx.array) -> list[mx.array]:
        """Returns for each group its pieces' queries (G * B, N, Q, D), of x (B, N, T, D)."""
        return self._folded(x, "queries", [group.length for group in self.groups])

    def keys(self, x: mx.array) -> list[mx.array]:
        """Returns for each group what its pieces see, (G * B, N, before + Q, D), of x (B, N, T, D)."""
        return self._folded(x, "keys", [group.before + group.length for group in self.groups])

    def unfolded(self, outputs: list[mx.array]) -> mx.array:
        """Returns the row (B, N, T, D) of the groups' outputs (G * B, N, Q, D)."""
        heads, width = outputs[0].shape[1], outputs[0].shape[3]
        num_rows = outputs[0].shape[0] // len(self.groups[0].pieces)
        flat = mx.concatenate([out.reshape(-1, width) for out in outputs])
        row = self._gather("outputs", num_rows, heads)(flat)
        return row.reshape(num_rows, heads, self.layout.length, width)

    def _folded(self, x: mx.array, what: str, lengths: list[int]) -> list[mx.array]:
        num_rows, heads, _, width = x.shape
        shapes = [
            (len(group.pieces) * num_rows, heads, length, width)
            for group, length in zip(self.groups, lengths, strict=True)
        ]
        edges = np.cumsum([np.prod(shape[:3]) for shape in shapes])[:-1].tolist()
        parts = mx.split(self._gather(what, num_rows, heads)(x.reshape(-1, width)), edges)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _gather(self, what: str, num_rows: int, heads: int) -> "_Gather":
        key = what, num_rows, heads
        if key not in self._kept:
            if what == "outputs":  # queries, the other way round
                queries = self._gather("queries", num_rows, heads)
                self._kept[key] = _Gather(queries.uses[0], [queries.source])
            else:
                self._kept[key] = self._made(what == "keys", num_rows * heads)
        return self._kept[key]

    def _made(self, with_keys: bool, num_heads: int) -> "_Gather":
        """Returns the gather of rows * heads from (head, position) to (group, piece, head, position)."""
        head = np.arange(num_heads, dtype=np.int32)[:, None]
        uses, source, done = _Uses(self.layout.length), [], 0
        for group in self.groups:
            length = group.length + (group.before if with_keys else 0)
            for number in group.pieces:
                piece = self.layout.pieces[number]
                ranges = piece.keys if with_keys else ((piece.start, piece.stop),)
                seen = np.concatenate([np.arange(*each, dtype=np.int32) for each in ranges])
                padded = np.pad(seen, (0, length - len(seen)), constant_values=_NONE)
                source.append(np.where(padded == _NONE, _NONE, padded + head * self.layout.length).ravel())
                uses.add(seen, done, length)
                done += num_heads * length
        return _Gather(np.concatenate(source), uses.of_heads(head))


class _Uses:
    """Where each position of the row goes: at its first use, its second (a prompt that a branch sees), ..."""

    def __init__(self, length: int):
        self.count = np.zeros(length, np.int32)
        self.tables: list[tuple[np.ndarray, np.ndarray]] = []  # of the first head, and from head to head

    def add(self, seen: np.ndarray, start: int, stride: int) -> None:
        """The positions `seen` go to start, start + 1, ..., and `stride` further on for the next head."""
        places = start + np.arange(len(seen), dtype=np.int32)
        for use in np.unique(self.count[seen]):
            if use == len(self.tables):
                self.tables.append((np.full_like(self.count, _NONE), np.zeros_like(self.count)))
            now = self.count[seen] == use
            self.tables[use][0][seen[now]] = places[now]
            self.tables[use][1][seen[now]] = stride
        self.count[seen] += 1

    def of_heads(self, head: np.ndarray) -> list[np.ndarray]:
        return [
            np.where(first == _NONE, _NONE, first + head * stride).ravel() for first, stride in self.tables
        ]


class _Gather:
    """Gathers rows (R, D) to (F, D). source: (F,), of each new row; uses: (R,) each, where an old one went.

    Its backward gathers too, use by use: a scatter adds in an order of its own, on a GPU another each time.
    """

    def __init__(self, source: np.ndarray, uses: list[np.ndarray]):
        self.source, self.uses = source, uses
        self.forward, first, *more = (_Pick(index) for index in (source, *uses))

        @mx.custom_function
        def gathered(rows):
            return self.forward(rows)

        @gathered.vjp
        def gathered_vjp(_, cotangent, __):
            return sum((pick(cotangent) for pick in more), first(cotangent))

        self._gathered = gathered

    def __call__(self, rows: mx.array) -> mx.array:
        return self._gathered(rows)


class _Pick:
    """Picks rows by index; zero where the index has none."""

    def __init__(self, index: np.ndarray):
        real = index != _NONE
        self.index = mx.array(np.maximum(index, 0))
        self.real = None if real.all() else mx.array(real[:, None])

    def __call__(self, rows: mx.array) -> mx.array:
        picked = mx.take(rows, self.index, axis=0)
        return picked if self.real is None else mx.where(self.real, picked, mx.zeros((), rows.dtype))


@lru_cache(maxsize=4)
def folding(layout: Layout, multiple: int) -> Folding:
    """Returns the groups of a layout; the last few are kept, since all layers of a forward ask for one."""
    return Folding(layout, multiple)
