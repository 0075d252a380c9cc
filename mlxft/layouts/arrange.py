"""Rows put into one forward: which tokens stand where, and where each row's positions are found again.

A group is a prompt with the branches that continue it; a plain row is a group of one branch without a
prompt. Every layout forwards the same logical rows, prompt + branch, one for each branch in order:

    padded          a row of the array each, padded at the end
    packed          end to end in one row of the array, each a piece of its own
    prefix_shared   end to end, each group's prompt once, its branches after it

`places` maps each logical position to where its hidden state comes out, so that objectives are written
once. The last token of a row is a target only and is not forwarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlxft.layouts.pieces import Layout, Piece, padded

LAYOUTS = ("padded", "packed", "prefix_shared")

_PAD_ID = 0  # padding is never a target and no real token sees it: any id of the vocabulary does


@dataclass(frozen=True)
class Group:
    """A prompt (P,) int32 shared by branches (C,) int32 of one token or more; P may be 0 for one branch."""

    prompt: np.ndarray
    branches: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Arrangement:
    """Groups in one forward.

    tokens: (B, T) int32. layout: its pieces. places: for each logical row the flat positions (L - 1,)
    in (B * T) whose hidden states predict the row's tokens 1 to L - 1. groups: what was arranged.
    """

    tokens: np.ndarray
    layout: Layout
    places: tuple[np.ndarray, ...]
    groups: tuple[Group, ...] = ()

    @property
    def num_positions(self) -> int:
        """Positions forwarded, B * T, what rounds up among them."""
        return self.tokens.size


@dataclass(frozen=True)
class Arranger:
    """Arranges groups in the layout of that name. multiple: the length T is rounded up to one of it."""

    layout: str = "padded"
    multiple: int = 1

    def __call__(self, groups: Sequence[Group]) -> Arrangement:
        arrange = {"padded": _padded, "packed": _packed, "prefix_shared": _prefix_shared}[self.layout]
        return replace(arrange(groups, self.multiple), groups=tuple(groups))


def _padded(groups: Sequence[Group], multiple: int) -> Arrangement:
    rows = _rows(groups)
    length = _rounded(max(len(row) - 1 for row in rows), multiple)
    tokens = np.full((len(rows), length), _PAD_ID, np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row) - 1] = row[:-1]
    places = tuple(place * length + np.arange(len(row) - 1) for place, row in enumerate(rows))
    return Arrangement(tokens, padded(length), places)


def _packed(groups: Sequence[Group], multiple: int) -> Arrangement:
    line = _Line()
    for row in _rows(groups):
        line.places.append(line.add(row[:-1], position=0, sees=()))
    return line.arrangement(multiple)


def _prefix_shared(groups: Sequence[Group], multiple: int) -> Arrangement:
    """Shares whole blocks of `multiple` prompt tokens; what is left of the prompt goes with each branch.

    So every piece begins, ends and sees multiples: few layouts, each a program worth compiling, and on
    CUDA the lengths that attention's backward is fast for.
    """
    line = _Line()
    for group in groups:
        first, *others = group.branches
        own = line.add(np.concatenate([group.prompt, first[:-1]]), position=0, sees=())
        line.places.append(own)
        shared = own[: len(group.prompt) // multiple * multiple]
        line.round_up(multiple)
        for branch in others:
            rest = np.concatenate([group.prompt[len(shared) :], branch[:-1]])
            own = line.add(rest, position=len(shared), sees=(shared,))
            line.places.append(np.concatenate([shared, own]))
            line.round_up(multiple)
    return line.arrangement(multiple)


def tree(rows: Sequence[np.ndarray], multiple: int = 1) -> Arrangement:
    """Returns rows (L,) int32 end to end, every beginning that some of them share forwarded once.

    A row goes on from where it parts with the row before it, and that one with its own, to any depth: rows in
    lexicographic order share the most. Whole blocks of `multiple` tokens are shared, as with prefix_shared.
    """
    line, before, chain = _Line(), np.zeros(0, np.int32), []
    for row in rows:
        same = num_same(before, row[:-1]) // multiple * multiple
        seen = _beginning(chain, same)
        own = line.add(row[same:-1], position=same, sees=seen)
        line.round_up(multiple)
        chain = [*seen, own] if len(own) else seen
        before = row[:-1]
        line.places.append(np.concatenate([*seen, own]))
    return line.arrangement(multiple)


def num_same(first: np.ndarray, second: np.ndarray) -> int:
    """Returns how many tokens two rows begin alike with."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


def _beginning(chain: Sequence[np.ndarray], length: int) -> tuple[np.ndarray, ...]:
    """Returns the first `length` places of a row whose places are the runs of `chain`, run by run."""
    kept = []
    for run in chain:
        if length > 0:
            kept.append(run[:length])
        length -= len(run)
    return tuple(kept)


def _rows(groups: Sequence[Group]) -> list[np.ndarray]:
    return [np.concatenate([group.prompt, branch]) for group in groups for branch in group.branches]


def _rounded(length: int, multiple: int) -> int:
    return -(-max(length, 1) // multiple) * multiple


class _Line:
    """One row of the array, filled piece by piece."""

    def __init__(self):
        self.tokens: list[np.ndarray] = []
        self.pieces: list[Piece] = []
        self.places: list[np.ndarray] = []
        self.length = 0

    def add(self, tokens: np.ndarray, position: int, sees: tuple[np.ndarray, ...]) -> np.ndarray:
        """Appends a piece that sees the runs of places `sees`, then itself; returns its places."""
        start, stop = self.length, self.length + len(tokens)
        if len(tokens):  # a branch of one token is predicted by its prompt and forwards nothing
            runs = tuple((int(run[0]), int(run[-1]) + 1) for run in sees if len(run))
            self.pieces.append(Piece(start, stop, (*runs, (start, stop)), position))
            self.tokens.append(tokens)
            self.length = stop
        return np.arange(start, stop)

    def round_up(self, multiple: int) -> None:
        """Lengthens the last piece to a multiple; what is added comes after all that is read."""
        extra = -self.length % multiple
        if not extra:
            return
        last = self.pieces.pop()
        stop = last.stop + extra
        self.pieces.append(Piece(last.start, stop, (*last.keys[:-1], (last.start, stop)), last.position))
        self.tokens.append(np.full(extra, _PAD_ID, np.int32))
        self.length = stop

    def arrangement(self, multiple: int) -> Arrangement:
        """Returns what was added; what is missing to a multiple becomes a piece that nobody reads."""
        extra = _rounded(self.length, multiple) - self.length
        if extra:
            self.add(np.full(extra, _PAD_ID, np.int32), position=0, sees=())
        tokens = np.concatenate(self.tokens).astype(np.int32)[None]
        return Arrangement(tokens, Layout(self.length, tuple(self.pieces)), tuple(self.places))
