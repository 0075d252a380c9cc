"""Shared by all tests: mlxft is imported first, so that its choice of BLAS is the one MLX gets."""

import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: a thread each
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import mlxft  # noqa: E402, F401


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
