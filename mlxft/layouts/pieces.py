"""A layout as a list of pieces: which queries see which keys, and at which position each piece starts.

The same few shapes describe every layout; attention and RoPE read nothing else.

    padded rows        one piece: all queries, all keys, from position 0
    packed rows        one piece a row: each sees itself, each starts at position 0
    a shared prompt    the prompt with its first branch; each further branch sees the prompt, then itself
"""

from dataclasses import dataclass

Span = tuple[int, int]  # positions of the row, [start, stop)


@dataclass(frozen=True)
class Piece:
    """Queries [start, stop) of the row, at positions `position`, `position` + 1, ...

    keys: the ranges of the row they may see, in order; the last is [start, stop) itself. Taken end to
    end the ranges are the row's positions up to the last query, so "causal", aligned to the lower
    right, is all the mask there is.
    """

    start: int
    stop: int
    keys: tuple[Span, ...]
    position: int

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return sum(stop - start for start, stop in self.keys)


@dataclass(frozen=True)
class Layout:
    """The pieces of a forward over `length` positions, in order and without gaps.

    Equal layouts give equal programs: a `Layout` is the part of a compile key that stands for them.
    """

    length: int
    pieces: tuple[Piece, ...]

    def __post_init__(self):
        edges = [0] + [piece.stop for piece in self.pieces]
        if [piece.start for piece in self.pieces] != edges[:-1] or edges[-1] != self.length:
            raise ValueError(f"pieces must cover [0, {self.length}) in order, got {self.pieces}")
        for piece in self.pieces:
            if piece.keys[-1] != (piece.start, piece.stop):
                raise ValueError(f"the last keys of a piece are its own: {piece}")

    @property
    def is_plain(self) -> bool:
        """True for a row that sees itself from position 0 on: what models do without a layout."""
        return len(self.pieces) == 1 and len(self.pieces[0].keys) == 1 and self.pieces[0].position == 0


def padded(length: int) -> Layout:
    """Returns the layout of rows side by side: every row causal over `length` positions.

    Padding stands at the end, where no real query sees it, so it needs no piece of its own.
    """
    return Layout(length, (Piece(0, length, ((0, length),), 0),))
