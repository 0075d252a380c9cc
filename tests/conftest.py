"""Shared by all tests: mlxft is imported first, so that its choice of BLAS is the one MLX gets."""

import pytest

import mlxft  # noqa: F401


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
