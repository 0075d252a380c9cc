"""Sets mixed by weight: whose rows an epoch has, and how often."""

from collections import Counter

import numpy as np
import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.batches import order_of
from mlxft.data.load import load_examples, mixture_in
from mlxft.data.mixture import Mixture, mixture_of
from mlxft.errors import InputError


def mixture(sizes, weights, seed=0):
    return Mixture(tuple(f"{n}.jsonl" for n in range(len(sizes))), tuple(sizes), tuple(weights), seed)


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [
        ((30, 30), (2.0, 1.0), (40, 20)),
        ((10, 90), (1.0, 1.0), (50, 50)),
        ((10, 10, 10), (1.0, 1.0, 1.0), (10, 10, 10)),
        ((1, 99), (1.0, 999.0), (1, 99)),  # 0.1 of a row: never none
        ((3, 4), (1.0, 1.0), (4, 3)),
    ],
)
def test_an_epoch_has_as_many_rows_as_there_are_shared_out_by_weight(sizes, weights, counts):
    assert sorted(mixture(sizes, weights).counts) == sorted(counts)
    assert sum(mixture(sizes, weights).counts) == sum(sizes)


def test_a_set_is_seen_evenly_over_the_epochs():
    mixed = mixture((10, 30), (1.0, 1.0))  # 20 and 20 an epoch: the first twice, the second 2/3
    assert mixed.counts == (20, 20)
    seen = Counter()
    for epoch in range(3):
        rows = mixed.rows(epoch)
        assert len(rows) == 40
        assert Counter(rows[rows < 10].tolist()) == {row: 2 for row in range(10)}
        seen.update(rows[rows >= 10].tolist())
    assert seen == {row: 2 for row in range(10, 40)}


def test_the_rows_are_a_pure_function_of_seed_and_epoch():
    mixed = mixture((10, 30), (1.0, 2.0))
    last = mixed.rows(5)
    assert np.array_equal(last, mixture((10, 30), (1.0, 2.0)).rows(5))
    assert not np.array_equal(last, mixed.rows(4))
    assert not np.array_equal(last, mixture((10, 30), (1.0, 2.0), seed=1).rows(5))


def test_sets_without_a_weight_count_as_one_and_none_means_no_mixture():
    assert mixture_of(["a", "b"], [4, 4], [None, None], 0) is None
    assert mixture_of(["a", "b"], [4, 4], [3, None], 0).weights == (3.0, 1.0)


def test_how_often_each_set_is_seen_is_said():
    assert mixture((10, 30), (1.0, 1.0)).lines() == [
        "0.jsonl: weight 1, 50%: an epoch sees each of its 10 rows 2.0 times",
        "1.jsonl: weight 1, 50%: an epoch sees 20 of its 30 rows",
    ]


def test_a_set_of_which_no_row_is_left_is_an_error():
    with pytest.raises(InputError, match=r"^1\.jsonl: no row is left to draw from"):
        mixture((3, 0), (1.0, 1.0))


def test_batches_hold_the_rows_of_the_mixture(write_rows):
    small = write_rows([{"input_ids": [1, 2]}] * 4, "small.jsonl")
    large = write_rows([{"input_ids": [3, 4]}] * 12, "large.jsonl")
    cfg = DataConfig(train=[{"path": small, "weight": 3}, {"path": large, "weight": 1}], batch_size=4)
    rows, _ = load_examples(cfg.train, cfg, None, 10)
    order = order_of(rows, cfg, 0, mixture_in(rows, cfg, 0))
    drawn = [rows[place].tokens[0] for batch in order.epoch(0) for place in batch]
    assert (drawn.count(1), drawn.count(3)) == (12, 4)
    assert order.num_batches == 4 == len(order.epoch(0))
    assert order.epoch(1) != order.epoch(0) == order_of(rows, cfg, 0, mixture_in(rows, cfg, 0)).epoch(0)


def test_sets_may_have_formats_and_columns_of_their_own(write_rows, make_tokenizer):
    texts = write_rows([{"text": "hello"}], "texts.jsonl")
    asked = write_rows([{"q": "two", "a": " three"}], "asked.jsonl")
    sets = [{"path": texts}, {"path": asked, "columns": {"prompt": "q", "completion": "a"}}]
    rows, report = load_examples(sets, DataConfig(), make_tokenizer(), 1000)
    assert [row.where for row in rows] == [f"{texts}:1", f"{asked}:1"]
    assert rows.set_sizes == (1, 1)
    assert report.format == "text and completion"
