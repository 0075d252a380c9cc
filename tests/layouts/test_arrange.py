"""Where tokens stand in each layout, and that every logical position is found again."""

import numpy as np
import pytest

from mlxft.layouts.arrange import LAYOUTS, Arranger, Group
from mlxft.layouts.pieces import Piece


def tokens(*values) -> np.ndarray:
    return np.array(values, np.int32)


NONE = tokens()
PAIRS = [
    Group(tokens(1, 2, 3), (tokens(4, 5), tokens(6, 7, 8))),
    Group(tokens(9), (tokens(10), tokens(11))),  # branches of one token
    Group(NONE, (tokens(12, 13, 14),)),
]
LOGICAL = [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7, 8], [9, 10], [9, 11], [12, 13, 14]]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_of_every_logical_row_is_found_again(layout, multiple):
    arranged = Arranger(layout, multiple)(PAIRS)
    flat = arranged.tokens.reshape(-1)
    assert [flat[places].tolist() for places in arranged.places] == [row[:-1] for row in LOGICAL]
    assert arranged.layout.length == arranged.tokens.shape[1]
    assert arranged.layout.length % multiple == 0


def test_padded_rows_stand_side_by_side():
    arranged = Arranger("padded")(PAIRS)
    assert arranged.tokens.tolist() == [
        [1, 2, 3, 4, 0],
        [1, 2, 3, 6, 7],
        [9, 0, 0, 0, 0],
        [9, 0, 0, 0, 0],
        [12, 13, 0, 0, 0],
    ]
    assert arranged.layout.is_plain


def test_packed_rows_each_see_themselves_from_position_0():
    arranged = Arranger("packed")(PAIRS)
    assert arranged.tokens.tolist() == [[1, 2, 3, 4, 1, 2, 3, 6, 7, 9, 9, 12, 13]]
    edges = [(0, 4), (4, 9), (9, 10), (10, 11), (11, 13)]
    assert arranged.layout.pieces == tuple(Piece(a, b, ((a, b),), 0) for a, b in edges)


def test_a_shared_prompt_is_forwarded_once_and_seen_by_every_branch():
    arranged = Arranger("prefix_shared")(PAIRS)
    assert arranged.tokens.tolist() == [[1, 2, 3, 4, 6, 7, 9, 12, 13]]
    assert arranged.layout.pieces == (
        Piece(0, 4, ((0, 4),), 0),
        Piece(4, 6, ((0, 3), (4, 6)), 3),
        Piece(6, 7, ((6, 7),), 0),
        Piece(7, 9, ((7, 9),), 0),
    )


def test_what_rounds_a_packed_row_up_is_seen_by_nobody():
    arranged = Arranger("packed", 16)(PAIRS)
    assert arranged.layout.pieces[-1] == Piece(13, 16, ((13, 16),), 0)
    assert all(piece.keys[-1][1] <= 13 for piece in arranged.layout.pieces[:-1])


def test_whole_blocks_of_a_prompt_are_shared_and_its_rest_goes_with_each_branch():
    """A prompt of 6 in blocks of 4: 4 shared, 2 forwarded again before the second branch."""
    group = Group(tokens(1, 2, 3, 4, 5, 6), (tokens(7, 8), tokens(9, 10, 11)))
    arranged = Arranger("prefix_shared", 4)([group])
    assert arranged.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0, 5, 6, 9, 10]]
    assert arranged.layout.pieces == (Piece(0, 8, ((0, 8),), 0), Piece(8, 12, ((0, 4), (8, 12)), 4))
    assert [places.tolist() for places in arranged.places] == [
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 8, 9, 10, 11],
    ]
