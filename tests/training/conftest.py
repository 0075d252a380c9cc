"""A tiny model and rows for the tests of whole runs."""

import shutil

import pytest

from tests.runs import STEPS, train, write_token_rows
from tests.tiny_models import make_model

LENGTHS = [5, 9, 30, 7, 12, 18, 6, 25, 11, 4]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a llama with two blocks."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A file of ten rows of tokens."""
    return write_token_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", LENGTHS)


@pytest.fixture(scope="session")
def valid(tmp_path_factory):
    """A file of three other rows."""
    return write_token_rows(tmp_path_factory.mktemp("rows") / "valid.jsonl", [8, 13, 5], seed=1)


@pytest.fixture(scope="session")
def finished(model, data, tmp_path_factory):
    """A run of six steps, not to be changed: a checkpoint of each, and a validation that is the best yet."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    more = ["trainer.max_steps=6", f"data.valid={data}", "trainer.eval_every=1"]
    train(model, data, run_dir, *STEPS, *more)
    return run_dir


@pytest.fixture
def run(finished, here):
    """A copy of the finished run, stopped after four steps."""
    shutil.copytree(finished, here / "run", symlinks=True)
    for step in (5, 6):
        shutil.rmtree(here / "run" / "checkpoints" / f"step-{step:06d}")
    return here / "run"
