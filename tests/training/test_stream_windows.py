"""Training on a stream: every row of a block once, and a resume that goes on at the same row."""

import shutil

import pytest

from mlxft.config.schema import DataConfig
from mlxft.data.load import stream_for
from mlxft.errors import InputError
from mlxft.training.stream_windows import StreamWindows
from tests.runs import STEPS, arrays, metrics, same, train, write_rows, write_token_rows

STREAM = ["data.streaming=true", "data.buffer=6", "data.batch_size=2", "trainer.accumulate=2"]


def windows(path, accumulate=1, seed=0, **settings):
    cfg = DataConfig(train=str(path), streaming=True, max_length=64, **settings)
    return StreamWindows(stream_for("sft", cfg, None, 1000), cfg, accumulate, seed)


@pytest.fixture
def rows(here):
    return write_token_rows(here / "rows.jsonl", [4 + 3 * n % 17 for n in range(26)])


def places(batches):
    return [int(row.where.rpartition(":")[2]) for batch in batches for row in batch]


def test_an_epoch_sees_every_row_once_block_by_block(rows):
    made = windows(rows, batch_size=3, buffer=8)  # blocks of 9, 9 and 8 rows
    steps = [places(made.at(step)) for step in range(9)]
    assert [len(step) for step in steps] == [3] * 8 + [2]
    for first, size, block in ((0, 9, steps[:3]), (9, 9, steps[3:6]), (18, 8, steps[6:])):
        assert sorted(sum(block, [])) == list(range(first + 1, first + size + 1))
    again = [places(made.at(step)) for step in range(9, 18)]
    assert sorted(sum(again, [])) == list(range(1, 27)) and again != steps


def test_rows_come_in_the_files_order_if_they_are_not_shuffled(rows):
    made = windows(rows, accumulate=2, batch_size=2, buffer=8, shuffle=False)
    seen = [place for step in range(8) for place in places(made.at(step))]
    assert seen == [*range(1, 27), 1, 2, 3, 4]


def test_the_rows_of_a_step_do_not_depend_on_where_reading_began(rows):
    straight = windows(rows, batch_size=2, buffer=6, accumulate=2)
    expected = [places(straight.at(step)) for step in range(20)]
    for step in range(20):
        other = windows(rows, batch_size=2, buffer=6, accumulate=2)
        assert places(other.at(step)) == expected[step]  # all rows before are gone through
        resumed = windows(rows, batch_size=2, buffer=6, accumulate=2)
        resumed.begin(other.state())
        assert places(resumed.at(step)) == expected[step]
        assert places(resumed.at(0)) == expected[0]  # back to the beginning
    assert windows(rows, batch_size=2, buffer=6, seed=1).at(0) != expected[0]


def test_rows_of_like_length_go_together_within_a_block(rows):
    made = windows(rows, batch_size=2, buffer=26)
    padding = sum(abs(a.num_tokens - b.num_tokens) for step in range(13) for [[a, b]] in [made.at(step)])
    in_order = windows(rows, batch_size=2, buffer=26, shuffle=False)
    unsorted = sum(abs(a.num_tokens - b.num_tokens) for step in range(13) for [[a, b]] in [in_order.at(step)])
    assert padding < unsorted / 3


def test_the_longest_batch_is_planned_with_rows_as_long_as_any_may_be(rows):
    made = windows(rows, batch_size=2, buffer=6)
    longest = [made.rows[place] for place in made.order.longest()]
    assert [row.num_tokens for row in longest] == [64, 64]
    assert all(0 < row.num_supervised < 64 for row in longest)


def test_a_stream_with_nothing_to_train_on_is_an_error(here):
    path = write_rows(here / "rows.jsonl", [{"input_ids": [1, 2], "completion_mask": [0, 0]}])
    with pytest.raises(InputError, match="nothing to train on in the stream"):
        windows(path)


@pytest.mark.parametrize("stopped", [1, 2, 4, 7, 8])
def test_a_resumed_run_is_one_that_never_stopped(model, rows, here, stopped):
    """26 rows, 4 a step: blocks of 8 rows, the last of 2 rows: 7 steps an epoch."""
    train(model, rows, here / "straight", *STEPS, *STREAM, "trainer.max_steps=9")
    shutil.copytree(here / "straight", here / "run", symlinks=True)
    for step in range(stopped + 1, 10):
        shutil.rmtree(here / "run" / "checkpoints" / f"step-{step:06d}")
    train(model, rows, here / "run", *STEPS, *STREAM, "trainer.max_steps=9", "trainer.resume=auto")
    assert metrics(here / "run") == metrics(here / "straight")
    assert same(arrays(here / "run" / "adapter"), arrays(here / "straight" / "adapter"))


def test_a_stream_that_has_changed_is_not_gone_on_with(model, rows, here):
    more = [*STEPS, *STREAM, "trainer.max_steps=2"]
    train(model, rows, here / "run", *more)
    with rows.open("a") as file:
        file.write('{"input_ids": [5, 6]}\n')
    more = [*more[:-1], "trainer.max_steps=3", "trainer.resume=auto"]
    with pytest.raises(InputError, match="was trained on rows with other tokens"):
        train(model, rows, here / "run", *more)


def test_a_run_says_what_it_reads(model, rows, here):
    write_rows(here / "valid.jsonl", [{"input_ids": [5, 6, 7]}])
    train(model, rows, here / "run", *STREAM, "trainer.max_steps=7", f"data.valid={here / 'valid.jsonl'}")
    log = (here / "run" / "train.log").read_text()
    assert "training rows: read as they are needed; the first 8: median 9, longest 19 tokens" in log
    assert "training rows: 26 rows of the stream read to their end" in log
    assert [line["step"] for line in metrics(here / "run", "valid")] == [7]
