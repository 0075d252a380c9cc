"""Runs on sets with weights: told, resumed, and not gone on with other weights."""

import shutil

import pytest

import mlxft
from mlxft.errors import InputError
from tests.runs import STEPS, arrays, metrics, same, write_token_rows


@pytest.fixture
def begin(model, here):
    """Returns a function (folder, weight, *overrides) that trains on two sets."""
    write_token_rows(here / "small.jsonl", [6, 9, 12])
    write_token_rows(here / "large.jsonl", [5, 8, 11, 14, 7, 10, 13], seed=1)

    def begin(folder, weight, *overrides):
        sets = f"data.train=[{{path:small.jsonl,weight:{weight}}},{{path:large.jsonl}}]"
        keys = [f"model.path={model}", "data.format=tokens", "data.batch_size=2", "trainer.max_steps=8"]
        return mlxft.train([sets, *keys, f"run.dir={folder}", *STEPS, *overrides])

    return begin


def test_a_run_says_how_often_each_set_is_seen(begin, here):
    begin("run", 4)
    log = (here / "run" / "train.log").read_text()
    assert "small.jsonl: weight 4, 80%: an epoch sees each of its 3 rows 2.7 times" in log
    assert "large.jsonl: weight 1, 20%: an epoch sees 2 of its 7 rows" in log


@pytest.mark.parametrize("stopped", [2, 6])
def test_a_resumed_run_is_one_that_never_stopped(begin, here, stopped):
    begin("straight", 4)
    shutil.copytree("straight", "run", symlinks=True)
    for step in range(stopped + 1, 9):
        shutil.rmtree(here / "run" / "checkpoints" / f"step-{step:06d}")
    begin("run", 4, "trainer.resume=auto")
    assert metrics(here / "run") == metrics(here / "straight")
    assert same(arrays(here / "run" / "adapter"), arrays(here / "straight" / "adapter"))


def test_other_weights_are_other_rows(begin):
    begin("run", 4)
    with pytest.raises(InputError, match="was trained on rows with other tokens"):
        begin("run", 2, "trainer.resume=auto", "trainer.max_steps=9")
