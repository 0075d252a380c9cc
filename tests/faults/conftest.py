"""A tiny model and rows for the tests of runs that go wrong."""

import pytest

from tests.runs import write_token_rows
from tests.tiny_models import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a llama with two blocks."""
    return make_model(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A file of ten rows of tokens."""
    lengths = [5, 9, 30, 7, 12, 18, 6, 25, 11, 4]
    return write_token_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", lengths)


@pytest.fixture
def refused(capsys):
    """Runs the command and returns what it says on standard error, which is no traceback."""
    from mlxft import cli

    def run(*overrides, code=2) -> str:
        assert cli.main(["train", *overrides]) == code
        said = capsys.readouterr().err
        assert "Traceback" not in said and "fault of mlxft" not in said
        return said

    return run
