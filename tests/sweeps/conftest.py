"""A tiny model and rows, and `mlxft train -m` on them."""

import json
import subprocess

import pytest

from tests.command import mlxft
from tests.runs import write_token_rows
from tests.tiny_models import make_model


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """What every run needs: a model with one block, rows and held-out rows, three steps."""
    folder = tmp_path_factory.mktemp("given")
    model = make_model(folder / "model", "llama", num_hidden_layers=1)
    data = write_token_rows(folder / "rows.jsonl", [5, 9, 7, 12])
    valid = write_token_rows(folder / "valid.jsonl", [8, 6], seed=1)
    return [
        f"model.path={model}", f"data.train={data}", f"data.valid={valid}", "data.format=tokens",
        "adapter.rank=2", "trainer.max_steps=3",
    ]  # fmt: skip


@pytest.fixture
def sweep(here, given):
    """Returns a function (arguments) -> the finished command, run in a folder of its own."""

    def run(*arguments: str, code: int = 0, given=tuple(given)) -> subprocess.CompletedProcess:
        done = mlxft("train", "-m", *given, *arguments)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def results(folder) -> dict[str, dict]:
    """Returns how each job ended, by its name."""
    return json.loads((folder / "results.json").read_text())
