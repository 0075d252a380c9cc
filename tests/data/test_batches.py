"""Which rows are in which micro-batch, epoch by epoch."""

import numpy as np
import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.batches import BatchOrder, PackedOrder, order_of, packed_sizes
from mlxft.data.example import Example, Pair
from mlxft.errors import InputError


def random_lengths(num_rows, seed=0):
    return np.random.default_rng(seed).integers(5, 500, num_rows).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_rows, batch_size", [(1, 1), (3, 4), (8, 4), (90, 4), (1001, 8)])
def test_every_row_comes_once_an_epoch_and_the_last_batch_is_smaller(num_rows, batch_size, shuffle):
    order = BatchOrder(random_lengths(num_rows), batch_size, shuffle, seed=3)
    for epoch in range(3):
        batches = order.epoch(epoch)
        assert sorted(row for batch in batches for row in batch) == list(range(num_rows))
        assert len(batches) == order.num_batches == -(-num_rows // batch_size)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert len(batches[-1]) == (num_rows - 1) % batch_size + 1


def test_without_shuffling_rows_come_in_their_order_every_epoch():
    order = BatchOrder([9, 1, 5, 1, 7], 2, shuffle=False, seed=3)
    assert order.epoch(0) == order.epoch(7) == [[0, 1], [2, 3], [4]]


def test_an_epochs_order_depends_on_seed_and_epoch_alone():
    lengths = random_lengths(200)
    first = BatchOrder(lengths, 4, True, seed=3)
    first.epoch(0)
    first.epoch(1)
    later = BatchOrder(lengths, 4, True, seed=3)
    np.random.default_rng(0).random(10)
    assert first.epoch(2) == later.epoch(2) == later.epoch(2)
    assert later.epoch(2) != later.epoch(3)
    assert later.epoch(2) != BatchOrder(lengths, 4, True, seed=4).epoch(2)


def test_batches_hold_neighbours_by_length():
    assert BatchOrder([50, 1, 30, 2, 40, 3], 2, True, seed=0).epoch(0) != [[0, 1], [2, 3], [4, 5]]
    pairs = BatchOrder([50, 1, 30, 2, 40, 3], 2, True, seed=0).epoch(0)
    assert sorted(sorted(pair) for pair in pairs) == [[0, 4], [1, 3], [2, 5]]  # 50 40, 1 2, 30 3


def test_little_of_a_shuffled_epoch_is_padding():
    lengths = np.array(random_lengths(2000))
    batches = BatchOrder(lengths, 8, True, seed=0).epoch(0)
    width = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    assert 1 - lengths.sum() / width < 0.05
    in_file_order = BatchOrder(lengths, 8, False, seed=0).epoch(0)
    assert 1 - lengths.sum() / sum(len(b) * int(lengths[b].max()) for b in in_file_order) > 0.3


def test_long_and_short_batches_are_mixed_through_the_epoch():
    lengths = np.array(random_lengths(2000))
    longest = [int(lengths[batch].max()) for batch in BatchOrder(lengths, 8, True, seed=0).epoch(0)]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.2  # sorted ones would be near 1


def test_every_row_is_sometimes_in_the_smaller_batch():
    order = BatchOrder([1, 2, 3, 4, 5, 6, 7], 2, True, seed=0)
    assert {order.epoch(epoch)[-1][0] for epoch in range(60)} == set(range(7))


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_epoch_has_a_batch_larger_than_the_longest(shuffle):
    lengths = np.array(random_lengths(101))
    order = BatchOrder(lengths, 4, shuffle, seed=1)
    longest = order.longest()
    size = len(longest) * int(lengths[longest].max())
    sizes = [len(batch) * int(lengths[batch].max()) for epoch in range(5) for batch in order.epoch(epoch)]
    assert max(sizes) <= size
    assert shuffle or max(sizes) == size


def test_nonsense_is_refused():
    with pytest.raises(InputError, match=r"data\.batch_size=0"):
        BatchOrder([1], 0, True, 0)
    with pytest.raises(InputError, match=r"trainer\.seed=-1"):
        BatchOrder([1], 1, True, -1)
    with pytest.raises(InputError, match="no rows"):
        BatchOrder([], 1, True, 0)


def test_packing_puts_every_row_into_one_batch_and_none_is_over_full():
    lengths = np.random.default_rng(0).integers(2, 200, 300)
    order = PackedOrder(lengths, batch_tokens=256, shuffle=True, seed=0)
    for epoch in (0, 1):
        batches = order.epoch(epoch)
        assert sorted(row for rows in batches for row in rows) == list(range(300))
        assert max((lengths[rows] - 1).sum() for rows in batches) <= 256
    assert order.epoch(0) != order.epoch(1)
    assert order.epoch(0) == PackedOrder(lengths, 256, True, 0).epoch(0)


def test_packing_leaves_little_room():
    """Longest first: the 300 rows need no more than one batch above the fewest there can be."""
    lengths = np.random.default_rng(0).integers(2, 200, 300)
    fewest = -(-(lengths - 1).sum() // 256)
    assert PackedOrder(lengths, 256, False, 0).num_batches <= fewest + 1


def test_packing_by_hand():
    """Positions 6, 5, 4, 3, 2 into 10: 6 + 4, 5 + 3 + 2."""
    order = PackedOrder([7, 6, 5, 4, 3], batch_tokens=10, shuffle=False, seed=0)
    assert order.epoch(3) == [[0, 2], [1, 3, 4]]
    assert order.longest() == [0, 2]


def test_a_row_without_room_is_refused():
    with pytest.raises(InputError, match="no room for the longest row, which forwards 11 positions"):
        PackedOrder([5, 12], batch_tokens=10, shuffle=True, seed=0)


def example(length, num_supervised):
    mask = np.arange(length) >= length - num_supervised
    return Example(np.ones(length, np.int32), mask, "rows.jsonl:1")


@pytest.mark.parametrize("multiple, positions, padding", [(1, 39, "0.0"), (10, 40, "2.5")])
def test_packed_batches_are_described_by_their_rows_targets_and_padding(multiple, positions, padding):
    # Into 40 positions go 29 + 11, 24 + 10 + 6, and 17 + 8 + 5 + 4 + 3: 117 in three batches of 10 rows.
    rows = [example(length + 1, 2) for length in (29, 24, 17, 11, 10, 8, 6, 5, 4, 3)]
    order = order_of(rows, DataConfig(batch_tokens=40), seed=0)
    assert packed_sizes(rows, order, multiple) == (
        f"on average a batch holds 3.3 rows with 7 tokens trained on, in {positions} positions, "
        f"{padding}% of them padding"
    )


def test_a_packed_pair_forwards_its_prompt_twice():
    prompt, chosen, rejected = (np.ones(size, np.int32) for size in (5, 3, 2))
    pair = Pair(prompt, chosen, rejected, chosen > 0, rejected > 0, "pairs.jsonl:1")
    order = order_of([pair, pair], DataConfig(batch_size=1), seed=0)
    # 5 + 3 - 1 and 5 + 2 - 1: nothing is predicted from an answer's last token.
    assert packed_sizes([pair, pair], order, 1) == (
        "on average a batch holds 1.0 rows with 5 tokens trained on, in 13 positions, 0.0% of them padding"
    )
